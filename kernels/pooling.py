"""Pools over sliding windows, over whole feature maps, and the inverse of MaxPool."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from . import blocks
from .faults import FAULTS
from .operands import (
    compute_dtype,
    contiguous_result,
    in_compute_dtype,
    mean_over,
    narrow,
    one_of,
    to_ints,
    widen,
    written,
)
from .reduction import identity_of
from .registry import Array, ArrayModule, HostArray, Shaped, kernel
from .scratch import SCRATCH, pieces_bytes
from .temporaries import arrays_like, copies_of_strided, together
from .windows import Windows

Ints = tuple[int, ...]


def _scratch_bytes(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For padding around the operand, what windows cover, and the operand and the sums as they are computed."""
    x, y = operands[0], results[0]
    if x is None:
        return 0
    windows = _windows_of(x, attributes)
    kind, sizes = compute_dtype(x.dtype), [math.prod(windows.counts)]
    if windows.is_padded:
        sizes.append(math.prod((*x.shape[:2], *windows.padded(x.shape[2:]))))
    if kind != x.dtype:
        sizes += [x.elements, y.elements]
    return pieces_bytes([(size,) for size in sizes], kind.itemsize)


@kernel("AveragePool", since=7, scratch=_scratch_bytes)
def average_pool(
    xp: ArrayModule,
    x: Array,
    *,
    kernel_shape: Ints,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
    out: Array | None = None,
) -> Array:
    """Mean of each window; padding counts as elements only with `count_include_pad`."""
    windows = Windows.over(
        x.shape[2:],
        tuple(kernel_shape),
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad=auto_pad,
        ceil_mode=bool(ceil_mode),
    )
    if xp.__name__ != "numpy":
        wide = widen(x)
        sums = windows.view(xp, wide, 0).sum(axis=windows.kernel_axes)
        return narrow(sums / _covered(xp, wide, windows, bool(count_include_pad)), x.dtype)
    y = contiguous_result(out, (*x.shape[:2], *windows.counts), x.dtype)
    wide = SCRATCH.in_dtype("wide", x, compute_dtype(x.dtype))
    sums = y if y.dtype == wide.dtype else SCRATCH.array("sums", y.shape, wide.dtype)
    np.sum(windows.over_padded(_padded(wide, windows)), axis=windows.kernel_axes, out=sums)
    np.divide(sums, _covered(xp, wide, windows, bool(count_include_pad)), out=sums)
    if sums is not y:
        np.copyto(y, sums, casting="unsafe")
    return y


def _padded(x: Array, windows: Windows) -> Array:
    """An array with zeros around, in `SCRATCH`; itself where there are none."""
    if not windows.is_padded:
        return x
    shape = (*x.shape[:2], *windows.padded(x.shape[2:]))
    return windows.with_pads(np, x, 0, SCRATCH.array("padded", shape, x.dtype))


def _covered(xp: ArrayModule, x: Array, windows: Windows, count_padding: bool) -> Array:
    """How many elements each window counts, in the dtype of x; what only `ceil_mode` added never counts."""
    shape = (1, 1, *windows.counts)
    covered = SCRATCH.array("covered", shape, x.dtype) if xp.__name__ == "numpy" else xp.empty(shape, x.dtype)
    covered.fill(1)
    for axis, size in enumerate(x.shape[2:]):
        along = windows.along(axis)
        if count_padding:
            size += sum(along.pads[0])
            along = replace(along, pads=((0, 0),))
        counts = along.view(xp, xp.ones((1, 1, size), np.int64), 0).sum(axis=along.kernel_axes)
        covered *= counts.reshape((-1,) + (1,) * (x.ndim - 3 - axis)).astype(x.dtype)
    return covered


