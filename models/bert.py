"""A BERT-like encoder: token types, a padding mask, post-LayerNorm blocks with biases, a pooled first token."""

import math
from dataclasses import dataclass

import onnx

from .attention import attend, key_bias, mask_input, project_heads
from .builder import GraphBuilder
from .config import TextConfig
from .layers import batch_and_seq, embedding, gelu, layer_norm, linear_with_bias, merge_heads, positions
from .weights import WeightStore


@dataclass(frozen=True, kw_only=True)
class BertConfig(TextConfig):
    """A BERT-like encoder.

    Attributes:
        ffn: width between the two linear layers of a feed-forward part; None is 4 * hidden.
        token_types: kinds of segments.
    """

    ffn: int | None = None
    token_types: int = 2

    def __post_init__(self) -> None:
        """Check the configuration; raises `ConfigError`."""
        super().__post_init__()
        self.require_positive("token_types")
        self.require_positive_if_given("ffn")

    @property
    def ffn_dim(self) -> int:
        """Width between the two linear layers of a feed-forward part."""
        return self.ffn or 4 * self.hidden


_BERT: dict[str, object] = {"vocab": 30522, "seq": 512, "batch": 8}
PRESETS: dict[str, dict[str, object]] = {
    "tiny": {},
    "small": {"layers": 12, "hidden": 768, "heads": 12, **_BERT},
    "large": {"layers": 24, "hidden": 1024, "heads": 16, **_BERT},
}


def build_bert(config: BertConfig, weights: WeightStore) -> GraphBuilder:
    """Build `input_ids, token_type_ids, attention_mask [batch, seq] -> hidden [batch, seq, D], pooled [batch, D]`.

    All inputs are int64; `attention_mask` is 1 for a token and 0 for padding.
    """
    b = GraphBuilder("bert", config, weights)
    shape = (config.batch_dim, config.seq_dim)
    ids = b.input("input_ids", onnx.TensorProto.INT64, shape)
    types = b.input("token_type_ids", onnx.TensorProto.INT64, shape)
    mask = mask_input(b, "attention_mask", shape)
    with b.scope("embeddings"):
        x = _embed(b, config, ids, types)
    with b.scope("mask"):
        bias = key_bias(b, mask)
    for layer in range(config.layers):
        with b.scope(f"encoder.{layer}"):
            x = layer_norm(b, "attention.norm", b.op("Add", x, _attention(b, config, x, bias)), config.hidden)
            x = layer_norm(b, "ffn.norm", b.op("Add", x, _feed_forward(b, config, x)), config.hidden)
    with b.scope("pooler"):
        first = b.op("Gather", x, b.constant("index", 0), axis=1)
        pooled = b.op("Tanh", linear_with_bias(b, "dense", first, config.hidden, config.hidden))
    b.output("hidden", x, b.elem_type, (*shape, config.hidden))
    b.output("pooled", pooled, b.elem_type, (config.batch_dim, config.hidden))
    return b


def _embed(b: GraphBuilder, config: BertConfig, ids: str, types: str) -> str:
    """Token, position and token type, added and normalised: `[B,S] -> [B,S,D]`."""
    _, seq = batch_and_seq(b, ids, config.batch, config.seq)
    tokens = embedding(b, "word", ids, config.vocab, config.hidden, std=1.0)
    tokens = b.op("Add", tokens, embedding(b, "token_type", types, config.token_types, config.hidden, std=0.5))
    places = embedding(b, "position", positions(b, seq), config.seq, config.hidden, std=0.5)
    return layer_norm(b, "norm", b.op("Add", tokens, places), config.hidden)


def _attention(b: GraphBuilder, config: BertConfig, x: str, bias: str) -> str:
    """Self-attention over what the mask leaves, `[B,S,D] -> [B,S,D]`."""
    with b.scope("attention"):
        batch, seq = batch_and_seq(b, x, config.batch, config.seq)
        query, key, value = (project_heads(b, config, name, x, batch, seq) for name in ("query", "key", "value"))
        merged = merge_heads(b, attend(b, query, key, value, config.head_dim, bias), batch, seq, config.hidden)
        return linear_with_bias(b, "output", merged, config.hidden, config.hidden)


def _feed_forward(b: GraphBuilder, config: BertConfig, x: str) -> str:
    """Two linear layers with a Gelu between them, `[B,S,D] -> [B,S,D]`."""
    with b.scope("ffn"):
        x = linear_with_bias(b, "intermediate", x, config.hidden, config.ffn_dim)
        with b.scope("act"):
            x = gelu(b, x)
        return linear_with_bias(b, "output", x, config.ffn_dim, config.hidden, gain=math.sqrt(2))
