"""Layers that several model families share. Shapes: B batch, S sequence, D hidden, H heads, K head dim."""

import math

import numpy as np

from .builder import Dim, GraphBuilder


def linear(b: GraphBuilder, name: str, x: str, fan_in: int, fan_out: int, *, gain: float = 1.0) -> str:
    """`[.., fan_in] -> [.., fan_out]` by MatMul with `<name>.weight`; unit variance in gives `gain`**2 out."""
    with b.scope(name):
        return b.op("MatMul", x, b.weight("weight", (fan_in, fan_out), std=gain / math.sqrt(fan_in)))


def linear_with_bias(b: GraphBuilder, name: str, x: str, fan_in: int, fan_out: int, *, gain: float = 1.0) -> str:
    """As `linear`, and Add of `<name>.bias`; the bias is far from zero so that adding it twice shows."""
    product = linear(b, name, x, fan_in, fan_out, gain=gain)
    with b.scope(name):
        return b.op("Add", product, b.weight("bias", (fan_out,), std=0.2))


def embedding(b: GraphBuilder, name: str, ids: str, rows: int, width: int, *, std: float) -> str:
    """Rows of `<name>.weight` `[rows, width]` by index."""
    with b.scope(name):
        return b.op("Gather", b.weight("weight", (rows, width), std=std), ids, axis=0)


def split_heads(b: GraphBuilder, x: str, batch: Dim, seq: Dim, heads: int, head_dim: int) -> str:
    """`[B,S,H*K] -> [B,H,S,K]`."""
    return b.op("Transpose", b.reshape(x, (batch, seq, heads, head_dim)), perm=(0, 2, 1, 3))


def merge_heads(b: GraphBuilder, x: str, batch: Dim, seq: Dim, hidden: int) -> str:
    """`[B,H,S,K] -> [B,S,H*K]`."""
    return b.reshape(b.op("Transpose", x, perm=(0, 2, 1, 3)), (batch, seq, hidden))


def masked_out(b: GraphBuilder) -> str:
    """The score of a position that may not be seen: large enough that its softmax weight is zero, finite in float16."""
    return b.constant("masked_out", np.float32(-3e4).item())


def batch_and_seq(b: GraphBuilder, x: str, batch: int, seq: int) -> tuple[Dim, Dim]:
    """The first two dims of `x`: known sizes, or read from `x` at run time where the model is dynamic."""
    if not b.config.dynamic:
        return batch, seq
    return b.size(x, 0), b.size(x, 1)


def positions(b: GraphBuilder, seq: Dim) -> str:
    """The int64 vector 0 .. S-1: a constant where S is known, else a Range."""
    if isinstance(seq, int):
        return b.constant("positions", np.arange(seq, dtype=np.int64))
    return b.op("Range", b.constant("zero", 0), seq, b.constant("one", 1))
