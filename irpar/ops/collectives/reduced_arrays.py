"""Element-wise reduction over arrays of several ranks, in one fixed order."""

import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import cache, partial
from typing import Any

import numpy as np

from irpar.ir import dtype_of_numpy
from irpar.sharding import Reduction

Array = np.ndarray[Any, Any]

_CHUNK = 1 << 16
"""Elements reduced at a time, so that the running total stays in the cache."""

_ARITHMETIC: dict[str, Callable[..., Array]] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}
_LOGIC: dict[str, Callable[..., Array]] = {"and": np.bitwise_and, "or": np.bitwise_or}


def reduce_arrays(arrays: Sequence[Array], reduction: Reduction, result: Array | None = None) -> Array:
    """Reduce arrays of one shape and dtype, from the first to the last.

    Floats narrower than 32 bits are reduced in float32 and rounded once; integers wrap around; `and` and `or` take
    bools and integers (bitwise). A single array comes back as it is.

    Args:
        arrays: what to reduce.
        reduction: how.
        result: where the result goes, in one piece in memory; None: a new array.

    Raises:
        ValueError: the dtype has no such reduction.
    """
    first = arrays[0]
    if len(arrays) == 1:
        return first
    compute, wide, makes_own = _operation(first.dtype, reduction)
    is_wide = wide == first.dtype
    if is_wide and first.size <= _CHUNK:
        return _reduce_few(compute, makes_own, arrays, result)
    if result is None:
        result = np.empty(first.shape, first.dtype)
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    target = result.reshape(-1)
    with np.errstate(all="ignore"):
        for start in range(0, first.size, _CHUNK):
            part = slice(start, start + _CHUNK)
            pieces = [array[part].astype(wide, copy=False) for array in flat]
            total = target[part] if is_wide else np.empty(pieces[0].shape, wide)
            compute(pieces[0], pieces[1], out=total)
            for piece in pieces[2:]:
                compute(total, piece, out=total)
            if not is_wide:
                target[part] = total.astype(first.dtype, copy=False)
    return result


def reducer(dtype: np.dtype[Any], size: int, reduction: Reduction) -> Callable[[Sequence[Array], Array | None], Array]:
    """What reduces two arrays or more of a dtype and size as `reduce_arrays` does, into the second argument likewise.

    Raises:
        ValueError: the dtype has no such reduction.
    """
    compute, wide, makes_own = _operation(dtype, reduction)
    if wide == dtype and size <= _CHUNK:
        return partial(_reduce_few, compute, makes_own)
    return lambda arrays, result: reduce_arrays(arrays, reduction, result)


class _Quiet(threading.local):
    """Calls of this thread in which NumPy warns of nothing: `np.errstate` takes longer than a small sum."""

    def __init__(self) -> None:
        context = copy_context()
        context.run(np.seterr, all="ignore")
        self.run = context.run


_quiet = _Quiet()


def _reduce_few(compute: Callable[..., Array], makes_own: bool, arrays: Sequence[Array], result: Array | None) -> Array:
    run, first = _quiet.run, arrays[0]
    if result is not None:
        run(compute, first, arrays[1], out=result)
    elif makes_own and first.ndim:
        result = run(compute, first, arrays[1], order="C")
    else:
        result = run(compute, first, arrays[1], out=np.empty(first.shape, first.dtype))
    if len(arrays) > 2:
        for array in arrays[2:]:
            run(compute, result, array, out=result)
    return result


@cache
def _operation(dtype: np.dtype[Any], reduction: Reduction) -> tuple[Callable[..., Array], np.dtype[Any], bool]:
    """What reduces arrays of a dtype, the dtype in which it does, and whether it makes an array of that by itself.

    NumPy makes one in less time than `np.empty`, but of int8 for some reductions of int4.

    Raises:
        ValueError: the dtype has no such reduction.
    """
    compute = operation(dtype, reduction)
    if dtype_of_numpy(dtype).is_float and dtype.itemsize < 4:
        return compute, np.dtype(np.float32), False
    none = np.empty(0, dtype)
    return compute, dtype, compute(none, none).dtype == dtype


def operation(dtype: np.dtype[Any], reduction: Reduction) -> Callable[..., Array]:
    """What reduces two arrays of a dtype.

    Raises:
        ValueError: the dtype has no such reduction.
    """
    kind = dtype_of_numpy(dtype)
    is_bool = dtype == np.bool_
    table = _LOGIC if is_bool or (kind.is_integer and reduction in _LOGIC) else _ARITHMETIC
    if reduction not in table or dtype == np.object_:
        raise ValueError(f"tensors of {kind} have no reduction {reduction!r}")
    return table[reduction]
