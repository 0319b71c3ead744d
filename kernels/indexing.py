"""Gathering, scattering and selecting elements by index."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .expression import DTYPES
from .faults import FAULTS
from .operands import check_same_dtype, contiguous_result, narrow, normalize_axis, one_of, to_int, widen, written
from .registry import Array, ArrayModule, HostArray, Shaped, kernel
from .scatter import copied, scattered
from .scratch import SCRATCH, piece_bytes
from .temporaries import arrays_like, copies_of_strided, together


def _checked(indices: Array, length: int, axis: int) -> Array:
    """Indices counted from the front; refused outside [-length, length - 1]."""
    if indices.size:
        is_outside = (indices < -length) | (indices >= length)
        FAULTS.refuse(is_outside, f"an index is outside [{-length}, {length - 1}] on axis {axis}")
    return indices + (indices < 0) * indices.dtype.type(length)


@kernel("Gather", since=1, temporaries=together(arrays_like(0, 4), copies_of_strided(0)))
def gather(xp: ArrayModule, x: Array, indices: Array, *, axis: int = 0, out: Array | None = None) -> Array:
    """Slices of x along one axis, in the shape of the indices."""
    axis = normalize_axis(axis, x.ndim)
    places = _checked(indices, x.shape[axis], axis)
    if xp.__name__ != "numpy" or not x.size:
        return xp.take(x, places, axis=axis)
    y = contiguous_result(out, (*x.shape[:axis], *places.shape, *x.shape[axis + 1 :]), x.dtype)
    return np.take(x, places, axis=axis, out=y, mode="clip")  # They are in range: to be told so takes a copy.


@kernel("GatherElements", since=11, temporaries=arrays_like(0, 4.5, results=1))
def gather_elements(xp: ArrayModule, x: Array, indices: Array, *, axis: int = 0, out: Array | None = None) -> Array:
    """One element of x for each index; the other coordinates are the index's own."""
    axis = normalize_axis(axis, x.ndim)
    return written(xp, x[_coordinates(xp, indices, x.shape, axis)], out)


def _coordinates(xp: ArrayModule, indices: Array, shape: tuple[int, ...], axis: int) -> tuple[Array, ...]:
    """The full coordinates of elements whose place on `axis` is an index, elsewhere their place in `indices`."""
    if indices.ndim != len(shape):
        raise ValueError(f"indices have rank {indices.ndim}, the data rank {len(shape)}")
    grid = []
    for d, size in enumerate(indices.shape):
        if d == axis:
            grid.append(_checked(indices, shape[axis], axis))
        else:
            if size > shape[d]:
                raise ValueError(f"indices of shape {indices.shape} reach beyond data of shape {shape}")
            grid.append(xp.arange(size).reshape((-1,) + (1,) * (indices.ndim - 1 - d)))
    return tuple(grid)


def _nd_coordinates(xp: ArrayModule, indices: Array, shape: tuple[int, ...], batch_dims: int) -> tuple[Array, ...]:
    """Coordinates from the last dim of `indices`, preceded by one coordinate for each batch dim."""
    depth = indices.shape[-1]
    if batch_dims + depth > len(shape):
        raise ValueError(f"indices with {depth} coordinates and {batch_dims} batch dims exceed rank {len(shape)}")
    grid = []
    for d in range(batch_dims):
        grid.append(xp.arange(shape[d]).reshape((-1,) + (1,) * (indices.ndim - 2 - d)))
    for d in range(depth):
        grid.append(_checked(indices[..., d], shape[batch_dims + d], batch_dims + d))
    return tuple(grid)


@kernel("GatherND", since=11, temporaries=arrays_like(0, 4.5, results=1))
def gather_nd(xp: ArrayModule, x: Array, indices: Array, *, batch_dims: int = 0, out: Array | None = None) -> Array:
    """Slices of x at coordinates that stand in the last dim of the indices."""
    if x.shape[:batch_dims] != indices.shape[:batch_dims]:
        raise ValueError(f"batch dims {x.shape[:batch_dims]} and {indices.shape[:batch_dims]} differ")
    grid = _nd_coordinates(xp, indices, x.shape, batch_dims)
    return written(xp, x[grid] if grid else xp.broadcast_to(x, (*indices.shape[:-1], *x.shape)).copy(), out)


