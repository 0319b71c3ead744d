"""Convolutions as matrix products: windows are laid out as columns in one launch, 16 bits stay 16 bits.

Rows of columns and of sums begin at even places, so that tensor cores can multiply them, however many places there are.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..convolution import images_at_once
from ..depthwise import MOST_SPATIAL_DIMS, geometry, is_depthwise
from ..gemm import product
from ..operands import compute_dtype, contiguous_result
from ..registry import Array
from ..windows import Windows
from .copies import in_order
from .gpu import Gpu, pointers_of
from .indexing import ELEMENTS
from .programs import Program
from .registry import cuda_kernel

Ints = tuple[int, ...]

_THREADS, _MOST_BLOCKS, _CHUNK_BYTES = 256, 65535, 16


@cuda_kernel("Conv", since=1)
def conv(
    gpu: Gpu,
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
) -> Array | None:
    """Convolution over up to three spatial dims, with a bias that is added before the result is rounded."""
    if not _is_fit(x, weight, bias, group) or kernel_shape not in (None, weight.shape[2:]):
        return None
    windows = Windows.over(
        x.shape[2:], weight.shape[2:], strides=strides, dilations=dilations, pads=pads, auto_pad=auto_pad
    )
    shape = (x.shape[0], weight.shape[0], *windows.counts)
    if not math.prod(shape) * math.prod(weight.shape) or min(map(min, windows.pads)) < 0:
        return None
    out = contiguous_result(out, shape, x.dtype, gpu)
    x, weight = in_order(gpu, x), in_order(gpu, weight)
    if is_depthwise(x, weight, group):
        numbers = np.int32(shape[1]), np.int32(shape[1] // group), *_geometry(x, windows)
        arguments = (x, weight, *pointers_of(bias), out, *numbers)
        gpu.launch(_program(x), "depthwise", _grid(math.prod(windows.counts), shape[1], shape[0]), _THREADS, arguments)
    else:
        _multiply_columns(gpu, x, weight, bias, group, windows, out)
    return out


def _is_fit(x: Array, weight: Array, bias: Array | None, group: int) -> bool:
    """Whether operands are such as are taken here, and fit each other."""
    if x.dtype not in ELEMENTS or weight.dtype != x.dtype or not 3 <= x.ndim <= 2 + MOST_SPATIAL_DIMS:
        return False
    if weight.ndim != x.ndim or weight.shape[1] * group != x.shape[1] or weight.shape[0] % group:
        return False
    is_bias_fit = bias is None or (bias.dtype == x.dtype and bias.shape == weight.shape[:1])
    return bool(is_bias_fit and x.shape[0] <= _MOST_BLOCKS and math.prod(x.shape[1:]) < 2**31)


def _multiply_columns(
    gpu: Gpu, x: Array, weight: Array, bias: Array | None, group: int, windows: Windows, y: Array
) -> None:
    """Write the convolution into a contiguous array, some images at a time."""
    (batch, channels), features, places = x.shape[:2], len(weight), math.prod(windows.counts)
    depth = weight.shape[1] * math.prod(windows.kernel)
    matrices = weight.reshape(group, features // group, depth)
    length = -(-places * x.itemsize // _CHUNK_BYTES) * _CHUNK_BYTES // x.itemsize if x.itemsize == 2 else places
    is_plain = length == places and {*windows.kernel, *windows.strides} == {1} and y.shape[2:] == x.shape[2:]
    # Sums are rounded once, when the bias is added; where nothing is added they go where they belong.
    is_apart = length != places or (bias is not None and x.itemsize == 2)
    own_bytes = (0 if is_plain else group * depth * length * x.itemsize) + (4 * features * length if is_apart else 0)
    images = images_at_once(own_bytes, x, weight, y) if own_bytes else batch
    for start in range(0, batch, images):
        part, target = x[start : start + images], y[start : start + images]
        columns = part if is_plain else gpu.empty((len(part), group, depth, length), x.dtype)
        if not is_plain:
            numbers = np.int32(channels), np.int32(length), *_geometry(x, windows)
            grid = _grid(length, channels, len(part))
            gpu.launch(_program(x), "lay_columns", grid, _THREADS, (part, columns, *numbers))
        sums_shape = (len(part), group, features // group, length)
        sums = gpu.empty(sums_shape, compute_dtype(x.dtype)) if is_apart else target.reshape(sums_shape)
        found = product(gpu.module, matrices, columns.reshape(len(part), group, depth, length), sums.dtype, out=sums)
        if found is not sums:
            sums[...] = found
        if is_apart or bias is not None:
            sizes = np.int32(features), np.int32(places), np.int32(length)
            grid = _grid(places, features, len(part))
            gpu.launch(_program(x), "add_bias", grid, _THREADS, (sums, target, *pointers_of(bias), *sizes))


def _grid(places: int, rows: int, images: int) -> Ints:
    return -(-places // _THREADS), min(rows, _MOST_BLOCKS), images


def _geometry(x: Array, windows: Windows) -> list[Any]:
    return [np.int32(number) for number in geometry(x.shape[2:], windows)]


def _program(x: Array) -> Program:
    return Program.file("convolution.cu", ELEMENT=ELEMENTS[x.dtype])


def all_programs() -> Iterator[Program]:
    """Every program that is launched here."""
    for element in ELEMENTS.values():
        yield Program.file("convolution.cu", ELEMENT=element)
