"""Operators that make tensors from shapes and scalars, and Dropout outside training."""

from typing import Any

import numpy as np

from .operands import check_same_dtype, contiguous_result, dtype_of, is_float, narrow, to_ints, widen
from .registry import Array, ArrayModule, HostArray, ShapeArray, kernel
from .temporaries import arrays_like


@kernel("Constant", since=1)
def constant(
    xp: ArrayModule,
    *,
    value: Array | None = None,
    value_float: float | None = None,
    value_floats: tuple[float, ...] | None = None,
    value_int: int | None = None,
    value_ints: tuple[int, ...] | None = None,
    value_string: str | None = None,
    value_strings: tuple[str, ...] | None = None,
) -> Array:
    """The value that one of the attributes holds."""
    numbers = ((value_float, np.float32), (value_floats, np.float32), (value_int, np.int64), (value_ints, np.int64))
    strings = ((value_string, np.object_), (value_strings, np.object_))
    given: list[tuple[Any, Any]] = [(v, dtype) for v, dtype in (*numbers, *strings) if v is not None]
    if value is not None:
        given.append((value, value.dtype))
    if len(given) != 1:
        raise ValueError(f"exactly one value attribute must be set, not {len(given)}")
    return xp.asarray(given[0][0], dtype=given[0][1])


@kernel("ConstantOfShape", since=9)
def constant_of_shape(
    xp: ArrayModule, shape: HostArray, *, value: Array | None = None, out: Array | None = None
) -> Array:
    """A tensor of one value, float32 zeros by default."""
    fill = np.zeros(1, np.float32) if value is None else np.asarray(value)
    if fill.size != 1:
        raise ValueError(f"attribute value must hold one element, not {fill.size}")
    if xp.__name__ != "numpy":
        return xp.full(to_ints(shape), fill.reshape(-1)[0], dtype=fill.dtype)
    y = contiguous_result(out, to_ints(shape), fill.dtype)
    y.fill(fill.reshape(-1)[0])
    return y


@kernel("Range", since=11)
def range_(
    xp: ArrayModule, start: HostArray, limit: HostArray, delta: HostArray, *, stash_type: int | None = None
) -> Array:
    """start, start + delta, ... up to but without `limit`."""
    check_same_dtype(start, limit, delta)
    first, last, step = (operand.reshape(()).item() for operand in (start, limit, delta))
    if step == 0:
        raise ValueError("delta must not be 0")
    if is_float(start.dtype):
        count = max(int(np.ceil((last - first) / step)), 0)
    else:
        count = max(-((first - last) // step), 0)
    wide = widen(start).dtype
    return narrow(xp.arange(count).astype(wide) * wide.type(step) + wide.type(first), start.dtype)


@kernel("EyeLike", since=9, temporaries=arrays_like(0, results=2))
def eye_like(xp: ArrayModule, x: ShapeArray, *, dtype: int | None = None, k: int = 0) -> Array:
    """Ones on diagonal k of a matrix of x's shape, zeros elsewhere."""
    if x.ndim != 2:
        raise ValueError(f"the operand must be a matrix, not of rank {x.ndim}")
    return xp.eye(*x.shape, k=k).astype(x.dtype if dtype is None else dtype_of(dtype))


@kernel("Dropout", since=12)
def dropout(
    xp: ArrayModule, x: Array, ratio: HostArray | None = None, training: HostArray | None = None, *, seed: int = 0
) -> tuple[Array, Array]:
    """x itself and a mask of trues; refused where training would draw random numbers."""
    if training is not None and bool(training.reshape(())):
        share = 0.5 if ratio is None else float(ratio.reshape(()))
        if share > 0:
            raise ValueError("training mode draws random numbers, which no two engines share; set the ratio to 0")
    return x, xp.ones(x.shape, dtype=bool)


@kernel("Dropout", since=7)
def dropout_inference(xp: ArrayModule, x: Array, *, ratio: float = 0.5) -> tuple[Array, Array]:
    """x itself and a mask of trues (before version 12 there is no training mode)."""
    return x, xp.ones(x.shape, dtype=bool)
