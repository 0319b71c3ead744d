"""16-bit products whose rows lie at odd places: tensor cores read and write matrices in rows of whole 16 bytes.

A vocabulary of 50,257 makes rows of logits that begin anywhere, for which cuBLASLt has only slow kernels. Where whoever
takes them lets rows lie further apart (`pitched`), the product is written so. Elsewhere it is computed in pieces of
rows, each of which has its rows further apart and is then copied to where it belongs, out of the cache; operands that
lie so are copied before. As its fast kernels take sizes of whole 16 bytes alone, the last 1 to 7 columns are a product
of their own.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..gemm import Gemm, Operand
from ..registry import Array, ArrayModule
from .gpu import Gpu, strides_of
from .programs import Program

ALIGNMENT = 16
"""Bytes."""

FEWEST_PRODUCTS = 2**28
"""Fewer take less time than a launch."""

FEWEST_TERMS = 256
"""How often an element is used at least, so that copying it takes less time than is gained."""

PIECE_BYTES = 2**26
"""Of rows of the result, or of the first operand that are computed at once."""

MOST_BYTES = 2**28
"""Of the second operand, which is copied as a whole."""

_THREADS, _MOST_BLOCKS, _CHUNK = 256, 65535, 8
_ROWS = 128
"""Pieces have a multiple of these."""


def is_worth(call: Gemm, itemsize: int, addresses: tuple[int, int, int]) -> bool:
    """Whether a product takes less time with rows further apart.

    Args:
        call: all that there is to multiply.
        itemsize: of all three.
        addresses: of a, b and the result.
    """
    if itemsize != 2 or call.batch > 1 or call.m * call.n * call.k < FEWEST_PRODUCTS:
        return False
    if is_odd(call.b, addresses[1], itemsize) and call.k * call.n * itemsize > MOST_BYTES:
        return False
    operands = zip((call.a, call.b, call.c), addresses, (call.n, call.m, call.k), strict=True)
    uses = [terms for operand, address, terms in operands if is_odd(operand, address, itemsize)]
    if call.n * itemsize % ALIGNMENT or even_rows(call, itemsize) < call.m or even_terms(call, itemsize) < call.k:
        uses.append(call.k)
    return bool(uses) and min(uses) >= FEWEST_TERMS


def even_rows(call: Gemm, itemsize: int) -> int:
    """How many rows of the result the fast kernels take: whole 16 bytes of an operand that lies column by column."""
    return call.m - call.m % (ALIGNMENT // itemsize) if call.a.transposed else call.m


def even_terms(call: Gemm, itemsize: int) -> int:
    """How many terms of each sum they take: whole 16 bytes where an operand has these one after the other."""
    is_along = not call.a.transposed or call.b.transposed
    return call.k - call.k % (ALIGNMENT // itemsize) if is_along else call.k


def term_parts(call: Gemm, itemsize: int) -> tuple[Gemm, Gemm]:
    """A product of the terms that they take, and one of those that are left, both into sums that touch each other.

    Of 50,257 terms of 2 bytes 50,256 and 1.
    """
    count = even_terms(call, itemsize)
    sums = Operand(False, 0, call.n, 0)
    steps = (call.a.leading if call.a.transposed else 1), (1 if call.b.transposed else call.b.leading)
    rest = (own._replace(offset=own.offset + count * step) for own, step in zip((call.a, call.b), steps, strict=True))
    a, b = rest
    return call._replace(k=count, c=sums), call._replace(k=call.k - count, a=a, b=b, c=sums)


def pitched(xp: ArrayModule, shape: tuple[int, ...], dtype: "np.dtype[Any]", terms: int) -> Array | None:
    """Memory for a product whose rows each begin at an even place; None where rows may as well touch.

    Args:
        xp: CuPy.
        shape, dtype: of the result, which is not empty.
        terms: of each of its sums.
    """
    if dtype.itemsize != 2 or terms < FEWEST_TERMS or math.prod(shape) * terms < FEWEST_PRODUCTS or len(shape) < 2:
        return None
    (*outer, columns), pitch = shape, even_length(shape[-1], dtype.itemsize)
    if pitch == columns:
        return None
    return xp.empty((math.prod(outer), pitch), dtype=dtype)[:, :columns].reshape(shape)


def row_pitch(x: Array) -> int | None:
    """How many elements lie from the beginning of a row to the next one; None: rows lie in another way.

    (4, 3) with strides (10, 2) bytes, of 16-bit numbers, is 5; with (10, 4) it is None.
    """
    if x.ndim < 2 or x.strides[-1] != x.itemsize or x.strides[-2] % x.itemsize:
        return None
    for outer, inner, size in zip(x.strides[:-2], x.strides[1:-1], x.shape[1:-1], strict=True):
        if outer != inner * size:
            return None
    pitch = int(x.strides[-2]) // x.itemsize
    return pitch if pitch >= x.shape[-1] else None


def has_rows_apart(x: Array) -> bool:
    """Whether rows of 16-bit numbers lie evenly apart, so that `copy_rows` can copy them."""
    return x.itemsize == 2 and row_pitch(x) is not None


def even_length(columns: int, itemsize: int) -> int:
    """Elements of a row with what is behind it, so that the next one begins at an even place."""
    return -(-columns * itemsize // ALIGNMENT) * ALIGNMENT // itemsize


def is_odd(operand: Operand, address: int, itemsize: int) -> bool:
    """Whether rows begin anywhere."""
    return bool(address % ALIGNMENT or operand.leading * itemsize % ALIGNMENT)


def lines(xp: ArrayModule, x: Array, operand: Operand, rows: int, columns: int) -> Array:
    """A matrix as its elements lie in memory: the transposed of one that lies column by column."""
    shape = (columns, rows) if operand.transposed else (rows, columns)
    return xp.lib.stride_tricks.as_strided(x, shape, (operand.leading * x.itemsize, x.itemsize))


def apart(xp: ArrayModule, lines: Array, operand: Operand) -> tuple[Array, Operand]:
    """Memory for lines of a matrix that each begin at an even place, and how the matrix lies there."""
    length = even_length(lines.shape[1], lines.itemsize)
    made = xp.empty((lines.shape[0], length), dtype=lines.dtype)
    return made[:, : lines.shape[1]], operand._replace(leading=length)


def column_parts(call: Gemm, itemsize: int) -> tuple[Gemm, Gemm]:
    """A product of the columns that are whole 16 bytes of a row, and one of those that are left; either may have none.

    50,257 columns of 2 bytes are 50,256 and 1.
    """
    count = call.n - call.n % (ALIGNMENT // itemsize)
    step = call.b.leading if call.b.transposed else 1
    last_b = call.b._replace(offset=call.b.offset + count * step)
    last_c = call.c._replace(offset=call.c.offset + count)
    return call._replace(n=count), call._replace(n=call.n - count, b=last_b, c=last_c)


def row_pieces(call: Gemm, itemsize: int, is_copied: bool) -> Iterator[slice]:
    """Rows of the result that are computed at once: all, or what the cache holds of rows that are copied."""
    row_bytes = max(call.n, call.k) * itemsize
    count = max(_ROWS, PIECE_BYTES // row_bytes // _ROWS * _ROWS) if is_copied else call.m
    even = even_rows(call, itemsize) or call.m
    for start in range(0, even, count):
        yield slice(start, min(even, start + count))
    if even < call.m:
        yield slice(even, call.m)


def copy_rows(gpu: Gpu, x: Array, y: Array) -> None:
    """Copy rows of 16-bit numbers, each of which lie one after the other, to others that share no memory with them."""
    rows, length = x.shape
    grid = -(-length // (_CHUNK * _THREADS)), min(rows, _MOST_BLOCKS)
    steps = [strides_of(each)[0] for each in (x, y)]
    gpu.launch(_program(), "copy_rows", grid, _THREADS, (x, y, np.int64(rows), np.int64(length), *steps))


def _program() -> Program:
    return Program.file("padding.cu")


def all_programs() -> Iterator[Program]:
    """Every program that is launched here."""
    yield _program()
