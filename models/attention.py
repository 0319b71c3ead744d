"""Scaled dot-product attention that several families share. Shapes: B batch, H heads, S queries, T keys, K head dim."""

import math

import onnx

from .builder import Dim, GraphBuilder
from .config import TransformerConfig
from .layers import linear, linear_with_bias, split_heads


def project_heads(
    b: GraphBuilder, config: TransformerConfig, name: str, x: str, batch: Dim, seq: Dim, *, bias: bool = True
) -> str:
    """`[B,S,D] -> [B,H,S,K]` by a linear layer."""
    layer = linear_with_bias if bias else linear
    projected = layer(b, name, x, config.hidden, config.hidden)
    return split_heads(b, projected, batch, seq, config.heads, config.head_dim)


def attend(b: GraphBuilder, query: str, key: str, value: str, head_dim: int, bias: str | None = None) -> str:
    """softmax(query key^T / sqrt K + bias) value, `[B,H,S,K] -> [B,H,S,K]`; `bias` broadcasts to [B,H,S,T]."""
    scores = b.op("MatMul", query, b.op("Transpose", key, perm=(0, 1, 3, 2)))
    scores = b.op("Div", scores, b.constant("sqrt_head_dim", math.sqrt(head_dim)))
    if bias is not None:
        scores = b.op("Add", scores, bias)
    return b.op("MatMul", b.op("Softmax", scores, axis=-1), value)


def key_bias(b: GraphBuilder, mask: str) -> str:
    """An int64 mask [B,T], 1 where a key may be seen, as what is added to scores: [B,1,1,T] of 0 and -1e4."""
    visible = b.op("Cast", b.unsqueeze(mask, 1, 2), to=b.elem_type)
    return b.op("Mul", b.op("Sub", b.constant("1.0", 1.0), visible), b.constant("minus_1e4", -1e4))


def mask_input(b: GraphBuilder, name: str, shape: tuple[int | str, int | str]) -> str:
    """The int64 graph input `name`, 1 where a token counts and 0 where it is padding."""
    return b.input(name, onnx.TensorProto.INT64, shape)
