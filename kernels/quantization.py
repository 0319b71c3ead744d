"""Linear quantization, per tensor, per axis and in blocks, and the products of quantized tensors."""

from typing import Any

import ml_dtypes
import numpy as np

from .cast import convert
from .matmul import integer_product
from .operands import FLOAT8_DTYPES, dtype_of, is_float, is_integer, narrow, normalize_axis, widen
from .registry import Array, ArrayModule, kernel
from .temporaries import arrays_like


def spread(xp: ArrayModule, parameter: Array, x: Array, axis: int, block_size: int) -> Array:
    """A scale or zero point shaped to broadcast against x.

    Args:
        xp: the array module.
        parameter: a scalar, a vector over `axis`, or (in blocks) an array of x's rank.
        x: the tensor that it belongs to.
        axis: the axis of a vector or of blocks.
        block_size: elements per block along `axis`; 0 when not in blocks.
    """
    if parameter.size == 1 and parameter.ndim <= 1:
        return parameter.reshape(())
    axis = normalize_axis(axis, x.ndim)
    if block_size:
        if parameter.ndim != x.ndim:
            raise ValueError(f"scale of shape {parameter.shape} in blocks must have the rank of {x.shape}")
        repeated = xp.repeat(parameter, block_size, axis=axis)
        return repeated[(slice(None),) * axis + (slice(0, x.shape[axis]),)]
    if parameter.shape != (x.shape[axis],):
        raise ValueError(f"scale or zero point of shape {parameter.shape} does not fit axis {axis} of {x.shape}")
    return parameter.reshape((-1,) + (1,) * (x.ndim - 1 - axis))


def saturated(xp: ArrayModule, rounded: Array, dtype: np.dtype[Any]) -> Array:
    """Whole numbers, held in floats or wide integers, limited to the range of an integer dtype."""
    limits = ml_dtypes.iinfo(dtype)
    return xp.clip(rounded, int(limits.min), int(limits.max)).astype(np.int64).astype(dtype)


@kernel("QuantizeLinear", since=10, temporaries=arrays_like(11, 0))
@kernel("QuantizeLinear", since=1, domain="com.microsoft", temporaries=arrays_like(11, 0))
def quantize_linear(
    xp: ArrayModule,
    x: Array,
    scale: Array,
    zero_point: Array | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    saturate: int = 1,
    precision: int = 0,
) -> Array:
    """saturate(round(x / scale) + zero point), ties to even."""
    dtype = np.dtype(np.uint8) if zero_point is None else zero_point.dtype
    if output_dtype:
        if zero_point is not None and dtype != dtype_of(output_dtype):
            raise ValueError(f"attribute output_dtype={output_dtype} is not the zero point's dtype {dtype}")
        dtype = dtype_of(output_dtype)
    division = dtype_of(precision) if precision else scale.dtype
    if not is_float(division):
        division = np.dtype(np.float32)
    divisor = spread(xp, scale, x, axis, block_size).astype(division)
    quotient = widen(narrow(x.astype(division), division) / divisor)
    offset = None if zero_point is None else spread(xp, zero_point, x, axis, block_size)
    if not is_integer(dtype):
        shifted = quotient if offset is None else quotient + widen(offset)
        return convert(xp, shifted, dtype, saturate=bool(saturate) or dtype not in FLOAT8_DTYPES)
    rounded = xp.rint(quotient).astype(np.float64)
    return saturated(xp, rounded if offset is None else rounded + offset.astype(np.float64), dtype)


@kernel("DequantizeLinear", since=10, temporaries=arrays_like(6, 0))
def dequantize_linear(
    xp: ArrayModule,
    x: Array,
    scale: Array,
    zero_point: Array | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Array:
    """(x - zero point) * scale, in the scale's dtype or the one asked for."""
    dtype = dtype_of(output_dtype) if output_dtype else scale.dtype
    exact = np.float32 if not is_integer(x.dtype) else np.int64
    value = x.astype(exact)
    if zero_point is not None:
        value = value - spread(xp, zero_point, x, axis, block_size).astype(exact)
    factor = widen(spread(xp, scale, x, axis, block_size))
    return narrow(value.astype(factor.dtype) * factor, dtype)


@kernel("DynamicQuantizeLinear", since=11, temporaries=arrays_like(6))
def dynamic_quantize_linear(xp: ArrayModule, x: Array) -> tuple[Array, Array, Array]:
    """Quantize to uint8 over the operand's own range, zero included; gives y, scale (1 where all is 0), zero point."""
    kind = x.dtype.type
    among = x if x.size else xp.zeros(1, x.dtype)
    least, greatest = xp.minimum(among.min(), kind(0)), xp.maximum(among.max(), kind(0))
    scale = (greatest - least) / kind(255)
    safe = xp.where(scale == 0, kind(1), scale).astype(x.dtype, copy=False)
    zero_point = saturated(xp, xp.rint(-least / safe), np.dtype(np.uint8))
    y = saturated(xp, xp.rint(x / safe) + zero_point.astype(x.dtype), np.dtype(np.uint8))
    return y, safe, zero_point


@kernel("QLinearMatMul", since=10, temporaries=arrays_like(4, results=12))
def q_linear_matmul(
    xp: ArrayModule,
    a: Array,
    a_scale: Array,
    a_zero_point: Array,
    b: Array,
    b_scale: Array,
    b_zero_point: Array,
    y_scale: Array,
    y_zero_point: Array,
) -> Array:
    """Product of quantized matrices, quantized again."""
    product = integer_product(xp, a, b, a_zero_point, b_zero_point)
    row_scale = a_scale[:, None] if a_scale.ndim == 1 and a_scale.size > 1 else a_scale
    factor = widen(row_scale) * widen(b_scale) / widen(y_scale)
    rounded = xp.rint(product.astype(np.float64) * factor.astype(np.float64))
    return saturated(xp, rounded + y_zero_point.astype(np.float64), y_zero_point.dtype)
