"""irpar.FusedMatMul: a matrix product with a bias of its columns, an activation, a residual."""

from .activation import gelu_of_tanh
from .gemm import is_for_cublas, product, product_shape
from .operands import check_same_dtype, compute_dtype, contiguous_result, narrow, one_of, widen, written
from .registry import Array, ArrayModule, kernel
from .temporaries import arrays_like


@kernel("FusedMatMul", since=1, domain="irpar", temporaries=arrays_like(1, results=4))
def fused_matmul(
    xp: ArrayModule,
    a: Array,
    b: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    *,
    activation: str = "none",
    length: int = 0,
    out: Array | None = None,
) -> Array:
    """activation(a @ b + residual + bias), rounded once; in rows of a length, of which the rest may be anything."""
    one_of("activation", activation, ("none", "gelu_tanh"))
    check_same_dtype(a, b, bias, residual)
    row = None if bias is None else bias.reshape(-1)
    if is_for_cublas(xp, a, b):
        from .cuda.cublas_lt import matmul

        chosen = None if activation == "none" else activation
        if not length:
            return matmul(xp, a, b, out, bias=row, residual=residual, activation=chosen)
        *rows, columns = product_shape(a, b)
        result = contiguous_result(out, (*rows, length), a.dtype, xp)
        place = result[..., :columns]
        made = matmul(xp, a, b, place, bias=row, residual=residual, activation=chosen)
        if made is not place:
            place[...] = made
        return result
    y = product(xp, a, b, compute_dtype(a.dtype))
    for addend in (residual, row):
        if addend is not None:
            y = y + widen(addend)
    if activation == "gelu_tanh":
        y = gelu_of_tanh(xp, y)
    if length:
        y = xp.pad(y, [*((0, 0) for _ in y.shape[:-1]), (0, length - y.shape[-1])])
    return written(xp, narrow(y, a.dtype), out)
