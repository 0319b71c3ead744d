"""Gradients of DequantizeLinear, and products with packed weights in plain operators: floats alone have gradients."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from irpar.ir import DType, Node, Value

from ..facts import CannotTellError, axis_attribute, int_attribute, needed, operand
from .fused import cut
from .writer import GradientWriter, NoGradientError, Of

_EXPANDED = {DType.I4: DType.I8, DType.U4: DType.U8}
_OF_OPSET_21 = (DType.I16, DType.U16, DType.I4, DType.U4)
"""Dtypes that DequantizeLinear has from opset 21 on."""


def of_dequantize(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Of the scale: the sum of g * (x - zero point) over what it scales; the second factor is x at scales of 1.

    Of x, where its numbers count as floats (`of_quantize`), the scale.
    """
    x, scale, g = needed(node, 0), needed(node, 1), of[0]
    assert g is not None

    def steps() -> Value:
        return w.cast(w.mul(g, _scales(node, x, w)), scale.dtype)

    def scales() -> Value:
        operands = [x, w.filled(1.0, scale), *node.operands[2:]]
        steps = w.op("DequantizeLinear", operands, node.attributes)
        return _summed(node, w.cast(w.mul(g, steps), scale.dtype), scale, w)

    return w.each(steps, scales)


def _scales(node: Node, quantised: Value, w: GradientWriter) -> Value:
    """The scale of each element."""
    return w.op("DequantizeLinear", [_filled(1, DType.I8, quantised, w), needed(node, 1)], _placing(node))


def _filled(number: int, dtype: DType, like: Value, w: GradientWriter) -> Value:
    """A tensor of a number, in the shape of another."""
    return w.op("Expand", [w.constant(np.asarray(number, dtype.numpy), "number"), w.shape_of(like)])


def _placing(node: Node) -> dict[str, Any]:
    """The attributes that say which elements a scale is of."""
    return {name: node.attributes[name] for name in ("axis", "block_size") if name in node.attributes}


