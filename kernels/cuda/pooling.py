"""Pools over windows of images, which CuPy's reductions read as views of six dims."""

from collections.abc import Iterator

import numpy as np

from ..operands import contiguous_result
from ..registry import Array
from ..windows import Windows
from .gpu import Gpu, strides_of
from .indexing import ELEMENTS
from .programs import Program
from .registry import cuda_kernel

Ints = tuple[int, ...]

_MOST = 2**31 - 1
_THREADS = 256
_BLOCKS_EACH = 32


@cuda_kernel("MaxPool", since=1)
def max_pool(
    gpu: Gpu,
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
) -> Array | None:
    """The greatest element of each window, without its place."""
    if n_outputs > 1 or not _fits(x, kernel_shape):
        return None
    windows = _windows(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)
    return _pooled(gpu, x, windows, False, (-1, -1), out)


@cuda_kernel("AveragePool", since=7)
def average_pool(
    gpu: Gpu,
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
) -> Array | None:
    """The mean of each window; padding counts with `count_include_pad`, what only `ceil_mode` added never."""
    if not _fits(x, kernel_shape):
        return None
    windows = _windows(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)
    (_, bottom), (_, right) = windows.pads
    return _pooled(gpu, x, windows, True, (bottom, right) if count_include_pad else (-1, -1), out)


def _fits(x: Array, kernel_shape: Ints) -> bool:
    return x.dtype in ELEMENTS and x.ndim == 4 and len(kernel_shape) == 2 and 0 < x.size <= _MOST and all(kernel_shape)


def _windows(
    x: Array,
    kernel_shape: Ints,
    auto_pad: str,
    ceil_mode: int,
    dilations: Ints | None,
    pads: Ints | None,
    strides: Ints | None,
) -> Windows:
    return Windows.over(
        x.shape[2:],
        tuple(kernel_shape),
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad=auto_pad,
        ceil_mode=bool(ceil_mode),
    )


def _pooled(
    gpu: Gpu, x: Array, windows: Windows, is_mean: bool, counted: tuple[int, int], out: Array | None
) -> Array | None:
    """Launch a pool; `counted`: how much of the padding behind an image counts in a mean, -1 for none at all."""
    shape = (*x.shape[:2], *windows.counts)
    if min(map(min, windows.pads)) < 0:
        return None
    out = contiguous_result(out, shape, x.dtype, gpu)
    if not out.size:
        return out
    strides = strides_of(x)
    sizes = (out.size, shape[1], shape[2], shape[3])
    (top, _), (left, _) = windows.pads
    geometry = (*windows.kernel, *windows.strides, *windows.dilations, top, left, *counted)
    arguments = (x, out, *map(np.uint32, sizes), *map(np.int32, x.shape[2:]), *strides, *map(np.int32, geometry))
    blocks = min(-(-out.size // _THREADS), _BLOCKS_EACH * gpu.multiprocessors)
    gpu.launch(_program(ELEMENTS[x.dtype], is_mean), "pool", blocks, _THREADS, arguments)
    return out


def _program(element: int, is_mean: bool) -> Program:
    return Program.file("pooling.cu", ELEMENT=element, MEAN=int(is_mean))


def all_programs() -> Iterator[Program]:
    """Every program that is launched here."""
    for element in ELEMENTS.values():
        for is_mean in (False, True):
            yield _program(element, is_mean)
