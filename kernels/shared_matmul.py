"""irpar.SharedMatMul: products of the same rows with several matrices; or of two, of which one gates the other."""

from collections.abc import Sequence

from .activation import gelu_of_tanh, sigmoid_of
from .gemm import product
from .operands import check_same_dtype, compute_dtype, narrow, one_of, written
from .registry import Array, ArrayModule, kernel

GATES = ("none", "silu", "gelu_tanh")


@kernel("SharedMatMul", since=1, domain="irpar")
def shared_matmul(
    xp: ArrayModule, a: Array, *matrices: Array, gate: str = "none", outs: Sequence[Array | None] = ()
) -> tuple[Array, ...]:
    """a @ b for each matrix b; or gate(a @ b) * (a @ c), rounded once."""
    one_of("gate", gate, GATES)
    check_same_dtype(a, *matrices)
    given = (*outs, *(None for _ in matrices))
    if gate == "none":
        made = (product(xp, a, b, a.dtype) for b in matrices)
        return tuple(written(xp, y, out) for y, out in zip(made, given, strict=False))
    if len(matrices) != 2:
        raise ValueError(f"a gate takes two matrices, not {len(matrices)}")
    first, second = (product(xp, a, b, compute_dtype(a.dtype)) for b in matrices)
    opened = first * sigmoid_of(xp, first) if gate == "silu" else gelu_of_tanh(xp, first)
    return (written(xp, narrow(opened * second, a.dtype), given[0]),)
