"""Pad and CenterCropPad."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .operands import contiguous_result, normalize_axes, one_of, to_ints, written
from .registry import Array, ArrayModule, HostArray, Shaped, kernel

Ints = tuple[int, ...]
_MODES = ("constant", "reflect", "edge", "wrap")


def _source_places(xp: ArrayModule, length: int, before: int, after: int, mode: str) -> Array:
    """For each element of a padded dim, the place in the operand that it repeats."""
    places = xp.arange(-before, length + after)
    if mode == "edge":
        return xp.clip(places, 0, length - 1)
    if mode == "wrap" or length == 1:
        return places % length
    period = 2 * (length - 1)
    places = places % period
    return xp.minimum(places, period - places)


def pad_array(
    xp: ArrayModule, x: Array, pads: list[tuple[int, int]], mode: str, value: object, out: Array | None = None
) -> Array:
    """Pad each dim by (before, after); negative amounts crop.

    A constant is there before anything is cropped: (3, -3) around a dim of 2 is two of it.

    Args:
        xp: the array module.
        x: the operand.
        pads: one pair per dim.
        mode: `constant`, `reflect`, `edge` or `wrap`.
        value: what `constant` fills with.
        out: what the result is written into where it fits; with other modes than `constant` on NumPy alone.
    """
    one_of("mode", mode, _MODES)
    if mode == "constant":
        return _surrounded(xp, x, pads, value, out)
    source = x
    x = x[tuple(slice(max(0, -b), max(0, n + min(0, a))) for n, (b, a) in zip(x.shape, pads, strict=True))]
    pads = [(max(0, before), max(0, after)) for before, after in pads]
    for axis, (before, after) in enumerate(pads):
        if before or after:
            if not x.shape[axis]:
                raise ValueError(f"mode {mode!r} cannot pad dim {axis}, which is empty")
            x = xp.take(x, _source_places(xp, x.shape[axis], before, after, mode), axis=axis)
    return written(xp, x.copy() if x.base is not None and xp.may_share_memory(x, source) else x, out)


def _surrounded(
    xp: ArrayModule, x: Array, pads: list[tuple[int, int]], value: object, out: Array | None = None
) -> Array:
    """What is left of an array between constants."""
    shape = tuple(n + before + after for n, (before, after) in zip(x.shape, pads, strict=True))
    result = contiguous_result(out, shape, x.dtype, xp)
    xp.copyto(result, value, casting="unsafe")
    kept = [(max(0, -b), max(0, -b, n + min(0, a))) for n, (b, a) in zip(x.shape, pads, strict=True)]
    places = tuple(slice(max(0, b), max(0, b) + end - start) for (start, end), (b, _) in zip(kept, pads, strict=True))
    result[places] = x[tuple(slice(start, end) for start, end in kept)]
    return result


def _pairs(pads: Ints, axes: Ints | None, rank: int) -> list[tuple[int, int]]:
    chosen = tuple(range(rank)) if axes is None else normalize_axes(axes, rank)
    if len(pads) != 2 * len(chosen):
        raise ValueError(f"{len(pads)} pads given for {len(chosen)} axes; each needs one before and one after")
    pairs = [(0, 0)] * rank
    for place, axis in enumerate(chosen):
        pairs[axis] = (pads[place], pads[place + len(chosen)])
    return pairs


def _repeated_bytes(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For what is padded along some dims, and the places that each dim repeats; constants lie around at once."""
    if attributes.get("mode", "constant") == "constant":
        return 0
    y = results[0]
    return 2 * y.elements * y.dtype.itemsize + 4 * max(y.shape, default=0) * np.dtype(np.int64).itemsize


@kernel("Pad", since=2, temporaries=_repeated_bytes)
def pad_by_attributes(
    xp: ArrayModule,
    x: Array,
    *,
    pads: Ints,
    mode: str = "constant",
    value: float = 0.0,
    out: Array | None = None,
) -> Array:
    """Pad by amounts given as an attribute (before version 11)."""
    return pad_array(xp, x, _pairs(pads, None, x.ndim), mode, value, out)


@kernel("Pad", since=11, temporaries=_repeated_bytes)
def pad(
    xp: ArrayModule,
    x: Array,
    pads: HostArray,
    value: Array | None = None,
    axes: HostArray | None = None,
    *,
    mode: str = "constant",
    out: Array | None = None,
) -> Array:
    """Pad some axes by amounts before and after; negative ones crop."""
    pairs = _pairs(to_ints(pads), None if axes is None else to_ints(axes), x.ndim)
    fill = xp.zeros((), x.dtype) if value is None else value.reshape(())
    return pad_array(xp, x, pairs, mode, fill, out)


@kernel("CenterCropPad", since=18)
def center_crop_pad(
    xp: ArrayModule, x: Array, shape: HostArray, *, axes: Ints | None = None, out: Array | None = None
) -> Array:
    """Crop or pad around the centre to given sizes."""
    pairs = [(0, 0)] * x.ndim
    chosen = normalize_axes(range(x.ndim) if axes is None else axes, x.ndim)
    for axis, size in zip(chosen, to_ints(shape), strict=True):
        missing = size - x.shape[axis]
        # a crop starts at the rounded-down centre, and a pad leaves its odd element on the right
        before = missing // 2 if missing >= 0 else -(-missing // 2)
        pairs[axis] = (before, missing - before)
    return pad_array(xp, x, pairs, "constant", xp.zeros((), x.dtype), out)
