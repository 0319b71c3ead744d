"""Quantisation: elementwise with scales that go with their dims or blocks, and products of quantised operands."""

from collections.abc import Sequence
from math import prod

from irpar.ir import Builder, DType, Node, TensorType, Type, with_dim

from .convolution import conv_factors, count_groups, window_sizes
from .elementwise import per_element
from .facts import (
    CannotTellError,
    dims_of,
    dtype_attribute,
    int_attribute,
    ints_attribute,
    operand,
    result_shape,
    shape_of,
    shapes_of,
    tensor_of,
)
from .gradients.quantized import decompose_dequantize, of_dequantize, of_quantize
from .gradients.refused import ROUNDS
from .gradients.zero import StraightThrough, zero
from .local_programs.quantization import DYNAMIC
from .matmul import cost_matmul, cost_products, matmul_dims, matmul_factors
from .microsoft import microsoft
from .op_def import OpDef
from .registry import define
from .rule import DimFactors, FactorRule, Kind, RuleBuilder, whole

# -- QuantizeLinear, DequantizeLinear -------------------------------------------------------------------------------


def _infer_quantize(node: Node) -> Sequence[Type]:
    shape = tensor_of(node, 0).shape
    named = int_attribute(node, "output_dtype", 0)
    if operand(node, 2) is not None:
        return [TensorType(tensor_of(node, 2).dtype, shape)]
    return [TensorType(dtype_attribute(node, "output_dtype") if named else DType.U8, shape)]


def _infer_dequantize(node: Node) -> Sequence[Type]:
    named = int_attribute(node, "output_dtype", 0)
    dtype = dtype_attribute(node, "output_dtype") if named else tensor_of(node, 1).dtype
    return [TensorType(dtype, tensor_of(node, 0).shape)]


def _rule_quantize(node: Node) -> FactorRule:
    """`([i,j],[j],[j])->([i,j])` along an axis; `([i,(kb)],[i,k],[i,k])->([i,(kb)])` for k blocks of b elements.

    A scale of one element stays whole, a vector goes with its axis, scales of blocks go with the blocks: a cut falls
    between them, or within them where each is on a device of its own.
    """
    block = int_attribute(node, "block_size", 0)
    rule = RuleBuilder()
    shape = shape_of(node, 0)
    axis = int_attribute(node, "axis", 1)
    is_axis = -len(shape) <= axis < len(shape)
    axis = axis % len(shape) if is_axis else axis
    if block:
        return _rule_blocks(node, rule, shape, axis, block)
    dims = rule.dims(shape)
    others: list[Sequence[DimFactors]] = []
    for scale in shapes_of(node)[1:]:
        if scale is None:
            others.append(())
        elif prod(scale) == 1:
            others.append(whole(len(scale)))
        elif len(scale) == 1 and is_axis and shape[axis] == scale[0]:
            others.append((dims[axis],))
        else:
            raise CannotTellError("scales of another shape")
    return rule.done([dims, *others], [dims])


