"""Sums and means over rows, such as gradients of biases: two launches where one would leave most of a device idle."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ..operands import contiguous_result, to_ints
from ..registry import Array, HostArray
from .gpu import Gpu
from .indexing import ELEMENTS
from .programs import Program
from .registry import cuda_kernel

_ACROSS, _DOWN = 32, 8
_FEWEST_ROWS, _FEWEST_COLUMNS = 32, 32
"""Of smaller ones CuPy's sums are as fast."""
_BLOCKS_EACH = 8
_MOST_BLOCKS = 65535
_WIDTHS = (8, 4, 2, 1)


@cuda_kernel("ReduceSum", since=13)
def reduce_sum(
    gpu: Gpu,
    x: Array,
    axes: HostArray | None = None,
    *,
    keepdims: int = 1,
    noop_with_empty_axes: int = 0,
    out: Array | None = None,
) -> Array | None:
    """The sum over dims beside each other that are not the last."""
    return _reduced(gpu, x, () if axes is None else to_ints(axes), keepdims, False, out)


@cuda_kernel("ReduceMean", since=18)
def reduce_mean(
    gpu: Gpu,
    x: Array,
    axes: HostArray | None = None,
    *,
    keepdims: int = 1,
    noop_with_empty_axes: int = 0,
    out: Array | None = None,
) -> Array | None:
    """The mean over dims beside each other that are not the last."""
    return _reduced(gpu, x, () if axes is None else to_ints(axes), keepdims, True, out)


def _reduced(gpu: Gpu, x: Array, axes: Sequence[int], keepdims: int, is_mean: bool, out: Array | None) -> Array | None:
    if x.dtype not in ELEMENTS or not axes or not x.flags.c_contiguous or any(not -x.ndim <= a < x.ndim for a in axes):
        return None
    places = sorted({axis % x.ndim for axis in axes})
    first, last = places[0], places[-1]
    if len(places) != len(axes) or len(places) != last - first + 1 or last == x.ndim - 1:
        return None
    groups, rows, columns = (math.prod(x.shape[a:b]) for a, b in ((0, first), (first, last + 1), (last + 1, x.ndim)))
    if rows < _FEWEST_ROWS or columns < _FEWEST_COLUMNS or not 0 < groups <= _MOST_BLOCKS or x.size >= 2**40:
        return None
    shape = tuple(1 if d in places else n for d, n in enumerate(x.shape) if keepdims or d not in places)
    out = contiguous_result(out, shape, x.dtype, gpu)
    _sum_rows(gpu, x, out, (groups, rows, columns), 1 / rows if is_mean else 1.0)
    return out


def _sum_rows(gpu: Gpu, x: Array, y: Array, sizes: tuple[int, int, int], scale: float) -> None:
    """Launch the sums of groups of rows; sizes are how many groups, rows and columns."""
    groups, rows, columns = sizes
    element = ELEMENTS[x.dtype]
    wide = np.dtype(np.float64 if element == 3 else np.float32)
    most = 16 // x.dtype.itemsize
    width = next(n for n in _WIDTHS if n <= most and columns % n == 0 and gpu.address(x) % (n * x.dtype.itemsize) == 0)
    across = -(-columns // (_ACROSS * width))
    wanted = max(1, _BLOCKS_EACH * gpu.multiprocessors // (across * groups))
    each = max(-(-rows // min(wanted, _MOST_BLOCKS)), 4 * _DOWN)
    ranges = -(-rows // each)
    target = y if ranges == 1 else gpu.empty((groups, ranges, columns), wide)
    steps = [(x, target, rows, each, width, scale if ranges == 1 else 1.0)]
    if ranges > 1:
        steps.append((target, y, ranges, ranges, 1, scale))
    for source, to, count, one, columns_each, factor in steps:
        program = _program(element, source is target, to is target and ranges > 1, columns_each)
        grid = (-(-columns // (_ACROSS * columns_each)), -(-count // one), groups)
        numbers = (np.uint32(count), np.uint32(columns), np.uint32(one), np.int64(count * columns), np.int64(columns))
        shared = _DOWN * _ACROSS * columns_each * wide.itemsize
        gpu.launch(program, "sum_rows", grid, (_ACROSS, _DOWN), (source, to, *numbers, wide.type(factor)), shared)


def _program(element: int, from_wide: bool, to_wide: bool, width: int) -> Program:
    return Program.file("sums.cu", ELEMENT=element, FROM_WIDE=int(from_wide), TO_WIDE=int(to_wide), WIDTH=width)


def all_programs() -> Iterator[Program]:
    """Every program that is launched here."""
    for element in ELEMENTS.values():
        yield _program(element, True, False, 1)
        for width in _WIDTHS:
            if width * (4, 2, 2, 8)[element] <= 16:
                yield _program(element, False, False, width)
                yield _program(element, False, True, width)
