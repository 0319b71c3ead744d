"""Matrix products: MatMul, Gemm, Einsum and their integer forms. fp16 and bf16 accumulate in float32."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .contraction import contracted, contraction_of, scratch_bytes
from .einsum import einsum as einsum_by_products
from .gemm import is_for_cublas, product, product_shape
from .operands import (
    check_same_dtype,
    compute_dtype,
    is_integer,
    narrow,
    summed_as_int32,
    summing_dtype,
    widen,
    written,
)
from .registry import Array, ArrayModule, Shaped, kernel
from .temporaries import arrays_like, widened


@kernel("MatMul", since=1, temporaries=widened)
def matmul(xp: ArrayModule, a: Array, b: Array, *, out: Array | None = None) -> Array:
    """Matrix product over the last two dims; leading dims broadcast."""
    check_same_dtype(a, b)
    if not a.ndim or not b.ndim:
        raise ValueError("operands must have rank 1 or more")
    inner = b.shape[-2] if b.ndim > 1 else b.shape[0]
    if a.shape[-1] != inner:
        raise ValueError(f"inner dims {a.shape[-1]} and {inner} differ")
    return product(xp, a, b, out=out)


def _gemm_bytes(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For operands and results in a wider dtype, and what factors make of the product and of what is added."""
    itemsize, scaled = compute_dtype(results[0].dtype).itemsize, 0
    if attributes.get("alpha", 1.0) != 1.0:
        scaled += results[0].elements
    if attributes.get("beta", 1.0) != 1.0 and len(operands) > 2 and operands[2] is not None:
        scaled += operands[2].elements
    return scaled * itemsize + widened(operands, results, attributes)


@kernel("Gemm", since=7, temporaries=_gemm_bytes)
def gemm(
    xp: ArrayModule,
    a: Array,
    b: Array,
    c: Array | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    out: Array | None = None,
) -> Array:
    """alpha * a' @ b' + beta * c, with a' and b' transposed on request; c broadcasts to the product."""
    check_same_dtype(a, b, c)
    if a.ndim != 2 or b.ndim != 2:
        raise ValueError(f"operands must be matrices, not of rank {a.ndim} and {b.ndim}")
    left, right = a.T if transA else a, b.T if transB else b
    if is_for_cublas(xp, a, b):
        return _with_addend(xp, left, right, c, alpha, beta, out)
    y = product(xp, left, right, compute_dtype(a.dtype), out=out)
    if alpha != 1.0:
        y = _scaled(y, alpha)
    if c is not None:
        _check_addend(c, y.shape)
        added = widen(c) if beta == 1.0 else _scaled(widen(c), beta)
        y = xp.add(y, added, out=y if added.dtype == y.dtype else None)
    return narrow(y, a.dtype)


def _check_addend(c: Array, shape: tuple[int, ...]) -> None:
    if np.broadcast_shapes(shape, c.shape) != shape:
        raise ValueError(f"c of shape {c.shape} does not broadcast to {shape}")


def _with_addend(
    xp: ArrayModule, a: Array, b: Array, c: Array | None, alpha: float, beta: float, out: Array | None
) -> Array:
    """alpha * a @ b + beta * c on a device, where c is a bias of the columns, or a residual."""
    from .cuda.cublas_lt import matmul

    if c is None:
        return matmul(xp, a, b, out, alpha=alpha)
    shape = product_shape(a, b)
    _check_addend(c, shape)
    if c.size == shape[1] and c.shape[-1:] == shape[1:] and beta == 1.0:
        return matmul(xp, a, b, out, bias=c.reshape(-1), alpha=alpha)
    return matmul(xp, a, b, out, residual=xp.broadcast_to(c, shape), alpha=alpha, beta=beta)


def _scaled(x: Array, factor: float) -> Array:
    return x * (factor if is_integer(x.dtype) else x.dtype.type(factor))


def _einsum_bytes(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For what is no product of two matrices: its result, which is copied to where it goes."""
    equation, known = str(attributes["equation"]).replace(" ", ""), [one for one in operands if one is not None]
    if len(known) == 2 and contraction_of(equation, known[0].shape, known[1].shape) is not None:
        return 0
    return _like_result(operands, results, attributes)


_like_result = arrays_like(0, results=1)


@kernel("Einsum", since=12, scratch=scratch_bytes, temporaries=_einsum_bytes)
def einsum(xp: ArrayModule, *operands: Array, equation: str, out: Array | None = None) -> Array:
    """Einstein summation."""
    check_same_dtype(*operands)
    equation, dtype = equation.replace(" ", ""), operands[0].dtype
    if xp.__name__ != "numpy":
        return einsum_by_products(xp, equation, operands, out)
    wide = [widen(x) for x in operands]
    if len(operands) == 2:
        first, second = wide
        known = contraction_of(equation, first.shape, second.shape)
        if known is not None:
            return written(xp, narrow(contracted(known, first, second, out), dtype), out)
    result = xp.asarray(xp.einsum(equation, *wide, optimize=len(operands) > 1))
    is_view = any(xp.may_share_memory(result, operand) for operand in operands)
    return written(xp, narrow(result.copy() if is_view else result, dtype), out)


def _less_zero_point(xp: ArrayModule, x: Array, zero_point: Array | None, rows: bool) -> Array:
    """x - zero point in int32; a vector zero point holds one value per row of `a`, or per column of `b`."""
    wide = x.astype(np.int32)
    if zero_point is None:
        return wide
    offset = zero_point.astype(np.int32)
    if rows and offset.ndim == 1 and offset.size > 1:
        offset = offset[:, None]
    return wide - offset


def integer_product(
    xp: ArrayModule, a: Array, b: Array, a_zero_point: Array | None, b_zero_point: Array | None
) -> Array:
    """(a - its zero point) @ (b - its zero point) in int32."""
    kind = summing_dtype(a.shape[-1])
    left = _less_zero_point(xp, a, a_zero_point, rows=True).astype(kind)
    right = _less_zero_point(xp, b, b_zero_point, rows=False).astype(kind)
    return summed_as_int32(product(xp, left, right))


@kernel("MatMulInteger", since=10, temporaries=arrays_like(4, results=4))
def matmul_integer(
    xp: ArrayModule,
    a: Array,
    b: Array,
    a_zero_point: Array | None = None,
    b_zero_point: Array | None = None,
) -> Array:
    """Product of 8-bit matrices less their zero points, in int32."""
    return integer_product(xp, a, b, a_zero_point, b_zero_point)
