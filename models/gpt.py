"""A GPT-2-like decoder: learned positions, pre-LayerNorm blocks, biases, tanh-Gelu."""

import math
from dataclasses import dataclass

import onnx

from .builder import GraphBuilder
from .config import TextConfig
from .layers import (
    batch_and_seq,
    causal_mask,
    embedding,
    layer_norm,
    linear,
    linear_with_bias,
    masked_out,
    merge_heads,
    positions,
    split_heads,
    tanh_gelu,
)
from .weights import WeightStore


@dataclass(frozen=True, kw_only=True)
class GptConfig(TextConfig):
    """A GPT-2-like decoder.

    Attributes:
        ffn: width between the two linear layers of an MLP; None is 4 * hidden.
        fused_qkv: one `c_attn` weight [hidden, 3 * hidden] and a Split instead of three weights q, k, v.
        tied: compute the logits with the transposed token embedding instead of a weight `lm_head` of their own.
    """

    ffn: int | None = None
    fused_qkv: bool = False
    tied: bool = False

    def __post_init__(self) -> None:
        """Check the configuration; raises `ConfigError`."""
        super().__post_init__()
        self.require_positive_if_given("ffn")

    @property
    def ffn_dim(self) -> int:
        """Width between the two linear layers of an MLP."""
        return self.ffn or 4 * self.hidden


_GPT2: dict[str, object] = {"vocab": 50257, "seq": 1024, "batch": 1}
PRESETS: dict[str, dict[str, object]] = {
    "tiny": {},
    "small": {"layers": 12, "hidden": 768, "heads": 12, **_GPT2},
    "medium": {"layers": 24, "hidden": 1024, "heads": 16, **_GPT2},
    "large": {"layers": 36, "hidden": 1280, "heads": 20, **_GPT2},
    "xl": {"layers": 48, "hidden": 1600, "heads": 25, **_GPT2},
}


def build_gpt(config: GptConfig, weights: WeightStore) -> GraphBuilder:
    """Build `input_ids int64 [batch, seq] -> logits [batch, seq, vocab]`."""
    b = GraphBuilder("gpt", config, weights)
    ids = b.input("input_ids", onnx.TensorProto.INT64, (config.batch_dim, config.seq_dim))
    with b.scope("embed"):
        _, seq = batch_and_seq(b, ids, config.batch, config.seq)
        position = positions(b, seq)
    with b.scope("mask"):
        mask = causal_mask(b, seq)
    tokens = embedding(b, "wte", ids, config.vocab, config.hidden, std=1.0)
    x = b.op("Add", tokens, embedding(b, "wpe", position, config.seq, config.hidden, std=0.5))
    for layer in range(config.layers):
        with b.scope(f"h.{layer}"):
            x = b.op("Add", x, _attention(b, config, layer_norm(b, "ln_1", x, config.hidden), mask))
            x = b.op("Add", x, _mlp(b, config, layer_norm(b, "ln_2", x, config.hidden)))
    x = layer_norm(b, "ln_f", x, config.hidden)
    if config.tied:
        with b.scope("lm_head"):
            # The embedding has rows of unit variance: the scale keeps the logits at unit variance too.
            scaled = b.op("Mul", x, b.constant("logit_scale", 1 / math.sqrt(config.hidden)))
            logits = b.op("MatMul", scaled, b.op("Transpose", "wte.weight", perm=(1, 0)))
    else:
        logits = linear(b, "lm_head", x, config.hidden, config.vocab)
    b.output("logits", logits, b.elem_type, (config.batch_dim, config.seq_dim, config.vocab))
    return b


def _attention(b: GraphBuilder, config: GptConfig, x: str, mask: str) -> str:
    """Causal self-attention `[B,S,D] -> [B,S,D]`."""
    with b.scope("attn"):
        batch, seq = batch_and_seq(b, x, config.batch, config.seq)
        query, key, value = (
            split_heads(b, part, batch, seq, config.heads, config.head_dim) for part in _query_key_value(b, config, x)
        )
        scores = b.op("MatMul", query, b.op("Transpose", key, perm=(0, 1, 3, 2)))
        scores = b.op("Div", scores, b.constant("sqrt_head_dim", math.sqrt(config.head_dim)))
        scores = b.op("Where", mask, scores, masked_out(b))
        context = b.op("MatMul", b.op("Softmax", scores, axis=-1), value)
        merged = merge_heads(b, context, batch, seq, config.hidden)
        return linear_with_bias(b, "proj", merged, config.hidden, config.hidden, gain=_residual_gain(config))


def _query_key_value(b: GraphBuilder, config: GptConfig, x: str) -> list[str]:
    if not config.fused_qkv:
        return [linear_with_bias(b, name, x, config.hidden, config.hidden) for name in ("q", "k", "v")]
    fused = linear_with_bias(b, "c_attn", x, config.hidden, 3 * config.hidden)
    return b.ops("Split", 3, fused, axis=-1, num_outputs=3)


def _mlp(b: GraphBuilder, config: GptConfig, x: str) -> str:
    """The feed-forward part of a block, `[B,S,D] -> [B,S,D]`."""
    with b.scope("mlp"):
        x = linear_with_bias(b, "c_fc", x, config.hidden, config.ffn_dim)
        with b.scope("act"):
            x = tanh_gelu(b, x)
        return linear_with_bias(b, "proj", x, config.ffn_dim, config.hidden, gain=_residual_gain(config))


def _residual_gain(config: GptConfig) -> float:
    """Scale of what a block adds, such that the residual stream has about the same variance after any depth."""
    return 1 / math.sqrt(config.layers)
