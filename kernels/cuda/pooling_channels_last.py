"""Pools of images with channels last: 16 bytes of channels at once."""

import math
from collections.abc import Iterator

import numpy as np

from ..depthwise import MOST_SPATIAL_DIMS, geometry
from ..operands import contiguous_result
from ..registry import Array
from ..windows import Windows
from .copies import in_order
from .gpu import Gpu
from .indexing import ELEMENTS
from .programs import Program
from .registry import cuda_kernel

Ints = tuple[int, ...]

_MOST = 2**31 - 1
_THREADS, _MOST_SHARES = 256, 32
_WIDTHS = (16, 8, 4, 2)
_BLOCKS_EACH = 32
_THREADS_EACH = 1024
"""Threads that keep a multiprocessor busy."""


@cuda_kernel("PoolChannelsLast", since=1, domain="irpar")
def pool_channels_last(
    gpu: Gpu,
    x: Array,
    *,
    mode: str,
    kernel_shape: Ints,
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
    out: Array | None = None,
) -> Array | None:
    """The greatest or the mean element of each window; sums are float32, or float64."""
    spatial = x.shape[1:-1]
    if mode not in ("max", "average") or x.dtype not in ELEMENTS or not 1 <= len(spatial) <= MOST_SPATIAL_DIMS:
        return None
    if not 0 < x.size <= _MOST or len(kernel_shape) != len(spatial) or min(kernel_shape) < 1:
        return None
    windows = Windows.over(
        spatial,
        tuple(kernel_shape),
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad="NOTSET",
        ceil_mode=bool(ceil_mode),
    )
    shape = (x.shape[0], *windows.counts, x.shape[-1])
    if min(map(min, windows.pads)) < 0 or math.prod(shape) > _MOST:
        return None
    out = contiguous_result(out, shape, x.dtype, gpu)
    if not out.size:
        return out
    x = in_order(gpu, x)
    width = _width(gpu, x, out)
    chunks = shape[-1] * x.itemsize // width
    count = math.prod(shape[:-1]) * chunks
    lanes = _THREADS // _shares(count, math.prod(windows.kernel[:-1]), gpu.multiprocessors)
    behind = [pair[1] if count_include_pad else -1 for pair in windows.pads]
    behind = [-1] * (MOST_SPATIAL_DIMS - len(behind)) + behind
    numbers = (np.uint32(count), np.uint32(chunks), *map(np.int32, (lanes, *geometry(spatial, windows), *behind)))
    blocks = min(-(-count // lanes), _BLOCKS_EACH * gpu.multiprocessors)
    wide = width // x.itemsize * max(x.itemsize, 4)
    shared = _THREADS * wide if lanes < _THREADS else 0
    program = _program(ELEMENTS[x.dtype], width, mode == "average")
    gpu.launch(program, "pool", blocks, _THREADS, (x, out, *numbers), shared)
    return out


def _width(gpu: Gpu, x: Array, out: Array) -> int:
    """How many bytes of the channels of a place are read at once."""
    fixed = (x.shape[-1] * x.itemsize, gpu.address(x), gpu.address(out))
    return next(width for width in (*_WIDTHS, x.itemsize) if width >= x.itemsize and not any(n % width for n in fixed))


def _shares(count: int, lines: int, multiprocessors: int) -> int:
    """How many threads share a window of so many lines, a power of two, where one each would leave a device idle."""
    shares = 1
    while shares < min(lines, _MOST_SHARES) and count * shares < _THREADS_EACH * multiprocessors:
        shares *= 2
    return shares


def _program(element: int, width: int, is_mean: bool) -> Program:
    return Program.file("pooling_channels_last.cu", ELEMENT=element, BYTES=width, MEAN=int(is_mean))


def all_programs() -> Iterator[Program]:
    """Every program that is launched here."""
    for element, itemsize in enumerate((4, 2, 2, 8)):
        for width in _WIDTHS:
            if width >= itemsize:
                yield _program(element, width, False)
                yield _program(element, width, True)
