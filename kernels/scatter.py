"""Combining updates with the elements at given places, where places may repeat."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .operands import check_same_dtype, compute_dtype, contiguous_result, is_float, narrow, one_of
from .registry import Array, ArrayModule

# reduction attribute -> the ufunc that combines, and needs to see repeated indices one by one
_COMBINERS = {"add": "add", "mul": "multiply", "max": "maximum", "min": "minimum"}


def copied(xp: ArrayModule, x: Array, out: Array | None) -> Array:
    """A copy of an array, on NumPy in `out`, where it fits there."""
    if xp.__name__ != "numpy":
        return x.copy()
    y = contiguous_result(out, x.shape, x.dtype)
    np.copyto(y, x)
    return y


def scattered(
    xp: ArrayModule,
    x: Array,
    coordinates: tuple[Array, ...],
    updates: Array,
    reduction: str,
    out: Array | None = None,
) -> Array:
    """A copy of x with elements (or slices) replaced by, or combined with, updates.

    Args:
        xp: the array module.
        x: the operand.
        coordinates: places along the first dims, which broadcast; not negative and in range.
        updates: of the shape of the coordinates, then of the dims of x that have none.
        reduction: `none`, `add`, `mul`, `max` or `min`.
        out: where the copy is made, on NumPy, where it fits there.
    """
    check_same_dtype(x, updates)
    one_of("reduction", reduction, ("none", *_COMBINERS))
    result = copied(xp, x, out)
    if reduction == "none":
        result[coordinates] = updates
        return result
    if xp.__name__ != "numpy":
        return _combined_on_device(xp, x, coordinates, updates, reduction) if updates.size else result
    if result.dtype == bool:
        # add and max are "or", mul and min are "and"; ufunc.at has no such loops for every name
        getattr(xp, "logical_or" if reduction in ("add", "max") else "logical_and").at(result, coordinates, updates)
    else:
        getattr(xp, _COMBINERS[reduction]).at(result, coordinates, updates)
    return result


def _combined_on_device(
    xp: ArrayModule, x: Array, coordinates: tuple[Array, ...], updates: Array, reduction: str
) -> Array:
    if x.dtype == bool:
        reduction = "max" if reduction in ("add", "max") else "min"
    wide = _wide_dtype(x.dtype)
    depth = len(coordinates)
    steps = [math.prod(x.shape[place + 1 : depth]) for place in range(depth)]
    keys = sum((place.astype(np.int64) * step for place, step in zip(coordinates, steps, strict=True)), start=0)
    if not depth:
        keys = xp.zeros(updates.shape[: updates.ndim - x.ndim], dtype=np.int64)
    keys = xp.broadcast_to(keys, updates.shape[: updates.ndim - (x.ndim - depth)]).reshape(-1)
    slice_size = math.prod(x.shape[depth:])
    target = x.astype(wide).reshape(-1, slice_size)
    values = updates.astype(wide).reshape(-1, slice_size)
    if reduction == "add" and xp.__name__ == "cupy" and wide.kind != "c":
        xp.add.at(target, keys, values)  # By atomics, which complex numbers have none of.
    else:
        combine = getattr(xp, _COMBINERS[reduction])
        keys, values, is_whole = _reduced_by_key(xp, keys, values, combine)
        # What is a part of another row goes to a row behind all others: to leave it out is to wait for how many stay.
        target = xp.concatenate([target, xp.zeros((1, slice_size), wide)])
        keys = xp.where(is_whole, keys, len(target) - 1)
        target[keys] = combine(target[keys], values)
        target = target[:-1]
    return narrow(target.reshape(x.shape), x.dtype)


def _wide_dtype(dtype: "np.dtype[Any]") -> "np.dtype[Any]":
    """A dtype that atomics have, in which sums of integers are the same modulo the narrower range."""
    if is_float(dtype) or dtype.kind == "c":
        return compute_dtype(dtype)
    return np.dtype(np.uint64) if dtype == np.uint64 else np.dtype(np.int64)


def _reduced_by_key(
    xp: ArrayModule, keys: Array, values: Array, combine: Callable[[Array, Array], Array]
) -> tuple[Array, Array, Array]:
    """Keys, values (rows) of each combined, and which have all of a key's; the order depends on the keys alone.

    Rows are sorted by key. Then each takes in what stands 1, 2, 4, ... rows before it where that has the same key, so
    that the last row of a key holds all of them.
    """
    order = xp.argsort(keys, kind="stable")
    keys, values = keys[order], values[order]
    reach = 1
    while reach < len(keys):
        is_same = (keys[reach:] == keys[:-reach])[:, None]
        taken = xp.where(is_same, combine(values[:-reach], values[reach:]), values[reach:])
        values = xp.concatenate([values[:reach], taken])
        reach *= 2
    is_last = xp.concatenate([keys[1:] != keys[:-1], xp.ones(1, dtype=bool)])
    return keys, values, is_last
