"""Gathering rows, adding rows by index in a fixed order, and one-hot rows, one launch each."""

import math
from collections.abc import Iterator

import numpy as np

from ..expression import DTYPES
from ..faults import FAULTS
from ..operands import BFLOAT16, FLOAT32, contiguous_result, normalize_axis
from ..registry import Array, HostArray
from .copies import copy_into, in_order, merged
from .gpu import Gpu
from .programs import Program
from .registry import cuda_kernel

ELEMENTS = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, BFLOAT16: 2, np.dtype(np.float64): 3}
"""Floats, as the sources number them."""

_PLACES = {np.dtype(np.int32): "int", np.dtype(np.int64): "long long"}
_WIDTHS = (16, 8, 4, 2, 1)
_MOST = 2**31 - 1
_THREADS = 256
_BLOCKS_EACH = 16
_MOST_ADDED = 2**14
"""Rows added in order: each looks at all indices. More are added by atomics."""
_COLUMNS = 8 * _THREADS


def _outside(length: int, axis: int) -> Array | None:
    """Where an index outside is noted, in the words of the generic kernel."""
    return FAULTS.word(f"an index is outside [{-length}, {length - 1}] on axis {axis}")


def _blocks(gpu: Gpu, count: int) -> int:
    return min(-(-count // _THREADS), _BLOCKS_EACH * gpu.multiprocessors)


@cuda_kernel("Gather", since=1)
def gather(gpu: Gpu, x: Array, indices: Array, *, axis: int = 0, out: Array | None = None) -> Array | None:
    """Slices of x along one axis, as many bytes at once as they and their places allow."""
    if indices.dtype not in _PLACES or not -x.ndim <= axis < x.ndim or x.dtype.itemsize not in _WIDTHS:
        return None
    axis = normalize_axis(axis, x.ndim)
    length, itemsize = x.shape[axis], x.dtype.itemsize
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    slices = merged(x.shape[axis + 1 :], x.strides[axis + 1 :], _strides(x.shape[axis + 1 :], itemsize))
    groups = merged(x.shape[:axis], x.strides[:axis], _strides(x.shape[:axis], 1))
    word = _outside(length, axis)
    if word is None or not length or len(slices) > 1 or len(groups) > 1 or math.prod(shape) > _MOST:
        return None
    if slices and slices[0].source != itemsize:
        return None
    y = contiguous_result(out, shape, x.dtype, gpu)
    if not y.size:
        return y
    inner = math.prod(x.shape[axis + 1 :]) * itemsize
    outer_stride = groups[0].source if groups else 0
    fixed = [inner, outer_stride, x.strides[axis], gpu.address(x), gpu.address(y)]
    unit = next(width for width in _WIDTHS if all(each % width == 0 for each in fixed))
    sizes = [math.prod(x.shape[:axis]), indices.size, length, inner // unit]
    strides = [np.int64(outer_stride // unit), np.int64(x.strides[axis] // unit)]
    program = Program.file("indexing.cu", BYTES=unit, PLACE=_PLACES[indices.dtype])
    operands = (x, in_order(gpu, indices), y, word)
    gpu.launch(
        program, "gather", _blocks(gpu, y.nbytes // unit), _THREADS, (*operands, *map(np.uint32, sizes), *strides)
    )
    return y


def _strides(shape: tuple[int, ...], itemsize: int) -> list[int]:
    """Those of an array whose elements lie one after the other."""
    return [math.prod(shape[place + 1 :]) * itemsize for place in range(len(shape))]


@cuda_kernel("ScatterND", since=16)
def scatter_nd(
    gpu: Gpu, x: Array, indices: Array, updates: Array, *, reduction: str = "none", out: Array | None = None
) -> Array | None:
    """Rows added to rows of a copy of x, those of an index in their order."""
    if reduction != "add" or x.dtype not in ELEMENTS or updates.dtype != x.dtype or indices.dtype not in _PLACES:
        return None
    if not x.ndim or not indices.ndim or indices.shape[-1] != 1 or indices.size > _MOST_ADDED:
        return None
    word = _outside(x.shape[0], 0)
    if word is None or updates.shape != (*indices.shape[:-1], *x.shape[1:]) or not x.shape[0]:
        return None
    y = contiguous_result(out, x.shape, x.dtype, gpu)
    if not copy_into(gpu, x, y):
        return None
    _launch_add_rows(gpu, indices, updates, y, word, is_apart=False)
    return y


def _launch_add_rows(gpu: Gpu, indices: Array, updates: Array, y: Array, word: Array, is_apart: bool) -> None:
    """Add rows in place; apart: of float32 to those of any float, rounded before."""
    inner = math.prod(y.shape[1:])
    element, place = ELEMENTS[y.dtype], _PLACES[indices.dtype]
    operands = (in_order(gpu, indices), in_order(gpu, updates), y, word)
    sizes = map(np.uint32, (indices.size, y.shape[0], inner))
    grid = (indices.size, -(-inner // _COLUMNS))
    program = Program.file("indexing.cu", ELEMENT=element, PLACE=place, APART=int(is_apart))
    gpu.launch(program, "add_rows", grid, _THREADS, (*operands, *sizes), _THREADS + 8)


@cuda_kernel("AddRows", since=1, domain="irpar")
def add_rows(
    gpu: Gpu,
    indices: Array,
    updates: Array,
    x: Array | None = None,
    *,
    length: int,
    to: str,
    out: Array | None = None,
) -> Array | None:
    """Sums of rows of an index, added to a copy of x, or put into zeros."""
    dtype = DTYPES[to]
    if ELEMENTS.get(dtype, 3) == 3 or updates.dtype != FLOAT32 or indices.dtype not in _PLACES:
        return None
    word, inner = _outside(length, 0), updates.shape[indices.ndim :]
    if word is None or not 0 < indices.size <= _MOST_ADDED or not length:
        return None
    y = contiguous_result(out, (length, *inner), dtype, gpu)
    if x is None:
        y.fill(0)
    elif x.dtype != dtype or x.shape != y.shape or not copy_into(gpu, x, y):
        return None
    _launch_add_rows(gpu, indices, updates, y, word, is_apart=True)
    return y


@cuda_kernel("OneHot", since=9)
def one_hot(
    gpu: Gpu, indices: Array, depth: HostArray, values: Array, *, axis: int = -1, out: Array | None = None
) -> Array | None:
    """`values[1]` at each index of a new axis of length `depth`, `values[0]` elsewhere."""
    if indices.dtype not in _PLACES or values.dtype.itemsize not in _WIDTHS or not values.flags.c_contiguous:
        return None
    place, length = normalize_axis(axis, indices.ndim + 1), int(depth.reshape(-1)[0])
    shape = (*indices.shape[:place], length, *indices.shape[place:])
    if length < 0 or math.prod(shape) > _MOST:
        return None
    y = contiguous_result(out, shape, values.dtype, gpu)
    if not y.size:
        return y
    sizes = map(np.uint32, (math.prod(shape[:place]), length, math.prod(shape[place + 1 :])))
    program = Program.file("indexing.cu", BYTES=values.dtype.itemsize, PLACE=_PLACES[indices.dtype])
    arguments = (in_order(gpu, indices), values, y, *sizes)
    gpu.launch(program, "one_hot", _blocks(gpu, y.size), _THREADS, arguments)
    return y


def all_programs() -> Iterator[Program]:
    """Every program that is launched here, not each with both types of indices."""
    for width in _WIDTHS:
        yield Program.file("indexing.cu", BYTES=width, PLACE="int")
    for element in ELEMENTS.values():
        yield Program.file("indexing.cu", ELEMENT=element, PLACE="long long")
    for element in (0, 1, 2):
        yield Program.file("indexing.cu", ELEMENT=element, PLACE="long long", APART=1)
