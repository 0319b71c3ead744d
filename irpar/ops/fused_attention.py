"""com.microsoft's attention: batch and heads may be sharded, caches too; counts of heads are those of the block."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from irpar.ir import Builder, Dim, DType, Node, TensorType, Type, Value
from irpar.sharding import ceil_div

from .attention_sizes import MEETS
from .coords import block_start
from .facts import (
    CannotTellError,
    dims_of,
    int_attribute,
    ints_attribute,
    ints_operand,
    needed,
    operand,
    result_shape,
    same_type,
    shape_of,
    shapes_of,
    tensor_of,
)
from .gradients.fused_attention import (
    decompose_grouped,
    decompose_multi_head,
    decompose_projected,
    decompose_rotary,
)
from .gradients.refused import PACKED
from .gradients.writer import GradientWriter
from .microsoft import microsoft
from .rule import DimFactors, FactorRule, Kind, RuleBuilder, whole

_SCORE_FLOPS = 6
"""The scale and the softmax of one score."""


def _size(dim: Dim, count: int = 1) -> int:
    if not isinstance(dim, int) or count < 1 or dim % count:
        raise CannotTellError("the size of a head")
    return dim // count


def _given(node: Node, index: int) -> bool:
    return operand(node, index) is not None


# -- sections of q, k and v side by side, of which a device has some heads -------------------------------------------


def _own_heads(
    value: Value, sections: Sequence[tuple[int, int, int, int]], result: Value, builder: Builder
) -> list[Value]:
    """Of a last dim with sections side by side the own heads of each.

    Args:
        value: whole along its last dim.
        sections: for each where it starts, its heads, those on one device, and the size of a head.
        result: the local result, whose last dim is sharded as the heads of the first section are.
        builder: inserts the slices.
    """
    sharding = result.sharding
    assert sharding is not None
    axes = sharding.dims[-1].axes
    axis = builder.constant(np.asarray([len(value.shape) - 1], np.int64), "axes")
    parts = []
    for offset, heads, own, size in sections:
        start = block_start(builder, sharding.mesh, axes, ceil_div(heads, sharding.mesh.group_size(axes)) * size)
        one = TensorType(DType.I64, (1,))
        first = builder.op("Reshape", [start, builder.constant(np.asarray([1], np.int64), "shape")], type=one)
        first = builder.op("Add", [first, builder.constant(np.asarray([offset], np.int64), "offset")], type=one)
        last = builder.op("Add", [first, builder.constant(np.asarray([own * size], np.int64), "size")], type=one)
        of = TensorType(value.dtype, (*value.shape[:-1], own * size))
        parts.append(builder.op("Slice", [value, first, last, axis], type=of))
    return parts


def _are_heads_cut(local: Node) -> bool:
    sharding = local.results[0].sharding
    return sharding is not None and bool(sharding.dims[-1].axes)


# -- MultiHeadAttention ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Heads:
    """Sizes of an attention node."""

    batch: Dim
    heads: int
    queries: Dim
    keys: Dim
    size: int
    value_size: int


def _multi_head(node: Node) -> _Heads:
    query = dims_of(node, 0)
    heads = int_attribute(node, "num_heads")
    if len(query) == 5:
        return _Heads(query[0], heads, query[1], query[1], _size(query[4]), _size(query[4]))
    if len(query) != 3 or not _given(node, 1):
        raise CannotTellError("a query that is not covered")
    size, key = _size(query[2], heads), dims_of(node, 1)
    if len(key) == 5:
        return _Heads(query[0], heads, query[1], key[1], size, size)
    value = dims_of(node, 2)
    if len(key) == 4:
        return _Heads(query[0], heads, query[1], key[2], size, _size(value[3]))
    return _Heads(query[0], heads, query[1], key[1], size, _size(value[2], heads))


def _past(node: Node, index: int) -> Dim:
    return dims_of(node, index)[2] if _given(node, index) else 0


def _infer_multi_head(node: Node) -> Sequence[Type]:
    of, data = _multi_head(node), tensor_of(node, 0)
    past = _past(node, 6)
    total = None if past is None or of.keys is None else of.keys + past
    if _given(node, 8):
        total = past
    types = [
        data.with_shape((of.batch, of.queries, of.heads * of.value_size)),
        data.with_shape((of.batch, of.heads, total, of.size)),
        data.with_shape((of.batch, of.heads, total, of.value_size)),
        data.with_shape((of.batch, of.heads, of.queries, total)),
    ]
    return types[: len(node.results)]


def _rule_multi_head(node: Node) -> FactorRule:
    """`([b,q,(hd)],[b,k,(hd)],[b,k,(he)],[.],[b,k],[b,h,q,t],[b,h,p,d],[b,h,p,e])->([b,q,(he)],[b,h,t,d],[b,h,t,e])`.

    Batch and heads pass, queries too where their place does not count. A bias of q, k and v side by side stays whole:
    each device takes its heads of it.
    """
    of = _multi_head(node)
    if _given(node, 8) or _given(node, 9) or of.size < 1:
        raise CannotTellError("caches that are shared")
    rule = RuleBuilder()
    batch, heads = rule.dims([_size(of.batch), of.heads])
    free = not int_attribute(node, "unidirectional", 0) and len(dims_of(node, 0)) == 3
    (queries,) = rule.dims([_size(of.queries)], Kind.PASS if free else Kind.REPLICATE)
    packed = len(dims_of(node, 0)) == 5
    keys = queries if packed else rule.dims([_size(of.keys)], Kind.REPLICATE)[0]
    size, value_size = rule.dims([of.size, of.value_size], Kind.REPLICATE)
    score: list[DimFactors] = [batch, heads, queries, ()]
    operands: list[Sequence[DimFactors]] = [
        [batch, queries, heads, (), size] if packed else [batch, queries, (*heads, *size)]
    ]
    forms: dict[int, dict[int, list[DimFactors]]] = {
        1: {3: [batch, keys, (*heads, *size)], 4: [batch, heads, keys, size], 5: [batch, keys, heads, (), size]},
        2: {3: [batch, keys, (*heads, *value_size)], 4: [batch, heads, keys, value_size]},
        3: {1: [()]},
        6: {4: [batch, heads, (), size]},
        7: {4: [batch, heads, (), value_size]},
    }
    for index, shape in enumerate(shapes_of(node)[1:], 1):
        if shape is None:
            operands.append([])
        elif index == 4:
            operands.append(_mask(shape, _size(of.batch), batch, queries))
        elif index == 5:
            sizes = (_size(of.batch), of.heads, _size(of.queries), -1)
            operands.append([f if n == full else () for n, full, f in zip(shape, sizes, score, strict=True)])
        else:
            operands.append(forms[index][len(shape)])
    results = [
        [batch, queries, (*heads, *value_size)],
        [batch, heads, (), size],
        [batch, heads, (), value_size],
        score,
    ]
    return rule.done(operands, results[: len(node.results)], moves=[(queries, heads), (keys, heads)], meets=MEETS)


def _mask(shape: Sequence[int], count: int, batch: DimFactors, queries: DimFactors) -> list[DimFactors]:
    """A mask of keys: lengths [b], [b,k] or [b,q,t]; lists of several lengths a row are not covered."""
    if shape[0] != count or len(shape) > 3:
        raise CannotTellError("a mask that is not covered")
    return [batch, *([queries, ()] if len(shape) == 3 else [()] * (len(shape) - 1))]


def _localize_multi_head(whole_node: Node, local: Node, builder: Builder) -> None:
    """Count the heads of the block; take its part of the bias."""
    of = _multi_head(whole_node)
    own = result_shape(local)[2] // of.value_size
    local.set_attribute("num_heads", own)
    if _given(local, 3) and _are_heads_cut(local):
        wide = of.heads * of.size
        sections = [
            (0, of.heads, own, of.size),
            (wide, of.heads, own, of.size),
            (2 * wide, of.heads, own, of.value_size),
        ]
        bias = needed(local, 3)
        parts = _own_heads(bias, sections, local.results[0], builder)
        joined = TensorType(bias.dtype, (sum(part.shape[0] for part in parts),))
        operands = list(local.operands)
        operands[3] = builder.op("Concat", parts, {"axis": 0}, type=joined, name=f"{bias.name}_heads")
        local.set_operands(operands)


def _cost_multi_head(node: Node) -> int:
    of = _multi_head(node)
    keys = _size(of.keys) + _size(_past(node, 6))
    scores = _size(of.batch) * of.heads * _size(of.queries) * keys
    return scores * (2 * of.size + _SCORE_FLOPS + 2 * of.value_size)


microsoft(
    "MultiHeadAttention",
    _infer_multi_head,
    _rule_multi_head,
    _cost_multi_head,
    _localize_multi_head,
    decompose=decompose_multi_head,
)


# -- GroupQueryAttention --------------------------------------------------------------------------------------------


def _grouped(node: Node) -> tuple[int, int, int]:
    """Query heads, key heads, and the size of a head."""
    heads, key_heads = int_attribute(node, "num_heads"), int_attribute(node, "kv_num_heads")
    if key_heads < 1 or heads % key_heads:
        raise CannotTellError("query heads that are no multiple of the key heads")
    wide = dims_of(node, 0)[2]
    return heads, key_heads, _size(wide, heads if _given(node, 1) else heads + 2 * key_heads)


def _infer_grouped(node: Node) -> Sequence[Type]:
    heads, key_heads, size = _grouped(node)
    data, (batch, steps, _) = tensor_of(node, 0), dims_of(node, 0)
    cache = tensor_of(node, 3) if _given(node, 3) else data
    try:
        asked = ints_operand(node, 6)
    except CannotTellError:
        asked = None
    past = _past(node, 3)
    total: Dim = None
    if asked and isinstance(past, int):
        total = max(asked[0], past)
    elif not _given(node, 3):
        total = steps
    present = cache.with_shape((batch, key_heads, total, size))
    scores = data.with_shape((batch, heads, steps, total))
    return [data.with_shape((batch, steps, heads * size)), present, present, scores][: len(node.results)]


def _rule_grouped(node: Node) -> FactorRule:
    """`([b,q,(hrd)],[b,q,(hd)],[b,q,(hd)],[b,h,p,d],[b,h,p,d],[b],[],..)->([b,q,(hrd)],[b,h,t,d],[b,h,t,d])`.

    Batch and heads pass, with r query heads a key head; caches, masks and sinks go with them. Steps follow each other.
    A query that holds q, k and v side by side stays replicated: each device takes its heads of it, all r of a key head.
    """
    heads_count, key_heads, head_size = _grouped(node)
    batch_size, steps_count, _ = shape_of(node, 0)
    rule = RuleBuilder()
    batch, heads = rule.dims([batch_size, key_heads])
    steps, size = rule.dims([steps_count, head_size], Kind.REPLICATE)
    if _given(node, 1):
        (group,) = rule.dims([heads_count // key_heads])
        query, inside = (*heads, *group), size
    else:
        (inside,) = rule.dims([heads_count // key_heads * head_size], Kind.REPLICATE)
        query = heads
    cache: list[DimFactors] = [batch, heads, (), size]
    sizes = (batch_size, heads_count)
    operands: list[Sequence[DimFactors]] = []
    for index, shape in enumerate(shapes_of(node)):
        if shape is None:
            operands.append([])
        elif index == 0:
            operands.append([batch, steps, (*query, *inside) if _given(node, 1) else ()])
        elif index in (1, 2):
            operands.append([batch, steps, (*heads, *size)])
        elif index in (3, 4):
            operands.append(cache)
        elif index in (5, 9):
            operands.append([batch if shape[0] == batch_size else (), *[()] * (len(shape) - 1)])
        elif index == 10:
            both = zip(shape, sizes, (batch, query), strict=False)
            operands.append([*(factors if count == full else () for count, full, factors in both), (), ()])
        elif index == 11:
            operands.append([query])
        elif index in (12, 13) and prod(shape) != 1:
            raise CannotTellError("scales of channels")
        else:
            operands.append(whole(len(shape)))
    results: list[list[DimFactors]] = [[batch, steps, (*query, *inside)], cache, cache, [batch, query, steps, ()]]
    return rule.done(operands, results[: len(node.results)], moves=[(steps, heads)])


def _localize_grouped(whole_node: Node, local: Node, builder: Builder) -> None:
    """Count the heads of the block; take them out of a query that holds q, k and v side by side."""
    heads, key_heads, size = _grouped(whole_node)
    own = result_shape(local)[2] // size
    own_keys = shape_of(local, 1)[2] // size if _given(local, 1) else own * key_heads // heads
    local.set_attribute("num_heads", own)
    local.set_attribute("kv_num_heads", own_keys)
    if not _given(local, 1) and _are_heads_cut(local):
        wide, narrow = heads * size, key_heads * size
        sections = [
            (0, heads, own, size),
            (wide, key_heads, own_keys, size),
            (wide + narrow, key_heads, own_keys, size),
        ]
        parts = _own_heads(needed(local, 0), sections, local.results[0], builder)
        local.set_operands([*parts, *local.operands[3:]])


def _cost_grouped(node: Node) -> int:
    heads, _, size = _grouped(node)
    batch, steps, _ = shape_of(node, 0)
    keys = result_shape(node, 1)[2] if len(node.results) > 1 else steps
    return batch * heads * steps * keys * (4 * size + _SCORE_FLOPS)


def _grouped_dtypes(node: Node) -> Sequence[DType]:
    data = tensor_of(node, 0).dtype
    cache = tensor_of(node, 3).dtype if _given(node, 3) else data
    return data, cache, cache, data


microsoft(
    "GroupQueryAttention",
    _infer_grouped,
    _rule_grouped,
    _cost_grouped,
    _localize_grouped,
    dtypes=_grouped_dtypes,
    decompose=decompose_grouped,
)


# -- Attention, QAttention: with their projection -------------------------------------------------------------------


def _projected(node: Node) -> tuple[int, int, int]:
    """Sizes of q, k and v together: heads, and the sizes of their heads."""
    heads = int_attribute(node, "num_heads")
    sizes = ints_attribute(node, "qkv_hidden_sizes")
    if sizes is None:
        one = _size(dims_of(node, 1)[1], 3 * heads)
        return heads, one, one
    return heads, _size(sizes[0], heads), _size(sizes[2], heads)


def _infer_projected(node: Node) -> Sequence[Type]:
    heads, size, value_size = _projected(node)
    batch, steps, _ = dims_of(node, 0)
    of = tensor_of(node, 0 if node.op_type == "Attention" else 3)
    past_index = 4 if node.op_type == "Attention" else 8
    past: Dim = dims_of(node, past_index)[3] if _given(node, past_index) else 0
    total = None if past is None or steps is None else steps + past
    if int_attribute(node, "past_present_share_buffer", 0):
        total = past
    return [
        of.with_shape((batch, steps, heads * value_size)),
        of.with_shape((2, batch, heads, total, size)),
    ][: len(node.results)]


def _rule_projected(node: Node) -> FactorRule:
    """`([b,s,c],[c,n],[n],[b,t],[2,b,h,p,d],[b,h,s,t])->([b,s,m],[2,b,h,t,d])`: b passes.

    Weights of q, k and v stand side by side, so that a block of their columns is not one of heads.
    """
    mask, past, bias = (3, 4, 5) if node.op_type == "Attention" else (5, 8, -1)
    batch_size, *inside = shape_of(node, 0)
    rule = RuleBuilder()
    (batch,) = rule.dims([batch_size])
    steps, channels = rule.dims(inside, Kind.REPLICATE)
    operands: list[Sequence[DimFactors]] = []
    for index, shape in enumerate(shapes_of(node)):
        if shape is None:
            operands.append([])
        elif index == 0:
            operands.append([batch, steps, channels])
        elif index == 1:
            operands.append([channels, *rule.dims(shape[1:], Kind.REPLICATE)])
        elif index == mask:
            if shape[0] != batch_size:
                raise CannotTellError("a mask that is not covered")
            operands.append([batch, *[()] * (len(shape) - 1)])
        elif index == past:
            operands.append([(), batch, *[()] * (len(shape) - 2)])
        elif index == bias:
            operands.append([batch if shape[0] == batch_size else (), *[()] * (len(shape) - 1)])
        else:
            operands.append(whole(len(shape)))
    return rule.done(operands, [[batch, (), ()], [(), batch, (), (), ()]][: len(node.results)])


def _cost_projected(node: Node) -> int:
    """The projection, and what MultiHeadAttention does."""
    heads, size, value_size = _projected(node)
    batch, steps, channels = shape_of(node, 0)
    keys = result_shape(node, 1)[3] if len(node.results) > 1 else steps
    scores = batch * heads * steps * keys * (2 * size + _SCORE_FLOPS + 2 * value_size)
    return scores + 2 * batch * steps * channels * shape_of(node, 1)[1]


microsoft("Attention", _infer_projected, _rule_projected, _cost_projected, decompose=decompose_projected)
microsoft("QAttention", _infer_projected, _rule_projected, _cost_projected, dtypes=3, gradient=PACKED)


# -- RotaryEmbedding, MRotaryEmbedding ------------------------------------------------------------------------------


def _rotated(node: Node) -> int:
    """The size of a head of an operand of three dims."""
    wide = dims_of(node, 0)[2]
    count = int_attribute(node, "num_heads", 0)
    if count:
        return _size(wide, count)
    size = 2 * _size(dims_of(node, 2)[1])
    return size if _size(wide, size) else 0


def _rule_rotary(node: Node) -> FactorRule:
    """`([b,h,s,d],[b,s],[.,.],[.,.])->([b,h,s,d])` or `[b,s,(hd)]`: batch and heads pass; so does s, but with one place
    for all, from which the steps are counted.
    """
    if int_attribute(node, "is_packed_batching", 0):
        raise CannotTellError("packed rows")
    shape, places = shape_of(node, 0), shape_of(node, 1)
    streams = len(places) - 2
    steps_count = shape[2] if len(shape) == 4 else shape[1]
    free = streams >= 0
    rule = RuleBuilder()
    (batch,) = rule.dims(shape[:1])
    (steps,) = rule.dims([steps_count], Kind.PASS if free else Kind.REPLICATE)
    count, size = (shape[1], shape[3]) if len(shape) == 4 else (shape[2] // _rotated(node), _rotated(node))
    (heads,) = rule.dims([count])
    (inside,) = rule.dims([size], Kind.REPLICATE)
    data = [batch, heads, steps, inside] if len(shape) == 4 else [batch, steps, (*heads, *inside)]
    ids: list[DimFactors] = [*[()] * streams, batch, steps] if free else [()]
    return rule.done([data, ids, whole(2), whole(2)], [data])


def _localize_rotary(whole_node: Node, local: Node, builder: Builder) -> None:
    """Count the heads of the block, where an attribute says how many there are."""
    shape = shape_of(local, 0)
    if int_attribute(whole_node, "num_heads", 0):
        local.set_attribute("num_heads", shape[1] if len(shape) == 4 else shape[2] // _rotated(whole_node))


def _cost_rotary(node: Node) -> int:
    return 3 * prod(result_shape(node))


def _decompose_rotary(node: Node, w: GradientWriter) -> list[Value]:
    return decompose_rotary(node, w, _rotated(node) if len(dims_of(node, 0)) == 3 else 0)


for _name in ("RotaryEmbedding", "MRotaryEmbedding"):
    microsoft(_name, same_type, _rule_rotary, _cost_rotary, _localize_rotary, decompose=_decompose_rotary)
