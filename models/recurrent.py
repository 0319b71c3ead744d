"""A classifier of token rows by LSTM or GRU layers, of one direction or two."""

import math
from dataclasses import dataclass

import onnx

from .builder import Dim, GraphBuilder
from .config import ModelConfig, require
from .layers import batch_and_seq, embedding, linear_with_bias
from .weights import WeightStore

CELLS = {"lstm": ("LSTM", 4), "gru": ("GRU", 3)}
"""Cell -> operator and gates."""


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(ModelConfig):
    """A classifier of token rows.

    Attributes:
        cell: a key of `CELLS`.
        bidirectional: read every row from both ends.
        layers: recurrent layers.
        hidden: width of the embedding and of the state of one direction.
        vocab: size of the vocabulary.
        seq: tokens per row; the longest row when `dynamic`.
        classes: width of the logits.
    """

    cell: str = "lstm"
    bidirectional: bool = False
    layers: int = 2
    hidden: int = 32
    vocab: int = 256
    seq: int = 16
    classes: int = 8

    def __post_init__(self) -> None:
        """Check the configuration; raises `ConfigError`."""
        super().__post_init__()
        self.require_positive("layers", "hidden", "vocab", "seq", "classes")
        require(self.cell in CELLS, f"cell must be one of {', '.join(CELLS)}, not {self.cell!r}")

    @property
    def directions(self) -> int:
        """1 or 2."""
        return 2 if self.bidirectional else 1


PRESETS: dict[str, dict[str, object]] = {
    "tiny": {},
    "small": {"hidden": 512, "vocab": 30000, "seq": 128, "batch": 32, "bidirectional": True},
}


def build_recurrent(config: RecurrentConfig, weights: WeightStore) -> GraphBuilder:
    """Build `input_ids int64 [batch, seq] -> logits [batch, classes]`, of the last layer's final state."""
    b = GraphBuilder("recurrent", config, weights)
    symbols: tuple[int | str, int | str] = (config.batch_dim, "seq" if config.dynamic else config.seq)
    ids = b.input("input_ids", onnx.TensorProto.INT64, symbols)
    batch, seq = batch_and_seq(b, ids, config.batch, config.seq)
    x = embedding(b, "embed", ids, config.vocab, config.hidden, std=1.0)
    x = b.op("Transpose", x, perm=(1, 0, 2))  # the operators read step by step
    width, state = config.hidden, x
    for layer in range(config.layers):
        with b.scope(f"layers.{layer}"):
            x, state = _layer(b, config, x, width)
            width = config.directions * config.hidden
            if layer + 1 < config.layers:
                x = b.reshape(b.op("Transpose", x, perm=(0, 2, 1, 3)), (seq, batch, width))
    final = _rows(b, state, batch, width)
    logits = linear_with_bias(b, "head", final, width, config.classes, gain=2.0)
    b.output("logits", logits, b.elem_type, (config.batch_dim, config.classes))
    return b


def _layer(b: GraphBuilder, config: RecurrentConfig, x: str, width: int) -> tuple[str, str]:
    """`[S,B,width] -> [S,directions,B,hidden]` and the final state `[directions,B,hidden]`."""
    op_type, gates = CELLS[config.cell]
    count, hidden, rows = config.directions, config.hidden, gates * config.hidden
    operands = (
        b.weight("input.weight", (count, rows, width), std=1.5 / math.sqrt(width)),
        b.weight("state.weight", (count, rows, hidden), std=1 / math.sqrt(hidden)),
        b.weight("bias", (count, 2 * rows), std=0.2),
    )
    direction = "bidirectional" if config.bidirectional else "forward"
    results = b.ops(op_type, 2, x, *operands, hidden_size=hidden, direction=direction)
    return results[0], results[1]


def _rows(b: GraphBuilder, state: str, batch: Dim, width: int) -> str:
    """The states of all directions side by side: `[directions,B,hidden] -> [B,width]`."""
    return b.reshape(b.op("Transpose", state, perm=(1, 0, 2)), (batch, width))
