"""LinearAttention and CausalConvWithState (opset 27, and com.microsoft's of the same names): layers that carry a state
from step to step. States and sums of fp16 and bf16 operands are held in float32."""

import math

from .gemm import product
from .operands import check_same_dtype, narrow, one_of, widen
from .registry import Array, ArrayModule, kernel
from .temporaries import arrays_like

RULES = ("linear", "gated", "delta", "gated_delta")


def _steps(x: Array, heads: int) -> Array:
    """(steps, batch, heads, size) of (batch, steps, heads * size)."""
    batch, steps, wide = x.shape
    if wide % heads:
        raise ValueError(f"{heads} heads do not divide the last dim of {x.shape}")
    return widen(x).reshape(batch, steps, heads, wide // heads).transpose(1, 0, 2, 3)


@kernel("LinearAttention", since=27, temporaries=arrays_like(1, results=1))
@kernel("LinearAttention", since=1, domain="com.microsoft", temporaries=arrays_like(1, results=1))
def linear_attention(
    xp: ArrayModule,
    query: Array,
    key: Array,
    value: Array,
    past_state: Array | None = None,
    decay: Array | None = None,
    beta: Array | None = None,
    *,
    q_num_heads: int,
    kv_num_heads: int,
    chunk_size: int = 64,
    scale: float = 0.0,
    update_rule: str = "gated_delta",
) -> tuple[Array, Array]:
    """The recurrence, a step at a time: S = exp(g) S + k (b (v - (exp(g) S)^T k))^T, o = scale S^T q.

    Rules without a gate have g = 0; those without a delta write v itself. `chunk_size` changes no result.

    Gives the outputs (batch, steps, query heads * value size) and the last state (batch, heads, key size, value size).
    """
    one_of("update_rule", update_rule, RULES)
    check_same_dtype(query, key, value)
    if (decay is not None) != ("gated" in update_rule) or (beta is not None) != ("delta" in update_rule):
        raise ValueError(f"update_rule={update_rule} does not fit the operands decay and beta")
    if kv_num_heads < 1 or q_num_heads % kv_num_heads:
        raise ValueError(f"{q_num_heads} query heads do not divide into groups for {kv_num_heads} key and value heads")
    queries, keys, values = _steps(query, q_num_heads), _steps(key, kv_num_heads), _steps(value, kv_num_heads)
    size = keys.shape[3]
    shape = (query.shape[0], kv_num_heads, size, values.shape[3])
    state = xp.zeros(shape, dtype=queries.dtype) if past_state is None else widen(past_state)
    if state.shape != shape:
        raise ValueError(f"past_state of shape {state.shape} must have shape {shape}")
    gates = None if decay is None else xp.exp(_steps(decay, kv_num_heads))[..., None]
    rates = None if beta is None else _steps(beta, beta.shape[2])
    factor = queries.dtype.type(scale or 1 / math.sqrt(size))
    outputs = []
    for step, (q, k, v) in enumerate(zip(queries, keys, values, strict=True)):
        if gates is not None:
            state = state * gates[step]
        written = v if rates is None else rates[step] * (v - product(xp, k[..., None, :], state)[..., 0, :])
        state = state + k[..., :, None] * written[..., None, :]
        groups = q.reshape(q.shape[0], kv_num_heads, -1, size)
        outputs.append(product(xp, groups, state).reshape(q.shape[0], -1) * factor)
    present = narrow(state, query.dtype if past_state is None else past_state.dtype)
    return narrow(xp.stack(outputs, axis=1), query.dtype), present


@kernel("CausalConvWithState", since=27, temporaries=arrays_like(2.5, 0, results=1))
@kernel("CausalConvWithState", since=1, domain="com.microsoft", temporaries=arrays_like(2.5, 0, results=1))
def causal_conv_with_state(
    xp: ArrayModule,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    past_state: Array | None = None,
    *,
    activation: str = "none",
) -> tuple[Array, Array]:
    """Each channel (batch, channels, places) convolved with a kernel of its own over itself and what came before.

    Gives the result and the last places, as many as the kernel has less one, for the next call.
    """
    one_of("activation", activation, ("none", "silu", "swish"))
    check_same_dtype(x, weight, bias, past_state)
    reach, length = weight.shape[2], x.shape[2]
    past = xp.zeros((*x.shape[:2], reach - 1), dtype=x.dtype) if past_state is None else past_state
    longer = xp.concatenate([past, x], axis=2)
    taps, places = widen(weight[:, 0]), widen(longer)
    total = sum(taps[:, tap, None] * places[:, :, tap : tap + length] for tap in range(reach))
    if bias is not None:
        total = total + widen(bias)[:, None]
    if activation != "none":
        total = total / (1 + xp.exp(-total))
    return narrow(total, x.dtype), longer[:, :, length:]
