"""Element-wise reduction over arrays of several ranks, in one fixed order."""

from collections.abc import Callable, Sequence
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


def reduce_arrays(arrays: Sequence[Array], reduction: Reduction) -> Array:
    """Reduce arrays of one shape and dtype, from the first to the last.

    Floats narrower than 32 bits are reduced in float32 and rounded once; integers wrap around; `and` and `or` take
    bools and integers (bitwise). A single array comes back as it is.

    Raises:
        ValueError: the dtype has no such reduction.
    """
    first = arrays[0]
    if len(arrays) == 1:
        return first
    operation = _operation(first.dtype, reduction)
    kind = dtype_of_numpy(first.dtype)
    wide = np.dtype(np.float32) if kind.is_float and first.dtype.itemsize < 4 else first.dtype
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    result = np.empty(first.size, first.dtype)
    with np.errstate(all="ignore"):
        for start in range(0, first.size, _CHUNK):
            part = slice(start, start + _CHUNK)
            total = operation(flat[0][part].astype(wide, copy=False), flat[1][part].astype(wide, copy=False))
            for array in flat[2:]:
                operation(total, array[part].astype(wide, copy=False), out=total)
            result[part] = total.astype(first.dtype, copy=False)
    return result.reshape(first.shape)


def _operation(dtype: np.dtype[Any], reduction: Reduction) -> Callable[..., Array]:
    kind = dtype_of_numpy(dtype)
    is_bool = dtype == np.bool_
    table = _LOGIC if is_bool or (kind.is_integer and reduction in _LOGIC) else _ARITHMETIC
    if reduction not in table or dtype == np.object_:
        raise ValueError(f"tensors of {kind} have no reduction {reduction!r}")
    return table[reduction]
