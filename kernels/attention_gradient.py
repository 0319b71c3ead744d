"""Attention for training: what it keeps for its gradients instead of a matrix of weights, and the gradients."""

import math
from collections.abc import Sequence

import numpy as np

from .attention import _allowed, _masked, _scores
from .gemm import product
from .operands import narrow, widen, written
from .registry import Array, ArrayModule, kernel


def _shown_scores(xp: ArrayModule, q: Array, k: Array, mask: Array | None, scale: float, is_causal: bool) -> Array:
    allowed = _allowed(xp, q.shape[2], k.shape[2], xp.asarray(0), is_causal, (-1, -1), None)
    return _masked(xp, _scores(xp, q, k, scale), mask, allowed)


@kernel("AttentionForward", since=1, domain="irpar")
def attention_forward(
    xp: ArrayModule, q: Array, k: Array, v: Array, mask: Array | None = None, *, scale: float, is_causal: int = 0
) -> tuple[Array, Array]:
    """ONNX's Attention of (batch, heads, places, size); and the logarithm to base 2 of what normalises each query.

    Of a query that sees no key that is infinite, and the result zero.
    """
    scores = _shown_scores(xp, q, k, mask, scale, bool(is_causal))
    peak = scores.max(axis=-1, keepdims=True)
    peak = xp.where(peak == -np.inf, xp.zeros_like(peak), peak)
    e = xp.exp(scores - peak)
    norm = e.sum(axis=-1, keepdims=True)
    weights = e / xp.where(norm == 0, xp.ones_like(norm), norm)
    y = narrow(_by_groups(xp, weights, v), q.dtype)
    logarithms = xp.where(norm == 0, xp.full_like(norm, np.inf), (peak + xp.log(norm)) / math.log(2))
    return y, logarithms[..., 0].astype(np.float32)


def _by_groups(xp: ArrayModule, factors: Array, rows: Array) -> Array:
    """factors [b, heads, q, k] @ rows [b, groups, k, d], as wide as the factors."""
    batch, heads, queries, keys = factors.shape
    groups = rows.shape[1]
    grouped = factors.reshape(batch, groups, heads // groups * queries, keys)
    return product(xp, grouped, rows.astype(factors.dtype, copy=False)).reshape(batch, heads, queries, rows.shape[3])


def _over_queries(xp: ArrayModule, factors: Array, rows: Array, groups: int) -> Array:
    """The sum over queries and heads of a group: factors [b, heads, q, k] and rows [b, heads, q, d] to [b, g, k, d]."""
    batch, heads, queries, keys = factors.shape
    grouped = factors.reshape(batch, groups, heads // groups * queries, keys)
    others = rows.astype(factors.dtype, copy=False).reshape(batch, groups, heads // groups * queries, rows.shape[3])
    return product(xp, xp.swapaxes(grouped, 2, 3), others)


@kernel("AttentionGradient", since=1, domain="irpar")
def attention_gradient(
    xp: ArrayModule,
    q: Array,
    k: Array,
    v: Array,
    dy: Array,
    y: Array,
    logarithms: Array,
    mask: Array | None = None,
    *,
    scale: float,
    is_causal: int = 0,
    outs: Sequence[Array | None] = (),
) -> tuple[Array, Array, Array]:
    """The gradients of q, k and v of `AttentionForward`, whose results are `y` and `logarithms`, by that of y."""
    scores = _shown_scores(xp, q, k, mask, scale, bool(is_causal))
    weights = xp.exp(scores - logarithms[..., None].astype(scores.dtype) * math.log(2))
    mean = (widen(dy) * widen(y)).sum(axis=-1, keepdims=True)
    of_scores = weights * (_scores(xp, dy, v, 1.0) - mean) * scores.dtype.type(scale)
    groups = k.shape[1]
    of_q, of_k, of_v, *_ = (*outs, None, None, None)
    return (
        written(xp, narrow(_by_groups(xp, of_scores, k), q.dtype), of_q),
        written(xp, narrow(_over_queries(xp, of_scores, q, groups), k.dtype), of_k),
        written(xp, narrow(_over_queries(xp, weights, dy, groups), v.dtype), of_v),
    )
