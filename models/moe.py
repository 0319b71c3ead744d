"""A decoder whose feed-forward parts are a mixture of experts of fixed capacity.

Two ways to send tokens to experts. `einsum`: each token chooses one expert, which takes the first `capacity` tokens of
a row that chose it; dispatch and combination are products with a mask, as in GShard (Lepikhin et al., 2020). `gather`:
each expert chooses the `capacity` tokens of a row that it scores highest by TopK, takes them by GatherND and adds its
results by ScatterND, as in expert choice (Zhou et al., 2022); an expert then sees the whole row.
"""

import math
from dataclasses import dataclass

import numpy as np
import onnx

from .attention import attend, project_heads
from .builder import Dim, GraphBuilder
from .config import TextConfig, require
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
    tanh_gelu,
)
from .weights import WeightStore

ROUTINGS = ("einsum", "gather")


@dataclass(frozen=True, kw_only=True)
class MoeConfig(TextConfig):
    """A decoder with a mixture of experts in each block.

    Attributes:
        experts: feed-forward networks of a block.
        capacity: tokens of a row that an expert takes; None is twice the tokens of a row over the experts.
        ffn: width inside an expert; None is 2 * hidden.
        routing: how tokens reach experts, one of `ROUTINGS`.
    """

    experts: int = 4
    capacity: int | None = None
    ffn: int | None = None
    routing: str = "einsum"

    def __post_init__(self) -> None:
        """Check the configuration; raises `ConfigError`."""
        super().__post_init__()
        self.require_positive("experts")
        self.require_positive_if_given("capacity", "ffn")
        require(self.routing in ROUTINGS, f"routing must be one of {', '.join(ROUTINGS)}, not {self.routing!r}")
        require(self.slots <= self.seq, f"capacity {self.slots} is more than the {self.seq} tokens of a row")

    @property
    def slots(self) -> int:
        """Tokens of a row that an expert takes."""
        return self.capacity or min(self.seq, -(-2 * self.seq // self.experts))

    @property
    def ffn_dim(self) -> int:
        """Width inside an expert."""
        return self.ffn or 2 * self.hidden


_LARGE: dict[str, object] = {"vocab": 32000, "seq": 1024, "batch": 8}
PRESETS: dict[str, dict[str, object]] = {
    "tiny": {},
    "small": {"layers": 12, "hidden": 768, "heads": 12, "experts": 8, "ffn": 3072, **_LARGE},
    "large": {"layers": 24, "hidden": 2048, "heads": 16, "experts": 64, "ffn": 8192, **_LARGE},
}


def build_moe(config: MoeConfig, weights: WeightStore) -> GraphBuilder:
    """Build `input_ids int64 [batch, seq] -> logits [batch, seq, vocab]`."""
    b = GraphBuilder("moe", config, weights)
    ids = b.input("input_ids", onnx.TensorProto.INT64, (config.batch_dim, config.seq_dim))
    with b.scope("embed"):
        batch, seq = batch_and_seq(b, ids, config.batch, config.seq)
        position = positions(b, seq)
    with b.scope("mask"):
        bias = b.op("Where", causal_mask(b, seq), b.constant("0.0", 0.0), masked_out(b))
    tokens = embedding(b, "wte", ids, config.vocab, config.hidden, std=1.0)
    x = b.op("Add", tokens, embedding(b, "wpe", position, config.seq, config.hidden, std=0.5))
    mixture = {"einsum": _mixture_by_einsum, "gather": _mixture_by_gather}[config.routing]
    for layer in range(config.layers):
        with b.scope(f"h.{layer}"):
            x = b.op("Add", x, _attention(b, config, layer_norm(b, "ln_1", x, config.hidden), bias, batch, seq))
            normed = layer_norm(b, "ln_2", x, config.hidden)
            with b.scope("moe"):
                x = b.op("Add", x, mixture(b, config, normed, batch, seq))
    logits = linear(b, "lm_head", layer_norm(b, "ln_f", x, config.hidden), config.hidden, config.vocab)
    b.output("logits", logits, b.elem_type, (config.batch_dim, config.seq_dim, config.vocab))
    return b


def _attention(b: GraphBuilder, config: MoeConfig, x: str, bias: str, batch: Dim, seq: Dim) -> str:
    """Causal self-attention `[B,S,D] -> [B,S,D]`."""
    with b.scope("attn"):
        query, key, value = (project_heads(b, config, name, x, batch, seq) for name in ("q", "k", "v"))
        merged = merge_heads(b, attend(b, query, key, value, config.head_dim, bias), batch, seq, config.hidden)
        gain = 1 / math.sqrt(config.layers)
        return linear_with_bias(b, "proj", merged, config.hidden, config.hidden, gain=gain)


def _gates(b: GraphBuilder, config: MoeConfig, x: str) -> str:
    """How much a token belongs to each expert, `[B,S,D] -> [B,S,E]`; far from even, so that choices are clear."""
    return b.op("Softmax", linear(b, "router", x, config.hidden, config.experts, gain=2.0), axis=-1)


def _mixture_by_einsum(b: GraphBuilder, config: MoeConfig, x: str, batch: Dim, seq: Dim) -> str:
    """Each token through the expert it chooses, if it gets a slot there: `[B,S,D] -> [B,S,D]`. C is the capacity."""
    gates = _gates(b, config, x)
    zero_one = b.constant("off_on", np.array([0, 1], np.int64))
    choice = b.op("ArgMax", gates, axis=-1, keepdims=0)
    chosen = b.op("OneHot", choice, b.constant("experts", config.experts), zero_one, axis=-1)
    # The token's place among those of its row that chose the same expert, from 0; -1 where it did not.
    count = b.op("CumSum", chosen, b.constant("seq_axis", 1))
    place = b.op("Sub", b.op("Mul", count, chosen), b.constant("one", 1))
    # Compared with all slots: a place of -1 or beyond the capacity equals none of them.
    slots = b.constant("slots", np.arange(config.slots, dtype=np.int64))
    dispatch = b.op("Cast", b.op("Equal", b.unsqueeze(place, 3), slots), to=b.elem_type)
    combine = b.op("Mul", dispatch, b.unsqueeze(gates, 3))
    taken = b.op("Einsum", dispatch, x, equation="bsec,bsd->becd")
    return b.op("Einsum", combine, _experts(b, config, taken), equation="bsec,becd->bsd")


def _mixture_by_gather(b: GraphBuilder, config: MoeConfig, x: str, batch: Dim, seq: Dim) -> str:
    """Each expert on the tokens that it chooses, added up: `[B,S,D] -> [B,S,D]`. C is the capacity."""
    scores = b.op("Transpose", _gates(b, config, x), perm=(0, 2, 1))
    count = b.constant("capacity", np.array([config.slots], np.int64))
    gates, places = b.ops("TopK", 2, scores, count, axis=-1)
    places = b.unsqueeze(places, 3)
    taken = b.op("GatherND", x, places, batch_dims=1)
    added = b.op("Mul", _experts(b, config, taken), b.unsqueeze(gates, 3))
    row = b.op("Expand", _rows(b, batch), b.shape((batch, config.experts, config.slots, 1)))
    zero = onnx.helper.make_tensor("zero", b.elem_type, [1], [0.0])
    nothing = b.op("ConstantOfShape", b.shape((batch, seq, config.hidden)), value=zero)
    return b.op("ScatterND", nothing, b.op("Concat", row, places, axis=-1), added, reduction="add")


def _rows(b: GraphBuilder, batch: Dim) -> str:
    """The number of each row of the batch, `[B,1,1,1]`."""
    return b.unsqueeze(positions(b, batch), 1, 2, 3)


def _experts(b: GraphBuilder, config: MoeConfig, x: str) -> str:
    """Every expert on its own tokens, `[B,E,C,D] -> [B,E,C,D]`; no biases: empty slots stay 0."""
    with b.scope("experts"):
        hidden, ffn, count = config.hidden, config.ffn_dim, config.experts
        first = b.weight("fc.weight", (count, hidden, ffn), std=1 / math.sqrt(hidden))
        x = b.op("MatMul", x, first)
        with b.scope("act"):
            x = tanh_gelu(b, x)
        gain = 3 / math.sqrt(config.layers)
        return b.op("MatMul", x, b.weight("proj.weight", (count, ffn, hidden), std=gain / math.sqrt(ffn)))
