"""com.microsoft's attention in plain operators."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from irpar.ir import DType, Node, Value

from ..facts import CannotTellError, float_attribute, int_attribute, ints_attribute, needed, operand
from .attention import MINUS_INFINITY, by_heads, grouped_product, joined, places_of, rotated
from .fused import cut
from .writer import GradientWriter, NoGradientError

_FILTER = -10000.0
"""What ONNX Runtime adds to scores of keys that are padding."""


def _refuse_operands(node: Node, places: dict[int, str]) -> None:
    """Refuse a node that is given certain operands."""
    for place, reason in places.items():
        if operand(node, place) is not None:
            raise NoGradientError(f"because {reason}")


def _refuse_attributes(node: Node, names: dict[str, str]) -> None:
    """Refuse a node whose attributes of these names are set."""
    for name, reason in names.items():
        if int_attribute(node, name, 0):
            raise NoGradientError(f"because {reason}")


# -- scores and their softmax ---------------------------------------------------------------------------------------


@dataclass
class _Scores:
    """How scores are made of products.

    Attributes:
        scale: of the products; 0: one over the root of a head's size.
        cap: the soft limit of them; 0: none.
        added: what is added, as it broadcasts to [batch, heads, queries, keys].
        seen: which keys count, as it broadcasts; None: all.
        sink: the logit of one more key without a value, as it broadcasts to [batch, heads, queries, 1].
    """

    scale: float = 0.0
    cap: float = 0.0
    added: list[Value] = field(default_factory=list)
    seen: list[Value] = field(default_factory=list)
    sink: Value | None = None


def _attend(q: Value, k: Value, v: Value, of: _Scores, w: GradientWriter) -> Value:
    """softmax(scores) v, by heads; a query that sees no key gets zeros."""
    size = w.dims(q)[3]
    if not of.scale and not isinstance(size, int):
        raise CannotTellError("the size of a head")
    scale = of.scale or 1 / math.sqrt(size if isinstance(size, int) else 1)
    scores = grouped_product(w.mul(q, scale), w.transpose(k, [0, 1, 3, 2]), w)
    if of.cap:
        scores = w.mul(w.op("Tanh", [w.div(scores, of.cap)]), of.cap)
    for more in of.added:
        scores = w.add(scores, w.cast(more, scores.dtype))
    if of.seen:
        seen = of.seen[0]
        for rule in of.seen[1:]:
            seen = w.op("And", [seen, rule])
        scores = w.where(seen, scores, MINUS_INFINITY)
    weights = _softmax(scores, of.sink, w)
    if of.seen and of.sink is None:
        weights = w.where(w.op("IsNaN", [weights]), 0.0, weights)
    return grouped_product(weights, v, w)


def _softmax(scores: Value, sink: Value | None, w: GradientWriter) -> Value:
    if sink is None:
        return w.op("Softmax", [scores], {"axis": -1})
    sizes = [w.size_of(scores, dim) for dim in range(3)]
    column = w.op("Expand", [w.cast(sink, scores.dtype), w.listed([*sizes, w.ints([1])])])
    weights = w.op("Softmax", [w.op("Concat", [column, scores], {"axis": 3})], {"axis": -1})
    return cut(weights, 3, 1, 2**62, w)


def _padding(node: Node, place: int, keys: Value, w: GradientWriter) -> Value | None:
    """What a mask of padding adds to scores: lengths [batch], or flags [batch, keys] or [batch, queries, keys].

    Raises:
        NoGradientError: it is of another form.
    """
    mask = operand(node, place)
    if mask is None:
        return None
    dims = w.dims(mask)
    if len(dims) == 1 and dims == w.dims(needed(node, 0))[:1]:
        is_key = w.op("Less", [places_of(keys, 2, w), w.cast(w.unsqueeze(mask, [1, 2, 3]), DType.I64)])
    elif len(dims) in (2, 3):
        is_key = w.unsqueeze(w.compare("Greater", mask, 0), [1, 2] if len(dims) == 2 else [1])
    else:
        raise NoGradientError("because its mask lists starts and ends")
    number = w.number(float_attribute(node, "mask_filter_value", _FILTER), keys)
    return w.where(is_key, 0.0, number)


def _earlier(q: Value, k: Value, w: GradientWriter) -> Value:
    """Which keys stand no later than each query, the last of both in one place: bool[queries, keys]."""
    row = w.unsqueeze(places_of(q, 2, w), [1])
    before = w.op("Sub", [w.size_of(k, 2), w.size_of(q, 2)])
    return w.op("LessOrEqual", [places_of(k, 2, w), w.op("Add", [row, before])])


# -- MultiHeadAttention ---------------------------------------------------------------------------------------------


def _unpacked(value: Value, w: GradientWriter) -> list[Value]:
    """The parts of [batch, places, heads, parts, size], each [batch, heads, places, size]."""
    count = w.dims(value)[3]
    assert isinstance(count, int)
    parts = [w.squeeze(cut(value, 3, place, place + 1, w), [3]) for place in range(count)]
    return [w.transpose(part, [0, 2, 1, 3]) for part in parts]


def _split_operands(node: Node, heads: int, w: GradientWriter) -> list[Value]:
    """q, k and v by heads, their bias added.

    Raises:
        NoGradientError: there is a bias of packed operands.
    """
    query, key, bias = needed(node, 0), operand(node, 1), operand(node, 3)
    if bias is not None and (key is None or len(w.dims(key)) != 3):
        raise NoGradientError("because it adds a bias to operands that are packed")
    if len(w.dims(query)) == 5:
        return _unpacked(query, w)
    assert key is not None
    if len(w.dims(key)) == 5:
        return [by_heads(query, heads, w), *_unpacked(key, w)]
    found, start = [query, key, needed(node, 2)], 0
    if bias is not None:
        for place, value in enumerate(found):
            size = w.dims(value)[-1]
            if not isinstance(size, int):
                raise CannotTellError("the size of a head")
            found[place] = w.add(value, cut(bias, 0, start, start + size, w))
            start += size
    return [by_heads(value, heads, w) for value in found]


def decompose_multi_head(node: Node, w: GradientWriter) -> list[Value]:
    """softmax(scale * q k^T + masks) v of operands in any of their forms, behind a cache if there is one.

    Raises:
        NoGradientError: caches are shared, scores are a result, or an operand is in a form that is not covered.
        CannotTellError: numbers of heads or their size are not known.
    """
    _refuse_operands(node, {8: "its cache is one buffer", 9: "its caches are those of other rows"})
    if len(node.results) > 3:
        raise NoGradientError("because its scores are a result")
    q, k, v = _split_operands(node, int_attribute(node, "num_heads"), w)
    k, v = (
        value if past is None else w.op("Concat", [past, value], {"axis": 2})
        for value, past in ((k, operand(node, 6)), (v, operand(node, 7)))
    )
    of = _Scores(float_attribute(node, "scale", 0.0))
    of.added.extend(more for more in (_padding(node, 4, k, w), operand(node, 5)) if more is not None)
    if int_attribute(node, "unidirectional", 0):
        of.seen.append(_earlier(q, k, w))
    results = [joined(_attend(q, k, v, of, w), w), k, v]
    return [_own(value, w) for value in results[: len(node.results)]]


def _own(value: Value, w: GradientWriter) -> Value:
    """A value that this decomposition makes."""
    return value if value.node in w.made else w.op("Identity", [value])


# -- Attention ------------------------------------------------------------------------------------------------------


def decompose_projected(node: Node, w: GradientWriter) -> list[Value]:
    """Attention of x W + b, in which q, k and v stand side by side.

    Raises:
        NoGradientError: it rotates its operands, or caches are shared.
        CannotTellError: the size of a head is not known.
    """
    _refuse_operands(node, {6: "its cache is one buffer"})
    _refuse_attributes(
        node, {"do_rotary": "it rotates its operands", "past_present_share_buffer": "its cache is one buffer"}
    )
    heads, sizes = int_attribute(node, "num_heads"), ints_attribute(node, "qkv_hidden_sizes")
    wide, bias, past = w.dims(needed(node, 1))[1], operand(node, 2), operand(node, 4)
    if not isinstance(wide, int):
        raise CannotTellError("the size of a head")
    sizes = sizes or (wide // 3,) * 3
    product = w.op("MatMul", [needed(node, 0), needed(node, 1)])
    product = product if bias is None else w.add(product, bias)
    bounds = [0, sizes[0], sizes[0] + sizes[1], wide]
    q, k, v = (by_heads(cut(product, 2, bounds[place], bounds[place + 1], w), heads, w) for place in range(3))
    if past is not None:
        k, v = (
            w.op("Concat", [w.squeeze(cut(past, 0, place, place + 1, w), [0]), value], {"axis": 2})
            for place, value in enumerate((k, v))
        )
    of = _Scores(float_attribute(node, "scale", 0.0))
    of.added.extend(more for more in (_padding(node, 3, k, w), operand(node, 5)) if more is not None)
    if int_attribute(node, "unidirectional", 0):
        of.seen.append(_earlier(q, k, w))
    results = [joined(_attend(q, k, v, of, w), w)]
    if len(node.results) > 1:
        results.append(w.op("Concat", [w.unsqueeze(value, [0]) for value in (k, v)], {"axis": 0}))
    return results


# -- GroupQueryAttention --------------------------------------------------------------------------------------------

_CACHE = "its cache is as long as a length that is found when the model runs"
_NORMS = "it normalises its operands"
_QUANTIZED = "its cache is quantised"


def decompose_grouped(node: Node, w: GradientWriter) -> list[Value]:
    """Attention of groups of heads, each query of which sees the keys before it, those of a cache too.

    Raises:
        NoGradientError: the cache is of a size that is found when the model runs, it normalises its operands, or scores
            are a result.
        CannotTellError: the size of a head is not known.
    """
    _refuse_operands(node, {12: _QUANTIZED, 13: _QUANTIZED, 14: _NORMS, 15: _NORMS, 16: _CACHE})
    if len(node.results) > 3:
        raise NoGradientError("because its scores are a result")
    heads, groups = int_attribute(node, "num_heads"), int_attribute(node, "kv_num_heads")
    q, k, v = _grouped_operands(node, heads, groups, w)
    cache = _Cache.of(node, k, w)
    rows = operand(node, 9)
    if rows is None and cache is not None:
        rows = cache.places
    if int_attribute(node, "do_rotary", 0):
        q, k = (_turned_by_place(node, value, rows, w) for value in (q, k))
    if cache is not None:
        k, v = (cache.joined(needed(node, place), new, w) for place, new in ((3, k), (4, v)))
    of = _Scores(float_attribute(node, "scale", 0.0), float_attribute(node, "softcap", 0.0))
    bias, sink = operand(node, 10), operand(node, 11)
    if bias is not None:
        of.added.append(bias)
    last = w.reshape(w.cast(needed(node, 5), DType.I64), [-1, 1, 1, 1])
    of.seen.append(w.op("LessOrEqual", [places_of(k, 2, w), last]))
    at = w.unsqueeze(places_of(q, 2, w), [1]) if cache is None else w.unsqueeze(cache.places, [1, 3])
    if int_attribute(node, "causal", 1):
        seen = _earlier(q, k, w) if cache is None else w.op("LessOrEqual", [places_of(k, 2, w), at])
        of.seen.append(seen)
    window = int_attribute(node, "local_window_size", -1)
    if window >= 0:
        of.seen.append(w.op("Greater", [places_of(k, 2, w), w.op("Sub", [at, w.ints([window])])]))
    if sink is not None:
        of.sink = w.unsqueeze(sink, [1, 2])
    elif int_attribute(node, "smooth_softmax", 0) > 0:
        of.sink = w.number(0.0, q)
    results = [joined(_attend(q, k, v, of, w), w), k, v]
    return [_own(value, w) for value in results[: len(node.results)]]


@dataclass(frozen=True)
class _Cache:
    """Keys and values of steps before, of which each row has a number of its own.

    Attributes:
        before: how many each row has: i64[batch].
        places: of the new keys, which follow them: i64[batch, new].
        count: places of the cache that goes on.
    """

    before: Value
    places: Value
    count: int

    @staticmethod
    def of(node: Node, new: Value, w: GradientWriter) -> "_Cache | None":
        """That of a node; None where it has none.

        Raises:
            NoGradientError: a size is found when the model runs.
        """
        past = operand(node, 3)
        if past is None:
            return None
        steps, held = w.dims(new)[2], w.dims(past)[2]
        count = w.dims(node.results[1])[2] if len(node.results) > 1 else None
        if not isinstance(steps, int) or not isinstance(held, int) or not isinstance(count, int) or count < held:
            raise NoGradientError(f"because {_CACHE}")
        known = w.op("Sub", [w.cast(needed(node, 5), DType.I64), w.ints([steps - 1])])
        before = w.reshape(w.op("Max", [known, w.ints([0])]), [-1])
        return _Cache(before, w.op("Add", [w.unsqueeze(before, [1]), w.ints(range(steps))]), count)

    def joined(self, past: Value, new: Value, w: GradientWriter) -> Value:
        """What a row had, what is new right behind it, and zeros."""
        steps, held = w.dims(new)[2], w.dims(past)[2]
        assert isinstance(steps, int)
        assert isinstance(held, int)
        if held < self.count:
            past = w.pad(past, {2: (0, self.count - held)})
        before = w.unsqueeze(self.before, [1, 2, 3])
        place = w.constant(np.arange(self.count)[:, None], "places")
        behind = w.op("Sub", [place, before])
        found = new  # One of them is what any place of a row may get.
        if steps > 1:
            nearest = w.op("Max", [w.op("Min", [behind, w.ints([steps - 1])]), w.ints([0])])
            index = w.op("Expand", [nearest, w.shape_of(past)])
            found = w.op("GatherElements", [new, index], {"axis": 2})
        found = w.where(w.compare("Less", behind, steps), found, 0.0)
        return w.where(w.compare("Less", behind, 0), past, found)


def _grouped_operands(node: Node, heads: int, groups: int, w: GradientWriter) -> list[Value]:
    """q, k and v by heads, which may stand side by side in one operand."""
    query, key = needed(node, 0), operand(node, 1)
    if key is not None:
        return [by_heads(query, heads, w), by_heads(key, groups, w), by_heads(needed(node, 2), groups, w)]
    wide = w.dims(query)[2]
    if not isinstance(wide, int):
        raise CannotTellError("the size of a head")
    size = wide // (heads + 2 * groups)
    ends = [heads * size, (heads + groups) * size, wide]
    parts = [cut(query, 2, start, end, w) for start, end in zip([0, *ends], ends, strict=False)]
    return [by_heads(part, count, w) for part, count in zip(parts, (heads, groups, groups), strict=True)]


def _turned_by_place(node: Node, value: Value, ids: Value | None, w: GradientWriter) -> Value:
    """Heads turned by angles of their places, which are given by row, or which are counted from 0."""
    cos, sin = needed(node, 7), needed(node, 8)
    rows = places_of(value, 2, w) if ids is None else ids
    cos, sin = (w.op("Gather", [table, rows], {"axis": 0}) for table in (cos, sin))
    if ids is not None:
        cos, sin = (w.unsqueeze(table, [1]) for table in (cos, sin))
    return rotated(value, cos, sin, _width(cos, w), bool(int_attribute(node, "rotary_interleaved", 0)), w)


def _width(cos: Value, w: GradientWriter) -> int:
    half = w.dims(cos)[-1]
    if not isinstance(half, int):
        raise CannotTellError("how many elements of a head are turned")
    return 2 * half


# -- RotaryEmbedding, MRotaryEmbedding ------------------------------------------------------------------------------


def decompose_rotary(node: Node, w: GradientWriter, size: int) -> list[Value]:
    """Heads turned by angles that position ids name, or which are counted from a place for all rows.

    Args:
        node, w: see `OpDef.decompose`.
        size: of a head.

    Raises:
        NoGradientError: rows are packed, or the result is scaled.
    """
    _refuse_attributes(node, {"is_packed_batching": "rows are packed"})
    if float_attribute(node, "scale", 1.0) != 1:
        raise NoGradientError("because it is scaled")
    x, ids, tables = needed(node, 0), needed(node, 1), (needed(node, 2), needed(node, 3))
    is_flat = len(w.dims(x)) == 3
    heads = x
    if is_flat:
        wide = w.dims(x)[2]
        if not isinstance(wide, int) or not size:
            raise CannotTellError("the size of a head")
        heads = w.reshaped(x, [(x, 0), (x, 1), wide // size, size])
    if len(w.dims(ids)) == 1:
        ids = w.unsqueeze(w.op("Add", [ids, places_of(x, 1 if is_flat else 2, w)]), [0])
    cos, sin = (w.op("Gather", [table, ids], {"axis": 0}) for table in tables)
    if node.op_type == "MRotaryEmbedding":
        cos, sin = (_of_streams(node, table, w) for table in (cos, sin))
    cos, sin = (w.unsqueeze(table, [2 if is_flat else 1]) for table in (cos, sin))
    turned = rotated(heads, cos, sin, _width(cos, w), bool(int_attribute(node, "interleaved", 0)), w)
    return [w.reshaped(turned, [(x, 0), (x, 1), (x, 2)]) if is_flat else turned]


def _of_streams(node: Node, table: Value, w: GradientWriter) -> Value:
    """Of angles [streams, batch, places, half] those of the stream that each column belongs to."""
    sections = ints_attribute(node, "mrope_section")
    half = w.dims(table)[-1]
    if sections is None or not isinstance(half, int) or sum(sections) != half:
        raise CannotTellError("the columns of each stream")
    stream = _streams(sections, bool(int_attribute(node, "mrope_layout", 0)))
    chosen = np.arange(len(sections))[:, None] == stream
    mask = w.constant(chosen[:, None, None, :], "streams")
    return w.sum(w.where(mask, table, 0.0), [0], keep=False)


def _streams(sections: Sequence[int], is_interleaved: bool) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    """The stream of each column: runs of one after the other, or the later ones in every third place among the first's.

    sections 3, 1, 2: 0 0 0 1 2 2; interleaved: 0 1 2 0 0 2
    """
    if not is_interleaved:
        return np.repeat(np.arange(len(sections), dtype=np.int64), sections)
    made = np.zeros(sum(sections), np.int64)
    for stream, count in enumerate(sections[1:], 1):
        made[stream : count * len(sections) : len(sections)] = stream
    return made
