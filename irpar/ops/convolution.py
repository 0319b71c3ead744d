"""Convolutions and pooling: batch and channels may be cut, places are whole."""

from collections.abc import Sequence
from math import prod

import numpy as np

from irpar.ir import Builder, Dim, DType, Expr, Node, TensorType, Type
from irpar.ir.dims import ceildiv, floordiv
from irpar.sharding import ceil_div

from .coords import block_index
from .facts import (
    CannotTellError,
    dims_of,
    int_attribute,
    ints_attribute,
    operand,
    result_shape,
    shape_of,
    tensor_of,
    text_attribute,
)
from .registry import OpDef, define
from .rule import DimFactors, FactorRule, Kind, RuleBuilder


def _windows(node: Node, kernel: Sequence[int]) -> list[Dim]:
    """Sizes of the result along the places."""
    dims = dims_of(node, 0)[2:]
    rank = len(dims)
    if len(kernel) != rank:
        raise CannotTellError("a kernel of another rank")
    strides = ints_attribute(node, "strides") or (1,) * rank
    dilations = ints_attribute(node, "dilations") or (1,) * rank
    pads = ints_attribute(node, "pads") or (0,) * (2 * rank)
    auto_pad = text_attribute(node, "auto_pad", "NOTSET")
    found: list[Dim] = []
    for dim, size in enumerate(dims):
        if size is None:
            found.append(None)
            continue
        reach = dilations[dim] * (kernel[dim] - 1) + 1
        if auto_pad.startswith("SAME"):
            found.append(ceildiv(size, strides[dim]))
            continue
        padding = 0 if auto_pad == "VALID" else pads[dim] + pads[dim + rank]
        span = size + padding - reach
        if isinstance(span, int) and span < 0:
            raise CannotTellError("a window that is larger than the data")
        if int_attribute(node, "ceil_mode", 0):
            found.append(_rounded_up(span, strides[dim], size, pads[dim]))
        else:
            found.append(floordiv(span, strides[dim]) + 1)
    return found


def _rounded_up(span: int | Expr, stride: int, size: int | Expr, before: int) -> int:
    """Windows where the last one may reach beyond the padding; one that would start behind the data is dropped."""
    if not isinstance(span, int) or not isinstance(size, int):
        raise CannotTellError("symbolic places")
    count = ceil_div(span, stride) + 1
    return count - ((count - 1) * stride >= size + before)


# -- Conv -----------------------------------------------------------------------------------------------------------


def _infer_conv(node: Node) -> Sequence[Type]:
    kernel = dims_of(node, 1)
    window = ints_attribute(node, "kernel_shape") or kernel[2:]
    if not all(isinstance(size, int) for size in window):
        raise CannotTellError("a symbolic kernel")
    shape = (dims_of(node, 0)[0], kernel[0], *_windows(node, window))  # type: ignore[arg-type]
    return [tensor_of(node, 0).with_shape(shape)]


