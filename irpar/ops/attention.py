"""Attention and RotaryEmbedding (opset 23 on)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from irpar.ir import Builder, Dim, Expr, Node, Type
from irpar.ir.dims import exact_div

from .facts import CannotTellError, dims_of, int_attribute, operand, result_shape, same_type, shape_of, tensor_of
from .registry import OpDef, define
from .rule import DimFactors, FactorRule, Kind, RuleBuilder, whole

SOFTMAX_FLOPS = 5
"""As in normalization.FLOPS_PER_ELEMENT."""


@dataclass(frozen=True)
class _Sizes:
    """The sizes of an Attention node, whatever the rank of its operands."""

    batch: Dim
    query_heads: Dim
    key_heads: Dim
    queries: Dim
    keys: Dim
    """Those of K and of the past together."""
    head: Dim
    value_head: Dim


def _divided(size: Dim, count: int) -> int | Expr:
    found = None if size is None else exact_div(size, count)
    if found is None:
        raise CannotTellError("the size of a head")
    return found


def _sizes(node: Node) -> _Sizes:
    q, k, v = (dims_of(node, place) for place in range(3))
    if len(q) == 4:
        sizes = _Sizes(q[0], q[1], k[1], q[2], k[2], q[3], v[3])
    else:
        query_heads, key_heads = int_attribute(node, "q_num_heads"), int_attribute(node, "kv_num_heads")
        head, value_head = _divided(q[2], query_heads), _divided(v[2], key_heads)
        sizes = _Sizes(q[0], query_heads, key_heads, q[1], k[1], head, value_head)
    if operand(node, 4) is None:
        return sizes
    past = dims_of(node, 4)[2]
    keys = None if past is None or sizes.keys is None else sizes.keys + past
    return _Sizes(sizes.batch, sizes.query_heads, sizes.key_heads, sizes.queries, keys, sizes.head, sizes.value_head)


def _infer_attention(node: Node) -> Sequence[Type]:
    of = _sizes(node)
    q, k, v = (tensor_of(node, place) for place in range(3))
    if q.rank == 4:
        result: tuple[Dim, ...] = (of.batch, of.query_heads, of.queries, of.value_head)
    else:
        assert of.query_heads is not None
        assert of.value_head is not None
        result = (of.batch, of.queries, of.query_heads * of.value_head)
    types = [
        q.with_shape(result),
        k.with_shape((of.batch, of.key_heads, of.keys, of.head)),
        v.with_shape((of.batch, of.key_heads, of.keys, of.value_head)),
        q.with_shape((of.batch, of.query_heads, of.queries, of.keys)),
    ]
    return types[: len(node.results)]


def _static(dim: Dim) -> int:
    if not isinstance(dim, int):
        raise CannotTellError("a symbolic dim")
    return dim


def _reads_position(node: Node) -> bool:
    """True where a query's place in the sequence counts: causal masks and windows."""
    windows = (int_attribute(node, "left_window_size", -1), int_attribute(node, "right_window_size", -1))
    return bool(int_attribute(node, "is_causal", 0)) or max(windows) >= 0


