"""A Llama-like decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU; no biases."""

import math
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray

from .builder import Dim, GraphBuilder
from .config import TextConfig, require
from .layers import batch_and_seq, embedding, linear, masked_out, merge_heads, positions, rms_norm, split_heads
from .weights import NUMPY_DTYPES, WeightStore


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(TextConfig):
    """A Llama-like decoder.

    Attributes:
        kv_heads: key and value heads; divides `heads`. None is `heads`, that is, no grouping.
        ffn: width of the gate and up projections; None is 8/3 * hidden rounded up to a multiple of 64.
        rope_theta: base of the rotary frequencies.
        fused: one Attention and one RotaryEmbedding instead of what they consist of; opset 23 on.
    """

    kv_heads: int | None = None
    ffn: int | None = None
    rope_theta: float = 10000.0
    fused: bool = False

    def __post_init__(self) -> None:
        """Check the configuration; raises `ConfigError`."""
        super().__post_init__()
        self.require_positive_if_given("kv_heads", "ffn")
        require(
            self.heads % self.kv_head_count == 0,
            f"heads {self.heads} is not divisible by kv_heads {self.kv_head_count}: every group needs the same size",
        )
        require(
            self.head_dim % 2 == 0,
            f"hidden / heads is {self.head_dim}, an odd number: rotary positions turn pairs of features",
        )
        require(not self.fused or self.opset >= 23, f"fused needs opset 23 or later, not {self.opset}")
        require(
            not self.fused or self.dtype != "float64",
            "fused models have no float64: ONNX has no RotaryEmbedding of it",
        )
        require(self.rope_theta > 0, f"rope_theta must be positive, got {self.rope_theta}")

    @property
    def kv_head_count(self) -> int:
        """Number of key and value heads."""
        return self.kv_heads or self.heads

    @property
    def ffn_dim(self) -> int:
        """Width of the gate and up projections."""
        return self.ffn or -(-8 * self.hidden // (3 * 64)) * 64


_LLAMA3: dict[str, object] = {
    "vocab": 128256,
    "kv_heads": 8,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
    "seq": 2048,
    "batch": 8,
}
PRESETS: dict[str, dict[str, object]] = {
    "tiny": {},
    "gqa": {"heads": 8, "kv_heads": 4},
    "fused": {"heads": 8, "kv_heads": 4, "opset": 23, "fused": True},
    "1b": {**_LLAMA3, "layers": 16, "hidden": 2048, "heads": 32, "ffn": 8192},
    "8b": {**_LLAMA3, "layers": 32, "hidden": 4096, "heads": 32, "ffn": 14336},
    "70b": {**_LLAMA3, "layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672},
}


@dataclass(frozen=True)
class _Shared:
    """Values that all layers use: the rotary tables [S, K] and the additive causal mask [S, S].

    A fused model has tables of the longest row [.., K/2], the position ids [B, S] instead of a mask.
    """

    cos: str
    sin: str
    mask: str = ""
    position_ids: str = ""


def build_llama(config: LlamaConfig, weights: WeightStore) -> GraphBuilder:
    """Build `input_ids int64 [batch, seq] -> logits [batch, seq, vocab]`."""
    b = GraphBuilder("llama", config, weights)
    ids = b.input("input_ids", onnx.TensorProto.INT64, (config.batch_dim, config.seq_dim))
    with b.scope("shared"):
        shared = (_shared_by_fused if config.fused else _shared)(b, config, ids)
    x = embedding(b, "embed_tokens", ids, config.vocab, config.hidden, std=1.0)
    for layer in range(config.layers):
        with b.scope(f"layers.{layer}"):
            normed = rms_norm(b, "input_layernorm", x, config.hidden)
            x = b.op("Add", x, (_fused_attention if config.fused else _attention)(b, config, normed, shared))
            x = b.op("Add", x, _mlp(b, config, rms_norm(b, "post_attention_layernorm", x, config.hidden)))
    x = rms_norm(b, "norm", x, config.hidden)
    logits = linear(b, "lm_head", x, config.hidden, config.vocab)
    b.output("logits", logits, b.elem_type, (config.batch_dim, config.seq_dim, config.vocab))
    return b


def _shared(b: GraphBuilder, config: LlamaConfig, ids: str) -> _Shared:
    _, seq = batch_and_seq(b, ids, config.batch, config.seq)
    cos, sin = (_rotary_rows(b, table, seq) for table in rotary_tables(config))
    return _Shared(cos, sin, _additive_mask(b, seq))


def _shared_by_fused(b: GraphBuilder, config: LlamaConfig, ids: str) -> _Shared:
    batch, seq = batch_and_seq(b, ids, config.batch, config.seq)
    cos, sin = (b.constant("rotary", table[:, : config.head_dim // 2].copy()) for table in rotary_tables(config))
    position_ids = b.op("Expand", b.unsqueeze(positions(b, seq), 0), b.shape((batch, seq)))
    return _Shared(cos, sin, position_ids=position_ids)


def rotary_tables(config: LlamaConfig) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """Return cos and sin of position times frequency, each [seq, head_dim]; the two halves of a row are equal."""
    frequencies = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    angles = np.outer(np.arange(config.seq), frequencies)
    angles = np.concatenate([angles, angles], axis=1)
    dtype = NUMPY_DTYPES[config.dtype]
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def _rotary_rows(b: GraphBuilder, table: NDArray[np.generic], seq: Dim) -> str:
    """The table's first S rows; all of it where S is known."""
    rows = b.constant("rotary", table)
    if isinstance(seq, int):
        return rows
    zero = b.constant("axes", np.array([0], np.int64))
    return b.op("Slice", rows, zero, b.shape((seq,)), zero)


def _additive_mask(b: GraphBuilder, seq: Dim) -> str:
    """The matrix [S, S]: 0 where row may see column, else a large negative score; computed from positions."""
    position = positions(b, seq)
    visible = b.op("GreaterOrEqual", b.unsqueeze(position, 1), b.unsqueeze(position, 0))
    return b.op("Where", visible, b.constant("0.0", 0.0), masked_out(b))


def _attention(b: GraphBuilder, config: LlamaConfig, x: str, shared: _Shared) -> str:
    """Causal grouped-query attention `[B,S,D] -> [B,S,D]`."""
    head_dim, kv_heads = config.head_dim, config.kv_head_count
    with b.scope("self_attn"):
        batch, seq = batch_and_seq(b, x, config.batch, config.seq)

        def project(name: str, heads: int) -> str:
            projected = linear(b, name, x, config.hidden, heads * head_dim)
            return split_heads(b, projected, batch, seq, heads, head_dim)

        query = _rotate(b, "q_rotary", project("q_proj", config.heads), head_dim, shared)
        key = _rotate(b, "k_rotary", project("k_proj", kv_heads), head_dim, shared)
        value = project("v_proj", kv_heads)
        key, value = (_repeat_heads(b, config, part, batch, seq) for part in (key, value))
        scores = b.op("MatMul", query, b.op("Transpose", key, perm=(0, 1, 3, 2)))
        scores = b.op("Mul", scores, b.constant("attention_scale", 1 / math.sqrt(head_dim)))
        context = b.op("MatMul", b.op("Softmax", b.op("Add", scores, shared.mask), axis=-1), value)
        merged = merge_heads(b, context, batch, seq, config.hidden)
        return linear(b, "o_proj", merged, config.hidden, config.hidden, gain=1 / math.sqrt(config.layers))


def _fused_attention(b: GraphBuilder, config: LlamaConfig, x: str, shared: _Shared) -> str:
    """As `_attention`, by RotaryEmbedding and Attention over heads that lie side by side: `[B,S,D] -> [B,S,D]`."""
    heads, kv_heads = config.heads, config.kv_head_count
    with b.scope("self_attn"):
        query = linear(b, "q_proj", x, config.hidden, config.hidden)
        key, value = (linear(b, name, x, config.hidden, kv_heads * config.head_dim) for name in ("k_proj", "v_proj"))
        query, key = (
            b.op("RotaryEmbedding", part, shared.cos, shared.sin, shared.position_ids, num_heads=count)
            for part, count in ((query, heads), (key, kv_heads))
        )
        counts = {"q_num_heads": heads, "kv_num_heads": kv_heads}
        context = b.op("Attention", query, key, value, is_causal=1, **counts)
        return linear(b, "o_proj", context, config.hidden, config.hidden, gain=1 / math.sqrt(config.layers))


def _rotate(b: GraphBuilder, name: str, x: str, head_dim: int, shared: _Shared) -> str:
    """Turn each pair of features (i, i + K/2) of `[B,H,S,K]` by its position's angle: x * cos + (-x2, x1) * sin."""
    with b.scope(name):
        last = b.constant("axes", np.array([-1], np.int64))
        start, middle, end = (b.constant("slice", np.array([i], np.int64)) for i in (0, head_dim // 2, head_dim))
        first = b.op("Slice", x, start, middle, last)
        second = b.op("Slice", x, middle, end, last)
        turned = b.op("Concat", b.op("Neg", second), first, axis=-1)
        return b.op("Add", b.op("Mul", x, shared.cos), b.op("Mul", turned, shared.sin))


def _repeat_heads(b: GraphBuilder, config: LlamaConfig, x: str, batch: Dim, seq: Dim) -> str:
    """Repeat each key or value head for its group of query heads: `[B,G,S,K] -> [B,H,S,K]`."""
    group = config.heads // config.kv_head_count
    if group == 1:
        return x
    shape = (batch, config.kv_head_count, group, seq, config.head_dim)
    expanded = b.op("Expand", b.unsqueeze(x, 2), b.shape(shape))
    return b.reshape(expanded, (batch, config.heads, seq, config.head_dim))


def _mlp(b: GraphBuilder, config: LlamaConfig, x: str) -> str:
    """SwiGLU: down(silu(gate(x)) * up(x)), `[B,S,D] -> [B,S,D]`."""
    with b.scope("mlp"):
        gate = linear(b, "gate_proj", x, config.hidden, config.ffn_dim)
        with b.scope("act"):
            gate = b.op("Mul", gate, b.op("Sigmoid", gate))
        product = b.op("Mul", gate, linear(b, "up_proj", x, config.hidden, config.ffn_dim))
        return linear(b, "down_proj", product, config.ffn_dim, config.hidden, gain=1.5 / math.sqrt(config.layers))
