"""Products with weights of 4 and 8 bits in blocks: of few rows as long as reading these takes, of many as floats."""

from collections.abc import Iterator
from itertools import product
from math import prod

import numpy as np

from ..registry import Array
from .cublas_lt import matmul
from .gpu import Gpu, pointers_of
from .indexing import ELEMENTS
from .programs import Program
from .registry import cuda_kernel

MOST_ROWS = 8
"""Of which each warp computes its columns; to make floats of the weights costs nine times as many bytes."""

_WARPS = 8
_CHUNK_BYTES = 16
_WORD_BYTES = 4
_BLOCKS = (16, 32, 64, 128, 256)
_BITS = (4, 8)
_NONE, _PACKED, _FLOATS = range(3)
"""How zero points are given."""
_BLOCKS_EACH = 16
"""Of a multiprocessor, where threads take several pieces of work."""


@cuda_kernel("MatMulNBits", since=1, domain="com.microsoft")
def matmul_nbits(
    gpu: Gpu,
    a: Array,
    b: Array,
    scales: Array,
    zero_points: Array | None = None,
    g_idx: Array | None = None,
    bias: Array | None = None,
    *,
    K: int,
    N: int,
    block_size: int,
    bits: int = 4,
    accuracy_level: int = 0,
    weight_prepacked: int = 0,
    out: Array | None = None,
) -> Array | None:
    """See `irpar.kernels.block_quantized.matmul_nbits`."""
    rows, blocks = prod(a.shape[:-1]), -(-K // block_size)
    given = [x for x in (scales, bias) if x is not None]
    if bits not in _BITS or block_size not in _BLOCKS or weight_prepacked or g_idx is not None or not rows:
        return None
    if ELEMENTS.get(a.dtype, 3) == 3 or a.shape[-1:] != (K,) or any(x.dtype != a.dtype for x in given):
        return None
    if b.size != N * blocks * block_size * bits // 8 or scales.size != N * blocks or gpu.address(b) % _WORD_BYTES:
        return None
    if not all(x.flags.c_contiguous for x in (b, *given, zero_points) if x is not None):
        return None
    points = _points(zero_points, a, N * -(-blocks * bits // 8), N * blocks)
    if points is None:
        return None
    shape = (*a.shape[:-1], N)
    is_fit = out is not None and out.shape == shape and out.dtype == a.dtype and out.flags.c_contiguous
    y = out if is_fit else gpu.empty(shape, a.dtype)
    of_node = ELEMENTS[a.dtype], bits, block_size, points
    sizes = [np.int64(number) for number in (K, N, blocks)]
    if rows <= MOST_ROWS and _is_aligned(gpu, a, b, blocks * block_size * bits // 8):
        columns = _WARPS * (2 if rows > 2 else 4)
        arguments = (a, b, scales, *pointers_of(zero_points, bias), y, *sizes, np.int64(K))
        gpu.launch(_program(*of_node, rows), "few_rows", -(-N // columns), _WARPS * 32, arguments)
        return y
    weights = gpu.empty((N, K), a.dtype)
    words = N * blocks * block_size * bits // 32
    grid = min(-(-words // (_WARPS * 32)), _BLOCKS_EACH * gpu.multiprocessors)
    arguments = (b, scales, *pointers_of(zero_points), weights, *sizes)
    gpu.launch(_program(*of_node, 1), "floats", grid, _WARPS * 32, arguments)
    return matmul(gpu.module, a, weights.T, y, bias=bias)


def _points(zero_points: Array | None, a: Array, packed: int, count: int) -> int | None:
    """How zero points are given; None: otherwise than a kernel takes them."""
    if zero_points is None:
        return _NONE
    if zero_points.dtype == np.uint8:
        return _PACKED if zero_points.size == packed else None
    return _FLOATS if zero_points.dtype == a.dtype and zero_points.size == count else None


def _is_aligned(gpu: Gpu, a: Array, b: Array, column_bytes: int) -> bool:
    """Whether rows of `a`, one after the other, and columns of weights begin at whole chunks."""
    numbers = (gpu.address(a), gpu.address(b), column_bytes, a.shape[-1] * a.itemsize if a.size > a.shape[-1] else 0)
    return a.flags.c_contiguous and not any(number % _CHUNK_BYTES for number in numbers)


def _program(element: int, bits: int, block: int, points: int, rows: int) -> Program:
    return Program.file("block_quantized.cu", ELEMENT=element, BITS=bits, BLOCK=block, POINTS=points, ROWS=rows)


def all_programs() -> Iterator[Program]:
    """Every program that is launched here, each choice of element and block with one of the others."""
    for number, (element, bits, block) in enumerate(product(range(3), _BITS, _BLOCKS)):
        yield _program(element, bits, block, number % 3, number % MOST_ROWS + 1)
