"""A T5-like encoder-decoder: relative position bias, cross-attention, RMSNorm, gated tanh-Gelu; no linear biases."""

import math
from dataclasses import dataclass

import onnx

from .attention import key_bias, mask_input
from .builder import Dim, GraphBuilder
from .config import TextConfig, require
from .layers import (
    batch_and_seq,
    causal_mask,
    embedding,
    linear,
    masked_out,
    merge_heads,
    positions,
    rms_norm,
    split_heads,
    tanh_gelu,
    wide_constant,
    wide_elem_type,
)
from .weights import WeightStore


@dataclass(frozen=True, kw_only=True)
class T5Config(TextConfig):
    """A T5-like encoder-decoder; `layers` and `seq` are those of the encoder.

    Attributes:
        decoder_layers: blocks of the decoder; None is `layers`.
        target: tokens per row of the decoder; the longest row when `dynamic`.
        ffn: width inside a feed-forward part; None is 2 * hidden.
        buckets: classes of distances between two positions; even.
        max_distance: distances from here on share a bucket.
    """

    decoder_layers: int | None = None
    target: int = 16
    ffn: int | None = None
    buckets: int = 16
    max_distance: int = 64

    def __post_init__(self) -> None:
        """Check the configuration; raises `ConfigError`."""
        super().__post_init__()
        self.require_positive("target", "buckets", "max_distance")
        self.require_positive_if_given("decoder_layers", "ffn")
        require(
            self.buckets % 4 == 0,
            f"buckets {self.buckets} is not divisible by 4: half are for each direction, and half of these for one "
            "distance each",
        )
        require(
            self.max_distance > self.buckets // 2,
            f"max_distance {self.max_distance} must be above buckets / 2, here {self.buckets // 2}",
        )

    @property
    def ffn_dim(self) -> int:
        """Width inside a feed-forward part."""
        return self.ffn or 2 * self.hidden

    @property
    def decoder_depth(self) -> int:
        """Blocks of the decoder."""
        return self.decoder_layers or self.layers

    @property
    def target_dim(self) -> int | str:
        """The sequence dim of the decoder's input: a size, or the symbol `target`."""
        return "target" if self.dynamic else self.target


_T5: dict[str, object] = {"vocab": 32128, "seq": 512, "target": 512, "buckets": 32, "max_distance": 128, "batch": 8}
PRESETS: dict[str, dict[str, object]] = {
    "tiny": {},
    "small": {"layers": 8, "hidden": 512, "heads": 8, "ffn": 1024, **_T5},
    "base": {"layers": 12, "hidden": 768, "heads": 12, "ffn": 2048, **_T5},
}


@dataclass(frozen=True)
class _Stack:
    """What the blocks of one stack share: its sizes and what is added to the scores of self- and cross-attention."""

    batch: Dim
    seq: Dim
    depth: int
    self_bias: str
    cross_bias: str = ""


def build_t5(config: T5Config, weights: WeightStore) -> GraphBuilder:
    """Build `input_ids, attention_mask [batch, seq], decoder_input_ids [batch, target] -> logits [.., target, vocab]`.

    All inputs are int64; `attention_mask` is 1 for a token of the encoder's input and 0 for padding.
    """
    b = GraphBuilder("t5", config, weights)
    ids = b.input("input_ids", onnx.TensorProto.INT64, (config.batch_dim, config.seq_dim))
    mask = mask_input(b, "attention_mask", (config.batch_dim, config.seq_dim))
    target_ids = b.input("decoder_input_ids", onnx.TensorProto.INT64, (config.batch_dim, config.target_dim))
    with b.scope("mask"):
        padding = key_bias(b, mask)
    tokens = embedding(b, "shared", ids, config.vocab, config.hidden, std=1.0)
    with b.scope("encoder"):
        batch, seq = batch_and_seq(b, ids, config.batch, config.seq)
        self_bias = b.op("Add", _relative_bias(b, config, seq, both_ways=True), padding)
        memory = _encode(b, config, tokens, _Stack(batch, seq, config.layers, self_bias))
    with b.scope("decoder"):
        _, target = batch_and_seq(b, target_ids, config.batch, config.target)
        self_bias = _relative_bias(b, config, target, both_ways=False)
        self_bias = b.op("Where", causal_mask(b, target), self_bias, masked_out(b))
        # T5 gives cross-attention a position bias of zeros, to which the padding mask is added.
        zeros = onnx.helper.make_tensor("zero", b.elem_type, [1], [0.0])
        cross_bias = b.op("ConstantOfShape", b.shape((1, config.heads, target, seq)), value=zeros)
        stack = _Stack(batch, target, config.decoder_depth, self_bias, b.op("Add", cross_bias, padding))
        targets = b.op("Gather", "shared.weight", target_ids, axis=0)
        x = _decode(b, config, targets, memory, seq, stack)
    logits = linear(b, "lm_head", x, config.hidden, config.vocab)
    b.output("logits", logits, b.elem_type, (config.batch_dim, config.target_dim, config.vocab))
    return b