@kernel("Scatter", since=9, temporaries=arrays_like(0, 4.5, 0))
@kernel("ScatterElements", since=11, temporaries=arrays_like(0, 4.5, 0))
def scatter_elements(
    xp: ArrayModule,
    x: Array,
    indices: Array,
    updates: Array,
    *,
    axis: int = 0,
    reduction: str = "none",
    out: Array | None = None,
) -> Array:
    """A copy of x with one element for each index replaced by, or combined with, its update."""
    if updates.shape != indices.shape:
        raise ValueError(f"updates of shape {updates.shape} do not match indices of shape {indices.shape}")
    grid = _coordinates(xp, indices, x.shape, normalize_axis(axis, x.ndim))
    return scattered(xp, x, grid, updates, reduction, out)


@kernel("ScatterND", since=11, temporaries=arrays_like(0, 4.5, 0))
def scatter_nd(
    xp: ArrayModule, x: Array, indices: Array, updates: Array, *, reduction: str = "none", out: Array | None = None
) -> Array:
    """A copy of x with the slices at the given coordinates replaced by, or combined with, their updates."""
    expected = (*indices.shape[:-1], *x.shape[indices.shape[-1] :])
    if updates.shape != expected:
        raise ValueError(f"updates must have shape {expected}, not {updates.shape}")
    return scattered(xp, x, _nd_coordinates(xp, indices, x.shape, 0), updates, reduction, out)


@kernel("AddRows", since=1, domain="irpar", temporaries=arrays_like(0, results=3))
def add_rows(
    xp: ArrayModule,
    indices: Array,
    updates: Array,
    x: Array | None = None,
    *,
    length: int,
    to: str,
    out: Array | None = None,
) -> Array:
    """Sums of the rows of each index, rounded, added to the rows of x; or beside rows of zeros.

    Args:
        xp: the array module.
        indices: of rows.
        updates: a row for each index, of the dtype in which they are added.
        x: what they are added to.
        length: how many rows there are.
        to: the dtype of x and of the result, as expressions name it.
        out: what the result is written to, where it has its shape and dtype.
    """
    zeros = xp.zeros((length, *updates.shape[indices.ndim :]), updates.dtype)
    sums = narrow(scatter_nd(xp, zeros, indices[..., None], updates, reduction="add"), DTYPES[to])
    return written(xp, sums if x is None else narrow(widen(x) + widen(sums), x.dtype), out)


@kernel("TensorScatter", since=24)
def tensor_scatter(
    xp: ArrayModule,
    past: Array,
    update: Array,
    write_indices: Array | None = None,
    *,
    axis: int = -2,
    mode: str = "linear",
    out: Array | None = None,
) -> Array:
    """A copy of a cache with `update` written along `axis`, each batch element from its own place on."""
    check_same_dtype(past, update)
    one_of("mode", mode, ("linear", "circular"))
    axis = normalize_axis(axis, past.ndim)
    if axis == 0:
        raise ValueError("attribute axis cannot name the batch dim")
    batch, capacity, length = past.shape[0], past.shape[axis], update.shape[axis]
    first = xp.zeros(batch, dtype=np.int64) if write_indices is None else write_indices
    places = first[:, None] + xp.arange(length)
    if mode == "circular":
        places = places % capacity
    elif length:
        FAULTS.refuse(places >= capacity, f"writing {length} places exceeds the cache's {capacity}")
    result = copied(xp, past, out)
    xp.moveaxis(result, axis, 1)[xp.arange(batch)[:, None], places] = xp.moveaxis(update, axis, 1)
    return result


