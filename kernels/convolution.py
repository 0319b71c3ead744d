"""Convolutions: windows laid out as columns and multiplied as matrices, one product per group."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import winograd
from .channelwise import WEIGHT
from .columns import convolve
from .columns import scratch_bytes as columns_bytes
from .depthwise import depthwise, is_depthwise
from .gemm import for_product, product
from .operands import (
    check_same_dtype,
    compute_dtype,
    contiguous_result,
    narrow,
    one_of,
    summed_as_int32,
    summing_dtype,
    widen,
)
from .quantization import saturated
from .registry import Array, ArrayModule, HostArray, Kept, Shaped, kernel
from .scratch import SCRATCH, pieces_bytes
from .temporaries import copies_of_strided, together, widened
from .windows import Windows

Ints = tuple[int, ...]

SPREAD_BYTES = 2**18
"""What the columns of a transposed convolution take at once on a processor, if one image takes no more."""

COLUMN_BYTES = 2**28
"""What columns may take at once on a device at most."""


def images_at_once(column_bytes: int, *beside: Array) -> int:
    """Of how many images columns are made at once on a device: such as take no more than what they are computed beside.

    Args:
        column_bytes: of one image.
        beside: operands and result, which are held meanwhile.
    """
    held = sum(int(x.nbytes) for x in beside)
    return max(1, min(COLUMN_BYTES, held) // max(1, column_bytes))


def convolved(
    xp: ArrayModule,
    x: Array,
    weight: Array,
    group: int,
    windows: Windows,
    kept: Kept,
    out: Array | None = None,
    dtype: "np.dtype[Any] | None" = None,
) -> Array:
    """The convolution itself, in the compute dtype, or in `dtype`; in `out`, where that has its shape and dtype."""
    batch, channels = x.shape[:2]
    features = weight.shape[0]
    if channels != weight.shape[1] * group or features % group:
        raise ValueError(f"{group} groups of weight {weight.shape} do not fit {channels} channels")
    if xp.__name__ == "cupy" and is_depthwise(x, weight, group):
        return depthwise(xp, widen(x), widen(weight), windows)
    shape, kind = (batch, features, *windows.counts), compute_dtype(x.dtype)
    if xp.__name__ == "numpy":
        y = contiguous_result(out, shape, kind)
        convolve(widen(x), widen(weight), group, windows, kept, y)
        return y
    kind = dtype or kind
    y = contiguous_result(out, shape, kind, xp)
    _multiply_columns(xp, for_product(xp, x), for_product(xp, weight), group, windows, y)
    return y


def _multiply_columns(xp: ArrayModule, x: Array, weight: Array, group: int, windows: Windows, y: Array) -> None:
    """Write the convolution into a contiguous array, on a device; columns are of the operands' own dtype."""
    features, depth, places = len(weight), weight.shape[1] * math.prod(windows.kernel), math.prod(windows.counts)
    matrices, view = weight.reshape(group, features // group, depth), windows.view(xp, x, 0)
    result = y.reshape(len(x), group, features // group, places)
    images = images_at_once(group * depth * places * x.dtype.itemsize, x, weight, y)
    for start in range(0, len(x), images):
        piece, target = view[start : start + images], result[start : start + images]
        columns = piece.reshape(len(piece), group, depth, places)
        found = product(xp, matrices, columns, y.dtype, out=target)
        if found is not target:
            target[...] = found


def _by_tiles(x: Array, weight: Array, group: int, windows: Windows, kept: Kept, out: Array | None) -> Array | None:
    """The convolution by Winograd's tiles, on NumPy and in the compute dtype; None where these do not fit."""
    x, weight = widen(x), widen(weight)
    if x.shape[1] != weight.shape[1] or not winograd.is_fit(x, weight, group, windows):
        return None
    y = contiguous_result(out, (len(x), len(weight), *windows.counts), x.dtype)
    kernels = kept.of(WEIGHT, "transformed", lambda: winograd.transformed_kernels(weight, kept.keeps(WEIGHT)))
    return y if winograd.convolve(x, kernels, windows, y) else None


def _convolved_integers(xp: ArrayModule, x: Array, weight: Array, group: int, windows: Windows) -> Array:
    """The convolution of 8-bit numbers less their zero points, in int32."""
    kind = summing_dtype(math.prod(weight.shape[1:]))
    return summed_as_int32(convolved(xp, x.astype(kind), weight.astype(kind), group, windows, Kept()))


def _check_kernel_shape(kernel_shape: Ints | None, weight: Array) -> None:
    if kernel_shape is not None and tuple(kernel_shape) != weight.shape[2:]:
        raise ValueError(f"attribute kernel_shape={kernel_shape} is not the weight's {weight.shape[2:]}")


def _kept_bytes(shapes: Sequence[Ints | None], attributes: Mapping[str, Any], itemsize: int) -> int:
    """What is kept of a constant weight on a processor: its kernels transformed, or with channels last."""
    weight = shapes[WEIGHT]
    if weight is None:
        return 0
    if attributes.get("group", 1) > 1:
        return math.prod(weight) * itemsize if weight[1] == 1 else 0
    is_dense = {*attributes.get("strides", ()), *attributes.get("dilations", ())} <= {1}
    return winograd.transformed_bytes(weight, itemsize) if is_dense else 0


def _scratch_bytes(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For columns, or for tiles where the numbers allow these."""
    x, weight = operands[0], operands[WEIGHT]
    if x is None or weight is None:
        return 0
    geometry: dict[str, Any] = {name: attributes.get(name) for name in ("strides", "dilations", "pads")}
    auto_pad = str(attributes.get("auto_pad", "NOTSET"))
    windows = Windows.over(x.shape[2:], weight.shape[2:], auto_pad=auto_pad, **geometry)
    known = (x.shape, weight.shape, int(attributes.get("group", 1)), windows, compute_dtype(x.dtype).itemsize)
    return max(columns_bytes(*known), winograd.scratch_bytes(*known, weight.is_constant))


_COPIED = together(widened, copies_of_strided(0, WEIGHT))
"""Operands in a wider dtype, and in one piece."""


@kernel("Conv", since=1, kept_bytes=_kept_bytes, scratch=_scratch_bytes, temporaries=_COPIED)
def conv(
    xp: ArrayModule,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
    out: Array | None = None,
    kept: Kept | None = None,
) -> Array:
    """Convolution over any number of spatial dims, in groups, with strides, dilations and padding."""
    check_same_dtype(x, weight, bias)
    _check_kernel_shape(kernel_shape, weight)
    windows = Windows.over(
        x.shape[2:], weight.shape[2:], strides=strides, dilations=dilations, pads=pads, auto_pad=auto_pad
    )
    kept = kept or Kept()
    y = _by_tiles(x, weight, group, windows, kept, out) if xp.__name__ == "numpy" else None
    if y is None:
        # What nothing is added to is rounded once already.
        y = convolved(xp, x, weight, group, windows, kept, out, x.dtype if bias is None else None)
    if bias is not None:
        y += widen(bias).reshape((-1,) + (1,) * (x.ndim - 2))
    return narrow(y, x.dtype)


def _less(x: Array, zero_point: Array | None, rank: int) -> Array:
    """x - zero point in int32; a vector zero point belongs to dim 0."""
    if zero_point is None:
        return x.astype(np.int32)
    offset = zero_point.astype(np.int32)
    return x.astype(np.int32) - (offset.reshape((-1,) + (1,) * (rank - 1)) if offset.ndim else offset)


def _integers_bytes(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For operands less their zero points, as floats too, their convolution, and its steps to a quantized result."""
    known = [one for one in operands if one is not None and len(one.shape) > 2]
    x, weight = known[0], known[1]
    names = ("strides", "dilations", "pads")
    given: dict[str, Any] = {name: attributes.get(name) for name in names}
    windows = Windows.over(x.shape[2:], weight.shape[2:], auto_pad=attributes.get("auto_pad", "NOTSET"), **given)
    padded = math.prod((*x.shape[:2], *windows.padded(x.shape[2:])))
    group, itemsize = int(attributes.get("group", 1)), np.dtype(np.float64).itemsize
    columns = columns_bytes(x.shape, weight.shape, group, windows, itemsize)
    return columns + 3 * itemsize * (padded + weight.elements) + 6 * itemsize * results[0].elements


@kernel("ConvInteger", since=10, temporaries=_integers_bytes)
def conv_integer(
    xp: ArrayModule,
    x: Array,
    weight: Array,
    x_zero_point: Array | None = None,
    weight_zero_point: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Array:
    """Convolution of 8-bit tensors less their zero points, in int32; padding counts as the zero point."""
    _check_kernel_shape(kernel_shape, weight)
    windows = Windows.over(
        x.shape[2:], weight.shape[2:], strides=strides, dilations=dilations, pads=pads, auto_pad=auto_pad
    )
    scalar = None if x_zero_point is None else x_zero_point.reshape(())
    return _convolved_integers(xp, _less(x, scalar, x.ndim), _less(weight, weight_zero_point, x.ndim), group, windows)


@kernel("QLinearConv", since=10, temporaries=_integers_bytes)
def q_linear_conv(
    xp: ArrayModule,
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    weight: Array,
    weight_scale: Array,
    weight_zero_point: Array,
    y_scale: Array,
    y_zero_point: Array,
    bias: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Array:
    """Convolution of quantized tensors, quantized again; the bias is int32 with scale x_scale * weight_scale."""
    _check_kernel_shape(kernel_shape, weight)
    windows = Windows.over(
        x.shape[2:], weight.shape[2:], strides=strides, dilations=dilations, pads=pads, auto_pad=auto_pad
    )
    offset = x_zero_point.reshape(())
    y = _convolved_integers(xp, _less(x, offset, x.ndim), _less(weight, weight_zero_point, x.ndim), group, windows)
    per_feature = (-1,) + (1,) * (x.ndim - 2)
    if bias is not None:
        y += bias.reshape(per_feature)
    factor = (widen(x_scale).astype(np.float64) * weight_scale / y_scale).reshape(per_feature)
    return saturated(xp, xp.rint(y * factor) + y_zero_point.astype(np.float64), y_zero_point.dtype)


def _transposed_geometry(
    size: int, reach: int, stride: int, pads: tuple[int, int], extra: int, wanted: int | None, auto_pad: str
) -> tuple[int, int]:
    """Of one spatial dim of a transposed convolution: elements cut off in front, and the result's size."""
    full = stride * (size - 1) + reach
    if auto_pad in ("SAME_UPPER", "SAME_LOWER") and wanted is None:
        # Where windows leave out places there is nothing to cut off: as ONNX Runtime has it, nothing is added either.
        wanted = min(size * stride, full + extra)
    if wanted is None:
        return pads[0], full + extra - sum(pads)
    total = max(full + extra - wanted, 0)
    return (total // 2 if auto_pad == "SAME_UPPER" else total - total // 2), wanted


@dataclass(frozen=True)
class Spread:
    """How a transposed convolution spreads kernels over its result.

    Attributes:
        group: how many groups there are.
        features: of the result.
        spatial, kernel: sizes of the operand and of a kernel per spatial dim.
        strides, dilations: per spatial dim.
        geometry: elements cut off in front, and the result's size, per spatial dim.
    """

    group: int
    features: int
    spatial: Ints
    kernel: Ints
    strides: Ints
    dilations: Ints
    geometry: tuple[tuple[int, int], ...]

    @classmethod
    def over(
        cls,
        shape: Ints,
        weight: Ints,
        group: int,
        *,
        auto_pad: str,
        strides: Ints | None,
        dilations: Ints | None,
        pads: Ints | None,
        extra: Ints | None,
        wanted: Ints | None,
    ) -> "Spread":
        """That of an operand and a weight of some shapes, from a node's attributes (None where it does not set one)."""
        rank, spatial = len(shape) - 2, shape[2:]
        ones, zeros = (1,) * rank, (0,) * rank
        strides, dilations, pads, extra = strides or ones, dilations or ones, pads or zeros * 2, extra or zeros
        sizes = wanted[-rank:] if wanted else (None,) * rank
        geometry = tuple(
            _transposed_geometry(
                spatial[d],
                (weight[2 + d] - 1) * dilations[d] + 1,
                strides[d],
                (pads[d], pads[rank + d]),
                extra[d],
                sizes[d],
                auto_pad,
            )
            for d in range(rank)
        )
        return cls(group, weight[1] * group, spatial, weight[2:], strides, dilations, geometry)

    @property
    def extents(self) -> Ints:
        """All that the kernels reach, and all that the result asks for."""
        dims = zip(self.spatial, self.kernel, self.strides, self.dilations, self.geometry, strict=True)
        return tuple(max((n - 1) * s + (k - 1) * d + 1, cut + size) for n, k, s, d, (cut, size) in dims)

    def columns(self, images: int) -> Ints:
        """The shape of the columns of some images."""
        return images, self.features, *self.kernel, *self.spatial

    def images(self, count: int, itemsize: int) -> int:
        """Of how many images the columns are made at once."""
        return max(1, min(count, SPREAD_BYTES // max(1, math.prod(self.columns(1)) * itemsize)))


def _spread_bytes(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For the columns of some images, and for what they are added up in."""
    x, weight = operands[0], operands[WEIGHT]
    if x is None or weight is None:
        return 0
    spread = Spread.over(
        x.shape,
        weight.shape,
        int(attributes.get("group", 1)),
        auto_pad=str(attributes.get("auto_pad", "NOTSET")),
        strides=attributes.get("strides"),
        dilations=attributes.get("dilations"),
        pads=attributes.get("pads"),
        extra=attributes.get("output_padding"),
        wanted=attributes.get("output_shape"),
    )
    itemsize = compute_dtype(x.dtype).itemsize
    images = spread.images(x.shape[0], itemsize)
    return pieces_bytes((spread.columns(images), (images, spread.features, *spread.extents)), itemsize)


@kernel("ConvTranspose", since=1, scratch=_spread_bytes, temporaries=_COPIED)
def conv_transpose(
    xp: ArrayModule,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    output_padding: Ints | None = None,
    output_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
    out: Array | None = None,
) -> Array:
    """Transposed convolution: each input element adds its weighted kernel to the result."""
    check_same_dtype(x, weight, bias)
    _check_kernel_shape(kernel_shape, weight)
    one_of("auto_pad", auto_pad, ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"))
    spread = Spread.over(
        x.shape,
        weight.shape,
        group,
        auto_pad=auto_pad,
        strides=strides,
        dilations=dilations,
        pads=pads,
        extra=output_padding,
        wanted=output_shape,
    )
    y = _spread_by_images(xp, x, weight, spread, out)
    if bias is not None:
        y += widen(bias).reshape(-1, *(1,) * (x.ndim - 2))
    return narrow(y, x.dtype)


def _spread_by_images(xp: ArrayModule, x: Array, weight: Array, spread: Spread, out: Array | None) -> Array:
    """As `_spread_kernels`, of as many images at once as have small columns; in `out` where that fits."""
    kind, shape = compute_dtype(x.dtype), (len(x), spread.features, *(size for _, size in spread.geometry))
    y = contiguous_result(out, shape, kind, xp)
    if xp.__name__ == "numpy":
        images = spread.images(len(x), kind.itemsize)
    else:
        images = images_at_once(math.prod(spread.columns(1)) * kind.itemsize, x, weight, y)
    for start in range(0, len(x), images):
        piece = slice(start, start + images)
        y[piece] = _spread_kernels(xp, x[piece], weight, spread)
    return y


def _spread_kernels(xp: ArrayModule, x: Array, weight: Array, spread: Spread) -> Array:
    group, kernel, strides, dilations = spread.group, spread.kernel, spread.strides, spread.dilations
    batch, channels, *spatial = x.shape
    if channels != weight.shape[0] or channels % group:
        raise ValueError(f"{group} groups of weight {weight.shape} do not fit {channels} channels")
    per_group = xp.swapaxes(weight.reshape(group, channels // group, math.prod(weight.shape[1:])), 1, 2)
    kind = compute_dtype(x.dtype)
    shape, parts = spread.columns(batch), x.reshape(batch, group, channels // group, math.prod(spatial))
    full_shape = (batch, spread.features, *spread.extents)
    if xp.__name__ == "numpy":
        into = SCRATCH.array("columns", (batch, group, per_group.shape[1], parts.shape[-1]), kind)
        columns = product(xp, per_group, parts, kind, out=into).reshape(shape)
        full = SCRATCH.array("full", full_shape, kind)
        full.fill(0)
    else:
        columns = product(xp, per_group, parts, kind).reshape(shape)
        full = xp.zeros(full_shape, dtype=kind)
    for place in itertools.product(*map(range, kernel)):
        target = tuple(
            slice(p * d, p * d + (n - 1) * s + 1, s)
            for p, d, n, s in zip(place, dilations, spatial, strides, strict=True)
        )
        full[(slice(None), slice(None), *target)] += columns[(slice(None), slice(None), *place)]
    return full[(slice(None), slice(None), *(slice(cut, cut + size) for cut, size in spread.geometry))]


@kernel("Col2Im", since=18)
def col2im(
    xp: ArrayModule,
    columns: Array,
    image_shape: HostArray,
    block_shape: HostArray,
    *,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Array:
    """Add columns (batch, channels * block, blocks) back into the image that they were cut from."""
    image = tuple(image_shape.reshape(-1).tolist())
    block = tuple(block_shape.reshape(-1).tolist())
    windows = Windows.over(image, block, strides=strides, dilations=dilations, pads=pads, auto_pad="NOTSET")
    batch, channels = columns.shape[0], columns.shape[1] // math.prod(block)
    pieces = widen(columns).reshape(batch, channels, *block, *windows.counts)
    full = xp.zeros((batch, channels, *(n + sum(p) for n, p in zip(image, windows.pads, strict=True))), pieces.dtype)
    for place in itertools.product(*map(range, block)):
        target = tuple(
            slice(p * d, p * d + (n - 1) * s + 1, s)
            for p, d, n, s in zip(place, windows.dilations, windows.counts, windows.strides, strict=True)
        )
        full[(slice(None), slice(None), *target)] += pieces[(slice(None), slice(None), *place)]
    cut = tuple(slice(before, before + n) for n, (before, _) in zip(image, windows.pads, strict=True))
    return narrow(full[(slice(None), slice(None), *cut)], columns.dtype)
