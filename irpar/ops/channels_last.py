"""Images whose channels are their last dim.

irpar.ConvChannelsLast: a convolution with what follows on its sums. irpar.PoolChannelsLast: the greatest or the mean
element of each window. irpar.GroupNormChannelsLast: groups of channels, standardised.
"""

import math
from collections.abc import Sequence

from irpar.ir import DOMAIN, Dim, DType, Node, TensorType, Type, Value
from irpar.sharding import IrparError

from .convolution import window_sizes
from .facts import (
    CannotTellError,
    dims_of,
    float_attribute,
    int_attribute,
    ints_attribute,
    needed,
    operand,
    result_shape,
    shape_of,
    tensor_of,
    text_attribute,
)
from .gradients.writer import GradientWriter
from .op_def import OpDef
from .registry import define

ACTIVATIONS = {"": 0, "Relu": 1, "Clip": 2, "Sigmoid": 4, "HardSwish": 4, "Silu": 5}
"""What may follow on the sums, with the operations of one element; Clip has the attributes `min` and `max`."""
GEOMETRY = ("dilations", "group", "kernel_shape", "pads", "strides")
"""Attributes that Conv has too."""
_BIAS, _RESIDUAL = 2, 3
_DTYPES = (DType.F16, DType.BF16, DType.F32, DType.F64)


def _wrong(node: Node, what: str, do: str) -> IrparError:
    return IrparError(f"irpar.{node.op_type} with {what}", where=f"node {node.label}", do=do)


def _infer(node: Node) -> Sequence[Type]:
    _check_attributes(node)
    data, kernel = dims_of(node, 0), dims_of(node, 1)
    if len(data) < 3 or len(kernel) != len(data):
        do = "give an image [batch, places..., channels] and a kernel [features, places..., channels of a group]"
        raise _wrong(node, f"an image {tensor_of(node, 0)} and a kernel {tensor_of(node, 1)}", do)
    window = [size for size in ints_attribute(node, "kernel_shape") or kernel[1:-1] if isinstance(size, int)]
    result = tensor_of(node, 0).with_shape(
        (data[0], *window_sizes(node, window, data[1:-1]), kernel[0])  # type: ignore[arg-type]
    )
    _check_operands(node, result)
    return [result]


def _check_activation(node: Node) -> None:
    activation = text_attribute(node, "activation")
    if activation not in ACTIVATIONS:
        named = ", ".join(f'"{name}"' for name in ACTIVATIONS)
        raise _wrong(node, f'the activation "{activation}"', f"write one of {named}")


def _check_attributes(node: Node) -> None:
    """Check that there is such an activation, and that padding is given in numbers."""
    _check_activation(node)
    if text_attribute(node, "auto_pad", "NOTSET") != "NOTSET":
        raise _wrong(node, "the attribute auto_pad", "write pads")


def _check_operands(node: Node, result: TensorType) -> None:
    """Check that operands are of one dtype, that groups divide channels, and that what is added fits the result."""
    if result.dtype not in _DTYPES:
        raise _wrong(node, f"an image {tensor_of(node, 0)}", f"cast to one of {', '.join(map(str, _DTYPES))}")
    kernel, data = dims_of(node, 1), dims_of(node, 0)
    group = int_attribute(node, "group", 1)
    window = ints_attribute(node, "kernel_shape")
    if window is not None and kernel[1:-1] != window and None not in kernel:
        raise _wrong(node, f"kernel_shape {list(window)} and a kernel {tensor_of(node, 1)}", "mend the attribute")
    if not _are_groups(group, data[-1], kernel[-1], kernel[0]):
        given = f"{group} groups, an image {tensor_of(node, 0)} and a kernel {tensor_of(node, 1)}"
        raise _wrong(node, given, "mend the attribute group, or the kernel")
    for index, name, wanted in (
        (1, "kernel", kernel),
        (_BIAS, "bias", (kernel[0],)),
        (_RESIDUAL, "residual", result.shape),
    ):
        if operand(node, index) is None or tensor_of(node, index).shape is None:
            continue
        given_type = tensor_of(node, index)
        if given_type.dtype != result.dtype or not _may_be(given_type.shape or (), wanted or ()):
            raise _wrong(node, f"a {name} {given_type} and a result {result}", f"mend the {name}")


def _are_groups(group: int, channels: Dim, depth: Dim, features: Dim) -> bool:
    """Whether so many groups may be, of channels of the image, channels of a group, and features."""
    if group < 1 or (isinstance(features, int) and features % group):
        return False
    return not (isinstance(channels, int) and isinstance(depth, int)) or channels == depth * group


def _may_be(shape: Sequence[Dim], wanted: Sequence[Dim]) -> bool:
    """Whether a shape may be the wanted one: dims that are numbers in both are equal."""
    if len(shape) != len(wanted):
        return False
    pairs = zip(shape, wanted, strict=True)
    return all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int))


def _flops(node: Node) -> int:
    """Those of the products, and of each element what is added, and the activation."""
    added = sum(operand(node, index) is not None for index in (_BIAS, _RESIDUAL))
    own = ACTIVATIONS.get(text_attribute(node, "activation"), 0)
    return math.prod(result_shape(node)) * (2 * math.prod(shape_of(node, 1)[1:]) + added + own)