def _block_bytes(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For a block of feature maps with padding around, and the greatest along one dim after the other."""
    x = operands[0]
    if x is None or len(results) > 1:
        return 0
    windows = _windows_of(x, attributes)
    itemsize, channels = compute_dtype(x.dtype).itemsize, math.prod(x.shape[:2])
    maps = min(channels, _maps_at_once(windows, x.shape[2:], itemsize))
    shapes = windows.shapes_along(x.shape[2:])
    sizes = [maps * math.prod(shape) for shape in (shapes if windows.is_padded else shapes[1:])]
    return pieces_bytes([(size,) for size in sizes], itemsize)


def _maps_at_once(windows: Windows, spatial: Ints, itemsize: int) -> int:
    """How many feature maps a core's cache holds."""
    return max(1, blocks.BLOCK_BYTES // max(1, math.prod(windows.padded(spatial)) * itemsize))


def _windows_bytes(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For operands in a wider dtype; with places for all windows side by side, and the places in each dim."""
    x, y = operands[0], results[0]
    if x is None:
        return 0
    windows = _windows_of(x, attributes)
    itemsize, map_elements = compute_dtype(x.dtype).itemsize, math.prod(windows.padded(x.shape[2:]))
    padded = math.prod(x.shape[:2]) * map_elements * itemsize
    widened = 0 if compute_dtype(x.dtype) == x.dtype else (x.elements + y.elements) * itemsize
    if len(results) == 1:
        return widened
    places = (2 * len(windows.kernel) + 4) * np.dtype(np.int64).itemsize
    return padded + widened + y.elements * (math.prod(windows.kernel) * itemsize + places)


def _windows_of(x: Shaped, attributes: Mapping[str, Any]) -> Windows:
    """The windows of a pool over an operand, by its node's attributes."""
    given: dict[str, Any] = {name: attributes.get(name) for name in ("strides", "dilations", "pads")}
    given |= {"auto_pad": attributes.get("auto_pad", "NOTSET"), "ceil_mode": bool(attributes.get("ceil_mode", 0))}
    return Windows.over(x.shape[2:], tuple(attributes["kernel_shape"]), **given)


@kernel("MaxPool", since=1, scratch=_block_bytes, temporaries=together(_windows_bytes, copies_of_strided(0)))
def max_pool(
    xp: ArrayModule,
    x: Array,
    *,
    kernel_shape: Ints,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    storage_order: int = 0,
    strides: Ints | None = None,
    n_outputs: int,
    out: Array | None = None,
) -> tuple[Array, ...]:
    """Greatest element of each window, and its flat place in the operand."""
    one_of("storage_order", storage_order, (0, 1))
    windows = Windows.over(
        x.shape[2:],
        tuple(kernel_shape),
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad=auto_pad,
        ceil_mode=bool(ceil_mode),
    )
    wide = widen(x)
    if n_outputs == 1 and xp.__name__ == "numpy" and all(windows.kernel):
        return (narrow(_greatest(wide, windows, out), x.dtype),)
    view = windows.view(xp, wide, identity_of(wide.dtype, least=True))
    y = narrow(view.max(axis=windows.kernel_axes), x.dtype)
    if n_outputs == 1:
        return (y,)
    flat = view.reshape(*x.shape[:2], math.prod(windows.kernel), *windows.counts)
    return y, _flat_places(xp, xp.argmax(flat, axis=2), x.shape, windows, column_major=bool(storage_order))


def _greatest(x: Array, windows: Windows, out: Array | None) -> Array:
    """The greatest elements of windows, dim by dim, of as many feature maps at a time as a core's cache holds."""
    y = contiguous_result(out, (*x.shape[:2], *windows.counts), x.dtype)
    if not y.size:
        return y
    channels = x.shape[0] * x.shape[1]
    maps, results = x.reshape(1, channels, *x.shape[2:]), y.reshape(1, channels, *windows.counts)
    least = identity_of(x.dtype, least=True)
    count, shapes = _maps_at_once(windows, x.shape[2:], x.itemsize), windows.shapes_along(x.shape[2:])
    for start in range(0, channels, count):
        piece = maps[:, start : start + count]
        rooms = [
            SCRATCH.array(f"greatest {axis}", (*piece.shape[:2], *shape), x.dtype)
            for axis, shape in enumerate(shapes)
            if axis or windows.is_padded
        ]
        block = windows.with_pads(np, piece, least, rooms.pop(0) if windows.is_padded else None)
        for axis, room in enumerate(rooms):
            _greatest_along(block, axis, windows, room)
            block = room
        results[:, start : start + count] = block
    return y


def _greatest_along(x: Array, axis: int, windows: Windows, out: Array) -> None:
    """Write the greatest elements along one spatial dim of a padded operand."""
    step, span = windows.strides[axis], (windows.counts[axis] - 1) * windows.strides[axis] + 1
    lead = (slice(None),) * (2 + axis)
    starts = range(0, windows.kernel[axis] * windows.dilations[axis], windows.dilations[axis])
    taken = [x[(*lead, slice(start, start + span, step))] for start in starts]
    np.copyto(out, taken[0])
    for more in taken[1:]:
        np.maximum(out, more, out=out)


def _flat_places(xp: ArrayModule, winner: Array, shape: Ints, windows: Windows, *, column_major: bool) -> Array:
    """Flat places in the operand of the winning elements, from their flat places in their windows."""
    rank = len(windows.kernel)
    offsets = []
    for size in reversed(windows.kernel):
        offsets.append(winner % size)
        winner = winner // size
    spatial = []
    for d, offset in enumerate(reversed(offsets)):
        start = xp.arange(windows.counts[d]).reshape((-1,) + (1,) * (rank - 1 - d))
        spatial.append(start * windows.strides[d] - windows.pads[d][0] + offset * windows.dilations[d])
    place = xp.zeros_like(spatial[0])
    order = reversed(range(rank)) if column_major else range(rank)
    for d in order:
        place = place * shape[2 + d] + spatial[d]
    maps = xp.arange(shape[0] * shape[1]).reshape(shape[0], shape[1], *(1,) * rank)
    return (maps * math.prod(shape[2:]) + place).astype(np.int64)


@kernel("MaxUnpool", since=9, temporaries=together(copies_of_strided(0, 1), arrays_like(0, 0.5, 0)))
def max_unpool(
    xp: ArrayModule,
    x: Array,
    indices: Array,
    output_shape: HostArray | None = None,
    *,
    kernel_shape: Ints,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Array:
    """Put each element back at its place in a tensor of zeros."""
    rank = x.ndim - 2
    strides, pads = strides or (1,) * rank, pads or (0,) * (2 * rank)
    inferred = tuple(
        (n - 1) * s + k - pads[d] - pads[rank + d]
        for d, (n, s, k) in enumerate(zip(x.shape[2:], strides, kernel_shape, strict=True))
    )
    # places count in the pool's own operand, whose shape `output_shape` may only extend
    result = xp.zeros(math.prod(x.shape[:2]) * math.prod(inferred), dtype=x.dtype)
    FAULTS.refuse((indices < 0) | (indices >= result.size), f"a position is outside [0, {result.size - 1}]")
    result[indices.reshape(-1)] = x.reshape(-1)
    result = result.reshape(*x.shape[:2], *inferred)
    if output_shape is None:
        return result
    extended = xp.zeros(to_ints(output_shape), dtype=x.dtype)
    extended[tuple(slice(0, n) for n in result.shape)] = result
    return extended


@kernel("LpPool", since=2, temporaries=arrays_like(2.5, results=1.5))
@in_compute_dtype
def lp_pool(
    xp: ArrayModule,
    x: Array,
    *,
    kernel_shape: Ints,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints | None = None,
    p: int = 2,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Array:
    """The Lp norm of each window."""
    windows = Windows.over(
        x.shape[2:],
        tuple(kernel_shape),
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad=auto_pad,
        ceil_mode=bool(ceil_mode),
    )
    return (windows.view(xp, xp.abs(x) ** p, 0).sum(axis=windows.kernel_axes)) ** (1 / p)


def _spatial(x: Array) -> Any:
    return tuple(range(2, x.ndim))


@kernel("GlobalAveragePool", since=1)
@in_compute_dtype
def global_average_pool(xp: ArrayModule, x: Array) -> Array:
    """Mean of each feature map."""
    return mean_over(x, _spatial(x))


@kernel("GlobalMaxPool", since=1)
def global_max_pool(xp: ArrayModule, x: Array, *, out: Array | None = None) -> Array:
    """Greatest element of each feature map."""
    return written(xp, narrow(widen(x).max(axis=_spatial(x), keepdims=True), x.dtype), out)


@kernel("GlobalLpPool", since=2, temporaries=arrays_like(2))
@in_compute_dtype
def global_lp_pool(xp: ArrayModule, x: Array, *, p: int = 2) -> Array:
    """The Lp norm of each feature map."""
    return (xp.abs(x) ** p).sum(axis=_spatial(x), keepdims=True) ** (1 / p)