@kernel("Compress", since=9, temporaries=copies_of_strided(0))
def compress(xp: ArrayModule, x: Array, condition: Array, *, axis: int | None = None) -> Array:
    """Slices along an axis (or elements of the flattened x) where the condition holds."""
    if axis is None:
        x, axis = x.reshape(-1), 0
    (places,) = xp.nonzero(condition[: x.shape[axis]])
    return xp.take(x, places, axis=axis)


@kernel("NonZero", since=9)
def non_zero(xp: ArrayModule, x: Array) -> Array:
    """Coordinates of the elements that are not zero: int64[rank, count], in row-major order."""
    if not x.ndim:
        return xp.zeros((0, int(bool(x))), dtype=np.int64)
    return xp.stack([place.astype(np.int64, copy=False) for place in xp.nonzero(x)])


def _extreme_place(name: str) -> Callable[..., Array]:
    def place(
        xp: ArrayModule,
        x: Array,
        *,
        axis: int = 0,
        keepdims: int = 1,
        select_last_index: int = 0,
        out: Array | None = None,
    ) -> Array:
        axis = normalize_axis(axis, x.ndim)
        if select_last_index:
            found = x.shape[axis] - 1 - getattr(xp, name)(xp.flip(widen(x), axis), axis=axis)
        else:
            found = getattr(xp, name)(widen(x), axis=axis)
        found = xp.asarray(found).astype(np.int64, copy=False)
        return written(xp, xp.expand_dims(found, axis) if keepdims else found, out)

    return place


kernel("ArgMax", since=1, temporaries=arrays_like(1, results=1))(_extreme_place("argmax"))
kernel("ArgMin", since=1, temporaries=arrays_like(1, results=1))(_extreme_place("argmin"))


@kernel("TopK", since=10, temporaries=arrays_like(3, 0))
def top_k(
    xp: ArrayModule, x: Array, k: HostArray, *, axis: int = -1, largest: int = 1, sorted: int = 1
) -> tuple[Array, Array]:
    """The k greatest or least elements along an axis, in order, and their places; of equals the first comes first."""
    axis, count = normalize_axis(axis, x.ndim), to_int(k)
    if not 0 <= count <= x.shape[axis]:
        raise ValueError(f"k={count} is outside [0, {x.shape[axis]}], the length of axis {axis}")
    wide = widen(x)
    if largest:
        # a stable ascending sort of the reversed array, read backwards, keeps equals in order
        places = x.shape[axis] - 1 - xp.flip(xp.argsort(xp.flip(wide, axis), axis=axis, kind="stable"), axis)
    else:
        places = xp.argsort(wide, axis=axis, kind="stable")
    places = places[(slice(None),) * axis + (slice(0, count),)]
    return xp.take_along_axis(x, places, axis), places.astype(np.int64, copy=False)


