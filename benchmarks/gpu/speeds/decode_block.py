"""One token of a Llama block after a cache of keys and values, as an export with a cache looks (opset 23)."""

import math
from dataclasses import dataclass

import numpy as np
import onnx

from irpar.models.builder import GraphBuilder
from irpar.models.layers import linear, rms_norm
from irpar.models.llama import LlamaConfig, rotary_tables
from irpar.models.weights import InlineWeights


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(LlamaConfig):
    """A block; `seq` is how many tokens the cache has."""


def build(config: DecodeConfig) -> onnx.ModelProto:
    """Build `x [B,1,D], position_ids int64 [B,1], past_key, past_value [B,G,S,K] -> y [B,1,D]` and the longer cache."""
    b = GraphBuilder("decode", config, InlineWeights(config.seed))
    batch, cached, head_dim, kv_heads = config.batch, config.seq, config.head_dim, config.kv_head_count
    x = b.input("x", b.elem_type, (batch, 1, config.hidden))
    position_ids = b.input("position_ids", onnx.TensorProto.INT64, (batch, 1))
    past = [b.input(name, b.elem_type, (batch, kv_heads, cached, head_dim)) for name in ("past_key", "past_value")]
    with b.scope("block"):
        attended, key, value = _attention(
            b, config, rms_norm(b, "input_layernorm", x, config.hidden), position_ids, past
        )
        made = b.op("Add", x, attended)
        made = b.op("Add", made, _mlp(b, config, rms_norm(b, "post_attention_layernorm", made, config.hidden)))
    b.output("y", made, b.elem_type, (batch, 1, config.hidden))
    for name, present in (("present_key", key), ("present_value", value)):
        b.output(name, present, b.elem_type, (batch, kv_heads, cached + 1, head_dim))
    return b.model({})


def tables(config: DecodeConfig) -> list[np.ndarray]:
    """cos and sin [rows, K/2] of all positions, that of the new token too."""
    longer = LlamaConfig(
        hidden=config.hidden, heads=config.heads, rope_theta=config.rope_theta, dtype=config.dtype, seq=config.seq + 1
    )
    return [table[:, : config.head_dim // 2].copy() for table in rotary_tables(longer)]


def _attention(
    b: GraphBuilder, config: DecodeConfig, x: str, position_ids: str, past: list[str]
) -> tuple[str, str, str]:
    heads, kv_heads = config.heads, config.kv_head_count
    with b.scope("self_attn"):
        widths = (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads))
        query, key, value = (linear(b, name, x, config.hidden, count * config.head_dim) for name, count in widths)
        cos, sin = (b.constant("rotary", table) for table in tables(config))
        query, key = (
            b.op("RotaryEmbedding", part, cos, sin, position_ids, num_heads=count)
            for part, count in ((query, heads), (key, kv_heads))
        )
        counts = {"q_num_heads": heads, "kv_num_heads": kv_heads}
        context, *present = b.ops("Attention", 3, query, key, value, "", *past, **counts)
        return linear(b, "o_proj", context, config.hidden, config.hidden), *present


def _mlp(b: GraphBuilder, config: DecodeConfig, x: str) -> str:
    with b.scope("mlp"):
        gate = linear(b, "gate_proj", x, config.hidden, config.ffn_dim)
        gate = b.op("Mul", gate, b.op("Sigmoid", gate))
        product = b.op("Mul", gate, linear(b, "up_proj", x, config.hidden, config.ffn_dim))
        return linear(b, "down_proj", product, config.ffn_dim, config.hidden, gain=math.sqrt(2))
