"""LinearAttention and CausalConvWithState: batch, heads and channels may be sharded, steps are whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from irpar.ir import Builder, Dim, Expr, Node, Type, Value
from irpar.ir.dims import exact_div

from .facts import (
    CannotTellError,
    dims_of,
    int_attribute,
    operand,
    result_shape,
    shape_of,
    shapes_of,
    tensor_of,
    text_attribute,
)
from .gradients.linear_attention import decompose_causal_conv, decompose_linear_attention
from .gradients.writer import GradientWriter
from .microsoft import microsoft
from .op_def import OpDef
from .registry import define
from .rule import DimFactors, FactorRule, Kind, RuleBuilder

# -- CausalConvWithState: each channel by itself --------------------------------------------------------------------


def _refuse_variants(node: Node) -> None:
    """Attributes of com.microsoft's operator that ONNX's does not have."""
    plain = {"channels_last": 0, "ndim": 1, "dilation": 1, "state_window": 0}
    if any(int_attribute(node, name, value) != value for name, value in plain.items()):
        raise CannotTellError("a layout that is not covered")


def _infer_causal_conv(node: Node) -> Sequence[Type]:
    _refuse_variants(node)
    data, kernel = tensor_of(node, 0), dims_of(node, 1)
    batch, channels, _ = dims_of(node, 0)
    reach = kernel[-1]
    state = data.with_shape((batch, channels, None if reach is None else reach - 1))
    return [data, state][: len(node.results)]


def _rule_causal_conv(node: Node) -> FactorRule:
    """`([b,c,l],[c,1,k],[c],[b,c,j])->([b,c,l],[b,c,j])`: b and c pass; a place needs the ones before it."""
    _refuse_variants(node)
    batch_size, count, length = shape_of(node, 0)
    rule = RuleBuilder()
    batch, channels = rule.dims([batch_size, count])
    places, reach = rule.dims([length, shape_of(node, 1)[-1]], Kind.REPLICATE)
    data: list[DimFactors] = [batch, channels, places]
    state: list[DimFactors] = [batch, channels, ()]
    given: list[list[DimFactors]] = [data, [channels, (), reach], [channels], state]
    operands = [[] if value is None else factors for value, factors in zip(node.operands, given, strict=False)]
    return rule.done(operands, [data, state][: len(node.results)])


def _cost_causal_conv(node: Node) -> int:
    return prod(result_shape(node)) * (2 * shape_of(node, 1)[-1] + (operand(node, 2) is not None))


# -- LinearAttention ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Heads:
    """Numbers of heads and their sizes."""

    queries: int
    keys: int
    size: int | Expr
    value_size: int | Expr


def _heads(node: Node) -> _Heads:
    queries, keys = int_attribute(node, "q_num_heads"), int_attribute(node, "kv_num_heads")
    if int_attribute(node, "state_window", 0) or keys < 1 or queries < keys or queries % keys:
        raise CannotTellError("heads that are not covered")
    size, value_size = dims_of(node, 0)[2], dims_of(node, 2)[2]
    found = [None if dim is None else exact_div(dim, count) for dim, count in ((size, queries), (value_size, keys))]
    if found[0] is None or found[1] is None:
        raise CannotTellError("the size of a head")
    return _Heads(queries, keys, found[0], found[1])


def _infer_linear_attention(node: Node) -> Sequence[Type]:
    of = _heads(node)
    data = tensor_of(node, 0)
    batch, steps, _ = dims_of(node, 0)
    result: tuple[Dim, ...] = (batch, steps, of.value_size * of.queries)
    past = operand(node, 3)
    state = tensor_of(node, 2) if past is None else tensor_of(node, 3)
    return [data.with_shape(result), state.with_shape((batch, of.keys, of.size, of.value_size))][: len(node.results)]


def _rule_linear_attention(node: Node) -> FactorRule:
    """`([b,t,(hrd)],[b,t,(hd)],[b,t,(he)],[b,h,d,e],[b,t,h],[b,t,h])->([b,t,(hre)],[b,h,d,e])`.

    Batch, heads and what is in the head of a value pass, with r query heads a key head; steps follow each other.
    """
    of = _heads(node)
    assert isinstance(of.size, int)
    assert isinstance(of.value_size, int)
    batch_size, steps, _ = shape_of(node, 0)
    rule = RuleBuilder()
    batch, heads, group = rule.dims([batch_size, of.keys, of.queries // of.keys])
    step, inside = rule.dims([steps, of.size], Kind.REPLICATE)
    (value,) = rule.dims([of.value_size])
    state: list[DimFactors] = [batch, heads, inside, value]

    def gate(index: int) -> list[DimFactors]:
        size = shape_of(node, index)[2]
        if size not in (1, of.keys, of.keys * of.size if isinstance(of.size, int) else 0):
            raise CannotTellError("gates of another size")
        return [batch, step, () if size == 1 and of.keys > 1 else heads if size == of.keys else (*heads, *inside)]

    operands: list[list[DimFactors]] = [
        [batch, step, (*heads, *group, *inside)],
        [batch, step, (*heads, *inside)],
        [batch, step, (*heads, *value)],
    ]
    for index, shape in enumerate(shapes_of(node)[3:], 3):
        operands.append([] if shape is None else state if index == 3 else gate(index))
    return rule.done(operands, [[batch, step, (*heads, *group, *value)], state][: len(node.results)])


def _localize_linear_attention(whole_node: Node, local: Node, builder: Builder) -> None:
    """Count the heads of the block."""
    of = _heads(whole_node)
    assert isinstance(of.size, int)
    local.set_attribute("q_num_heads", shape_of(local, 0)[2] // of.size)
    local.set_attribute("kv_num_heads", shape_of(local, 1)[2] // of.size)


_FLOPS = {"linear": 4, "gated": 5, "delta": 7, "gated_delta": 8}
"""For each element of a head's state and step: to update and to read it."""


def _cost_linear_attention(node: Node) -> int:
    of = _heads(node)
    batch, steps, _ = shape_of(node, 0)
    if not isinstance(of.size, int) or not isinstance(of.value_size, int):
        raise CannotTellError("a symbolic head")
    states = batch * of.keys * of.size * of.value_size
    reads = 2 * batch * (of.queries - of.keys) * of.size * of.value_size
    return steps * (states * _FLOPS[text_attribute(node, "update_rule", "gated_delta")] + reads)


def _decompose_causal_conv(node: Node, w: GradientWriter) -> list[Value]:
    _refuse_variants(node)
    return decompose_causal_conv(node, w)


_CONV = (_infer_causal_conv, _rule_causal_conv, _cost_causal_conv)
define(OpDef("", "CausalConvWithState", *_CONV, decompose=_decompose_causal_conv))
microsoft("CausalConvWithState", *_CONV, decompose=_decompose_causal_conv)
_LINEAR = (_infer_linear_attention, _rule_linear_attention, _cost_linear_attention, _localize_linear_attention)
define(OpDef("", "LinearAttention", *_LINEAR, decompose=decompose_linear_attention))
microsoft("LinearAttention", *_LINEAR, decompose=decompose_linear_attention)
