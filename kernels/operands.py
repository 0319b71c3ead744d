"""Reading operands: ONNX data types, axes, and the precision to compute in."""

import functools
import inspect
import math
from collections.abc import Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from .registry import Array, ArrayModule, Function

# TensorProto.DataType -> dtype. Strings are object arrays of str.
ONNX_DTYPES: dict[int, np.dtype[Any]] = {
    number: np.dtype(scalar)
    for number, scalar in {
        1: np.float32,
        2: np.uint8,
        3: np.int8,
        4: np.uint16,
        5: np.int16,
        6: np.int32,
        7: np.int64,
        8: np.object_,
        9: np.bool_,
        10: np.float16,
        11: np.float64,
        12: np.uint32,
        13: np.uint64,
        14: np.complex64,
        15: np.complex128,
        16: ml_dtypes.bfloat16,
        17: ml_dtypes.float8_e4m3fn,
        18: ml_dtypes.float8_e4m3fnuz,
        19: ml_dtypes.float8_e5m2,
        20: ml_dtypes.float8_e5m2fnuz,
        21: ml_dtypes.uint4,
        22: ml_dtypes.int4,
        23: ml_dtypes.float4_e2m1fn,
        24: ml_dtypes.float8_e8m0fnu,
        25: ml_dtypes.uint2,
        26: ml_dtypes.int2,
    }.items()
}

BFLOAT16 = ONNX_DTYPES[16]
FLOAT8_DTYPES = frozenset(ONNX_DTYPES[number] for number in (17, 18, 19, 20))
SMALL_FLOATS = frozenset({np.dtype(np.float16), BFLOAT16, ONNX_DTYPES[23], ONNX_DTYPES[24]}) | FLOAT8_DTYPES
SMALL_INTEGERS = frozenset(ONNX_DTYPES[number] for number in (21, 22, 25, 26))
FLOAT32 = np.dtype(np.float32)

_MOST_PRODUCT = 255 * 255
"""The largest product of two 8-bit numbers less their zero points."""


def dtype_of(number: int) -> np.dtype[Any]:
    """The dtype of an ONNX data type number (`TensorProto.DataType`)."""
    if number not in ONNX_DTYPES:
        raise ValueError(f"ONNX data type {number} is not supported")
    return ONNX_DTYPES[number]


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is a real floating-point type, those of ml_dtypes included."""
    return dtype.kind == "f" or dtype in SMALL_FLOATS


def is_integer(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is an integer type (bool is not), those of ml_dtypes included."""
    return dtype.kind in "iu" or dtype in SMALL_INTEGERS


def compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype to compute in: float32 for the smaller floats, else the dtype itself."""
    return FLOAT32 if dtype in SMALL_FLOATS else dtype


def widen(x: Array) -> Array:
    """The array in its compute dtype; itself where that is its own."""
    return x.astype(compute_dtype(x.dtype), copy=False)


def narrow(x: Array, dtype: np.dtype[Any]) -> Array:
    """The array in the result dtype; itself where it has it already."""
    return x if x.dtype == dtype else x.astype(dtype)


def summing_dtype(terms: int) -> np.dtype[Any]:
    """The float in which sums of products of 8-bit numbers less their zero points are exact.

    Products of floats are those of BLAS; NumPy multiplies matrices of integers up to a hundred times slower.

    Args:
        terms: how many products a sum has.
    """
    return FLOAT32 if terms * _MOST_PRODUCT <= 2**24 else np.dtype(np.float64)


def summed_as_int32(sums: Array) -> Array:
    """Sums of whole numbers as int32, where larger ones wrap around."""
    return sums.astype(np.int64).astype(np.int32)


def in_compute_dtype(function: Function) -> Function:
    """Let a function of one float operand compute in the compute dtype and give back the operand's dtype."""

    @functools.wraps(function)
    def wrapper(xp: ArrayModule, x: Array, *operands: Array, out: Array | None = None, **attributes: Any) -> Array:
        return written(xp, narrow(xp.asarray(function(xp, widen(x), *operands, **attributes)), x.dtype), out)

    return with_out(wrapper, function)


