"""Groups of channels of images with channels last, standardised: sums over places, then each element."""

import math
from collections.abc import Iterator

import numpy as np

from ..operands import contiguous_result
from ..registry import Array
from .channels_last import NUMBERS
from .copies import in_order
from .gpu import COUNTERS, Gpu, pointers_of
from .indexing import ELEMENTS
from .programs import Program
from .registry import cuda_kernel

_THREADS, _CHUNK_BYTES = 256, 16
_MOST_CHANNELS = 4096
"""Of which a block holds means and squares."""
_SUMMING, _WRITING = 4, 16
"""Blocks for each multiprocessor."""
_LEAST_PLACES = 4
"""Of a thread."""
_MOST = 2**31 - 1


@cuda_kernel("GroupNormChannelsLast", since=1, domain="irpar")
def group_norm_channels_last(
    gpu: Gpu,
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    num_groups: int,
    activation: str = "",
    epsilon: float = 1e-5,
    max: float = math.inf,
    min: float = -math.inf,
    out: Array | None = None,
) -> Array | None:
    """activation(standardised * scale + bias), rounded once; sums and squares are float32."""
    images, *spatial, channels = x.shape
    places, chunks = math.prod(spatial), channels * x.dtype.itemsize // _CHUNK_BYTES
    if not _is_fit(x, scale, bias, activation) or num_groups < 1 or channels % num_groups:
        return None
    out = contiguous_result(out, x.shape, x.dtype, gpu)
    x = in_order(gpu, x)
    if gpu.address(x) % _CHUNK_BYTES or gpu.address(out) % _CHUNK_BYTES:
        return None
    lanes = chunks if chunks < _THREADS else _THREADS
    tiles, rows = -(-chunks // lanes), _THREADS // lanes
    program = _program(ELEMENTS[x.dtype])
    each, ranges = _ranges(places, rows, images * tiles, _SUMMING * gpu.multiprocessors)
    sums = gpu.empty((images, ranges, 2, channels), np.dtype(np.float32))
    found = gpu.empty((images, 2, channels), np.dtype(np.float32))
    sizes = np.uint32(places), np.uint32(chunks)
    numbers = np.uint32(each), np.int32(lanes), np.int32(num_groups), np.float32(epsilon)
    measured = (x, *pointers_of(scale), sums, found, gpu.counters(), *sizes, *numbers)
    width = _CHUNK_BYTES // x.itemsize
    shared = 8 * (width * _THREADS if width * _THREADS > channels else channels)
    gpu.launch(program, "measure", (tiles, ranges, images), _THREADS, measured, shared)
    each, ranges = _ranges(places, rows, images * tiles, _WRITING * gpu.multiprocessors)
    following = np.int32(NUMBERS[activation]), np.float32(min), np.float32(max)
    written = (x, *pointers_of(bias), found, out, *sizes, np.uint32(each), np.int32(lanes), *following)
    gpu.launch(program, "standardise", (tiles, ranges, images), _THREADS, written)
    return out


def _is_fit(x: Array, scale: Array | None, bias: Array | None, activation: str) -> bool:
    """Whether operands are such as are taken here."""
    if ELEMENTS.get(x.dtype, 3) == 3 or x.ndim < 3 or not 0 < x.size <= _MOST or activation not in NUMBERS:
        return False
    channels = x.shape[-1]
    if channels * x.dtype.itemsize % _CHUNK_BYTES or channels > _MOST_CHANNELS or x.shape[0] > COUNTERS:
        return False
    rows = [each for each in (scale, bias) if each is not None]
    return all(row.shape == (channels,) and row.dtype == x.dtype and row.flags.c_contiguous for row in rows)


def _ranges(places: int, rows: int, beside: int, blocks: int) -> tuple[int, int]:
    """How many places a block has, of `rows` at once, and how many ranges of them there are for so many blocks."""
    wanted = -(-blocks // beside)
    each = max(-(-places // wanted), rows * _LEAST_PLACES)
    return each, -(-places // each)


def _program(element: int) -> Program:
    return Program.file("group_norm_last.cu", ELEMENT=element)


def all_programs() -> Iterator[Program]:
    """Every program that is launched here."""
    return map(_program, (0, 1, 2))
