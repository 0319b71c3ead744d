"""Attention and RotaryEmbedding (opset 23 on)."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from irpar.ir import Builder, Dim, DType, Node, TensorType, Type

from .attention_sizes import (
    MEETS,
    AttentionSizes,
    Places,
    attention_sizes,
    head_dim,
    key_count,
    masked,
    query_dim,
    reads_position,
    static,
    visible_keys,
)
from .facts import CannotTellError, int_attribute, needed, operand, result_shape, same_type, shape_of, tensor_of
from .gradients.attention import decompose_attention, decompose_rotary
from .local_programs import ring_attention
from .local_programs.attention import LOCAL_PROGRAM
from .local_programs.cached_attention import CACHED
from .local_programs.program import LocalProgram
from .op_def import OpDef
from .registry import define
from .rule import DimFactors, FactorRule, Kind, RuleBuilder, whole

SOFTMAX_FLOPS = 5
"""As in normalization.FLOPS_PER_ELEMENT."""


def _infer_attention(node: Node) -> Sequence[Type]:
    of = attention_sizes(node)
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


def _rule_attention(node: Node) -> FactorRule:
    """`([b,(hr),q,d],[b,h,k,d],[b,h,k,e])->([b,(hr),q,e])`: batch, queries and heads pass, r query heads a key head.

    Keys are reduced, after the maximum and sum of their scores (`irpar.ops.local_programs.attention`): those of K, or
    of a past and of all, which are a result then; they are whole where scores are a result. What is in a head is whole.
    Operands of three dims have compound factors `[b,q,(hrd)]`.
    """
    of = attention_sizes(node)
    heads, key_heads = static(of.query_heads), static(of.key_heads)
    if heads % key_heads:
        raise CannotTellError("query heads that are no multiple of the key heads")
    rule = RuleBuilder()
    (batch,) = rule.dims([static(of.batch)])
    (key_head,) = rule.dims([key_heads])
    query_head = (*key_head, *rule.dims([heads // key_heads])[0])
    # Where scores are a result, a mask in the place of attributes that count queries would show in it.
    shows_mask = len(node.results) > 3 and reads_position(node)
    (queries,) = rule.dims([static(of.queries)], Kind.REPLICATE if shows_mask else Kind.PASS)
    has_cache, is_cut = bool(CACHED.dims(node)), bool(LOCAL_PROGRAM.dims(node))
    count = static(of.keys) if has_cache else key_count(node)
    (keys,) = rule.dims([count], Kind.REDUCE if has_cache or is_cut else Kind.REPLICATE)
    head, value_head = rule.dims([static(of.head), static(of.value_head)], Kind.REPLICATE)

    def packed(head_factors: DimFactors, places: DimFactors, inside: DimFactors, index: int) -> list[DimFactors]:
        if len(shape_of(node, index)) == 4:
            return [batch, head_factors, places, inside]
        return [batch, places, (*head_factors, *inside)]

    result = [batch, query_head, queries, value_head]
    if len(shape_of(node, 0)) == 3:
        result = [batch, queries, (*query_head, *value_head)]
    operands: list[Sequence[DimFactors]] = [
        packed(query_head, queries, head, 0),
        packed(key_head, () if has_cache else keys, head, 1),
        packed(key_head, () if has_cache else keys, value_head, 2),
    ]
    held = keys if has_cache or is_cut else ()
    cache: tuple[list[DimFactors], ...] = ([batch, key_head, held, head], [batch, key_head, held, value_head])
    scores: list[DimFactors] = [batch, query_head, queries, keys if of.keys == count else ()]
    mask = _mask_factors(node, of, scores) if operand(node, 3) is not None else []
    others = (mask, *cache, [batch])[: len(node.operands) - 3]
    operands.extend([] if operand(node, place) is None else factors for place, factors in enumerate(others, 3))
    results = [result, cache[0], cache[1], scores][: len(node.results)]
    return rule.done(operands, results, moves=[(queries, key_head), (keys, key_head)], meets=MEETS)


def _rule_ring(node: Node) -> FactorRule | None:
    """Places of queries and of keys are one factor `s`: `([b,(hr),s,d],[b,h,s,d],[b,h,s,e])->([b,(hr),s,e])`.

    There may be more of the ones than of the others. A mask is sharded along its queries, its keys are whole.
    """
    if not ring_attention.dims(node):
        return None
    rule, dim = _rule_attention(node), query_dim(node)
    queries, keys = rule.operands[0][dim], rule.operands[1][dim]
    if not queries or not keys:
        return None
    operands = list(rule.operands)
    if len(operands) > 3:
        operands[3] = tuple(() if parts == keys else parts for parts in operands[3])
    return replace(rule, operands=tuple(operands)).merged(queries[0], keys[0], Kind.PERMUTE)


def _mask_factors(node: Node, of: AttentionSizes, scores: Sequence[DimFactors]) -> list[DimFactors]:
    """The mask broadcasts to batch, heads, queries, keys; its keys are whole."""
    shape = shape_of(node, 3)
    sizes = (of.batch, of.query_heads, of.queries, of.keys)
    start = 4 - len(shape)
    return [scores[start + dim] if size == sizes[start + dim] else () for dim, size in enumerate(shape)]


def _localize_attention(whole_node: Node, local: Node, builder: Builder) -> None:
    """Count the heads of the block, where an attribute says how many there are, and the queries before it."""
    if reads_position(whole_node) and shape_of(whole_node, 0)[query_dim(local)] != shape_of(local, 0)[query_dim(local)]:
        _place_queries(whole_node, local, builder)
    if head_dim(whole_node) == 1:
        return
    of = attention_sizes(whole_node)
    head = static(of.head)
    local.set_attribute("q_num_heads", shape_of(local, 0)[2] // head)
    local.set_attribute("kv_num_heads", shape_of(local, 1)[2] // head)


def _place_queries(whole_node: Node, local: Node, builder: Builder) -> None:
    """A mask instead of the attributes that count queries from the first one of the block."""
    sharding = needed(whole_node, 0).sharding
    assert sharding is not None
    dim, mask = query_dim(local), operand(local, 3)
    count = static(attention_sizes(whole_node).keys)
    if mask is not None and mask.shape and mask.shape[-1] != 1:
        count = mask.shape[-1]  # The keys that a shorter mask leaves out are not seen anyway.
    queries = Places(shape_of(local, 0)[dim], shape_of(whole_node, 0)[dim], sharding.axes[dim])
    allowed = visible_keys(whole_node, local, queries, Places(count, count, ()), sharding.mesh, builder)
    assert allowed is not None
    if mask is None:
        mask = allowed
    elif mask.dtype is DType.BOOL:
        shape = tuple(np.broadcast_shapes(mask.shape, allowed.shape))
        mask = builder.op("And", [mask, allowed], type=TensorType(DType.BOOL, shape))
    else:
        mask = masked(mask, allowed, builder)
    local.set_operands([*local.operands[:3], mask, *local.operands[4:]])
    for name in ("is_causal", "left_window_size", "right_window_size"):
        local.attributes.pop(name, None)


def _cost_attention(node: Node) -> int:
    """Two products and the softmax over all scores; masks count nothing, causal ones included."""
    of = attention_sizes(node)
    scores = static(of.batch) * static(of.query_heads) * static(of.queries) * static(of.keys)
    return scores * (2 * static(of.head) + 1 + SOFTMAX_FLOPS + 2 * static(of.value_head))


RING = LocalProgram(
    ring_attention.sends, ring_attention.write, ring_attention.dims, operand=1, rule=_rule_ring, manner="in a ring"
)
"""Along queries and keys that the same axes cut."""

define(
    OpDef(
        "",
        "Attention",
        _infer_attention,
        _rule_attention,
        _cost_attention,
        _localize_attention,
        LOCAL_PROGRAM,
        other_programs=(RING, CACHED),
        decompose=decompose_attention,
    )
)


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


define(
    OpDef(
        "",
        "RotaryEmbedding",
        same_type,
        _rule_rotary,
        _cost_rotary,
        _localize_rotary,
        decompose=decompose_rotary,
    )
)