def with_out(wrapper: Function, function: Function) -> Function:
    """A function around another, which says that it also takes `out`."""
    known = inspect.signature(function)
    out = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=None)
    wrapper.__signature__ = known.replace(parameters=[*known.parameters.values(), out])  # type: ignore[attr-defined]
    return wrapper


def written(xp: ArrayModule, result: Array, out: Array | None) -> Array:
    """A new array, on NumPy in `out`, where it fits there: what has no better way to get there is copied."""
    if out is None or out is result or xp.__name__ != "numpy":
        return result
    if out.shape != result.shape or out.dtype != result.dtype:
        return result
    np.copyto(out, result)
    return out


def fitting(out: Array | None, dtype: np.dtype[Any], *operands: Array) -> Array | None:
    """What a function was given to write into, where its result has that dtype and the operands broadcast to its shape.

    What a model declares of a result may be wrong, and NumPy repeats a result that is smaller. Of the smaller floats a
    device computes wider ones.
    """
    if out is None or out.dtype != dtype or compute_dtype(dtype) != dtype:
        return None
    shapes = {operand.shape for operand in operands}
    return out if (shapes.pop() if len(shapes) == 1 else np.broadcast_shapes(*shapes)) == out.shape else None


def contiguous_result(out: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any], xp: ArrayModule = np) -> Array:
    """Where a result is written: `out`, where that is contiguous and of that shape and dtype; else new memory."""
    if out is None or out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous:
        return xp.empty(shape, dtype)
    return out


def is_view(x: Array, shape: Sequence[int]) -> bool:
    """Whether an array can be read in another shape of as many elements where it lies."""
    if not x.size:
        return True
    old = [each for each in zip(x.shape, x.strides, strict=True) if each[0] != 1]
    new = [size for size in shape if size != 1]
    while old and new:
        # The fewest dims of both that hold as many elements; those of the array must go on where each other end.
        (count, stride), wanted = old.pop(0), new.pop(0)
        while count != wanted:
            if count > wanted:
                if not new:
                    return False
                wanted *= new.pop(0)
                continue
            size, inner = old.pop(0)
            if stride != size * inner:
                return False
            count, stride = count * size, inner
    return True


def check_same_dtype(*operands: Array | None) -> None:
    """Raise ValueError unless all operands that are present have one dtype."""
    dtypes = {operand.dtype for operand in operands if operand is not None}
    if len(dtypes) > 1:
        raise ValueError(f"operands must have one dtype, not {', '.join(sorted(map(str, dtypes)))}")


def to_ints(values: Array) -> tuple[int, ...]:
    """Python ints from a shape or axes operand (any array module), an attribute tuple, or one int."""
    if isinstance(values, int):
        return (values,)
    items: Iterable[Any] = values
    if hasattr(values, "tolist"):
        items = values.reshape(-1).tolist()
    return tuple(int(item) for item in items)


def to_int(value: Array) -> int:
    """The Python int in an operand that holds one element."""
    values = to_ints(value)
    if len(values) != 1:
        raise ValueError(f"expected one integer, not {len(values)}")
    return values[0]


def normalize_axis(axis: int, rank: int) -> int:
    """An axis counted from the front; ValueError outside [-rank, rank - 1]."""
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} is outside [{-rank}, {rank - 1}] for rank {rank}")
    return axis % rank


def normalize_axes(axes: Iterable[int], rank: int) -> tuple[int, ...]:
    """Axes counted from the front, in the given order; ValueError when outside the rank or named twice."""
    result = tuple(normalize_axis(axis, rank) for axis in axes)
    if len(set(result)) < len(result):
        raise ValueError(f"axes {result} name an axis twice")
    return result


def one_of(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise ValueError unless attribute `name` has one of the allowed values."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"attribute {name}={value!r} is not supported; it can be {', '.join(map(repr, allowed))}")


def mean_over(x: Array, axes: Iterable[int]) -> Array:
    """The mean over some axes, which are kept; of no elements NaN, without numpy's warning."""
    axes = tuple(axes)
    return x.sum(axis=axes, keepdims=True) / x.dtype.type(math.prod(x.shape[axis] for axis in axes))
