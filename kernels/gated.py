"""com.microsoft's SwiGLU, and the first product of a mixture of experts, which ends in it."""

from typing import Any

import numpy as np

from .activation import sigmoid_of
from .gemm import product
from .operands import check_same_dtype, narrow, one_of, widen
from .registry import Array, ArrayModule, kernel
from .temporaries import arrays_like

DOMAIN = "com.microsoft"


def _gated(
    xp: ArrayModule,
    gate: Array,
    up: Array,
    dtype: "np.dtype[Any]",
    *,
    alpha: float,
    beta: float,
    limit: float,
    rounds: bool = False,
) -> Array:
    """gate * sigmoid(alpha * gate) * (up + beta), both sides clamped where there is a limit; rounded once, or twice."""
    left, right = widen(gate), widen(up)
    if limit > 0:
        left, right = xp.minimum(left, limit), xp.clip(right, -limit, limit)
    gated = left * sigmoid_of(xp, alpha * left)
    if rounds:
        gated = widen(narrow(gated, dtype))
    return narrow(gated * (right + beta if beta else right), dtype)


@kernel("SwiGLU", since=1, domain=DOMAIN, temporaries=arrays_like(3.5, 0))
def swiglu(
    xp: ArrayModule,
    gate: Array,
    up: Array | None = None,
    *,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    limit: float = 0.0,
    round_activation: int = 0,
) -> Array:
    """The clamped SwiGLU; without `up` the last dim of `gate` holds both halves, gate first."""
    dtype = gate.dtype
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError(f"the last dim must hold two halves, not {gate.shape[-1]} elements")
        gate, up = xp.split(gate, 2, axis=-1)
    check_same_dtype(gate, up)
    if gate.shape != up.shape:
        raise ValueError(f"operands must have one shape, not {gate.shape} and {up.shape}")
    return _gated(
        xp,
        gate,
        up,
        dtype,
        alpha=activation_alpha,
        beta=activation_beta,
        limit=limit,
        rounds=bool(round_activation),
    )


@kernel("RouterGateUpProj", since=1, domain=DOMAIN, temporaries=arrays_like(0, results=6))
def router_gate_up_proj(
    xp: ArrayModule,
    x: Array,
    weight: Array,
    *,
    router_size: int,
    activation: str = "swiglu",
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    limit: float = 0.0,
) -> tuple[Array, Array]:
    """The first `router_size` columns of x @ weight, and SwiGLU of the two halves of the others."""
    one_of("activation", activation, ("swiglu",))
    check_same_dtype(x, weight)
    inner = weight.shape[-1] - router_size
    if inner < 0 or inner % 2:
        raise ValueError(f"{weight.shape[-1]} columns are not {router_size} of the router and two halves")
    columns = product(xp, x, weight)
    gate, up = xp.split(columns[..., router_size:], 2, axis=-1)
    activated = _gated(xp, gate, up, x.dtype, alpha=activation_alpha, beta=activation_beta, limit=limit)
    return columns[..., :router_size], activated
