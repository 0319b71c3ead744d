"""irpar.FusedMatMul: a matrix product with a bias of its columns, an activation, a residual."""

from .activation import gelu_of_tanh
from .gemm import is_for_cublas, product
from .operands import check_same_dtype, compute_dtype, narrow, one_of, widen, written
from .registry import Array, ArrayModule, kernel


@kernel("FusedMatMul", since=1, domain="irpar")
def fused_matmul(
    xp: ArrayModule,
    a: Array,
    b: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    *,
    activation: str = "none",
    out: Array | None = None,
) -> Array:
    """activation(a @ b + residual + bias), rounded once."""
    one_of("activation", activation, ("none", "gelu_tanh"))
    check_same_dtype(a, b, bias, residual)
    row = None if bias is None else bias.reshape(-1)
    if is_for_cublas(xp, a, b):
        from .cuda.cublas_lt import matmul

        chosen = None if activation == "none" else activation
        return matmul(xp, a, b, out, bias=row, residual=residual, activation=chosen)
    y = product(xp, a, b, compute_dtype(a.dtype))
    for addend in (residual, row):
        if addend is not None:
            y = y + widen(addend)
    if activation == "gelu_tanh":
        y = gelu_of_tanh(xp, y)
    return written(xp, narrow(y, a.dtype), out)
