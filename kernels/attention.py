"""Attention and RotaryEmbedding (opset 23 and later). Scores of fp16 and bf16 operands are computed in float32."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .gemm import product
from .operands import check_same_dtype, compute_dtype, dtype_of, is_float, narrow, one_of, widen
from .registry import Array, ArrayModule, Shaped, kernel
from .temporaries import arrays_like


def _by_heads(x: Array, heads: int | None, attribute: str) -> Array:
    """(batch, heads, sequence, size) from that shape or from (batch, sequence, heads * size)."""
    if x.ndim == 4:
        return x
    if x.ndim != 3:
        raise ValueError(f"operand of shape {x.shape} must have rank 3 or 4")
    if not heads or x.shape[2] % heads:
        raise ValueError(f"attribute {attribute}={heads} does not divide the last dim of {x.shape}")
    return x.reshape(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(0, 2, 1, 3)


def _allowed(
    xp: ArrayModule,
    queries: int,
    keys: int,
    offset: Any,
    causal: bool,
    window: tuple[int, int],
    valid: Array | None,
) -> Array | None:
    """Which keys each query may see by position, broadcastable to (batch, heads, queries, keys); None for all."""
    left, right = window
    position = xp.arange(queries)[:, None] + offset
    key = xp.arange(keys)
    rules = []
    if causal:
        rules.append(key <= position)
    if left >= 0:
        rules.append(key >= position - left)
    if right >= 0:
        rules.append(key <= position + right)
    if valid is not None:
        rules.append(key < valid.reshape(-1, 1, 1, 1))
    if not rules:
        return None
    allowed = rules[0]
    for rule in rules[1:]:
        allowed = allowed & rule
    return allowed


def _masked(xp: ArrayModule, scores: Array, mask: Array | None, allowed: Array | None) -> Array:
    """Scores with the mask added or applied, and minus infinity where a key may not be seen."""
    if mask is not None:
        missing = scores.shape[-1] - mask.shape[-1]
        if missing > 0 and mask.shape[-1] > 1:
            # a mask may be shorter than the cache; what it does not cover is not attended
            fill = False if mask.dtype == bool else mask.dtype.type(-np.inf)
            mask = xp.concatenate([mask, xp.full((*mask.shape[:-1], missing), fill, dtype=mask.dtype)], axis=-1)
        scores = xp.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask.astype(scores.dtype)
    if allowed is not None:
        scores = xp.where(allowed, scores, -np.inf)
    return scores


def _softmax_or_zero(xp: ArrayModule, scores: Array) -> Array:
    """Softmax over keys; a query that may see none gets zeros, not NaN."""
    if not scores.shape[-1]:
        return scores
    peak = scores.max(axis=-1, keepdims=True)
    e = xp.exp(scores - xp.where(peak == -np.inf, xp.zeros_like(peak), peak))
    norm = e.sum(axis=-1, keepdims=True)
    return e / xp.where(norm == 0, xp.ones_like(norm), norm)


def _with_past(xp: ArrayModule, past: Array | None, new: Array) -> Array:
    check_same_dtype(past, new)
    return new if past is None else xp.concatenate([past, new], axis=2)


def _scores(xp: ArrayModule, q: Array, k: Array, scale: float) -> Array:
    """Scaled products (batch, query heads, queries, keys); heads of q that share one of k are one group."""
    batch, heads, queries, size = q.shape
    groups = k.shape[1]
    if not groups or heads % groups:
        raise ValueError(f"{heads} query heads do not divide into groups for {groups} key and value heads")
    kind = compute_dtype(q.dtype)
    if xp.__name__ == "numpy":
        q, scale = widen(q) * kind.type(scale), 1.0
    # On a device what is multiplied stays as narrow as it came, so the products are scaled.
    grouped = q.reshape(batch, groups, heads // groups * queries, size)
    scores = product(xp, grouped, xp.swapaxes(k, 2, 3), kind, alpha=scale)
    return scores.reshape(batch, heads, queries, k.shape[2])


def _weighted_values(xp: ArrayModule, weights: Array, v: Array, dtype: "np.dtype[Any]") -> Array:
    batch, heads, queries, keys = weights.shape
    groups = v.shape[1]
    grouped = weights.reshape(batch, groups, heads // groups * queries, keys)
    if xp.__name__ != "numpy" and v.dtype == dtype:
        # What is multiplied on a device stays as narrow as it came.
        y = product(xp, narrow(grouped, dtype), v)
    else:
        # The weights stay as wide as they were computed: rounded to fp16 they would cost half of the precision.
        y = narrow(product(xp, grouped, v.astype(weights.dtype, copy=False)), dtype)
    return y.reshape(batch, heads, queries, v.shape[3])


def _temporary_bytes(
    operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]
) -> int:
    """For scores at each stage of the way to their softmax, and operands as they are multiplied."""
    q, k, v, *more = operands
    if q is None or k is None or v is None:
        return 0
    past = more[1].shape[2] if len(more) > 1 and more[1] is not None else 0
    heads = q.shape[1] if len(q.shape) == 4 else int(attributes["q_num_heads"])
    scores = q.shape[0] * heads * q.shape[-2] * (k.shape[-2] + past)
    multiplied = sum(one.elements for one in (q, k, v) if one is not None) + results[0].elements
    return (6 * scores + 2 * multiplied) * compute_dtype(q.dtype).itemsize


@kernel("Attention", since=23, temporaries=_temporary_bytes)
def attention(
    xp: ArrayModule,
    q: Array,
    k: Array,
    v: Array,
    attn_mask: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    nonpad_kv_seqlen: Array | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
) -> tuple[Array, Array, Array, Array]:
    """Scaled dot-product attention with grouped heads, masks, windows and a cache.

    Gives y (of q's rank), present key, present value, and the scores at the stage that `qk_matmul_output_mode` names.
    """
    one_of("qk_matmul_output_mode", qk_matmul_output_mode, (0, 1, 2, 3))
    check_same_dtype(q, k)
    queries = _by_heads(q, q_num_heads, "q_num_heads")
    keys = _with_past(xp, past_key, _by_heads(k, kv_num_heads, "kv_num_heads"))
    values = _with_past(xp, past_value, _by_heads(v, kv_num_heads, "kv_num_heads"))
    length = queries.shape[2]
    offset: Any = 0 if past_key is None else past_key.shape[2]
    if nonpad_kv_seqlen is not None:
        offset = (nonpad_kv_seqlen - length).reshape(-1, 1, 1, 1)
    window = (left_window_size, right_window_size)
    allowed = _allowed(xp, length, keys.shape[2], offset, bool(is_causal), window, nonpad_kv_seqlen)

    stages = [_scores(xp, queries, keys, 1 / math.sqrt(queries.shape[3]) if scale is None else scale)]
    stages.append(softcap * xp.tanh(stages[0] / softcap) if softcap else stages[0])
    stages.append(_masked(xp, stages[1], attn_mask, allowed))
    scores = stages[2]
    if softmax_precision is not None:
        if not is_float(dtype_of(softmax_precision)):
            raise ValueError(f"attribute softmax_precision={softmax_precision} is not a floating-point type")
        scores = widen(scores.astype(dtype_of(softmax_precision)))
    stages.append(_softmax_or_zero(xp, scores))
    y = _weighted_values(xp, stages[3], values, q.dtype)
    if q.ndim == 3:
        y = y.transpose(0, 2, 1, 3).reshape(q.shape[0], length, -1)
    return y, keys, values, narrow(stages[qk_matmul_output_mode], q.dtype)


@kernel("RotaryEmbedding", since=23, temporaries=arrays_like(4, 0))
def rotary_embedding(
    xp: ArrayModule,
    x: Array,
    cos: Array,
    sin: Array,
    position_ids: Array | None = None,
    *,
    interleaved: int = 0,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
) -> Array:
    """Rotate pairs of elements of each head by angles that belong to the token's position."""
    check_same_dtype(x, cos, sin)
    if x.ndim == 4:
        heads = x.transpose(0, 2, 1, 3)
    elif num_heads and x.ndim == 3 and x.shape[2] % num_heads == 0:
        heads = x.reshape(*x.shape[:2], num_heads, -1)
    else:
        raise ValueError(f"attribute num_heads={num_heads} does not fit an operand of shape {x.shape}")
    width = rotary_embedding_dim or heads.shape[3]
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    if cos.shape[-1] != width // 2 or sin.shape[-1] != width // 2:
        raise ValueError(f"caches of shape {cos.shape} and {sin.shape} do not fit {width} rotated elements")
    real_part, imaginary_part = widen(cos)[:, :, None], widen(sin)[:, :, None]

    rotated = widen(heads[..., :width])
    first, second = (
        (rotated[..., 0::2], rotated[..., 1::2])
        if interleaved
        else (rotated[..., : width // 2], rotated[..., width // 2 :])
    )
    real = real_part * first - imaginary_part * second
    imaginary = imaginary_part * first + real_part * second
    if interleaved:
        turned = xp.stack([real, imaginary], axis=-1).reshape(rotated.shape)
    else:
        turned = xp.concatenate([real, imaginary], axis=-1)
    y = xp.concatenate([narrow(turned, x.dtype), heads[..., width:]], axis=-1)
    return y.reshape(x.shape) if x.ndim == 3 else y.transpose(0, 2, 1, 3)