def _encode(b: GraphBuilder, config: T5Config, x: str, stack: _Stack) -> str:
    for layer in range(stack.depth):
        with b.scope(f"block.{layer}"):
            normed = rms_norm(b, "norm", x, config.hidden)
            x = b.op("Add", x, _attention(b, config, "self", normed, normed, stack.seq, stack.self_bias, stack))
            x = b.op("Add", x, _feed_forward(b, config, rms_norm(b, "ffn_norm", x, config.hidden), stack.depth))
    return rms_norm(b, "final_norm", x, config.hidden)


def _decode(b: GraphBuilder, config: T5Config, x: str, memory: str, seq: Dim, stack: _Stack) -> str:
    for layer in range(stack.depth):
        with b.scope(f"block.{layer}"):
            normed = rms_norm(b, "norm", x, config.hidden)
            x = b.op("Add", x, _attention(b, config, "self", normed, normed, stack.seq, stack.self_bias, stack))
            normed = rms_norm(b, "cross_norm", x, config.hidden)
            x = b.op("Add", x, _attention(b, config, "cross", normed, memory, seq, stack.cross_bias, stack))
            x = b.op("Add", x, _feed_forward(b, config, rms_norm(b, "ffn_norm", x, config.hidden), stack.depth))
    return rms_norm(b, "final_norm", x, config.hidden)


def _attention(
    b: GraphBuilder, config: T5Config, name: str, x: str, memory: str, keys: Dim, bias: str, stack: _Stack
) -> str:
    """Attention of `x` `[B,S,D]` over `memory` `[B,T,D]`; scores are not scaled, the weight of q is small instead."""
    heads, head_dim, hidden = config.heads, config.head_dim, config.hidden
    with b.scope(name):
        query = linear(b, "q", x, hidden, hidden, gain=1 / math.sqrt(head_dim))
        query = split_heads(b, query, stack.batch, stack.seq, heads, head_dim)
        key, value = (
            split_heads(b, linear(b, part, memory, hidden, hidden), stack.batch, keys, heads, head_dim)
            for part in ("k", "v")
        )
        scores = b.op("Add", b.op("MatMul", query, b.op("Transpose", key, perm=(0, 1, 3, 2))), bias)
        context = b.op("MatMul", b.op("Softmax", scores, axis=-1), value)
        merged = merge_heads(b, context, stack.batch, stack.seq, hidden)
        return linear(b, "o", merged, hidden, hidden, gain=1 / math.sqrt(stack.depth))


def _feed_forward(b: GraphBuilder, config: T5Config, x: str, depth: int) -> str:
    """wo(gelu(wi_0(x)) * wi_1(x)), `[B,S,D] -> [B,S,D]`."""
    with b.scope("ffn"):
        gate = linear(b, "wi_0", x, config.hidden, config.ffn_dim)
        with b.scope("act"):
            gate = tanh_gelu(b, gate)
        product = b.op("Mul", gate, linear(b, "wi_1", x, config.hidden, config.ffn_dim))
        return linear(b, "wo", product, config.ffn_dim, config.hidden, gain=1.5 / math.sqrt(depth))


def _relative_bias(b: GraphBuilder, config: T5Config, seq: Dim, *, both_ways: bool) -> str:
    """What the distance of two positions adds to their score, learned by bucket and head: `[1,H,S,S]`."""
    with b.scope("relative_attention_bias"):
        position = positions(b, seq)
        distance = b.op("Sub", b.unsqueeze(position, 0), b.unsqueeze(position, 1))
        buckets = _buckets_both_ways(b, config, distance) if both_ways else _buckets_of_past(b, config, distance)
        rows = b.op("Gather", b.weight("weight", (config.buckets, config.heads), std=0.5), buckets, axis=0)
        return b.unsqueeze(b.op("Transpose", rows, perm=(2, 0, 1)), 0)


def _buckets_both_ways(b: GraphBuilder, config: T5Config, distance: str) -> str:
    """Half of the buckets for positions behind, half for those ahead."""
    half = config.buckets // 2
    ahead = b.op("Cast", b.op("Greater", distance, b.constant("zero", 0)), to=onnx.TensorProto.INT64)
    return b.op("Add", b.op("Mul", ahead, b.constant("half", half)), _bucket(b, config, b.op("Abs", distance), half))


def _buckets_of_past(b: GraphBuilder, config: T5Config, distance: str) -> str:
    """All buckets for positions behind; those ahead are masked out anyway."""
    behind = b.op("Neg", b.op("Min", distance, b.constant("zero", 0)))
    return _bucket(b, config, behind, config.buckets)


def _bucket(b: GraphBuilder, config: T5Config, distance: str, count: int) -> str:
    """The bucket of a distance that is not negative: one each up to count / 2, then logarithmically wider ones."""
    exact = count // 2
    first_wide = b.constant("first_wide", exact)
    far = b.op("Cast", b.op("Max", distance, first_wide), to=wide_elem_type(b))
    ratio = b.op("Log", b.op("Div", far, wide_constant(b, "exact", exact)))
    scale = (count - exact) / math.log(config.max_distance / exact)
    steps = b.op("Mul", ratio, wide_constant(b, "log_scale", scale))
    wide = b.op("Add", b.op("Cast", steps, to=onnx.TensorProto.INT64), first_wide)
    wide = b.op("Min", wide, b.constant("last", count - 1))
    return b.op("Where", b.op("Less", distance, first_wide), distance, wide)
