"""Resize: each resized axis in turn becomes a weighted sum of a few neighbours (its taps)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from .operands import compute_dtype, contiguous_result, is_integer, narrow, normalize_axes, one_of, to_ints, written
from .registry import Array, ArrayModule, HostArray, Shaped, kernel
from .scratch import SCRATCH, pieces_bytes
from .temporaries import copies_of_strided

Ints = tuple[int, ...]
_COORDINATES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_half_pixel_for_nn",
    "tf_crop_and_resize",
)
_NEAREST: dict[str, Callable[[ArrayModule, Array], Array]] = {
    "round_prefer_floor": lambda xp, x: xp.ceil(x - 0.5),
    "round_prefer_ceil": lambda xp, x: xp.floor(x + 0.5),
    "floor": lambda xp, x: xp.floor(x),
    "ceil": lambda xp, x: xp.ceil(x),
}


@dataclass(frozen=True)
class Axis:
    """How one axis is resized.

    Attributes:
        length: elements before.
        resized: elements after.
        scale: the ratio asked for, which `resized / length` only approximates.
        region: start and end of the cropped region, as shares of the axis.
    """

    length: int
    resized: int
    scale: float
    region: tuple[float, float]

    def coordinates(self, xp: ArrayModule, mode: str, dtype: type[np.float32] | type[np.float64] = np.float32) -> Array:
        """The place in the operand of each element of the result; `dtype` is one of `coordinate_dtype`."""
        x = xp.arange(self.resized, dtype=dtype)
        n, m, scale, half = self.length, self.resized, dtype(self.scale), dtype(0.5)
        start, end = self.region
        match mode:
            case "pytorch_half_pixel" if m <= 1:
                return xp.zeros(m, dtype)
            case "half_pixel" | "pytorch_half_pixel":
                return (x + half) / scale - half
            case "half_pixel_symmetric":
                center = dtype(n) / 2 * (1 - dtype(m) / (scale * dtype(n)))
                return center + (x + half) / scale - half
            case "tf_half_pixel_for_nn":
                return (x + half) / scale
            case "align_corners":
                return x * (n - 1) / (m - 1) if m > 1 else xp.zeros(m, dtype)
            case "asymmetric":
                return x / scale
            case _:
                if m > 1:
                    return start * (n - 1) + x * (end - start) * (n - 1) / (m - 1)
                return xp.full(m, 0.5 * (start + end) * (n - 1))


def coordinate_dtype(mode: str, dtype: np.dtype[Any]) -> type[np.float32] | type[np.float64]:
    """What places are computed in for an operand's dtype.

    float32 for the nearest of elements, as ONNX Runtime has it: that decides which of two neighbours a place between
    them is. Weights of float64 are as exact as that.
    """
    return np.float64 if dtype == np.float64 and mode != "nearest" else np.float32


@dataclass(frozen=True)
class Filter:
    """The interpolation that a node asks for.

    Attributes:
        mode: `nearest`, `linear` or `cubic`.
        nearest_mode: how `nearest` rounds.
        cubic_a: the coefficient of the cubic.
        antialias: whether to stretch the filter when shrinking.
        exclude_outside: whether neighbours outside the operand weigh nothing.
    """

    mode: str
    nearest_mode: str
    cubic_a: float
    antialias: bool
    exclude_outside: bool

    def taps(self, xp: ArrayModule, coordinates: Array, axis: Axis) -> tuple[Array, Array]:
        """Places and weights, each (resized, taps), of the neighbours that make each element."""
        if self.mode == "nearest":
            # In double precision: half of a place more must not round.
            places = _NEAREST[self.nearest_mode](xp, coordinates.astype(np.float64))[:, None]
            return xp.clip(places, 0, axis.length - 1).astype(np.int64), xp.ones_like(places)
        stretch = min(axis.scale, 1.0) if self.antialias else 1.0
        reach = math.ceil((1 if self.mode == "linear" else 2) / stretch)
        places = xp.floor(coordinates)[:, None] + xp.arange(-reach + 1, reach + 1)
        distance = xp.abs(places - coordinates[:, None]) * stretch
        weights = xp.maximum(1 - distance, 0) if self.mode == "linear" else self._cubic(xp, distance)
        if self.exclude_outside:
            weights = xp.where((places < 0) | (places > axis.length - 1), 0, weights)
        weights = weights / weights.sum(axis=1, keepdims=True)
        return xp.clip(places, 0, axis.length - 1).astype(np.int64), weights

    def _cubic(self, xp: ArrayModule, t: Array) -> Array:
        a = self.cubic_a
        near = ((a + 2) * t - (a + 3)) * t * t + 1
        far = ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
        return xp.where(t <= 1, near, xp.where(t < 2, far, 0))


def _resize_axis(
    xp: ArrayModule, x: Array, dim: int, places: Array, weights: Array, out: Array | None, term: Array | None
) -> Array:
    """Along one axis the sum of neighbours by their weights, in `out`; `term` has its shape, for all but the first."""
    if places.shape[1] == 1:
        return _taken(xp, x, dim, places[:, 0], out)
    column = (-1,) + (1,) * (x.ndim - 1 - dim)
    result = None
    for tap in range(places.shape[1]):
        each = _taken(xp, x, dim, places[:, tap], out if result is None else term)
        each *= weights[:, tap].astype(x.dtype).reshape(column)
        if result is None:
            result = each
        else:
            result += each
    return result


def _taken(xp: ArrayModule, x: Array, dim: int, places: Array, out: Array | None) -> Array:
    """Elements of some places along an axis, in `out`."""
    # NumPy writes to `out` as it goes where it need not refuse a place; there is none outside.
    return xp.take(x, places, axis=dim, out=out, **({"mode": "clip"} if xp.__name__ == "numpy" else {}))


def _sizes_by_policy(lengths: Ints, sizes: Ints, policy: str) -> tuple[Ints, list[float]]:
    """The result's sizes and scales from the sizes that were asked for."""
    one_of("keep_aspect_ratio_policy", policy, ("stretch", "not_larger", "not_smaller"))
    scales = [size / length for size, length in zip(sizes, lengths, strict=True)]
    if policy == "stretch":
        return sizes, scales
    scale = min(scales) if policy == "not_larger" else max(scales)
    return tuple(math.floor(scale * length + 0.5) for length in lengths), [scale] * len(lengths)


