"""Matrix products of any dtype and layout. fp16 and bf16 accumulate in float32, and are widened on NumPy alone.

On CuPy products of floats go to cuBLASLt (see `cuda.cublas_lt`): its strided batched product takes transposed and
broadcast operands as they lie, and multiplies fp16 and bf16 into float32, none of which `cupy.matmul` does for batches;
and it can be captured in a CUDA graph.
"""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from .operands import BFLOAT16, FLOAT32, compute_dtype, is_float, narrow, widen
from .registry import Array, ArrayModule

Ints = tuple[int, ...]

CUBLAS_DTYPES = frozenset((FLOAT32, np.dtype(np.float64), np.dtype(np.float16), BFLOAT16))
"""Of what cuBLASLt multiplies."""

MOST_CALLS = 16
"""Batches that need more calls than this are copied into one piece first."""


class Gemm(NamedTuple):
    """A product of a batch of matrices as cuBLAS takes it, but row by row: c = a @ b.

    Offsets, strides and leading dims count elements. A transposed operand lies column by column.
    """

    m: int
    n: int
    k: int
    batch: int
    a: "Operand"
    b: "Operand"
    c: "Operand"


class Operand(NamedTuple):
    """Where the matrices of one operand lie."""

    transposed: bool
    offset: int
    leading: int
    stride: int


def for_product(xp: ArrayModule, x: Array) -> Array:
    """An operand as `product` takes it best where it is made into a larger one first: widened on NumPy."""
    return x if xp.__name__ == "cupy" else widen(x)


def product(
    xp: ArrayModule,
    a: Array,
    b: Array,
    dtype: "np.dtype[Any] | None" = None,
    *,
    alpha: float = 1.0,
    out: Array | None = None,
) -> Array:
    """A factor times the matrix product over the last two dims; leading dims broadcast, a vector is a row or a column.

    Args:
        xp: the array module.
        a, b: operands; where their dtypes differ, both are taken in the wider one's compute dtype.
        dtype: of the result; None: that of `a`.
        alpha: the factor.
        out: what the result is written into, where it has its shape and dtype; on a device, where it is contiguous.
    """
    dtype = a.dtype if dtype is None else dtype
    if is_for_cublas(xp, a, b):
        from .cuda.cublas_lt import matmul

        return matmul(xp, a, b, out, dtype=dtype, alpha=alpha)
    if out is not None and (a.dtype != dtype or out.dtype != compute_dtype(dtype) or out.shape != product_shape(a, b)):
        out = None
    y = xp.matmul(widen(a), widen(b), out=out)
    if alpha != 1.0:
        y = xp.multiply(y, alpha, out=y if is_float(y.dtype) else None)
    return narrow(y, dtype)


def is_for_cublas(xp: ArrayModule, *operands: Array) -> bool:
    """Whether products of the operands are cuBLASLt's."""
    return xp.__name__ == "cupy" and all(x.dtype in CUBLAS_DTYPES for x in operands)


def product_shape(a: Array, b: Array) -> tuple[int, ...]:
    """The shape of `product`."""
    rows, columns = a.shape[-2:-1], b.shape[-1:] if b.ndim > 1 else ()
    return (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), *rows, *columns)


def contiguous_calls(xp: ArrayModule, a: Array, b: Array, batch: Ints) -> tuple[Array, Array, list[Gemm]]:
    """The calls that multiply two operands, none of which is empty, into a contiguous result.

    Returns:
        The operands, copied where cuBLAS cannot take them as they lie, or else in too many pieces; the calls.
    """
    a, b = _with_layout(xp, a), _with_layout(xp, b)
    calls = _calls_of(a, b, batch)
    if len(calls) > MOST_CALLS:
        a, b = xp.ascontiguousarray(a), xp.ascontiguousarray(b)
        calls = _calls_of(a, b, batch)
    return a, b, calls


# -- layouts --------------------------------------------------------------------------------------------------------


def layout(shape: Ints, strides: Ints) -> tuple[bool, int] | None:
    """Whether a matrix lies column by column, and its leading dim; None where its elements have gaps between them.

    (2, 3) with strides (4, 1) is (False, 4); with strides (1, 2) it is (True, 2); with strides (6, 2) it is None.
    """
    (rows, columns), (down, across) = shape, strides
    if across == 1 or columns == 1:
        leading = down if rows > 1 else columns
        if leading >= columns:
            return False, leading
    if down == 1 or rows == 1:
        leading = across if columns > 1 else rows
        if leading >= rows:
            return True, leading
    return None


