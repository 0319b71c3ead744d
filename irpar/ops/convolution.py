"""Convolutions: batch and channels may be sharded; those of Conv along places too, with what its windows cover."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from irpar.ir import Builder, Dim, Expr, Node, Type
from irpar.ir.dims import ceildiv, floordiv
from irpar.sharding import ceil_div

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
from .gradients.convolution import of_conv, of_conv_transpose
from .gradients.sampling import decompose_deform_conv
from .local import add_bias_once
from .local_programs.transpose import TRANSPOSED
from .local_programs.window import WINDOWS
from .op_def import OpDef
from .registry import define
from .rule import DimFactors, FactorRule, Kind, RuleBuilder


def window_sizes(node: Node, kernel: Sequence[int], places: Sequence[Dim] | None = None) -> list[Dim]:
    """Sizes of the result along the places; those of the first operand, unless others are given."""
    dims = dims_of(node, 0)[2:] if places is None else places
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
    shape = (dims_of(node, 0)[0], kernel[0], *window_sizes(node, window))  # type: ignore[arg-type]
    return [tensor_of(node, 0).with_shape(shape)]


@dataclass(frozen=True)
class ConvFactors:
    """The factors of a convolution: `([b,(gc),s],[(gm),c,k])->([b,(gm),s])`.

    Attributes:
        rule: the builder that has them.
        data, kernel, result: by dim.
        channels: those of the result, as a bias has them.
    """

    rule: RuleBuilder
    data: list[DimFactors]
    kernel: list[DimFactors]
    result: list[DimFactors]
    channels: DimFactors


def conv_factors(
    data: Sequence[int], kernel: Sequence[int], groups: int, inputs_kind: Kind, *, has_windows: bool = False
) -> ConvFactors:
    """Batch, groups and output channels pass; input channels are of the given kind.

    Places are whole, or where a local program fetches what windows cover, blocks of them need their neighbours.
    """
    rule = RuleBuilder()
    places = rule.dims(data[2:], Kind.PERMUTE if has_windows else Kind.REPLICATE)
    (batch,) = rule.dims(data[:1])
    (group,) = rule.dims([groups])
    (inputs,) = rule.dims(kernel[1:2], inputs_kind)
    (outputs,) = rule.dims([kernel[0] // groups])
    channels: DimFactors = (*group, *outputs)
    return ConvFactors(
        rule,
        [batch, (*group, *inputs), *places],
        [channels, inputs, *rule.dims(kernel[2:], Kind.REPLICATE)],
        [batch, channels, *(places if has_windows else [()] * len(places))],
        channels,
    )


def _rule_conv(node: Node) -> FactorRule:
    """`([b,(gc),s],[(gm),c,k],[(gm)])->([b,(gm),s])`: batch, groups and output channels pass.

    Input channels give partial sums, to one of which the bias is added; places need what their windows cover.
    """
    groups = int_attribute(node, "group", 1)
    found = conv_factors(shape_of(node, 0), shape_of(node, 1), groups, Kind.REDUCE, has_windows=True)
    operands = [found.data, found.kernel]
    if len(node.operands) > 2:
        operands.append([] if operand(node, 2) is None else [found.channels])
    return found.rule.done(operands, [found.result])


def _localize_conv(whole_node: Node, local: Node, builder: Builder) -> None:
    """Count the groups of the block; add the bias once over all blocks of the input channels."""
    count_groups(whole_node, local, 0, 1)
    add_bias_once(local, 2, builder)


def count_groups(whole_node: Node, local: Node, data: int, kernel: int, channels: int = 1) -> None:
    """Set the attribute `group` to the number of groups in the block; `channels` is the dim of these in the data."""
    if int_attribute(whole_node, "group", 1) > 1:
        local.set_attribute("group", shape_of(local, data)[channels] // shape_of(local, kernel)[1])


def _cost_conv(node: Node) -> int:
    size = prod(result_shape(node))
    return size * (2 * prod(shape_of(node, 1)[1:]) + (operand(node, 2) is not None))


define(
    OpDef(
        "",
        "Conv",
        _infer_conv,
        _rule_conv,
        _cost_conv,
        _localize_conv,
        WINDOWS["Conv"].local_program(),
        gradient=of_conv,
    )
)


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
    pads = ints_attribute(node, "pads") or (0,) * (2 * rank)
    dilation = (ints_attribute(node, "dilations") or (1,) * rank)[dim]
    extra = (ints_attribute(node, "output_padding") or (0,) * rank)[dim]
    beyond = dilation * (reach - 1) + 1 + extra - stride
    if auto_pad.startswith("SAME"):
        # ONNX Runtime adds nothing where windows leave out places, and the result is smaller than places * stride.
        return size * stride + min(beyond, 0)
    padding = 0 if auto_pad == "VALID" else pads[dim] + pads[dim + rank]
    return size * stride + (beyond - padding)


def _rule_conv_transpose(node: Node) -> FactorRule:
    """`([b,(gc),s],[(gc),m,k],[(gm)])->([b,(gm),t])`: batch, groups and output channels pass, c gives partial sums.

    Places are spread over their neighbours.
    """
    data, kernel = shape_of(node, 0), shape_of(node, 1)
    groups = int_attribute(node, "group", 1)
    rule = RuleBuilder()
    (batch,) = rule.dims(data[:1])
    (group,) = rule.dims([groups])
    (inputs,) = rule.dims([kernel[0] // groups], Kind.REDUCE)
    (outputs,) = rule.dims(kernel[1:2])
    places = rule.dims(data[2:], Kind.PERMUTE)
    operands: list[list[DimFactors]] = [
        [batch, (*group, *inputs), *places],
        [(*group, *inputs), outputs, *rule.dims(kernel[2:], Kind.REPLICATE)],
    ]
    if len(node.operands) > 2:
        operands.append([] if operand(node, 2) is None else [(*group, *outputs)])
    return rule.done(operands, [[batch, (*group, *outputs), *places]])


def _localize_conv_transpose(whole_node: Node, local: Node, builder: Builder) -> None:
    """As for Conv."""
    if int_attribute(whole_node, "group", 1) > 1:
        local.set_attribute("group", result_shape(local)[1] // shape_of(local, 1)[1])
    add_bias_once(local, 2, builder)


def _cost_conv_transpose(node: Node) -> int:
    """Every element of the data meets every weight of its channel; a bias adds one for each element of the result."""
    products = 2 * prod(shape_of(node, 0)) * prod(shape_of(node, 1)[1:])
    return products + prod(result_shape(node)) * (operand(node, 2) is not None)


define(
    OpDef(
        "",
        "ConvTranspose",
        _infer_conv_transpose,
        _rule_conv_transpose,
        _cost_conv_transpose,
        _localize_conv_transpose,
        TRANSPOSED.local_program(),
        gradient=of_conv_transpose,
    )
)


# -- DeformConv -----------------------------------------------------------------------------------------------------


def _rule_deform_conv(node: Node) -> FactorRule:
    """`([b,(gc),s],[(gm),c,k],[b,(ok),t],[(gm)],[b,(ol),t])->([b,(gm),t])`, with o groups of channels that move alike.

    As for Conv, where all channels move alike or each group of the convolution does so; else they are whole. The places
    of result and offsets are whole: an offset counts from its place.
    """
    data, kernel, offsets = (shape_of(node, index) for index in range(3))
    groups, moves = int_attribute(node, "group", 1), int_attribute(node, "offset_group", 1)
    if kernel[0] % groups or data[1] % moves:
        raise CannotTellError("groups of different sizes")
    fits = moves in (1, groups)
    kind = Kind.REDUCE if fits else Kind.REPLICATE
    rule = RuleBuilder()
    (batch,) = rule.dims(data[:1])
    (group,) = rule.dims([groups], Kind.PASS if fits else Kind.REPLICATE)
    (inputs,) = rule.dims(kernel[1:2], kind)
    (outputs,) = rule.dims([kernel[0] // groups])
    channels: DimFactors = (*group, *outputs)
    moved = group if moves > 1 and fits else ()

    def offset_dims(shape: Sequence[int]) -> list[DimFactors]:
        (inside,) = rule.dims([shape[1] // moves if moved else shape[1]], Kind.REPLICATE)
        return [batch, (*moved, *inside), *rule.dims(shape[2:], Kind.REPLICATE)]

    operands: list[list[DimFactors]] = [
        [batch, (*group, *inputs), *rule.dims(data[2:], Kind.REPLICATE)],
        [channels, inputs, *rule.dims(kernel[2:], Kind.REPLICATE)],
        offset_dims(offsets),
    ]
    if len(node.operands) > 3:
        operands.append([] if operand(node, 3) is None else [channels])
    if len(node.operands) > 4:
        operands.append(offset_dims(shape_of(node, 4)))
    return rule.done(operands, [[batch, channels, *[()] * (len(data) - 2)]])


def _infer_deform_conv(node: Node) -> Sequence[Type]:
    offsets = dims_of(node, 2)
    return [tensor_of(node, 0).with_shape((dims_of(node, 0)[0], dims_of(node, 1)[0], *offsets[2:]))]


def _localize_deform_conv(whole_node: Node, local: Node, builder: Builder) -> None:
    """Count the groups of the block, and the groups that move alike; add the bias once."""
    count_groups(whole_node, local, 0, 1)
    if int_attribute(whole_node, "offset_group", 1) > 1:
        inside = shape_of(whole_node, 2)[1] // int_attribute(whole_node, "offset_group")
        local.set_attribute("offset_group", shape_of(local, 2)[1] // inside)
    add_bias_once(local, 3, builder)


def _cost_deform_conv(node: Node) -> int:
    """As for Conv, and a bilinear sample (8) of each element of the data that goes in."""
    samples = 8 * prod(shape_of(node, 0)[:2]) * prod(shape_of(node, 1)[2:]) * prod(result_shape(node)[2:])
    size = prod(result_shape(node))
    return size * (2 * prod(shape_of(node, 1)[1:]) + (operand(node, 3) is not None)) + samples


define(
    OpDef(
        "",
        "DeformConv",
        _infer_deform_conv,
        _rule_deform_conv,
        _cost_deform_conv,
        _localize_deform_conv,
        decompose=decompose_deform_conv,
    )
)