def _computed(dtype: "np.dtype[Any]", mode: str) -> "np.dtype[Any]":
    """The dtype that sums of neighbours are computed in; the nearest of elements stay what they are."""
    if mode == "nearest":
        return dtype
    return np.dtype(np.float64) if is_integer(dtype) else compute_dtype(dtype)


def _scratch_bytes(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For the operand as it is computed, what lies between the axes, and one neighbour of each element on the way."""
    x, y, mode = operands[0], results[0], attributes.get("mode", "nearest")
    if x is None:
        return 0
    kind, axes = _computed(x.dtype, mode), attributes.get("axes")
    shape, sizes = list(x.shape), []
    for dim in normalize_axes(range(len(x.shape)) if axes is None else axes, len(x.shape)):
        if shape[dim] != y.shape[dim]:
            shape[dim] = y.shape[dim]
            sizes.append(math.prod(shape))
    pieces = sizes[:-1] if kind == x.dtype else [x.elements, *sizes]
    if mode != "nearest":
        pieces.append(max(sizes, default=0))
    return pieces_bytes([(size,) for size in pieces], kind.itemsize)


@kernel("Resize", since=11, scratch=_scratch_bytes, temporaries=copies_of_strided(0))
def resize(
    xp: ArrayModule,
    x: Array,
    roi: HostArray | None = None,
    scales: HostArray | None = None,
    sizes: HostArray | None = None,
    *,
    antialias: int = 0,
    axes: Ints | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
    out: Array | None = None,
) -> Array:
    """Resample some axes to given sizes or by given scales; a copy where no size changes, as ONNX Runtime has it."""
    one_of("mode", mode, ("nearest", "linear", "cubic"))
    one_of("nearest_mode", nearest_mode, _NEAREST)
    one_of("coordinate_transformation_mode", coordinate_transformation_mode, _COORDINATES)
    dims = normalize_axes(range(x.ndim) if axes is None else axes, x.ndim)
    crop = coordinate_transformation_mode == "tf_crop_and_resize"
    regions = _regions(roi, len(dims)) if crop else None
    axes_of = plan([x.shape[dim] for dim in dims], scales, sizes, keep_aspect_ratio_policy, regions)
    if all(axis.length == axis.resized for axis in axes_of):
        return written(xp, x.copy(), out)
    interpolation = Filter(mode, nearest_mode, cubic_coeff_a, bool(antialias), bool(exclude_outside))

    # Of a crop too, as ONNX Runtime has it.
    changed = [
        each for each in zip(dims, axes_of, strict=True) if each[1].length != each[1].resized or each[1].scale != 1
    ]
    shapes = [x.shape]
    for dim, axis in changed:
        shapes.append((*shapes[-1][:dim], axis.resized, *shapes[-1][dim + 1 :]))
    rooms = _Rooms(xp, x, _computed(x.dtype, mode), shapes, out)
    result, outside = rooms.operand(), []
    for number, (dim, axis) in enumerate(changed):
        coordinates = axis.coordinates(xp, coordinate_transformation_mode, coordinate_dtype(mode, x.dtype))
        places, weights = interpolation.taps(xp, coordinates, axis)
        term = rooms.term(number) if places.shape[1] > 1 else None
        result = _resize_axis(xp, result, dim, places, weights, rooms.result(number), term)
        if crop:
            beyond = (coordinates < 0) | (coordinates > axis.length - 1)
            outside.append(beyond.reshape((-1,) + (1,) * (x.ndim - 1 - dim)))
    for beyond in outside:
        result = _filled(xp, result, beyond, extrapolation_value)
    if is_integer(x.dtype) and mode != "nearest":
        limits = np.iinfo(x.dtype)
        # ONNX Runtime leaves fractions away, but for those of an antialiasing filter.
        whole = xp.rint(result, out=result) if antialias else xp.trunc(xp.round(result, 5, out=result), out=result)
        xp.clip(whole, limits.min, limits.max, out=result)
    return rooms.narrowed(result)


def _filled(xp: ArrayModule, x: Array, places: Array, value: float) -> Array:
    """An array with a number at some places, on NumPy written over it."""
    if xp.__name__ != "numpy":
        return xp.where(places, x.dtype.type(value), x)
    np.copyto(x, x.dtype.type(value), where=places)
    return x


class _Rooms:
    """Where what is computed between an operand and its result lies: on NumPy in `SCRATCH`, the last of it in `out`.

    Args:
        xp: the array module.
        x: the operand.
        kind: the dtype that is computed in.
        shapes: of the operand, and of what each axis in turn makes of it; the last is the result's.
        out: where the result goes, or None.
    """

    def __init__(
        self, xp: ArrayModule, x: Array, kind: "np.dtype[Any]", shapes: Sequence[Ints], out: Array | None
    ) -> None:
        self._x, self._kind, self._shapes = x, kind, shapes
        self._is_on_host = xp.__name__ == "numpy"
        fits = out is not None and out.shape == shapes[-1] and out.dtype == x.dtype
        self._y = contiguous_result(out, shapes[-1], x.dtype) if self._is_on_host else out if fits else None
        # An axis may keep its size and be taken from other places, which nobody foresees.
        self._resized = [number for number, pair in enumerate(pairwise(shapes)) if pair[0] != pair[1]]
        self._between = self._resized[:-1] if kind == x.dtype else self._resized
        self._most = max((math.prod(shapes[number + 1]) for number in self._resized), default=0)

    def operand(self) -> Array:
        """The operand in the dtype that is computed in."""
        if not self._is_on_host:
            return self._x.astype(self._kind, copy=False)
        return SCRATCH.in_dtype("wide", self._x, self._kind)

    def result(self, number: int) -> Array | None:
        """For what one axis more makes of it."""
        is_last = number + 2 == len(self._shapes)
        if is_last and self._kind == self._x.dtype:
            return self._y
        if not self._is_on_host or number not in self._between:
            return None
        return SCRATCH.array(f"resized {number}", self._shapes[number + 1], self._kind)

    def term(self, number: int) -> Array | None:
        """For one neighbour of each of these elements."""
        if not self._is_on_host or number not in self._resized:
            return None
        shape = self._shapes[number + 1]
        return SCRATCH.array("term", (self._most,), self._kind)[: math.prod(shape)].reshape(shape)

    def narrowed(self, result: Array) -> Array:
        """The result in the operand's dtype."""
        if not self._is_on_host or result is self._y:
            return narrow(result, self._x.dtype)
        assert self._y is not None
        np.copyto(self._y, result, casting="unsafe")
        return self._y


def _regions(roi: Array | None, count: int) -> list[tuple[float, float]]:
    if roi is None or roi.size != 2 * count:
        raise ValueError(f"tf_crop_and_resize needs a roi of {2 * count} numbers")
    values = roi.reshape(-1).astype(np.float64).tolist()
    return list(zip(values[:count], values[count:], strict=True))


def plan(
    lengths: Sequence[int],
    scales: Array | None,
    sizes: Array | None,
    policy: str = "stretch",
    regions: Sequence[tuple[float, float]] | None = None,
) -> list[Axis]:
    """How each of some axes is resized.

    Args:
        lengths: elements before.
        scales, sizes: what is asked for; one of both.
        policy: `keep_aspect_ratio_policy`.
        regions: of a crop, start and end of each axis as shares of it.
    """
    given_scales = scales is not None and scales.size > 0
    given_sizes = sizes is not None and sizes.size > 0
    if given_scales == given_sizes:
        raise ValueError("exactly one of scales and sizes must be given")
    taken = regions or [(0.0, 1.0)] * len(lengths)
    if given_sizes:
        resized, ratios = _sizes_by_policy(tuple(lengths), to_ints(sizes), policy)
    else:
        assert scales is not None
        ratios = [float(scale) for scale in scales.reshape(-1).tolist()]
        # In single precision: 10 times 0.7 is 7 there. As ONNX Runtime has it, a crop has the size of the whole: the
        # operator's text multiplies by the region's share too.
        exact = zip(*(np.asarray(numbers, np.float32) for numbers in (lengths, ratios)), strict=True)
        resized = tuple(int(length * ratio) for length, ratio in exact)
    return [Axis(n, m, ratio, region) for n, m, ratio, region in zip(lengths, resized, ratios, taken, strict=True)]


@kernel("Upsample", since=9, scratch=_scratch_bytes, temporaries=copies_of_strided(0))
def upsample(xp: ArrayModule, x: Array, scales: HostArray, *, mode: str = "nearest", out: Array | None = None) -> Array:
    """Resample by scales, in the way of the operator that Resize replaced."""
    asked: dict[str, Any] = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return resize(xp, x, None, scales, None, mode=mode, out=out, **asked)