def _element_strides(x: Array) -> Ints:
    return tuple(stride // x.itemsize for stride in x.strides)


def _with_layout(xp: ArrayModule, x: Array) -> Array:
    """x, or a copy where cuBLAS cannot take its matrices as they lie in memory."""
    strides = _element_strides(x)
    is_backwards = any(stride < 0 for stride in strides[:-2])
    return xp.ascontiguousarray(x) if is_backwards or layout(x.shape[-2:], strides[-2:]) is None else x


def _calls_of(a: Array, b: Array, batch: Ints) -> list[Gemm]:
    return gemm_calls(a.shape, _element_strides(a), b.shape, _element_strides(b), batch)


def gemm_calls(a_shape: Ints, a_strides: Ints, b_shape: Ints, b_strides: Ints, batch: Ints) -> list[Gemm]:
    """The calls that multiply two operands into a contiguous result.

    Batch dims that lie behind each other in all operands become one. Where `b` is the same for all of them they become
    rows of `a`: (8, 128, 768) @ (768, 64) is one product of 1024 rows. Of what is left the longest dim is the batch of
    a call, and there is a call for each place in the others.

    Args:
        a_shape, b_shape: global shape; no dim of the result is empty.
        a_strides, b_strides: in elements; the matrices have a `layout`.
        batch: the batch dims of the result.
    """
    m, k, n = a_shape[-2], a_shape[-1], b_shape[-1]
    a_layout, b_layout = layout(a_shape[-2:], a_strides[-2:]), layout(b_shape[-2:], b_strides[-2:])
    assert a_layout is not None
    assert b_layout is not None
    a_transposed, a_leading = a_layout
    dims = _merged(batch, _batch_strides(a_shape, a_strides, batch), _batch_strides(b_shape, b_strides, batch), m * n)
    while dims and dims[-1][2] == 0 and (step := _row_step(dims[-1], m, k, a_transposed, a_leading)) is not None:
        a_transposed, a_leading, m = False, step, m * dims.pop()[0]
    longest = max(range(len(dims)), key=lambda place: dims[place][0], default=None)
    count, *steps = dims.pop(longest) if longest is not None else (1, 0, 0, 0)
    calls = []
    for places in itertools.product(*(range(dim[0]) for dim in dims)):
        offsets = [sum(place * dim[1 + x] for place, dim in zip(places, dims, strict=True)) for x in range(3)]
        a = Operand(a_transposed, offsets[0], a_leading, steps[0])
        b = Operand(b_layout[0], offsets[1], b_layout[1], steps[1])
        calls.append(Gemm(m, n, k, count, a, b, Operand(False, offsets[2], n, steps[2])))
    return calls


def _row_step(dim: tuple[int, int, int, int], m: int, k: int, transposed: bool, leading: int) -> int | None:
    """The leading dim of `a` with a batch dim as further rows; None where they do not lie behind each other."""
    step = dim[1]
    if m == 1:
        # A single row lies either way; its elements must touch.
        return step if step >= k and (not transposed or leading == 1 or k == 1) else None
    return leading if not transposed and step == m * leading else None


def _batch_strides(shape: Ints, strides: Ints, batch: Ints) -> list[int]:
    """Strides of all batch dims of the result: 0 where an operand is repeated."""
    missing = len(batch) - (len(shape) - 2)
    own = [0 if size == 1 else stride for size, stride in zip(shape[:-2], strides[:-2], strict=True)]
    return [0] * missing + own


def _merged(batch: Ints, a: list[int], b: list[int], elements: int) -> list[tuple[int, int, int, int]]:
    """(size, stride of a, of b, of c) of the batch dims, those of one element left out, those that can be made one."""
    c = [elements * math.prod(batch[place + 1 :]) for place in range(len(batch))]
    dims: list[tuple[int, int, int, int]] = []
    for size, *steps in zip(batch, a, b, c, strict=True):
        if size == 1:
            continue
        if dims and all(outer == size * inner for outer, inner in zip(dims[-1][1:], steps, strict=True)):
            size *= dims.pop()[0]
        dims.append((size, steps[0], steps[1], steps[2]))
    return dims
