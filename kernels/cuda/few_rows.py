"""Products of few rows with a large matrix, such as those of one token: they take as long as reading the matrix."""

from collections.abc import Iterator, Sequence

import numpy as np

from ..gemm import Gemm
from ..registry import Array
from .finish import Finish
from .gpu import COUNTERS, Gpu
from .indexing import ELEMENTS
from .programs import Program

MOST_ROWS = 2
"""cuBLASLt reads the matrix for more rows in the same time: measured on an H200, where each row costs 10 % here."""
MOST_MATRICES = 3
"""Which one launch multiplies the same rows with."""
FEWEST_BYTES = 2**20
"""A smaller matrix is read from the device's cache."""

_WARPS, _EACH = 8, 2
_CHUNK_BYTES = 16
_STEP, _AHEAD = 32, 3
_NONE = np.uint64(0)
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
    if not call.b.transposed and MOST_MATRICES * -(-call.n // (32 * width)) > COUNTERS:
        return False
    sizes = [call.k if call.b.transposed else call.n, call.b.leading]
    read = [addresses[1]]
    if call.b.transposed:  # Rows are read in chunks too.
        sizes.append(call.a.leading if call.m > 1 else 0)
        read.append(addresses[0])
    return not any(size % width for size in sizes) and not any(address % _CHUNK_BYTES for address in read)


def multiply(gpu: Gpu, call: Gemm, a: Array, b: Array, result: Array, finish: Finish) -> None:
    """Write a product that fits, and what follows on it, into a contiguous array of the dtype of all that is given."""
    if not call.b.transposed:
        _by_tiles(gpu, [call], a, [b], [result], finish, is_gated=False)
        return
    pointers, numbers = finish.arguments(np.dtype(np.float32))
    sizes = [np.int64(number) for number in (call.k, call.n, call.a.leading, call.b.leading)]
    blocks = -(-call.n // (_WARPS * _EACH))
    program = _program(ELEMENTS[a.dtype], call.m)
    gpu.launch(program, "dots", blocks, _WARPS * 32, (a, b, result, *pointers, *sizes, *numbers))


def multiply_each(
    gpu: Gpu, calls: Sequence[Gemm], a: Array, matrices: Sequence[Array], results: Sequence[Array]
) -> None:
    """Write products of the same rows, up to `MOST_MATRICES`, that fit with matrices that lie row by row."""
    _by_tiles(gpu, calls, a, matrices, results, Finish(), is_gated=False)


def multiply_gated(
    gpu: Gpu, calls: Sequence[Gemm], a: Array, matrices: Sequence[Array], result: Array, activation: str
) -> None:
    """Write activation(a @ gate) * (a @ up), for two matrices of one shape that fit and lie row by row."""
    _by_tiles(gpu, calls, a, matrices, [result], Finish(activation=activation), is_gated=True)


def _by_tiles(
    gpu: Gpu,
    calls: Sequence[Gemm],
    a: Array,
    matrices: Sequence[Array],
    results: Sequence[Array],
    finish: Finish,
    is_gated: bool,
) -> None:
    m, k = calls[0].m, calls[0].k
    width = 32 * _CHUNK_BYTES // a.itemsize
    shared = _AHEAD * _STEP * 32 * _CHUNK_BYTES + _WARPS * m * width * 4
    tiles, steps = sum(-(-call.n // width) for call in calls), -(-k // _STEP)
    resident = gpu.multiprocessors * max(1, min(2, gpu.shared_bytes // (shared + _RESERVED_BYTES)))
    each = -(-tiles * steps // resident)
    blocks = -(-tiles * steps // each)
    parts = gpu.empty((blocks + tiles, m, width), np.dtype(np.float32))
    pointers, numbers = finish.arguments(np.dtype(np.float32))
    missing = MOST_MATRICES - len(calls)
    arrays = (*matrices, *[_NONE] * missing, *results, *[_NONE] * (MOST_MATRICES - len(results)))
    counts = [np.int64(call.n) for call in calls] + [np.int64(0)] * missing
    leading = [np.int64(call.b.leading) for call in calls] + [np.int64(0)] * missing
    sizes = (np.int64(k), *counts, np.int32(each), np.int64(calls[0].a.leading), *leading)
    arguments = (a, *arrays, parts, gpu.counters(), *pointers, *sizes, *numbers)
    gpu.launch(_program(ELEMENTS[a.dtype], m, is_gated), "columns_of", blocks, _WARPS * 32, arguments, shared)


def _program(element: int, rows: int, is_gated: bool = False) -> Program:
    return Program.file("few_rows.cu", ELEMENT=element, ROWS=rows, GATED=int(is_gated))


def all_programs() -> Iterator[Program]:
    """Every program that is launched here."""
    for element in (0, 1, 2):
        for rows in range(1, MOST_ROWS + 1):
            yield _program(element, rows)
        yield _program(element, 1, is_gated=True)
