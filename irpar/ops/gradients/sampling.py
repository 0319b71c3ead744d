"""Sampling of images at computed places, in plain operators: one look-up for each neighbour of a place.

GridSample of 4 neighbours     y = sum over 4 of GatherND(x, place) * weight     places and weights follow from the grid
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from irpar.ir import DType, Node, Value

from ..facts import float_attribute, int_attribute, ints_attribute, needed, needed_ints, operand, text_attribute
from .writer import GradientWriter, NoGradientError, Of

Tap = tuple[Value, Value | None]
"""A neighbour along one dim, as a whole number of floats, and its weight; None: 1."""

_KINDS = {"bilinear": "linear", "linear": "linear", "bicubic": "cubic", "cubic": "cubic", "nearest": "nearest"}
_CUBIC = -0.75


def _sizes(value: Value, first: int, w: GradientWriter) -> list[int]:
    """The dims of a value from one on.

    Raises:
        NoGradientError: one is symbolic.
    """
    found = [size for size in w.dims(value)[first:] if isinstance(size, int)]
    if len(found) < len(w.dims(value)) - first:
        raise NoGradientError(f"because dims of %{value.name} are symbolic")
    return found


def _clipped(value: Value, most: float, w: GradientWriter) -> Value:
    return w.op("Clip", [value, w.number(0, value), w.number(most, value)])


def _inside(value: Value, low: float, high: float, w: GradientWriter) -> Value:
    """Whether elements lie between two numbers, these included."""
    return w.op("And", [w.compare("GreaterOrEqual", value, low), w.compare("LessOrEqual", value, high)])


def _linear_taps(place: Value, w: GradientWriter) -> list[Tap]:
    first = w.op("Floor", [place])
    share = w.sub(place, first)
    return [(first, w.sub(1.0, share)), (w.add(first, 1.0), share)]


def _cubic_taps(place: Value, w: GradientWriter) -> list[Tap]:
    first = w.op("Floor", [place])
    share = w.sub(place, first)

    def near(t: Value) -> Value:
        return w.add(w.mul(w.mul(w.sub(w.mul(t, _CUBIC + 2), _CUBIC + 3), t), t), 1.0)

    def far(t: Value) -> Value:
        inner = w.add(w.mul(w.sub(w.mul(t, _CUBIC), 5 * _CUBIC), t), 8 * _CUBIC)
        return w.sub(w.mul(inner, t), 4 * _CUBIC)

    weights = [far(w.add(share, 1.0)), near(share), near(w.sub(1.0, share)), far(w.sub(2.0, share))]
    return [(w.add(first, float(number - 1)), weight) for number, weight in enumerate(weights)]


def _terms(image: Value, taps: Sequence[Sequence[Tap]], w: GradientWriter, images: Value | None = None) -> list[Value]:
    """What each combination of neighbours adds: [batch, *places, channels].

    Args:
        image: [batch, channels, *spatial].
        taps: for each spatial dim its neighbours, which broadcast to [batch, *places].
        images: which image a place lies in, broadcast likewise; None: that of its own batch.
    """
    spatial = _sizes(image, 2, w)
    rows = w.transpose(w.reshaped(image, [(image, 0), (image, 1), math.prod(spatial)]), [0, 2, 1])
    if images is not None:
        rows = w.reshaped(rows, [-1, (image, 1)])
    terms = []
    for neighbours in itertools.product(*taps):
        index, weight = images, None
        for (neighbour, share), size in zip(neighbours, spatial, strict=True):
            at = w.cast(_clipped(neighbour, size - 1, w), DType.I64)
            index = at if index is None else w.add(w.mul(index, size), at)
            weight = share if weight is None else weight if share is None else w.mul(weight, share)
        assert index is not None
        if images is None:
            picked = w.op("GatherND", [rows, w.unsqueeze(index, [len(w.dims(index))])], {"batch_dims": 1})
        else:
            picked = w.op("Gather", [rows, index], {"axis": 0})
        if weight is not None:
            picked = w.mul(picked, w.cast(w.unsqueeze(weight, [len(w.dims(weight))]), image.dtype))
        terms.append(picked)
    return terms


def _total(terms: Sequence[Value], w: GradientWriter) -> Value:
    return terms[0] if len(terms) == 1 else w.op("Sum", terms)


def _channels_first(value: Value, w: GradientWriter) -> Value:
    rank = len(w.dims(value))
    return w.transpose(value, [0, rank - 1, *range(1, rank - 1)])


# -- GridSample, AffineGrid -----------------------------------------------------------------------------------------


def _reflected(place: Value, size: int, is_aligned: bool, w: GradientWriter) -> Value:
    """Places mirrored at the borders until they lie inside."""
    low, span = (0.0, size - 1.0) if is_aligned else (-0.5, float(size))
    if span == 0:
        return w.mul(place, 0.0)
    away = w.op("Abs", [w.sub(place, low)])
    turns = w.op("Floor", [w.div(away, 2 * span)])
    folded = w.sub(away, w.mul(turns, 2 * span))
    return w.add(w.where(w.compare("Greater", folded, span), w.sub(2 * span, folded), folded), low)


def _kept_inside(place: Value, size: int, padding: str, is_aligned: bool, w: GradientWriter) -> Value:
    if padding == "zeros":
        return place
    return _clipped(_reflected(place, size, is_aligned, w) if padding == "reflection" else place, size - 1, w)


def decompose_grid_sample(node: Node, w: GradientWriter) -> list[Value]:
    """The neighbours of each place, weighted by how near they are.

    Raises:
        NoGradientError: the image has symbolic dims.
    """
    image, grid = needed(node, 0), needed(node, 1)
    kind = _KINDS[text_attribute(node, "mode", "linear")]
    padding, is_aligned = text_attribute(node, "padding_mode", "zeros"), bool(int_attribute(node, "align_corners", 0))
    spatial = _sizes(image, 2, w)
    wide = w.widened(grid)
    taps: list[list[Tap]] = []
    for dim, size in enumerate(spatial):
        # The last coordinate is the place along the first dim.
        unit = w.op("Gather", [wide, w.constant(np.int64(len(spatial) - 1 - dim), "number")], {"axis": -1})
        place = w.add(w.mul(unit, (size - is_aligned) / 2), (size - 1) / 2)
        if kind == "cubic":
            found = [(_kept_inside(at, size, padding, is_aligned, w), share, at) for at, share in _cubic_taps(place, w)]
        else:
            place = _kept_inside(place, size, padding, is_aligned, w)
            near = _linear_taps(place, w) if kind == "linear" else [(w.op("Round", [place]), None)]
            found = [(at, share, at) for at, share in near]
        if padding == "zeros":
            taps.append([(at, _zero_outside(share, before, size, w)) for at, share, before in found])
        else:
            taps.append([(at, share) for at, share, _ in found])
    return [_channels_first(_total(_terms(image, taps, w), w), w)]


def _zero_outside(share: Value | None, place: Value, size: int, w: GradientWriter) -> Value:
    inside = _inside(place, 0, size - 1, w)
    return w.cast(inside, place.dtype) if share is None else w.where(inside, share, 0.0)


def of_affine_grid(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """What the grid of the identity is multiplied with, transposed."""
    theta, size, g = needed(node, 0), needed(node, 1), of[0]
    assert g is not None
    rank = _sizes(theta, 1, w)[0]

    def transform() -> Value:
        identity = w.constant(np.eye(rank, rank + 1, dtype=theta.dtype.numpy), "identity")
        attributes = {"align_corners": int_attribute(node, "align_corners", 0)}
        alike = w.op("Expand", [identity, w.shape_of(theta)], type=theta.type)
        grid = w.op("AffineGrid", [alike, size], attributes, type=g.type)
        places = w.reshaped(grid, [(theta, 0), -1, rank])
        steps = w.op("MatMul", [w.swapped(w.reshaped(g, [(theta, 0), -1, rank])), places])
        moved = w.sum(w.reshaped(g, [(theta, 0), -1, rank]), [1], keep=False)
        made = w.op("Concat", [steps, w.unsqueeze(moved, [2])], {"axis": 2})
        return w.shaped_as(made, theta)

    return w.each(transform)


# -- regions --------------------------------------------------------------------------------------------------------


def _edges(rois: Value, order: Sequence[int], w: GradientWriter) -> list[Value]:
    """Columns of the regions, each [regions]."""
    return [w.op("Gather", [rois, w.constant(np.int64(place), "number")], {"axis": 1}) for place in order]


def _steps(count: int, like: Value, offset: float = 0.0) -> "np.ndarray":  # type: ignore[type-arg]
    return (np.arange(count) + offset).astype(like.dtype.numpy)


def decompose_roi_align(node: Node, w: GradientWriter) -> list[Value]:
    """Bins of a number of samples of each region, of which each is a mean, or the greatest.

    Raises:
        NoGradientError: the number of samples follows from the sizes of regions.
    """
    image, rois, which = needed(node, 0), needed(node, 1), needed(node, 2)
    samples = int_attribute(node, "sampling_ratio", 0)
    if samples <= 0:
        raise NoGradientError("because the number of its samples follows from its regions; set its sampling_ratio")
    is_half = (
        node.version >= 16 and text_attribute(node, "coordinate_transformation_mode", "half_pixel") == "half_pixel"
    )
    scale = float_attribute(node, "spatial_scale", 1.0)
    bins = [int_attribute(node, name, 1) for name in ("output_height", "output_width")]
    left, top, right, bottom = (w.sub(w.mul(edge, scale), 0.5 * is_half) for edge in _edges(rois, range(4), w))
    taps: list[list[Tap]] = []
    spatial = _sizes(image, 2, w)
    for dim, (start, end, size) in enumerate(zip((top, left), (bottom, right), spatial, strict=True)):
        extent = w.op("Max", [w.sub(end, start), w.number(0.0 if is_half else 1.0, start)])
        # [regions, bins of rows, their samples, bins of columns, their samples]
        axes = [1, 2, 3, 4]
        places = (np.arange(bins[dim])[:, None] + (np.arange(samples) + 0.5) / samples) / bins[dim]
        at = w.constant(
            places.reshape((*places.shape, 1, 1) if dim == 0 else places.shape).astype(rois.dtype.numpy), "at"
        )
        place = w.add(w.mul(w.unsqueeze(extent, axes), at), w.unsqueeze(start, axes))
        inside = _inside(place, -1, size, w)
        taps.append(
            [
                (near, w.where(inside, share, 0.0))
                for near, share in _linear_taps(_clipped(place, size - 1, w), w)
                if share is not None
            ]
        )
    terms = _terms(image, taps, w, w.unsqueeze(w.cast(which, DType.I64), [1, 2, 3, 4]))
    if text_attribute(node, "mode", "avg") == "avg":
        pooled = w.op("ReduceMean", [_total(terms, w), w.ints([2, 4])], {"keepdims": 0})
    else:
        # The greatest weighted neighbour, not the greatest sample.
        pooled = w.op("ReduceMax", [w.op("Max", terms), w.ints([2, 4])], {"keepdims": 0})
    return [_channels_first(pooled, w)]


def decompose_crop_and_resize(node: Node, w: GradientWriter) -> list[Value]:
    """Samples of each region, its corners included; a number where they lie outside of the image."""
    image, rois, which = needed(node, 0), needed(node, 1), needed(node, 2)
    counts, spatial = needed_ints(node, 3), _sizes(image, 2, w)
    is_linear = text_attribute(node, "mode", "bilinear") == "bilinear"
    top, left, bottom, right = _edges(rois, range(4), w)
    taps, valid = [], None
    for dim, (start, end, size, count) in enumerate(zip((top, left), (bottom, right), spatial, counts, strict=True)):
        shares = np.arange(count) / (count - 1) if count > 1 else np.full(1, 0.5)
        at = w.constant(shares.reshape((-1, 1) if dim == 0 else (-1,)).astype(rois.dtype.numpy), "at")
        first, extent = (w.mul(w.unsqueeze(edge, [1, 2]), size - 1.0) for edge in (start, w.sub(end, start)))
        place = w.add(first, w.mul(extent, at))
        inside = _inside(place, 0, size - 1, w)
        valid = inside if valid is None else w.op("And", [valid, inside])
        taps.append(_linear_taps(place, w) if is_linear else [(w.op("Floor", [w.add(place, 0.5)]), None)])
    assert valid is not None
    found = _total(_terms(image, taps, w, w.unsqueeze(w.cast(which, DType.I64), [1, 2])), w)
    filler = float_attribute(node, "extrapolation_value", 0.0)
    return [_channels_first(w.where(w.unsqueeze(valid, [3]), found, filler), w)]


# -- DeformConv -----------------------------------------------------------------------------------------------------


def decompose_deform_conv(node: Node, w: GradientWriter) -> list[Value]:
    """The elements under the kernel, each moved by its offset, times the weights.

    Raises:
        NoGradientError: a dim is symbolic.
    """
    image, weight, offsets = needed(node, 0), needed(node, 1), needed(node, 2)
    bias, mask = operand(node, 3), operand(node, 4)
    batch, channels, *spatial = _sizes(image, 0, w)
    filters, inside, *kernel = _sizes(weight, 0, w)
    places = _sizes(offsets, 2, w)
    if len(spatial) != 2:
        raise NoGradientError("because its image has not two dims")
    groups, moved = int_attribute(node, "group", 1), int_attribute(node, "offset_group", 1)
    elements, count = math.prod(kernel), math.prod(places)
    strides, dilations = (ints_attribute(node, name) or (1, 1) for name in ("strides", "dilations"))
    pads = ints_attribute(node, "pads") or (0, 0, 0, 0)
    apart = w.reshape(offsets, [batch * moved, elements, 2, *places])
    taps: list[list[Tap]] = []
    for dim, size in enumerate(spatial):
        along = np.arange(places[dim]) * strides[dim] - pads[dim]
        under = np.arange(kernel[dim]) * dilations[dim]
        grid = np.zeros((*kernel, *places))
        grid += np.expand_dims(under, [at for at in range(4) if at != dim])
        grid += np.expand_dims(along, [at for at in range(4) if at != 2 + dim])
        start = w.constant(grid.reshape(elements, *places).astype(image.dtype.numpy), "grid")
        offset = w.op("Gather", [apart, w.constant(np.int64(dim), "number")], {"axis": 2})
        near = _linear_taps(w.add(offset, start), w)
        taps.append([(at, _zero_outside(share, at, size, w)) for at, share in near])
    parts = w.reshape(image, [batch * moved, channels // moved, *spatial])
    columns = _channels_first(_total(_terms(parts, taps, w), w), w)
    if mask is not None:
        columns = w.mul(columns, w.reshape(mask, [batch * moved, 1, elements, *places]))
    columns = w.reshape(columns, [batch, groups, inside * elements, count])
    rows = w.reshape(weight, [groups, filters // groups, inside * elements])
    made = w.reshape(w.op("MatMul", [rows, columns]), [batch, filters, *places])
    return [made if bias is None else w.add(made, w.unsqueeze(bias, [1, 2]))]