def _steps_bytes(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For the place that each step of each sequence comes from."""
    return 3 * math.prod(results[0].shape[:2]) * np.dtype(np.int64).itemsize


@kernel("ReverseSequence", since=10, temporaries=_steps_bytes)
def reverse_sequence(xp: ArrayModule, x: Array, lengths: Array, *, batch_axis: int = 1, time_axis: int = 0) -> Array:
    """Reverse the first `lengths[b]` steps of each batch element."""
    if {batch_axis, time_axis} != {0, 1}:
        raise ValueError(f"attributes batch_axis={batch_axis} and time_axis={time_axis} must be 0 and 1")
    steps = xp.arange(x.shape[time_axis])
    own = lengths[:, None]
    places = xp.where(steps < own, own - 1 - steps, steps)
    by_batch = x if batch_axis == 0 else xp.swapaxes(x, 0, 1)
    reversed_ = by_batch[xp.arange(by_batch.shape[0])[:, None], places]
    return reversed_ if batch_axis == 0 else xp.swapaxes(reversed_, 0, 1)


@kernel("Unique", since=11)
def unique(xp: ArrayModule, x: Array, *, axis: int | None = None, sorted: int = 1) -> tuple[Array, Array, Array, Array]:
    """Distinct elements or slices, the first place of each, the way back, and how often each occurs."""
    if axis is None:
        x, axis = x.reshape(-1), 0
    values, first, back, counts = xp.unique(x, True, True, True, axis=axis)
    back = back.reshape(-1)
    if not sorted:
        order = xp.argsort(first)
        rank = xp.argsort(order)
        values, first, counts, back = xp.take(values, order, axis=axis), first[order], counts[order], rank[back]
    return values, first.astype(np.int64), back.astype(np.int64), counts.astype(np.int64)


def _cumulative(xp: ArrayModule, x: Array, axis: Array, name: str, exclusive: int, reverse: int) -> Array:
    place = normalize_axis(to_int(axis), x.ndim)
    dtype, x = x.dtype, widen(x)
    x = xp.flip(x, place) if reverse else x
    result = getattr(xp, name)(x, axis=place, dtype=x.dtype)
    if exclusive and x.shape[place]:
        before = (slice(None),) * place
        start = xp.full_like(x[(*before, slice(0, 1))], 1 if name == "cumprod" else 0)
        result = xp.concatenate([start, result[(*before, slice(0, -1))]], axis=place)
    return narrow(xp.flip(result, place) if reverse else result, dtype)


@kernel("CumSum", since=11, temporaries=arrays_like(2.5, 0))
def cum_sum(
    xp: ArrayModule, x: Array, axis: HostArray, *, exclusive: int = 0, reverse: int = 0, out: Array | None = None
) -> Array:
    """Running sums along an axis."""
    return written(xp, _cumulative(xp, x, axis, "cumsum", exclusive, reverse), out)


@kernel("CumProd", since=26, temporaries=arrays_like(2.5, 0))
def cum_prod(
    xp: ArrayModule, x: Array, axis: HostArray, *, exclusive: int = 0, reverse: int = 0, out: Array | None = None
) -> Array:
    """Running products along an axis."""
    return written(xp, _cumulative(xp, x, axis, "cumprod", exclusive, reverse), out)


def _mask_bytes(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For the truth of each element."""
    return piece_bytes(results[0].elements, 1)


@kernel("OneHot", since=9, scratch=_mask_bytes, temporaries=arrays_like(3.5, 0))
def one_hot(
    xp: ArrayModule, indices: Array, depth: HostArray, values: Array, *, axis: int = -1, out: Array | None = None
) -> Array:
    """`values[1]` at each index of a new axis of length `depth`, `values[0]` elsewhere."""
    length = int(depth.reshape(-1)[0])
    place = normalize_axis(axis, indices.ndim + 1)
    wanted = xp.expand_dims(indices.astype(np.int64), place)
    wanted = xp.where(wanted < 0, wanted + length, wanted)
    places = xp.arange(length).reshape((-1,) + (1,) * (indices.ndim - place))
    if xp.__name__ != "numpy":
        return narrow(xp.where(wanted == places, values[1], values[0]), values.dtype)
    shape = np.broadcast_shapes(wanted.shape, places.shape)
    y, is_there = contiguous_result(out, shape, values.dtype), SCRATCH.array("is there", shape, np.dtype(bool))
    np.copyto(y, values[0])
    np.copyto(y, values[1], where=np.equal(wanted, places, out=is_there))
    return y


@kernel(
    "ArrayFeatureExtractor",
    since=1,
    domain="ai.onnx.ml",
    temporaries=together(arrays_like(0, 4), copies_of_strided(0)),
)
def array_feature_extractor(xp: ArrayModule, x: Array, indices: Array) -> Array:
    """Elements of the last dim at the given places; a vector gives one row."""
    chosen = xp.take(x, _checked(indices.reshape(-1), x.shape[-1], x.ndim - 1), axis=-1)
    return chosen.reshape(1, -1) if x.ndim == 1 else chosen
