"""Operators of detectors and spatial transformers: sampling at given places, regions of interest, box suppression."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .gemm import product
from .operands import check_same_dtype, compute_dtype, narrow, one_of, to_ints, widen
from .registry import Array, ArrayModule, HostArray, Shaped, kernel
from .temporaries import arrays_like

Ints = tuple[int, ...]


@kernel("AffineGrid", since=20, temporaries=arrays_like(0, results=4))
def affine_grid(xp: ArrayModule, theta: Array, size: HostArray, *, align_corners: int = 0) -> Array:
    """Sampling places (batch, *spatial, rank) of an affine transform, in coordinates from -1 to 1."""
    spatial = to_ints(size)[2:]
    if theta.shape[1:] != (len(spatial), len(spatial) + 1):
        raise ValueError(f"theta of shape {theta.shape} does not transform {len(spatial)} spatial dims")
    wide = widen(theta)
    steps = [_unit_coordinates(xp, n, bool(align_corners)).astype(wide.dtype) for n in spatial]
    grid = xp.meshgrid(*steps, indexing="ij")
    # the last coordinate names the first place: x runs along the last dim
    places = xp.stack([*reversed(grid), xp.ones_like(grid[0])], axis=-1)
    flat = product(xp, places.reshape(-1, len(spatial) + 1), xp.swapaxes(wide, 1, 2))
    return narrow(flat.reshape(theta.shape[0], *spatial, len(spatial)), theta.dtype)


def _unit_coordinates(xp: ArrayModule, n: int, align_corners: bool) -> Array:
    if align_corners:
        return xp.linspace(-1, 1, n)
    return (2 * xp.arange(n) + 1) / n - 1


def _denormalized(unit: Array, n: int, align_corners: bool) -> Array:
    return (unit + 1) / 2 * (n - 1) if align_corners else ((unit + 1) * n - 1) / 2


def _reflected(xp: ArrayModule, x: Array, n: int, align_corners: bool) -> Array:
    """Places mirrored at the borders until they lie inside."""
    low, high = (0.0, n - 1.0) if align_corners else (-0.5, n - 0.5)
    span = high - low
    if span == 0:
        return xp.zeros_like(x)
    folded = xp.abs(x - low) % (2 * span)
    return xp.where(folded > span, 2 * span - folded, folded) + low


def _padded_place(xp: ArrayModule, place: Array, n: int, padding_mode: str, align_corners: bool) -> Array:
    if padding_mode == "border":
        return xp.clip(place, 0, n - 1)
    if padding_mode == "reflection":
        return xp.clip(_reflected(xp, place, n, align_corners), 0, n - 1)
    return place


def _cubic_weights(xp: ArrayModule, share: Array) -> list[Array]:
    """Weights of the neighbours at -1, 0, 1, 2 of a place `share` past neighbour 0, with a = -0.75."""
    a = -0.75

    def near(t: Array) -> Array:
        return ((a + 2) * t - (a + 3)) * t * t + 1

    def far(t: Array) -> Array:
        return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a

    return [far(share + 1), near(share), near(1 - share), far(2 - share)]


def _taps(xp: ArrayModule, place: Array, mode: str) -> list[tuple[Array, Array]]:
    """(neighbour, weight) pairs along one dim."""
    if mode == "nearest":
        return [(xp.rint(place), xp.ones_like(place))]
    first = xp.floor(place)
    share = place - first
    if mode == "linear":
        return [(first, 1 - share), (first + 1, share)]
    return [(first + offset - 1, weight) for offset, weight in enumerate(_cubic_weights(xp, share))]


_SAMPLING = {"bilinear": "linear", "linear": "linear", "bicubic": "cubic", "cubic": "cubic", "nearest": "nearest"}


@kernel("GridSample", since=16, temporaries=arrays_like(0, 12, results=3.5))
def grid_sample(
    xp: ArrayModule, x: Array, grid: Array, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> Array:
    """Values of x (batch, channels, *spatial) at places (batch, *places, rank) given from -1 to 1."""
    one_of("mode", mode, _SAMPLING)
    one_of("padding_mode", padding_mode, ("zeros", "border", "reflection"))
    spatial, aligned = x.shape[2:], bool(align_corners)
    if grid.shape[-1] != len(spatial) or grid.shape[0] != x.shape[0]:
        raise ValueError(f"grid of shape {grid.shape} does not sample {x.shape}")
    wide, kind = widen(x), _SAMPLING[mode]
    along = []
    for d, n in enumerate(spatial):
        place = _denormalized(widen(grid)[..., len(spatial) - 1 - d], n, aligned)
        if kind != "cubic":  # a cubic's neighbours are padded one by one instead
            place = _padded_place(xp, place, n, padding_mode, aligned)
        along.append(_taps(xp, place, kind))
    batch = xp.arange(x.shape[0]).reshape((-1,) + (1,) * (grid.ndim - 2))
    result = xp.zeros((x.shape[0], *grid.shape[1:-1], x.shape[1]), dtype=wide.dtype)
    for taps in itertools.product(*along):
        weight, index = xp.ones(grid.shape[:-1], dtype=wide.dtype), []
        for (neighbour, share), n in zip(taps, spatial, strict=True):
            if padding_mode == "zeros":
                share = xp.where((neighbour >= 0) & (neighbour <= n - 1), share, xp.zeros_like(share))
            neighbour = _padded_place(xp, neighbour, n, padding_mode, aligned)
            index.append(xp.clip(neighbour, 0, n - 1).astype(np.int64))
            weight = weight * share
        result += xp.moveaxis(wide, 1, -1)[(batch, *index)] * weight[..., None].astype(wide.dtype)
    return narrow(xp.moveaxis(result, -1, 1), x.dtype)


def _samples_bytes(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For the samples of one region, four neighbours each, twice, their means, and what is computed in a wider dtype.

    Where the number of samples follows from the regions, 2 x 2 are counted for an element.
    """
    x, rois, ratio = operands[0], operands[1], int(attributes.get("sampling_ratio", 0)) or 2
    itemsize = 4 if x is None else compute_dtype(x.dtype).itemsize
    elements, regions = results[0].elements, 1 if rois is None else max(1, rois.elements // 4)
    wide = 0 if x is None or x.dtype.itemsize >= itemsize else x.elements + elements
    return (10 * ratio**2 * elements // regions + wide) * itemsize


@kernel("RoiAlign", since=10, temporaries=_samples_bytes)
def roi_align_without_shift(
    xp: ArrayModule,
    x: Array,
    rois: HostArray,
    batch_indices: HostArray,
    *,
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Array:
    """RoiAlign before version 16, which does not shift coordinates by half a pixel."""
    return roi_align(
        xp,
        x,
        rois,
        batch_indices,
        coordinate_transformation_mode="output_half_pixel",
        mode=mode,
        output_height=output_height,
        output_width=output_width,
        sampling_ratio=sampling_ratio,
        spatial_scale=spatial_scale,
    )


@kernel("RoiAlign", since=16, temporaries=_samples_bytes)
def roi_align(
    xp: ArrayModule,
    x: Array,
    rois: HostArray,
    batch_indices: HostArray,
    *,
    coordinate_transformation_mode: str = "half_pixel",
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Array:
    """Each region of interest pooled to a fixed size from bilinear samples."""
    one_of("mode", mode, ("avg", "max"))
    one_of("coordinate_transformation_mode", coordinate_transformation_mode, ("half_pixel", "output_half_pixel"))
    check_same_dtype(x, rois)
    half = 0.5 if coordinate_transformation_mode == "half_pixel" else 0.0
    wide = widen(x)
    result = xp.empty((len(rois), x.shape[1], output_height, output_width), dtype=wide.dtype)
    for number, (region, image) in enumerate(zip(widen(rois), batch_indices, strict=True)):
        left, top, right, bottom = (float(edge) * spatial_scale - half for edge in region)
        least = 0.0 if half else 1.0
        rows = _roi_samples(top, max(bottom - top, least), output_height, sampling_ratio)
        columns = _roi_samples(left, max(right - left, least), output_width, sampling_ratio)
        result[number] = _roi_pooled(xp, wide[int(image)], rows, columns, mode)
    return narrow(result, x.dtype)


def _roi_samples(start: float, extent: float, bins: int, ratio: int) -> np.ndarray:
    """Sampling places (bins, samples of each) along one dim."""
    samples = ratio if ratio > 0 else math.ceil(extent / bins)
    size = extent / bins
    return start + np.arange(bins)[:, None] * size + (np.arange(samples) + 0.5) * (size / max(samples, 1))


def _roi_taps(places: np.ndarray, n: int) -> list[tuple[np.ndarray, np.ndarray]]:
    inside = (places >= -1) & (places <= n)
    place = np.clip(places, 0, n - 1)
    first = np.floor(place).astype(np.int64)
    share = place - first
    return [(first, (1 - share) * inside), (np.minimum(first + 1, n - 1), share * inside)]


def _roi_pooled(xp: ArrayModule, image: Array, rows: np.ndarray, columns: np.ndarray, mode: str) -> Array:
    """One region (channels, bins, bins) of an image (channels, height, width)."""
    terms = []
    for (row, row_weight), (column, column_weight) in itertools.product(
        _roi_taps(rows, image.shape[1]), _roi_taps(columns, image.shape[2])
    ):
        picked = image[:, xp.asarray(row.reshape(-1, 1)), xp.asarray(column.reshape(1, -1))]
        weight = xp.asarray((row_weight.reshape(-1, 1) * column_weight.reshape(1, -1)).astype(image.dtype))
        terms.append((picked * weight).reshape(-1, *rows.shape, *columns.shape))
    if mode == "avg":
        return sum(terms[1:], terms[0]).mean(axis=(2, 4))
    # the greatest weighted neighbour, as ONNX's own data and ONNX Runtime have it, not the greatest sample
    return xp.stack(terms).max(axis=(0, 3, 5))


@kernel("NonMaxSuppression", since=10)
def non_max_suppression(
    xp: ArrayModule,
    boxes: HostArray,
    scores: HostArray,
    max_output_boxes_per_class: HostArray | None = None,
    iou_threshold: HostArray | None = None,
    score_threshold: HostArray | None = None,
    *,
    center_point_box: int = 0,
) -> Array:
    """(batch, class, box) of boxes that no better box of their class overlaps too much, best first."""
    limit = 0 if max_output_boxes_per_class is None else to_ints(max_output_boxes_per_class)[0]
    overlap = 0.0 if iou_threshold is None else float(iou_threshold.reshape(()))
    least = -math.inf if score_threshold is None else float(score_threshold.reshape(()))
    corners = _corners(boxes, bool(center_point_box))
    selected: list[tuple[int, int, int]] = []
    for image, kind in itertools.product(range(scores.shape[0]), range(scores.shape[1])):
        chosen = _suppressed(corners[image], scores[image, kind], limit, overlap, least)
        selected += [(image, kind, box) for box in chosen]
    return xp.asarray(selected, dtype=np.int64).reshape(-1, 3)


def _corners(boxes: np.ndarray, centred: bool) -> np.ndarray:
    """Boxes as (low y, low x, high y, high x)."""
    first, second = boxes[..., :2], boxes[..., 2:]
    if centred:
        first, second = np.flip(first - second / 2, -1), np.flip(first + second / 2, -1)
    return np.concatenate([np.minimum(first, second), np.maximum(first, second)], axis=-1)


def _suppressed(corners: np.ndarray, scores: np.ndarray, limit: int, overlap: float, least: float) -> list[int]:
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] > least]
    area = (corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1])
    chosen: list[int] = []
    while order.size and len(chosen) < limit:
        best, order = order[0], order[1:]
        chosen.append(int(best))
        low = np.maximum(corners[order, :2], corners[best, :2])
        high = np.minimum(corners[order, 2:], corners[best, 2:])
        common = np.maximum(high - low, 0).prod(axis=-1)
        union = area[order] + area[best] - common
        order = order[common <= overlap * union]
    return chosen