def _decompose(node: Node, writer: GradientWriter) -> Sequence[Value]:
    """Conv between Transposes, Add, and the activation."""
    rank = len(dims_of(node, 0))
    to_first, to_last = (0, rank - 1, *range(1, rank - 1)), (0, *range(2, rank), 1)
    given = {name: value for name, value in node.attributes.items() if name in GEOMETRY}
    bias, residual = operand(node, _BIAS), operand(node, _RESIDUAL)
    operands = [writer.transpose(needed(node, index), to_first) for index in (0, 1)]
    made = writer.op("Conv", [*operands, *([] if bias is None else [bias])], given)
    made = writer.transpose(made, to_last)
    return [_activated(node, made if residual is None else writer.add(made, residual), writer)]


def _activated(node: Node, value: Value, writer: GradientWriter) -> Value:
    match text_attribute(node, "activation"):
        case "":
            return value
        case "Clip":
            bounds = [
                writer.bound(float_attribute(node, name, 0.0), value) if name in node.attributes else None
                for name in ("min", "max")
            ]
            return writer.op("Clip", [value, *bounds])
        case "Silu":
            return writer.mul(value, writer.op("Sigmoid", [value]))
        case name if name in ACTIVATIONS:
            return writer.op(name, [value])
        case name:
            raise CannotTellError(f"the activation {name}")


define(OpDef(DOMAIN, "ConvChannelsLast", _infer, flops=_flops, decompose=_decompose))


# -- PoolChannelsLast -----------------------------------------------------------------------------------------------


POOLS = {"max": "MaxPool", "average": "AveragePool"}
"""ONNX's operators by the attribute `mode`; other attributes are theirs."""


def _infer_pool(node: Node) -> Sequence[Type]:
    mode = text_attribute(node, "mode")
    if mode not in POOLS:
        do = f"write one of {', '.join(POOLS)}"
        raise _wrong(node, f'the mode "{mode}"', do)
    data = dims_of(node, 0)
    window = ints_attribute(node, "kernel_shape") or ()
    return [tensor_of(node, 0).with_shape((data[0], *window_sizes(node, window, data[1:-1]), data[-1]))]


def _flops_of_pool(node: Node) -> int:
    return math.prod(result_shape(node)) * math.prod(ints_attribute(node, "kernel_shape") or ())


def _decompose_pool(node: Node, writer: GradientWriter) -> Sequence[Value]:
    """A pool between Transposes."""
    rank = len(dims_of(node, 0))
    given = {name: value for name, value in node.attributes.items() if name != "mode"}
    if set(ints_attribute(node, "dilations") or ()) == {1}:
        del given["dilations"]  # Before opset 19 an AveragePool has none.
    x = writer.transpose(needed(node, 0), (0, rank - 1, *range(1, rank - 1)))
    made = writer.op(POOLS[text_attribute(node, "mode")], [x], given)
    return [writer.transpose(made, (0, *range(2, rank), 1))]


define(OpDef(DOMAIN, "PoolChannelsLast", _infer_pool, flops=_flops_of_pool, decompose=_decompose_pool))


# -- GroupNormChannelsLast ------------------------------------------------------------------------------------------


def _infer_norm(node: Node) -> Sequence[Type]:
    _check_activation(node)
    x, groups, channels = tensor_of(node, 0), int_attribute(node, "num_groups"), dims_of(node, 0)[-1]
    if groups < 1 or (isinstance(channels, int) and channels % groups):
        raise _wrong(node, f"{groups} groups of an image {x}", "mend the attribute num_groups")
    for index, name in ((1, "scale"), (2, "bias")):
        given = None if operand(node, index) is None else tensor_of(node, index)
        if given is not None and given != TensorType(x.dtype, (channels,)):
            raise _wrong(node, f"a {name} {given} and an image {x}", f"mend the {name}")
    return [x]


def _flops_of_norm(node: Node) -> int:
    """As GroupNormalization's, and the activation's."""
    return math.prod(result_shape(node)) * (8 + ACTIVATIONS.get(text_attribute(node, "activation"), 0))


def _decompose_norm(node: Node, w: GradientWriter) -> Sequence[Value]:
    """Means, in float32 where the image is narrower."""
    x = needed(node, 0)
    shape, groups = shape_of(node, 0), int_attribute(node, "num_groups")
    grouped = w.reshape(w.widened(x), (shape[0], math.prod(shape[1:-1]), groups, shape[-1] // groups))
    count = math.prod(shape[1:]) // groups
    centered = w.sub(grouped, w.div(w.sum(grouped, (1, 3)), count))
    variance = w.div(w.sum(w.mul(centered, centered), (1, 3)), count)
    spread = w.op("Sqrt", [w.add(variance, float_attribute(node, "epsilon", 1e-5))])
    made = w.reshape(w.div(centered, spread), shape)
    for index, join in ((1, w.mul), (2, w.add)):
        given = operand(node, index)
        made = made if given is None else join(made, w.widened(given))
    return [w.cast(_activated(node, made, w), x.dtype)]


define(OpDef(DOMAIN, "GroupNormChannelsLast", _infer_norm, flops=_flops_of_norm, decompose=_decompose_norm))