def of_quantize(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """As if nothing were rounded: 1 / scale where the number is in the range of the type, else 0."""
    x, scale, zero_point, g = needed(node, 0), needed(node, 1), operand(node, 2), of[0]
    assert g is not None
    quantised = node.results[0]
    dtype = quantised.dtype

    def data() -> Value:
        scales = w.cast(_scales(node, quantised, w), x.dtype)
        number = w.div(x, scales)
        if dtype.is_integer:
            number = w.op("Round", [number])
            if zero_point is not None:
                wide = _EXPANDED.get(dtype, dtype)  # Expand has no integers of 4 bits.
                operands = [_filled(0, wide, quantised, w), w.filled(1.0, scale), w.cast(zero_point, wide)]
                below = w.op("DequantizeLinear", operands, _placing(node))
                number = w.sub(number, w.cast(below, x.dtype))
            is_signed = dtype.text.startswith("i")
            low, high = -(2 ** (dtype.bits - 1)) * is_signed, 2 ** (dtype.bits - is_signed) - 1
        else:
            high = float(ml_dtypes.finfo(dtype.numpy).max)
            low = -high
        inside = w.op("And", [w.compare("GreaterOrEqual", number, low), w.compare("LessOrEqual", number, high)])
        return w.where(inside, w.div(w.cast(g, x.dtype), scales), 0.0)

    return w.each(data)


def _summed(node: Node, terms: Value, scale: Value, w: GradientWriter) -> Value:
    """The sum of terms for each scale: of all, of those along an axis, or of blocks along it."""
    rank, block = len(w.dims(terms)), int_attribute(node, "block_size", 0)
    if block:
        axis = axis_attribute(node, rank, 1)
        size = w.dims(terms)[axis]
        if not isinstance(size, int):
            raise CannotTellError("the number of blocks")
        count = -(-size // block)
        if size % block:
            terms = w.pad(terms, {axis: (0, count * block - size)})
        sizes = [[count, block] if dim == axis else [(terms, dim)] for dim in range(rank)]
        return w.sum(w.reshaped(terms, [size for each in sizes for size in each]), [axis + 1], keep=False)
    if len(w.dims(scale)) == 1 and w.dims(scale) != (1,):
        axis = axis_attribute(node, rank, 1)
        return w.sum(terms, [dim for dim in range(rank) if dim != axis], keep=False)
    return w.shaped_as(w.sum(terms, range(rank)), scale)


def decompose_dequantize(node: Node, w: GradientWriter) -> list[Value]:
    """ONNX's DequantizeLinear.

    Raises:
        NoGradientError: the opset is too old for its operands.
    """
    if needed(node, 0).dtype in _OF_OPSET_21 and w.opsets[""] < 21:
        raise NoGradientError("because its operands take opset 21 or newer")
    return [w.op("DequantizeLinear", list(node.operands), node.attributes)]


# -- packed weights -------------------------------------------------------------------------------------------------


def unpacked(data: Value, bits: int, w: GradientWriter) -> Value:
    """The numbers of a last dim of bytes, 8 / bits in each, the low bits first: uint8.

    Raises:
        NoGradientError: numbers go over the ends of bytes.
    """
    if bits == 8:
        return data
    if bits not in (1, 2, 4):
        raise NoGradientError(f"because its weights have {bits} bits")
    rank = len(w.dims(data))
    parts = []
    for shift in range(0, 8, bits):
        moved = w.op("BitShift", [data, w.number(shift, data)], {"direction": "RIGHT"}) if shift else data
        part = w.op("BitwiseAnd", [moved, w.number(2**bits - 1, data)])
        parts.append(w.unsqueeze(part, [rank]))
    size = w.dims(data)[-1]
    if not isinstance(size, int):
        raise CannotTellError("the number of bytes")
    together = w.op("Concat", parts, {"axis": rank})
    return w.reshaped(together, [*((data, dim) for dim in range(rank - 1)), size * len(parts)])


def decompose_packed_product(node: Node, w: GradientWriter) -> list[Value]:
    """MatMulNBits: x times the transposed weights, (numbers - zero points) * scales of blocks.

    Raises:
        NoGradientError: weights are in another order, or in the layout of a device.
    """
    if int_attribute(node, "weight_prepacked", 0) or operand(node, 4) is not None:
        raise NoGradientError("because its weights are in another order")
    x, data, scales, points, bias = (operand(node, place) for place in (0, 1, 2, 3, 5))
    assert x is not None
    assert data is not None
    assert scales is not None
    inner, columns, block = (int_attribute(node, name) for name in ("K", "N", "block_size"))
    bits = int_attribute(node, "bits", 4)
    count = -(-inner // block)
    if w.dims(data) != (columns, count, block * bits // 8):
        raise NoGradientError("because its weights are left out")
    numbers = w.cast(unpacked(data, bits, w), scales.dtype)
    if points is None:
        centred = w.sub(numbers, 2.0 ** (bits - 1))
    else:
        if points.dtype is DType.U8:
            points = w.reshape(points, [columns, -(-count * bits // 8)])
            points = cut(unpacked(points, bits, w), 1, 0, count, w)
        centred = w.sub(numbers, w.reshape(w.cast(points, scales.dtype), [columns, count, 1]))
    scaled = w.mul(centred, w.reshape(scales, [columns, count, 1]))
    weights = w.reshape(scaled, [columns, count * block])
    if count * block != inner:
        weights = cut(weights, 1, 0, inner, w)
    made = w.op("MatMul", [x, w.transpose(w.cast(weights, x.dtype), [1, 0])])
    return [made if bias is None else w.add(made, bias)]


def decompose_packed_rows(node: Node, w: GradientWriter) -> list[Value]:
    """GatherBlockQuantized of bytes: rows of a table, (numbers - zero points) * scales of blocks.

    Raises:
        NoGradientError: the table is not of bytes.
    """
    data, index, scales, points = needed(node, 0), needed(node, 1), needed(node, 2), operand(node, 3)
    if data.dtype is not DType.U8:
        raise NoGradientError(f"because its table is of {data.dtype}")
    bits, block = int_attribute(node, "bits", 4), int_attribute(node, "block_size", 128)
    rank, ahead = len(w.dims(data)), len(w.dims(index)) - 1
    axis = axis_attribute(node, rank, 1, "quantize_axis") + ahead
    rows, factors = (w.op("Gather", [table, index], {"axis": 0}) for table in (data, scales))
    numbers = w.cast(unpacked(rows, bits, w), scales.dtype)
    shift: Value | float = 2.0 ** (bits - 1)
    if points is not None:
        found = unpacked(w.op("Gather", [points, index], {"axis": 0}), bits, w)
        count = w.dims(factors)[-1]
        if not isinstance(count, int):
            raise CannotTellError("the number of blocks")
        found = cut(found, rank + ahead - 1, 0, count, w)
        shift = _for_each(w.cast(found, scales.dtype), numbers, axis, block, w)
    return [w.mul(w.sub(numbers, shift), _for_each(factors, numbers, axis, block, w))]


def _for_each(of_blocks: Value, numbers: Value, axis: int, block: int, w: GradientWriter) -> Value:
    """What blocks along an axis have, for each of their elements."""
    size, count = w.dims(numbers)[axis], w.dims(of_blocks)[axis]
    if not isinstance(size, int) or not isinstance(count, int):
        raise CannotTellError("the number of blocks")
    rank = len(w.dims(numbers))
    wide = w.unsqueeze(of_blocks, [axis + 1])
    sizes = [w.size_of(of_blocks, dim) for dim in range(rank)]
    sizes.insert(axis + 1, w.ints([block]))
    dims = (*w.dims(of_blocks)[: axis + 1], block, *w.dims(of_blocks)[axis + 1 :])
    repeated = w.op("Expand", [wide, w.listed(sizes)], type=of_blocks.tensor_type.with_shape(dims))
    flat = w.reshaped(repeated, [count * block if dim == axis else (of_blocks, dim) for dim in range(rank)])
    return flat if count * block == size else cut(flat, axis, 0, size, w)


def decompose_to_float(node: Node, w: GradientWriter) -> list[Value]:
    """MatMulIntegerToFloat: the product of (A - its zero point) and (B - its zero points), scaled, and a bias."""
    scale_a, scale_b = needed(node, 2), needed(node, 3)
    sides = []
    for place in (0, 1):
        value, point = w.cast(needed(node, place), scale_a.dtype), operand(node, place + 4)
        sides.append(value if point is None else w.sub(value, w.cast(point, scale_a.dtype)))
    made = w.mul(w.mul(w.op("MatMul", sides), scale_a), scale_b)
    bias = operand(node, 6)
    return [made if bias is None else w.add(made, bias)]