def _rule_conv(node: Node) -> FactorRule:
    """`([b,(gc),s],[(gm),c,k],[(gm)])->([b,(gm),s])`: batch, groups and output channels pass.

    Input channels give partial sums, to one of which the bias is added; places are whole.
    """
    data, kernel = shape_of(node, 0), shape_of(node, 1)
    groups = int_attribute(node, "group", 1)
    rule = RuleBuilder()
    (batch,) = rule.dims(data[:1])
    (group,) = rule.dims([groups])
    (inputs,) = rule.dims(kernel[1:2], Kind.REDUCE)
    (outputs,) = rule.dims([kernel[0] // groups])
    channels: DimFactors = (*group, *outputs)
    operands: list[list[DimFactors]] = [
        [batch, (*group, *inputs), *rule.dims(data[2:], Kind.REPLICATE)],
        [channels, inputs, *rule.dims(kernel[2:], Kind.REPLICATE)],
    ]
    if len(node.operands) > 2:
        operands.append([] if operand(node, 2) is None else [channels])
    return rule.done(operands, [[batch, channels, *[()] * (len(data) - 2)]])


def _localize_conv(whole_node: Node, local: Node, builder: Builder) -> None:
    """Count the groups of the block; add the bias once over all blocks of the input channels."""
    groups = int_attribute(whole_node, "group", 1)
    if groups > 1:
        local.set_attribute("group", shape_of(local, 0)[1] // shape_of(local, 1)[1])
    _add_bias_once(local, builder)


def _add_bias_once(local: Node, builder: Builder) -> None:
    """Where the result is a partial sum, give the bias to the first device of those that add theirs up."""
    bias, sharding = operand(local, 2), local.result.sharding
    if bias is None or sharding is None or not sharding.partial:
        return
    index = block_index(builder, sharding.mesh, sharding.partial)
    zero = builder.constant(np.asarray(0, np.int64), "number_0")
    is_first = builder.op("Equal", [index, zero], type=TensorType(DType.BOOL, ()))
    nothing = builder.constant(np.zeros((), bias.dtype.numpy), "zero")
    once = builder.op("Where", [is_first, bias, nothing], type=bias.type, name=f"{bias.name}_once")
    local.set_operands([*local.operands[:2], once])


def _cost_conv(node: Node) -> int:
    size = prod(result_shape(node))
    return size * (2 * prod(shape_of(node, 1)[1:]) + (operand(node, 2) is not None))


define(OpDef("", "Conv", _infer_conv, _rule_conv, _cost_conv, _localize_conv))


# -- ConvTranspose --------------------------------------------------------------------------------------------------


def _infer_conv_transpose(node: Node) -> Sequence[Type]:
    data, kernel = dims_of(node, 0), dims_of(node, 1)
    if kernel[1] is None:
        raise CannotTellError("output channels")
    window = ints_attribute(node, "kernel_shape") or kernel[2:]
    places = [_spread(node, dim, size, window) for dim, size in enumerate(data[2:])]
    return [tensor_of(node, 0).with_shape((data[0], kernel[1] * int_attribute(node, "group", 1), *places))]


def _spread(node: Node, dim: int, size: Dim, window: Sequence[Dim]) -> Dim:
    """The size of the result along a place."""
    rank = len(window)
    asked = ints_attribute(node, "output_shape")
    if asked is not None:
        return asked[dim - rank]
    reach = window[dim]
    if not isinstance(reach, int):
        raise CannotTellError("a symbolic kernel")
    if size is None:
        return None
    stride = (ints_attribute(node, "strides") or (1,) * rank)[dim]
    auto_pad = text_attribute(node, "auto_pad", "NOTSET")
    if auto_pad.startswith("SAME"):
        return size * stride
    pads = ints_attribute(node, "pads") or (0,) * (2 * rank)
    padding = 0 if auto_pad == "VALID" else pads[dim] + pads[dim + rank]
    dilation = (ints_attribute(node, "dilations") or (1,) * rank)[dim]
    extra = (ints_attribute(node, "output_padding") or (0,) * rank)[dim]
    return size * stride + (dilation * (reach - 1) + 1 + extra - padding - stride)


def _rule_conv_transpose(node: Node) -> FactorRule:
    """`([b,(gc),s],[(gc),m,k],[(gm)])->([b,(gm),t])`: batch, groups and output channels pass, c gives partial sums."""
    data, kernel = shape_of(node, 0), shape_of(node, 1)
    groups = int_attribute(node, "group", 1)
    rule = RuleBuilder()
    (batch,) = rule.dims(data[:1])
    (group,) = rule.dims([groups])
    (inputs,) = rule.dims([kernel[0] // groups], Kind.REDUCE)
    (outputs,) = rule.dims(kernel[1:2])
    operands: list[list[DimFactors]] = [
        [batch, (*group, *inputs), *rule.dims(data[2:], Kind.REPLICATE)],
        [(*group, *inputs), outputs, *rule.dims(kernel[2:], Kind.REPLICATE)],
    ]
    if len(node.operands) > 2:
        operands.append([] if operand(node, 2) is None else [(*group, *outputs)])
    return rule.done(operands, [[batch, (*group, *outputs), *[()] * (len(data) - 2)]])


def _localize_conv_transpose(whole_node: Node, local: Node, builder: Builder) -> None:
    """As for Conv."""
    if int_attribute(whole_node, "group", 1) > 1:
        local.set_attribute("group", result_shape(local)[1] // shape_of(local, 1)[1])
    _add_bias_once(local, builder)


def _cost_conv_transpose(node: Node) -> int:
    """Every element of the data meets every weight of its channel; a bias adds one for each element of the result."""
    products = 2 * prod(shape_of(node, 0)) * prod(shape_of(node, 1)[1:])
    return products + prod(result_shape(node)) * (operand(node, 2) is not None)


define(
    OpDef(
        "", "ConvTranspose", _infer_conv_transpose, _rule_conv_transpose, _cost_conv_transpose, _localize_conv_transpose
    )
)


# -- pooling --------------------------------------------------------------------------------------------------------


def _infer_pool(node: Node) -> Sequence[Type]:
    if len(node.results) > 1:
        raise CannotTellError("positions")
    shape = (*dims_of(node, 0)[:2], *_windows(node, ints_attribute(node, "kernel_shape") or ()))
    return [tensor_of(node, 0).with_shape(shape)]


def _infer_global_pool(node: Node) -> Sequence[Type]:
    dims = dims_of(node, 0)
    return [tensor_of(node, 0).with_shape((*dims[:2], *[1] * (len(dims) - 2)))]


def _rule_pool(node: Node) -> FactorRule | None:
    """Batch and channels pass; a maximum over all places is the greatest of those over blocks of them.

    Positions of maxima count through the whole tensor: no rule.
    """
    if len(node.results) > 1:
        return None
    shape = shape_of(node, 0)
    rule = RuleBuilder()
    leading = rule.dims(shape[:2])
    places = rule.dims(shape[2:], Kind.REDUCE if node.op_type == "GlobalMaxPool" else Kind.REPLICATE)
    return rule.done([[*leading, *places]], [[*leading, *[()] * len(places)]], "max")


def _cost_pool(node: Node) -> int:
    return prod(result_shape(node)) * prod(ints_attribute(node, "kernel_shape") or ())


def _cost_global_pool(node: Node) -> int:
    return prod(shape_of(node, 0))


for _name in ("AveragePool", "LpPool", "MaxPool"):
    define(OpDef("", _name, _infer_pool, _rule_pool, _cost_pool))
for _name in ("GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool"):
    define(OpDef("", _name, _infer_global_pool, _rule_pool, _cost_global_pool))