def _rule_blocks(node: Node, rule: RuleBuilder, shape: tuple[int, ...], axis: int, block: int) -> FactorRule:
    """Scales for blocks of `block` elements along an axis; of a last block that is shorter the axis is whole."""
    count = -(-shape[axis] // block)
    dims: list[DimFactors] = []
    scales: list[DimFactors] = []
    for dim, size in enumerate(shape):
        if dim != axis:
            (factors,) = found = rule.dims([size])
            dims.append(factors)
            scales.extend(found)
        elif size % block:
            dims.extend(rule.dims([size], Kind.REPLICATE))
            scales.append(())
        else:
            blocks, inside = rule.dims([count, block])
            dims.append((*blocks, *inside))
            scales.append(blocks)
    expected = with_dim(shape, axis, count)
    others: list[Sequence[DimFactors]] = []
    for scale in shapes_of(node)[1:]:
        if scale not in (None, expected):
            raise CannotTellError("scales of another shape")
        others.append(() if scale is None else scales)
    return rule.done([dims, *others], [dims])


def _localize_quantize(whole_node: Node, local: Node, builder: Builder) -> None:
    """A vector of one block has one scale for all, which ONNX Runtime takes for no block at all."""
    if int_attribute(local, "block_size", 0) and shape_of(local, 1) == (1,):
        local.set_attribute("block_size", 0)


_QUANTIZE = (_infer_quantize, _rule_quantize, per_element(2), _localize_quantize)
_DEQUANTIZE = (_infer_dequantize, _rule_quantize, per_element(2), _localize_quantize)
define(OpDef("", "QuantizeLinear", *_QUANTIZE, gradient=StraightThrough(of_quantize)))
define(OpDef("", "DequantizeLinear", *_DEQUANTIZE, gradient=of_dequantize))
microsoft("QuantizeLinear", *_QUANTIZE, gradient=zero)
microsoft("DequantizeLinear", *_DEQUANTIZE, dtypes=1, decompose=decompose_dequantize)


# -- DynamicQuantizeLinear ------------------------------------------------------------------------------------------


def _infer_dynamic(node: Node) -> Sequence[Type]:
    data = tensor_of(node, 0)
    return [TensorType(DType.U8, data.shape), TensorType(data.dtype, ()), TensorType(DType.U8, ())]


def _rule_dynamic(node: Node) -> FactorRule:
    """`([i,j])->([i,j],[],[])`: all are whole, but for the local program, which reduces the greatest and the least."""
    rule = RuleBuilder()
    dims = rule.dims(shape_of(node, 0), Kind.REPLICATE)
    return rule.done([dims], [dims, [], []])


_DYNAMIC = (_infer_dynamic, _rule_dynamic, per_element(5))
define(OpDef("", "DynamicQuantizeLinear", *_DYNAMIC, gradient=ROUNDS, local_program=DYNAMIC))


# -- MatMulInteger, QLinearMatMul -----------------------------------------------------------------------------------


def _infer_matmul_integer(node: Node) -> Sequence[Type]:
    return [TensorType(DType.I32, matmul_dims(dims_of(node, 0), dims_of(node, 1)))]


def along(shape: tuple[int, ...] | None, factors: Sequence[DimFactors], sizes: Sequence[int]) -> list[DimFactors]:
    """The factors of a scale or zero point that has one number in all, one for each row or column, or broadcasts.

    Args:
        shape: of the scale; None where it is left out.
        factors, sizes: of the dims that it broadcasts to, the one that a vector goes with last.
    """
    if shape is None:
        return []
    if prod(shape) == 1:
        return [()] * len(shape)
    if len(shape) > len(factors):
        raise CannotTellError("a scale of more dims than its operand")
    start = len(factors) - len(shape)
    if any(size not in (1, known) for size, known in zip(shape, sizes[start:], strict=True)):
        raise CannotTellError("a scale of another shape")
    return [factor if size != 1 else () for size, factor in zip(shape, factors[start:], strict=True)]


def _rule_matmul_integer(node: Node) -> FactorRule:
    """As MatMul; zero points of one element stay replicated, vectors go with the rows or columns."""
    left, right = shape_of(node, 0), shape_of(node, 1)
    rule, operands, result = matmul_factors(left, right, result_shape(node))
    places = [operands[0][-2:-1], operands[1][-1:] if len(right) > 1 else []]
    for shape, factors in zip(shapes_of(node)[2:], places, strict=False):
        if shape is not None and prod(shape) != 1 and (len(shape) != 1 or not factors):
            raise CannotTellError("zero points of several dims")
        operands.append(along(shape, factors, shape or ()))
    return rule.done(operands, [result])


def _infer_qlinear_matmul(node: Node) -> Sequence[Type]:
    return [TensorType(tensor_of(node, 7).dtype, matmul_dims(dims_of(node, 0), dims_of(node, 3)))]


def _rule_qlinear_matmul(node: Node) -> FactorRule:
    """`([i,k],[i],[i],[k,j],[j],[j],[],[])->([i,j])`: i, j and batch dims pass; k is whole, since sums are rounded."""
    left, right = shape_of(node, 0), shape_of(node, 3)
    rule, (a, b), result = matmul_factors(left, right, result_shape(node), Kind.REPLICATE)
    scales = [along(shape, a[-2:-1], left[-2:-1]) for shape in shapes_of(node)[1:3]]
    points = [along(shape, b[-1:] if len(right) > 1 else [], right[-1:]) for shape in shapes_of(node)[4:6]]
    others = [whole(len(shape or ())) for shape in shapes_of(node)[6:]]
    return rule.done([a, *scales, b, *points, *others], [result])


define(OpDef("", "MatMulInteger", _infer_matmul_integer, _rule_matmul_integer, cost_matmul, gradient=zero))
microsoft(
    "MatMulInteger16",
    _infer_matmul_integer,
    _rule_matmul_integer,
    cost_matmul,
    dtypes=lambda _: [DType.I32],
    gradient=zero,
)
define(OpDef("", "QLinearMatMul", _infer_qlinear_matmul, _rule_qlinear_matmul, cost_matmul, gradient=zero))


# -- ConvInteger, QLinearConv ---------------------------------------------------------------------------------------


def _conv_shape(node: Node, kernel_index: int) -> tuple[object, ...]:
    kernel = dims_of(node, kernel_index)
    window = [size for size in ints_attribute(node, "kernel_shape") or kernel[2:] if isinstance(size, int)]
    if len(window) != len(kernel) - 2:
        raise CannotTellError("a symbolic kernel")
    if int_attribute(node, "channels_last", 0):
        batch, *places, _ = dims_of(node, 0)
        return (batch, *window_sizes(node, window, places), kernel[0])
    return (dims_of(node, 0)[0], kernel[0], *window_sizes(node, window))


def _infer_conv_integer(node: Node) -> Sequence[Type]:
    return [TensorType(DType.I32, _conv_shape(node, 1))]  # type: ignore[arg-type]


def _infer_qlinear_conv(node: Node) -> Sequence[Type]:
    return [TensorType(tensor_of(node, 7).dtype, _conv_shape(node, 3))]  # type: ignore[arg-type]


def _rule_conv_integer(node: Node) -> FactorRule:
    """As for Conv: input channels give partial sums, whose integers are exact."""
    found = conv_factors(shape_of(node, 0), shape_of(node, 1), int_attribute(node, "group", 1), Kind.REDUCE)
    points = shapes_of(node)[2:]
    others = [[] if shape is None else _of_channels(shape, found.channels) for shape in points]
    if points and points[0] is not None and prod(points[0]) != 1:
        raise CannotTellError("several zero points of the data")
    return found.rule.done([found.data, found.kernel, *others], [found.result])


def _of_channels(shape: Sequence[int], channels: DimFactors) -> Sequence[DimFactors]:
    """One number stays replicated, a vector goes with the channels of the result."""
    return whole(len(shape)) if prod(shape) == 1 else [channels]


def _rule_qlinear_conv(node: Node) -> FactorRule:
    """As for Conv, but input channels are whole, since sums are rounded; com.microsoft's may have channels last."""
    shapes, data = shapes_of(node), shape_of(node, 0)
    is_last = bool(int_attribute(node, "channels_last", 0))
    if is_last:
        data = (data[0], data[-1], *data[1:-1])
    found = conv_factors(data, shape_of(node, 3), int_attribute(node, "group", 1), Kind.REPLICATE)
    operands: list[Sequence[DimFactors]] = [whole(len(shape or ())) for shape in shapes]
    operands[0], operands[3] = _with_channels_last(found.data) if is_last else found.data, found.kernel
    for place in (4, 5):
        operands[place] = _of_channels(shapes[place] or (), found.channels)
    if operand(node, 8) is not None:
        operands[8] = [found.channels]
    return found.rule.done(operands, [_with_channels_last(found.result) if is_last else found.result])


def _with_channels_last(dims: Sequence[DimFactors]) -> list[DimFactors]:
    batch, channels, *places = dims
    return [batch, *places, channels]


def _cost_conv(node: Node) -> int:
    kernel = shape_of(node, 1 if node.op_type == "ConvInteger" else 3)
    return cost_products(node, prod(kernel[1:]))


define(
    OpDef(
        "",
        "ConvInteger",
        _infer_conv_integer,
        _rule_conv_integer,
        _cost_conv,
        lambda node, local, _: count_groups(node, local, 0, 1),
        gradient=zero,
    )
)


def _localize_qlinear_conv(whole_node: Node, local: Node, builder: Builder) -> None:
    """Count the groups of the block."""
    count_groups(whole_node, local, 0, 3, -1 if int_attribute(whole_node, "channels_last", 0) else 1)


_QLINEAR_CONV = (_infer_qlinear_conv, _rule_qlinear_conv, _cost_conv, _localize_qlinear_conv)
define(OpDef("", "QLinearConv", *_QLINEAR_CONV, gradient=zero))
microsoft("QLinearConv", *_QLINEAR_CONV, dtypes=7, gradient=zero)
