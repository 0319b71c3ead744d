"""Copies on the device, one launch each: what lies otherwise put in order, and arrays joined.

CuPy's copies compute the place of each element by itself, however many lie one after the other.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from ..operands import contiguous_result, is_view, normalize_axis, to_ints
from ..registry import Array, HostArray
from .gpu import Gpu
from .programs import Program
from .registry import cuda_kernel

_RANK = 5
"""The most dims that a copy has after merging."""
_MOST = 2**31 - 1
_THREADS = 256
_WIDTHS = (16, 8, 4, 2, 1)
_PARTS = 8
"""How many arrays one launch joins."""
_HEAD_PARTS = 4
"""The same of heads that lie anywhere."""
_BLOCKS_EACH = 16
"""Blocks for each multiprocessor: more let each thread copy several elements."""


class Dim(NamedTuple):
    """A dim of a copy: how many, and how far apart in what is read and in what is written, in bytes."""

    size: int
    source: int
    target: int


def merged(shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> list[Dim]:
    """The dims of a copy, fewest, the one whose elements are written next to each other last.

    Args:
        shape: of both arrays.
        source, target: their strides.
    """
    dims = [Dim(*each) for each in zip(shape, source, target, strict=True) if each[0] != 1]
    dims.sort(key=lambda dim: (-abs(dim.target), -abs(dim.source)))
    found: list[Dim] = []
    for dim in dims:
        above = found[-1] if found else None
        if above and above.source == dim.size * dim.source and above.target == dim.size * dim.target:
            found[-1] = Dim(above.size * dim.size, dim.source, dim.target)
        else:
            found.append(dim)
    return found


def _width(dims: Sequence[Dim], itemsize: int, addresses: Sequence[int]) -> int:
    """How many bytes can be copied at once, at least an element."""
    if not dims or dims[-1].source != itemsize or dims[-1].target != itemsize:
        return itemsize
    fixed = [dims[-1].size * itemsize, *addresses, *(stride for dim in dims[:-1] for stride in dim[1:])]
    return next(width for width in _WIDTHS if width <= itemsize or all(each % width == 0 for each in fixed))


def copy_into(gpu: Gpu, x: Array, out: Array) -> bool:
    """Copy an array into one of its shape and dtype; False where no launch of ours can.

    Args:
        gpu: the current device.
        x: of any strides.
        out: of any strides; no memory of x's.
    """
    itemsize = x.dtype.itemsize
    dims = merged(x.shape, x.strides, out.strides)
    if itemsize not in _WIDTHS or len(dims) > _RANK or x.size > _MOST:
        return False
    if not x.size:
        return True
    across = next((place for place, dim in enumerate(dims[:-1]) if dim.source == itemsize and dim.size >= 8), None)
    if across is not None and dims[-1].target == itemsize and dims[-1].size >= 8 and dims[-1].source != itemsize:
        _launch_transpose(gpu, x, out, [*dims[:across], *dims[across + 1 : -1], dims[across], dims[-1]])
        return True
    width = _width(dims, itemsize, (gpu.address(x), gpu.address(out)))
    if width > itemsize:
        dims[-1] = Dim(dims[-1].size * itemsize // width, width, width)
    padded = [Dim(1, 0, 0)] * (_RANK - len(dims)) + dims
    count = math.prod(dim.size for dim in dims)
    blocks = min(-(-count // _THREADS), _BLOCKS_EACH * gpu.multiprocessors)
    sizes = [np.uint32(dim.size) for dim in padded]
    strides = [np.int64(dim[place] // width) for place in (1, 2) for dim in padded]
    program = Program.file("copies.cu", BYTES=width, RANK=max(len(dims), 1))
    gpu.launch(program, "copy", blocks, _THREADS, (x, out, np.uint32(count), *sizes, *strides))
    return True


def _launch_transpose(gpu: Gpu, x: Array, out: Array, dims: Sequence[Dim]) -> None:
    """Let the last dim but one, which is read along memory, and the last, which is written so, change places."""
    itemsize = x.dtype.itemsize
    side = 64 if itemsize <= 2 else 32
    padded = [Dim(1, 0, 0)] * (_RANK - len(dims)) + list(dims)
    *_, rows, columns = padded
    blocks = math.prod(dim.size for dim in padded[:3]) * -(-rows.size // side) * -(-columns.size // side)
    sizes = [np.uint32(dim.size) for dim in padded]
    source = [np.int64(dim.source // itemsize) for dim in (*padded[:3], columns)]
    target = [np.int64(dim.target // itemsize) for dim in (*padded[:3], rows)]
    program = Program.file("copies.cu", BYTES=itemsize, RANK=2)
    shared = side * (side + 1) * itemsize
    blocks = min(blocks, _BLOCKS_EACH * gpu.multiprocessors * 4)
    gpu.launch(program, "transpose", blocks, (side, 8), (x, out, *sizes, *source, *target), shared)


def in_order(gpu: Gpu, x: Array) -> Array:
    """The array, or a copy of it, whose elements lie one after the other."""
    if x.flags.c_contiguous:
        return x
    made = gpu.empty(x.shape, x.dtype)
    return made if copy_into(gpu, x, made) else gpu.module.ascontiguousarray(x)


@cuda_kernel("Reshape", since=5)
def reshape(gpu: Gpu, x: Array, shape: HostArray, *, allowzero: int = 0) -> Array | None:
    """A copy in order, in another shape, of what cannot be read so where it lies."""
    target = list(to_ints(shape))
    if not x.size or x.flags.c_contiguous or (allowzero and 0 in target):
        return None
    if any(size == 0 and axis >= x.ndim for axis, size in enumerate(target)):
        return None
    target = [x.shape[axis] if size == 0 else size for axis, size in enumerate(target)]
    if -1 in target:
        rest = math.prod(size for size in target if size != -1)
        target[target.index(-1)] = x.size // rest if rest > 0 else 0
    if math.prod(target) != x.size or min(target, default=1) < 0 or is_view(x, target):
        return None
    made = gpu.empty(x.shape, x.dtype)
    return made.reshape(target) if copy_into(gpu, x, made) else None


@cuda_kernel("Concat", since=4)
def concat(gpu: Gpu, *operands: Array, axis: int, out: Array | None = None) -> Array | None:
    """Operands joined along one axis: up to 8 that lie in order in one launch, others each where it belongs."""
    first = operands[0]
    if any(x.dtype != first.dtype or x.ndim != first.ndim for x in operands) or not first.ndim:
        return None
    axis = normalize_axis(axis, first.ndim)
    rests = {(*x.shape[:axis], *x.shape[axis + 1 :]) for x in operands}
    shape = (*first.shape[:axis], sum(x.shape[axis] for x in operands), *first.shape[axis + 1 :])
    if len(rests) > 1 or first.dtype.itemsize not in _WIDTHS or math.prod(shape) > _MOST:
        return None
    out = contiguous_result(out, shape, first.dtype, gpu)
    if not out.size:
        return out
    start = 0
    for is_in_order, same in groupby((x for x in operands if x.size), lambda x: bool(x.flags.c_contiguous)):
        for parts in _batched(list(same), _PARTS if is_in_order else 1):
            end = start + sum(x.shape[axis] for x in parts)
            if is_in_order or not copy_into(gpu, parts[0], out[(slice(None),) * axis + (slice(start, end),)]):
                _launch_join(gpu, [in_order(gpu, x) for x in parts], out, axis, start)
            start = end
    return out


@cuda_kernel("JoinHeads", since=1, domain="irpar")
def join_heads(gpu: Gpu, *parts: Array, out: Array | None = None) -> Array | None:
    """Heads of up to 4 parts, each (batch, places, heads, size) as it lies, in one launch."""
    first = parts[0]
    if len(parts) > _HEAD_PARTS or any(x.dtype != first.dtype or x.ndim != 4 for x in parts):
        return None
    batch, places, _, size = first.shape
    itemsize, heads = first.dtype.itemsize, sum(x.shape[2] for x in parts)
    if any((x.shape[0], x.shape[1], x.shape[3]) != (batch, places, size) for x in parts) or itemsize not in _WIDTHS:
        return None
    shape = (batch, places, heads * size)
    if math.prod(shape) > _MOST or any(x.strides[3] != itemsize and size > 1 for x in parts):
        return None
    out = contiguous_result(out, shape, first.dtype, gpu)
    if not out.size:
        return out
    fixed = [
        size * itemsize,
        *(gpu.address(x) for x in (*parts, out)),
        *(each for x in parts for each in x.strides[:3]),
    ]
    unit = next(width for width in _WIDTHS if all(each % width == 0 for each in fixed))
    given: list[object] = []
    for x in parts:
        given += [x, np.uint32(x.shape[2]), *(np.int64(stride // unit) for stride in x.strides[:3])]
    given += [np.uint64(0), np.uint32(0), *(np.int64(0) for _ in range(3))] * (_HEAD_PARTS - len(parts))
    count = out.nbytes // unit
    sizes = [np.uint32(each) for each in (count, places, heads, size * itemsize // unit)]
    blocks = min(-(-count // _THREADS), _BLOCKS_EACH * gpu.multiprocessors)
    program = Program.file("copies.cu", BYTES=unit, RANK=2)
    gpu.launch(program, "join_heads", blocks, _THREADS, (out, *sizes, *given))
    return out


def _batched(arrays: Sequence[Array], count: int) -> Iterator[Sequence[Array]]:
    return (arrays[place : place + count] for place in range(0, len(arrays), count))


def _launch_join(gpu: Gpu, parts: Sequence[Array], out: Array, axis: int, begin: int) -> None:
    """Write arrays that lie in order beside each other along an axis of `out`, from an element of it on."""
    inner, rows = math.prod(out.shape[axis + 1 :]) * out.dtype.itemsize, math.prod(out.shape[:axis])
    widths, start, stride = [x.shape[axis] * inner for x in parts], begin * inner, out.shape[axis] * inner
    address = gpu.address(out) + start
    fixed = [address, stride, *widths, *(gpu.address(x) for x in parts)]
    unit = next(width for width in _WIDTHS if all(each % width == 0 for each in fixed))
    width, count = sum(widths) // unit, rows * sum(widths) // unit
    given: list[object] = []
    for x, own in zip(parts, widths, strict=True):
        given += [x, np.uint32(own // unit), np.int64(own // unit)]
    given += [np.uint64(0), np.uint32(0), np.int64(0)] * (_PARTS - len(parts))
    blocks = min(-(-count // _THREADS), _BLOCKS_EACH * gpu.multiprocessors)
    arguments = (np.uint64(address), np.uint32(rows), np.uint32(width), np.int64(stride // unit), *given)
    gpu.launch(Program.file("copies.cu", BYTES=unit, RANK=2), "join", blocks, _THREADS, arguments)


def all_programs() -> Iterator[Program]:
    """Every program that is launched here."""
    for width in _WIDTHS:
        for rank in range(1, _RANK + 1):
            yield Program.file("copies.cu", BYTES=width, RANK=rank)
