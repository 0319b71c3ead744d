"""Products of few rows with a large matrix, such as those of one token: they take as long as reading the matrix."""

from collections.abc import Iterator

import numpy as np

from ..gemm import Gemm
from ..registry import Array
from .finish import Finish
from .gpu import COUNTERS, Gpu
from .indexing import ELEMENTS
from .programs import Program

MOST_ROWS = 8
FEWEST_BYTES = 2**20
"""A smaller matrix is read from the device's cache."""

_WARPS, _EACH = 8, 2
_CHUNK_BYTES = 16
_STEP, _AHEAD = 32, 3
_RESERVED_BYTES = 1024
"""What the device takes of a multiprocessor's shared memory for a block."""


def is_fit(call: Gemm, a: Array, b: Array, result: Array, addresses: tuple[int, int]) -> bool:
    """Whether a product is one of few rows that reads a large matrix, in chunks of 16 bytes.

    Args:
        call: all that there is to multiply.
        a, b, result: the arrays.
        addresses: of a and b.
    """
    if call.m > MOST_ROWS or call.batch > 1 or call.a.transposed or call.k * call.n * b.itemsize < FEWEST_BYTES:
        return False
    if not a.dtype == b.dtype == result.dtype or ELEMENTS.get(a.dtype, 3) == 3:
        return False
    width = _CHUNK_BYTES // a.itemsize
    if not call.b.transposed and -(-call.n // (32 * width)) > COUNTERS:
        return False
    sizes = [call.k if call.b.transposed else call.n, call.b.leading]
    read = [addresses[1]]
    if call.b.transposed:  # Rows are read in chunks too.
        sizes.append(call.a.leading if call.m > 1 else 0)
        read.append(addresses[0])
    return not any(size % width for size in sizes) and not any(address % _CHUNK_BYTES for address in read)


def multiply(gpu: Gpu, call: Gemm, a: Array, b: Array, result: Array, finish: Finish) -> None:
    """Write a product that fits, and what follows on it, into a contiguous array of the dtype of all that is given."""
    program = _program(ELEMENTS[a.dtype], call.m)
    pointers, numbers = finish.arguments(np.dtype(np.float32))
    depth, columns = np.int64(call.k), np.int64(call.n)
    steps_apart = np.int64(call.a.leading), np.int64(call.b.leading)
    if call.b.transposed:
        blocks = -(-call.n // (_WARPS * _EACH))
        gpu.launch(
            program, "dots", blocks, _WARPS * 32, (a, b, result, *pointers, depth, columns, *steps_apart, *numbers)
        )
        return
    width = 32 * _CHUNK_BYTES // a.itemsize
    shared = _AHEAD * _STEP * 32 * _CHUNK_BYTES + _WARPS * call.m * width * 4
    tiles, steps = -(-call.n // width), -(-call.k // _STEP)
    resident = gpu.multiprocessors * max(1, min(2, gpu.shared_bytes // (shared + _RESERVED_BYTES)))
    each = -(-tiles * steps // resident)
    blocks = -(-tiles * steps // each)
    parts = gpu.empty((blocks + tiles, call.m, width), np.dtype(np.float32))
    arguments = (a, b, result, parts, gpu.counters(), *pointers, depth, columns, np.int32(each), *steps_apart)
    gpu.launch(program, "columns_of", blocks, _WARPS * 32, (*arguments, *numbers), shared)


def _program(element: int, rows: int) -> Program:
    return Program.file("few_rows.cu", ELEMENT=element, ROWS=rows)


def all_programs() -> Iterator[Program]:
    """Every program that is launched here."""
    for element in (0, 1, 2):
        for rows in range(1, MOST_ROWS + 1):
            yield _program(element, rows)
