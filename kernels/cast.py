"""Cast, CastLike and BitCast: conversion between any two ONNX data types."""

from typing import Any

import ml_dtypes
import numpy as np

from .operands import (
    FLOAT8_DTYPES,
    ONNX_DTYPES,
    SMALL_INTEGERS,
    contiguous_result,
    dtype_of,
    is_float,
    is_integer,
    one_of,
    written,
)
from .registry import Array, ArrayModule, ShapeArray, kernel

_STRING = np.dtype(np.object_)
_FLOAT4 = ONNX_DTYPES[23]
_FLOAT8E8M0 = ONNX_DTYPES[24]
_ROUNDED = FLOAT8_DTYPES | SMALL_INTEGERS
"""What numbers do not become as NumPy converts them."""


def to_float8(xp: ArrayModule, x: Array, dtype: np.dtype[Any], saturate: bool) -> Array:
    """Round to a float8 type; beyond its range to the greatest value, or to infinity or NaN without `saturate`."""
    result = x.astype(dtype)
    if not saturate:
        return result
    greatest = ml_dtypes.finfo(dtype).max
    wide = x.astype(np.float64)
    # the sign comes from x, since a NaN that stands for "too great" has lost it
    overflowed = ~xp.isfinite(result.astype(np.float32)) & ~xp.isnan(wide)
    return xp.where(overflowed, xp.where(wide > 0, greatest, -greatest), result).astype(dtype)


def _to_float8e8m0(xp: ArrayModule, x: Array, saturate: bool, round_mode: str) -> Array:
    """Round to a power of two, 2**-127 .. 2**127, stored as a biased exponent."""
    one_of("round_mode", round_mode, ("up", "down", "nearest"))
    wide = xp.abs(x.astype(np.float64))
    mantissa, exponent = xp.frexp(wide)  # wide = mantissa * 2**exponent with mantissa in [1/2, 1)
    floor = exponent.astype(np.int64) - 1
    threshold = {"up": 0.5, "nearest": np.nextafter(0.75, 0), "down": 1.0}[round_mode]
    biased = floor + (mantissa > threshold) + 127
    biased = xp.where(wide == 0, -1 if not saturate else 0, biased)
    biased = xp.where(xp.isinf(wide), 255, biased)
    if saturate:
        biased = xp.clip(biased, 0, 254)
    outside = (biased < 0) | (biased > 254) | xp.isnan(wide)
    return xp.where(outside, 255, biased).astype(np.uint8).view(_FLOAT8E8M0)


def _to_integer(xp: ArrayModule, x: Array, dtype: np.dtype[Any]) -> Array:
    """Truncate floats; between integers, drop the high bits."""
    if dtype not in SMALL_INTEGERS:
        return x.astype(dtype)
    if is_float(x.dtype):
        return xp.trunc(x.astype(np.float64)).astype(np.int64).astype(dtype)
    limits = ml_dtypes.iinfo(dtype)
    span = int(limits.max) - int(limits.min) + 1
    return ((x.astype(np.int64) - int(limits.min)) % span + int(limits.min)).astype(dtype)


def _text_of(value: Any) -> str:
    if isinstance(value, (bool, np.bool_)):
        return "1" if value else "0"
    if isinstance(value, (int, np.integer)):
        return str(int(value))
    if np.isnan(value):
        return "NaN"
    if np.isinf(value):
        return "INF" if value > 0 else "-INF"
    return np.format_float_positional(value, trim="-") if value == int(value) else str(value)


def _to_string(xp: ArrayModule, x: Array) -> Array:
    wide = x.astype(np.float32) if is_float(x.dtype) and x.dtype.kind != "f" else x
    flat = [_text_of(value) for value in wide.reshape(-1)]
    return np.array(flat, dtype=_STRING).reshape(x.shape)


def _from_string(xp: ArrayModule, x: Array, dtype: np.dtype[Any]) -> Array:
    if dtype.kind == "b":
        raise ValueError("a string does not convert to bool")
    integers = is_integer(dtype) and all(_is_integer_text(text) for text in x.reshape(-1))
    values = [int(text) if integers else float(text) for text in x.reshape(-1)]
    return np.array(values, dtype=np.int64 if integers else np.float64).reshape(x.shape).astype(dtype)


def _is_integer_text(text: str) -> bool:
    return text.strip().lstrip("+-").isdigit()


def convert(xp: ArrayModule, x: Array, dtype: np.dtype[Any], *, saturate: bool = True, round_mode: str = "up") -> Array:
    """x in another dtype by ONNX's rules.

    Args:
        xp: the array module.
        x: any array; strings are object arrays of str.
        dtype: the dtype to convert to.
        saturate: for float8 types, whether what is out of range becomes the greatest value.
        round_mode: for float8e8m0: `up`, `down` or `nearest`.
    """
    if x.dtype == dtype:
        return x
    if dtype == _STRING:
        return _to_string(xp, x)
    if x.dtype == _STRING:
        x = _from_string(xp, x, np.dtype(np.int64) if is_integer(dtype) else np.dtype(np.float64))
    if dtype.kind == "b":
        return (x.astype(np.float32) if x.dtype.kind == "V" else x) != 0
    if dtype in FLOAT8_DTYPES:
        return to_float8(xp, x, dtype, saturate)
    if dtype == _FLOAT8E8M0:
        return _to_float8e8m0(xp, x, saturate, round_mode)
    if is_integer(dtype):
        return _to_integer(xp, x, dtype)
    return x.astype(dtype)


@kernel("Cast", since=6)
def cast(
    xp: ArrayModule, x: Array, *, to: int, saturate: int = 1, round_mode: str = "up", out: Array | None = None
) -> Array:
    """x in the data type number `to`."""
    return _cast(xp, x, dtype_of(to), bool(saturate), round_mode, out)


def _cast(xp: ArrayModule, x: Array, dtype: np.dtype[Any], saturate: bool, round_mode: str, out: Array | None) -> Array:
    """A new array in a dtype, on NumPy in `out`, where it fits there."""
    is_plain = x.dtype.kind in "fiub" and dtype.kind in "fiu" and not {x.dtype, dtype} & _ROUNDED
    if is_plain and xp.__name__ == "numpy":
        y = contiguous_result(out, x.shape, dtype)
        np.copyto(y, x, casting="unsafe")
        return y
    y = convert(xp, x, dtype, saturate=saturate, round_mode=round_mode)
    return written(xp, y.copy() if y is x else y, out)


@kernel("CastLike", since=15)
def cast_like(
    xp: ArrayModule,
    x: Array,
    target: ShapeArray,
    *,
    saturate: int = 1,
    round_mode: str = "up",
    out: Array | None = None,
) -> Array:
    """x in the data type of another operand."""
    return _cast(xp, x, target.dtype, bool(saturate), round_mode, out)


@kernel("BitCast", since=26)
def bit_cast(xp: ArrayModule, x: Array, *, to: int) -> Array:
    """The same bits read as another data type of the same width."""
    dtype = dtype_of(to)
    packed = SMALL_INTEGERS | {_FLOAT4}
    if dtype.itemsize != x.dtype.itemsize or (dtype in packed) != (x.dtype in packed):
        raise ValueError(f"{x.dtype} and {dtype} differ in width")
    return xp.ascontiguousarray(x).reshape(x.shape).view(dtype)
