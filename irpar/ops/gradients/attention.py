"""Attention and RotaryEmbedding in plain operators, which have gradients."""

import math
from collections.abc import Sequence

import numpy as np

from irpar.ir import DType, Node, Value

from ..facts import CannotTellError, dtype_attribute, float_attribute, int_attribute, needed, operand
from .writer import GradientWriter

MINUS_INFINITY = -math.inf


def by_heads(x: Value, heads: int, w: GradientWriter) -> Value:
    """[batch, heads, places, size], from that shape or from [batch, places, heads * size]."""
    if len(w.dims(x)) == 4:
        return x
    width = w.dims(x)[2]
    if not isinstance(width, int) or not heads or width % heads:
        raise CannotTellError("the size of a head")
    return w.transpose(w.reshaped(x, [(x, 0), (x, 1), heads, width // heads]), [0, 2, 1, 3])


def joined(y: Value, w: GradientWriter) -> Value:
    """[batch, places, heads * size]."""
    _, heads, _, size = w.dims(y)
    if not isinstance(heads, int) or not isinstance(size, int):
        raise CannotTellError("the size of a head")
    return w.reshaped(w.transpose(y, [0, 2, 1, 3]), [(y, 0), (y, 2), heads * size])


def grouped_product(a: Value, b: Value, w: GradientWriter) -> Value:
    """a @ b by heads, where groups of heads of `a` share one of `b`.

    Args:
        a: [batch, groups * heads, rows, inner].
        b: [batch, groups, inner, columns].
        w: the writer.

    Raises:
        CannotTellError: numbers of heads are not known.
    """
    heads, groups = w.dims(a)[1], w.dims(b)[1]
    if heads == groups:
        return w.op("MatMul", [a, b])
    if not isinstance(heads, int) or not isinstance(groups, int) or heads % groups:
        raise CannotTellError("the number of heads")
    apart = w.reshaped(a, [(a, 0), groups, heads // groups, (a, 2), (a, 3)])
    made = w.op("MatMul", [apart, w.unsqueeze(b, [2])])
    return w.reshaped(made, [(a, 0), heads, (a, 2), (b, 3)])


def places_of(value: Value, dim: int, w: GradientWriter) -> Value:
    """0, 1, 2 ... along a dim of a tensor: int64[size]."""
    size = w.dims(value)[dim]
    if isinstance(size, int):
        return w.constant(np.arange(size, dtype=np.int64), "places")
    last = w.squeeze(w.size_of(value, dim), [0])
    made = w.op("Range", [w.constant(0), last, w.constant(1)])
    made.type = w.shape_of(value).tensor_type.with_shape((size,))
    return made


def _seen(node: Node, q: Value, k: Value, w: GradientWriter) -> Value | None:
    """Which keys each query sees by its place, as it broadcasts to the scores; None where it sees all."""
    past, valid = operand(node, 4), operand(node, 6)
    left, right = (int_attribute(node, f"{side}_window_size", -1) for side in ("left", "right"))
    is_causal = bool(int_attribute(node, "is_causal", 0))
    rules = []
    key = places_of(k, 2, w)
    if is_causal or left >= 0 or right >= 0:
        row = w.unsqueeze(places_of(q, 2, w), [1])
        if valid is not None:
            before = w.op("Sub", [w.cast(valid, DType.I64), w.size_of(q, 2)])
            row = w.op("Add", [row, w.unsqueeze(before, [1, 2, 3])])
        elif past is not None:
            row = w.op("Add", [row, w.size_of(past, 2)])
        if is_causal:
            rules.append(w.op("LessOrEqual", [key, row]))
        if left >= 0:
            rules.append(w.op("GreaterOrEqual", [key, w.op("Sub", [row, w.constant(left)])]))
        if right >= 0:
            rules.append(w.op("LessOrEqual", [key, w.op("Add", [row, w.constant(right)])]))
    if valid is not None:
        rules.append(w.op("Less", [key, w.unsqueeze(w.cast(valid, DType.I64), [1, 2, 3])]))
    if not rules:
        return None
    seen = rules[0]
    for rule in rules[1:]:
        seen = w.op("And", [seen, rule])
    return seen


def _full_mask(mask: Value, scores: Value, w: GradientWriter) -> Value:
    """A mask that covers all keys: what it does not reach is not seen."""
    size, keys = w.dims(mask)[-1], w.dims(scores)[-1]
    if size == 1 or (size is not None and size == keys):
        return mask
    behind: int | Value
    if isinstance(size, int) and isinstance(keys, int):
        behind = keys - size
    else:
        behind = w.op("Sub", [w.size_of(scores, 3), w.size_of(mask, len(w.dims(mask)) - 1)])
    pads: dict[int, tuple[int | Value, int | Value]] = {len(w.dims(mask)) - 1: (0, behind)}
    if mask.dtype is DType.BOOL:
        padded = w.pad(w.cast(mask, DType.I32), pads)
        return w.cast(padded, DType.BOOL)
    return w.pad(mask, pads, w.number(MINUS_INFINITY, mask))


def decompose_attention(node: Node, w: GradientWriter) -> list[Value]:
    """softmax(scale * q k^T + mask) v, with groups of heads, a cache, windows and a soft limit of scores.

    Raises:
        CannotTellError: numbers of heads or their size are not known.
    """
    given = needed(node, 0)
    q = by_heads(given, int_attribute(node, "q_num_heads", 0), w)
    k, v = (by_heads(needed(node, place), int_attribute(node, "kv_num_heads", 0), w) for place in (1, 2))
    for place in (4, 5):
        past = operand(node, place)
        if past is not None and place == 4:
            k = w.op("Concat", [past, k], {"axis": 2})
        elif past is not None:
            v = w.op("Concat", [past, v], {"axis": 2})
    size = w.dims(q)[3]
    if "scale" not in node.attributes and not isinstance(size, int):
        raise CannotTellError("the size of a head")
    scale = float_attribute(node, "scale", 1 / math.sqrt(size) if isinstance(size, int) else 1.0)
    stages = [grouped_product(w.mul(q, scale), w.transpose(k, [0, 1, 3, 2]), w)]
    cap = float_attribute(node, "softcap", 0.0)
    stages.append(w.mul(w.op("Tanh", [w.div(stages[0], cap)]), cap) if cap else stages[0])
    scores = stages[1]
    mask, seen = operand(node, 3), _seen(node, q, k, w)
    if mask is not None:
        mask = _full_mask(mask, scores, w)
        is_flag = mask.dtype is DType.BOOL
        scores = w.where(mask, scores, MINUS_INFINITY) if is_flag else w.add(scores, w.cast(mask, scores.dtype))
    if seen is not None:
        scores = w.where(seen, scores, MINUS_INFINITY)
    stages.append(scores)
    wide = dtype_attribute(node, "softmax_precision") if "softmax_precision" in node.attributes else scores.dtype
    weights = w.op("Softmax", [w.cast(scores, wide)], {"axis": -1})
    if mask is not None or seen is not None:  # A query that sees no key gets zeros.
        weights = w.where(w.op("IsNaN", [weights]), 0.0, weights)
    weights = w.cast(weights, q.dtype)
    stages.append(weights)
    y = grouped_product(weights, v, w)
    if len(w.dims(given)) == 3:
        y = joined(y, w)
    results = [y, k, v, stages[int_attribute(node, "qk_matmul_output_mode", 0)]]
    return [w.op("Identity", [value]) if value.node not in w.made else value for value in results[: len(node.results)]]


# -- RotaryEmbedding ------------------------------------------------------------------------------------------------


def rotated(x: Value, cos: Value, sin: Value, width: int, is_interleaved: bool, w: GradientWriter) -> Value:
    """Pairs of elements of the last dim turned by angles.

    Args:
        x: [..., size], of which the first `width` elements are turned.
        cos, sin: [..., width / 2], as they broadcast to x.
        width: how many.
        is_interleaved: whether the elements of a pair are neighbours; else they stand half the width apart.
        w: the writer.
    """
    last = len(w.dims(x)) - 1
    half = width // 2

    def cut(start: int, end: int, step: int = 1) -> Value:
        bounds = [w.ints([number]) for number in (start, end, last)]
        return w.op("Slice", [x, *bounds, *([w.ints([step])] if step > 1 else [])])

    first, second = (cut(0, width, 2), cut(1, width, 2)) if is_interleaved else (cut(0, half), cut(half, width))
    real = w.sub(w.mul(cos, first), w.mul(sin, second))
    imaginary = w.add(w.mul(sin, first), w.mul(cos, second))
    if is_interleaved:
        pairs = w.op("Concat", [w.unsqueeze(part, [last + 1]) for part in (real, imaginary)], {"axis": last + 1})
        turned = w.reshaped(pairs, [*((x, dim) for dim in range(last)), width])
    else:
        turned = w.op("Concat", [real, imaginary], {"axis": last})
    if w.dims(x)[last] == width:
        return turned
    return w.op("Concat", [turned, cut(width, 2**62)], {"axis": last})


def decompose_rotary(node: Node, w: GradientWriter) -> list[Value]:
    """See `rotated`; angles belong to places, which position ids name or the caches have in order.

    Raises:
        CannotTellError: the size of a head is not known.
    """
    x, cos, sin, ids = needed(node, 0), needed(node, 1), needed(node, 2), operand(node, 3)
    is_flat = len(w.dims(x)) == 3
    heads = x
    if is_flat:
        count, total = int_attribute(node, "num_heads", 0), w.dims(x)[2]
        if not count or not isinstance(total, int) or total % count:
            raise CannotTellError("the size of a head")
        heads = w.reshaped(x, [(x, 0), (x, 1), count, total // count])
    size = w.dims(heads)[3]
    width = int_attribute(node, "rotary_embedding_dim", 0) or size
    if not isinstance(width, int):
        raise CannotTellError("the size of a head")
    if ids is not None:
        cos, sin = (w.op("Gather", [table, ids], {"axis": 0}) for table in (cos, sin))
    around: Sequence[int] = [2] if is_flat else [1]
    cos, sin = (w.unsqueeze(table, around) for table in (cos, sin))
    turned = rotated(heads, cos, sin, width, bool(int_attribute(node, "interleaved", 0)), w)
    return [w.reshaped(turned, [(x, 0), (x, 1), (x, 2)]) if is_flat else turned]
