"""Rotary embeddings in one launch: heads are read where they lie, and each element is read and written once."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..faults import FAULTS
from ..registry import Array
from .gpu import Gpu
from .indexing import ELEMENTS
from .programs import Program
from .registry import cuda_kernel

_PLACES = {np.dtype(np.int32): "int", np.dtype(np.int64): "long long"}
_WIDTHS = (8, 4, 2, 1)
_MOST = 2**31 - 1
_THREADS = 256
_BLOCKS_EACH = 16


@cuda_kernel("RotaryEmbedding", since=23)
def rotary_embedding(
    gpu: Gpu,
    x: Array,
    cos: Array,
    sin: Array,
    position_ids: Array | None = None,
    *,
    interleaved: int = 0,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
    out: Array | None = None,
) -> Array | None:
    """Pairs of elements of each head rotated by angles that belong to the token's position."""
    if x.dtype not in ELEMENTS or cos.dtype != x.dtype or sin.dtype != x.dtype or not x.size or x.size > _MOST:
        return None
    heads = x.shape[1] if x.ndim == 4 else num_heads
    if x.ndim not in (3, 4) or not heads or x.shape[-1] % (heads if x.ndim == 3 else 1):
        return None
    batch, rows = x.shape[0], x.shape[-2]
    size = x.shape[3] if x.ndim == 4 else x.shape[2] // heads
    half = (rotary_embedding_dim or size) // 2
    if not 0 < 2 * half <= size or (rotary_embedding_dim or size) % 2 or not _fit(cos, sin, position_ids, x, half):
        return None
    y = out if out is not None and out.shape == x.shape and out.dtype == x.dtype else gpu.empty(x.shape, x.dtype)
    itemsize = x.dtype.itemsize
    strides = [*_by_rows(x, heads, size), *_by_rows(y, heads, size)]
    for table in (cos, sin):
        strides += [_stride(table, 0) if position_ids is None else 0, _stride(table, table.ndim - 2)]
    addresses = [gpu.address(array) for array in (x, y, cos, sin)]
    fixed = [*strides, *addresses, half * itemsize, (size - 2 * half) * itemsize]
    width = next(n for n in _WIDTHS if n * itemsize <= 16 and all(each % (n * itemsize) == 0 for each in fixed))
    places = [0, 0] if position_ids is None else [_stride(position_ids, 0), _stride(position_ids, 1)]
    each = 1 if position_ids is None else position_ids.dtype.itemsize
    numbers = [np.int64(stride // itemsize) for stride in strides] + [np.int64(stride // each) for stride in places]
    word = FAULTS.word(f"a position is outside the {cos.shape[0]} of the cache") if position_ids is not None else None
    nowhere = np.uint64(0)
    operands = (x, cos, sin, nowhere if position_ids is None else position_ids, y, nowhere if word is None else word)
    sizes = map(np.uint32, (batch, rows, heads, size, half, cos.shape[0]))
    place = None if position_ids is None else _PLACES[position_ids.dtype]
    count = batch * rows * heads * (size - half) // width
    blocks = min(-(-count // _THREADS), _BLOCKS_EACH * gpu.multiprocessors)
    program = _program(ELEMENTS[x.dtype], width, bool(interleaved), place)
    gpu.launch(program, "rotate", blocks, _THREADS, (*operands, *sizes, *numbers))
    return y


def _fit(cos: Array, sin: Array, position_ids: Array | None, x: Array, half: int) -> bool:
    """Whether the tables have the rows, and all elements of a row lie one after the other."""
    rows = (x.shape[0], x.shape[-2])
    if cos.shape != sin.shape or cos.shape[-1] != half or any(a.strides[-1] != x.dtype.itemsize for a in (x, cos, sin)):
        return False
    if position_ids is not None:
        return cos.ndim == 2 and bool(cos.shape[0]) and position_ids.shape == rows and position_ids.dtype in _PLACES
    return cos.ndim == 3 and all(own in (1, wanted) for own, wanted in zip(cos.shape, rows, strict=False))


def _stride(x: Array, axis: int) -> int:
    """From one to the next along an axis, 0 where there is only one."""
    return int(x.strides[axis]) if x.shape[axis] > 1 else 0


def _by_rows(x: Array, heads: int, size: int) -> Sequence[int]:
    """Strides of batch, rows and heads, whether these are a dim of their own or not."""
    if x.ndim == 4:
        return _stride(x, 0), _stride(x, 2), _stride(x, 1)
    return _stride(x, 0), _stride(x, 1), size * x.dtype.itemsize


def _program(element: int, width: int, is_interleaved: bool, place: str | None) -> Program:
    defines: dict[str, Any] = {"ELEMENT": element, "WIDTH": width, "INTERLEAVED": int(is_interleaved)}
    if place is None:
        return Program.file("rotary.cu", **defines)
    return Program.file("rotary.cu", **defines, PLACED=1, PLACE=place)


def all_programs() -> Iterator[Program]:
    """Every program that is launched here, each width with one of the other choices."""
    for element in ELEMENTS.values():
        for number, width in enumerate(_WIDTHS):
            if width * (4, 2, 2, 8)[element] <= 16:
                yield _program(element, width, bool(number % 2), (None, "int", "long long")[number % 3])