def _rule_attention(node: Node) -> FactorRule:
    """`([b,(hr),q,d],[b,h,k,d],[b,h,k,e])->([b,(hr),q,e])`: batch and heads pass, with r query heads a key head.

    Queries pass where their place does not count; keys and what is in a head are whole. Operands of three dims have
    compound factors `[b,q,(hrd)]`.
    """
    of = _sizes(node)
    heads, key_heads = _static(of.query_heads), _static(of.key_heads)
    if heads % key_heads:
        raise CannotTellError("query heads that are no multiple of the key heads")
    rule = RuleBuilder()
    (batch,) = rule.dims([_static(of.batch)])
    (key_head,) = rule.dims([key_heads])
    query_head = (*key_head, *rule.dims([heads // key_heads])[0])
    (queries,) = rule.dims([_static(of.queries)], Kind.REPLICATE if _reads_position(node) else Kind.PASS)
    (keys,) = rule.dims([_key_count(node)], Kind.REPLICATE)
    head, value_head = rule.dims([_static(of.head), _static(of.value_head)], Kind.REPLICATE)

    def packed(head_factors: DimFactors, places: DimFactors, inside: DimFactors, index: int) -> list[DimFactors]:
        if len(shape_of(node, index)) == 4:
            return [batch, head_factors, places, inside]
        return [batch, places, (*head_factors, *inside)]

    result = [batch, query_head, queries, value_head]
    if len(shape_of(node, 0)) == 3:
        result = [batch, queries, (*query_head, *value_head)]
    operands: list[Sequence[DimFactors]] = [
        packed(query_head, queries, head, 0),
        packed(key_head, keys, head, 1),
        packed(key_head, keys, value_head, 2),
    ]
    cache: tuple[list[DimFactors], ...] = ([batch, key_head, (), head], [batch, key_head, (), value_head])
    scores: list[DimFactors] = [batch, query_head, queries, keys if of.keys == _key_count(node) else ()]
    mask = _mask_factors(node, of, scores) if operand(node, 3) is not None else []
    others = (mask, *cache, [batch])[: len(node.operands) - 3]
    operands.extend([] if operand(node, place) is None else factors for place, factors in enumerate(others, 3))
    return rule.done(operands, [result, cache[0], cache[1], scores][: len(node.results)])


def _key_count(node: Node) -> int:
    """The keys of K, without those of the past."""
    return shape_of(node, 1)[-2]


def _mask_factors(node: Node, of: _Sizes, scores: Sequence[DimFactors]) -> list[DimFactors]:
    """The mask broadcasts to batch, heads, queries, keys; its keys are whole."""
    shape = shape_of(node, 3)
    sizes = (of.batch, of.query_heads, of.queries, of.keys)
    start = 4 - len(shape)
    return [scores[start + dim] if size == sizes[start + dim] else () for dim, size in enumerate(shape)]


def _localize_attention(whole_node: Node, local: Node, builder: Builder) -> None:
    """Count the heads of the block, where an attribute says how many there are."""
    if len(shape_of(whole_node, 0)) == 4:
        return
    of = _sizes(whole_node)
    head = _static(of.head)
    local.set_attribute("q_num_heads", shape_of(local, 0)[2] // head)
    local.set_attribute("kv_num_heads", shape_of(local, 1)[2] // head)


def _cost_attention(node: Node) -> int:
    """Two products and the softmax over all scores; masks count nothing, causal ones included."""
    of = _sizes(node)
    scores = _static(of.batch) * _static(of.query_heads) * _static(of.queries) * _static(of.keys)
    return scores * (2 * _static(of.head) + 1 + SOFTMAX_FLOPS + 2 * _static(of.value_head))


define(OpDef("", "Attention", _infer_attention, _rule_attention, _cost_attention, _localize_attention))


# -- RotaryEmbedding ------------------------------------------------------------------------------------------------


def _rule_rotary(node: Node) -> FactorRule:
    """`([b,h,s,d],[.,.],[.,.],[b,s])->([b,h,s,d])`: batch, heads and places pass, a head is whole.

    Without position ids the caches are `[b,s,.]`; an operand of three dims is `[b,s,(hd)]`.
    """
    shape = shape_of(node, 0)
    if len(shape) == 4:
        count, places, head = shape[1:]
    else:
        count, places = int_attribute(node, "num_heads"), shape[1]
        if not count or shape[2] % count:
            raise CannotTellError("heads of different sizes")
        head = shape[2] // count
    rule = RuleBuilder()
    (batch, heads, sequence) = rule.dims([shape[0], count, places])
    (inside,) = rule.dims([head], Kind.REPLICATE)
    data = [batch, heads, sequence, inside] if len(shape) == 4 else [batch, sequence, (*heads, *inside)]
    leading = ((shape[0], batch), (places, sequence))

    def aligned(index: int) -> list[DimFactors]:
        return [
            factors if size == full else ()
            for size, (full, factors) in zip(shape_of(node, index)[:2], leading, strict=True)
        ]

    if operand(node, 3) is None:
        return rule.done([data, [*aligned(1), ()], [*aligned(2), ()], *[()] * (len(node.operands) - 3)], [data])
    return rule.done([data, whole(2), whole(2), aligned(3)], [data])


def _localize_rotary(whole_node: Node, local: Node, builder: Builder) -> None:
    """Count the heads of the block, where an attribute says how many there are."""
    shape = shape_of(whole_node, 0)
    if len(shape) == 3:
        head = shape[2] // int_attribute(whole_node, "num_heads")
        local.set_attribute("num_heads", shape_of(local, 0)[2] // head)


def _cost_rotary(node: Node) -> int:
    """Two multiplies and an add for each element."""
    return 3 * prod(result_shape(node))


define(OpDef("", "RotaryEmbedding", same_type, _rule_rotary, _cost_rotary, _localize_rotary))
