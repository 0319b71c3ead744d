"""A DLRM-like recommender: embedding tables, a bottom and a top perceptron, pairwise interactions of features."""

import math
from dataclasses import dataclass

import numpy as np
import onnx

from .builder import GraphBuilder
from .config import ModelConfig
from .layers import linear_with_bias
from .weights import WeightStore


@dataclass(frozen=True, kw_only=True)
class DlrmConfig(ModelConfig):
    """A DLRM-like recommender.

    Attributes:
        dense: features that are numbers.
        tables: features that are rows of an embedding table, each of a table of its own.
        rows: of each table.
        hots: rows of a table that are added up for one feature.
        width: of an embedding and of what the bottom perceptron gives.
        hidden: width inside both perceptrons.
    """

    batch: int = 8
    dense: int = 13
    tables: int = 4
    rows: int = 100
    hots: int = 3
    width: int = 16
    hidden: int = 64

    def __post_init__(self) -> None:
        """Check the configuration; raises `ConfigError`."""
        super().__post_init__()
        self.require_positive("dense", "tables", "rows", "hots", "width", "hidden")

    @property
    def pairs(self) -> int:
        """Pairs of different features, the dense ones counting as one."""
        return self.tables * (self.tables + 1) // 2


PRESETS: dict[str, dict[str, object]] = {
    "tiny": {},
    "small": {"tables": 26, "rows": 10000, "width": 64, "hidden": 512, "batch": 128},
    "large": {"tables": 26, "rows": 4000000, "width": 128, "hidden": 1024, "batch": 2048},
}


def build_dlrm(config: DlrmConfig, weights: WeightStore) -> GraphBuilder:
    """Build `dense [batch, dense], sparse int64 [batch, tables, hots] -> score [batch, 1]`, between 0 and 1."""
    b = GraphBuilder("dlrm", config, weights)
    dense = b.input("dense", b.elem_type, (config.batch_dim, config.dense))
    sparse = b.input("sparse", onnx.TensorProto.INT64, (config.batch_dim, config.tables, config.hots))
    with b.scope("bottom"):
        x = b.op("Relu", linear_with_bias(b, "0", dense, config.dense, config.hidden))
        x = b.op("Relu", linear_with_bias(b, "1", x, config.hidden, config.width, gain=math.sqrt(2)))
    features = [x, *(_embedding_bag(b, config, sparse, table) for table in range(config.tables))]
    with b.scope("interaction"):
        pairs = _interactions(b, config, features)
        x = b.op("Concat", x, pairs, axis=1)
    with b.scope("top"):
        x = b.op("Relu", linear_with_bias(b, "0", x, config.width + config.pairs, config.hidden))
        x = b.op("Relu", linear_with_bias(b, "1", x, config.hidden, config.hidden, gain=math.sqrt(2)))
        x = b.op("Sigmoid", linear_with_bias(b, "2", x, config.hidden, 1, gain=2.0))
    b.output("score", x, b.elem_type, (config.batch_dim, 1))
    return b


def _embedding_bag(b: GraphBuilder, config: DlrmConfig, sparse: str, table: int) -> str:
    """The sum of a table's rows that a feature names: `[B, tables, hots] -> [B, width]`."""
    with b.scope(f"tables.{table}"):
        ids = b.op("Gather", sparse, b.constant("table", table), axis=1)
        # The products of two features of this size are of order 1.
        weight = b.weight("weight", (config.rows, config.width), std=config.width**-0.25 / math.sqrt(config.hots))
        rows = b.op("Gather", weight, ids, axis=0)
        return b.op("ReduceSum", rows, b.constant("axes", np.array([1], np.int64)), keepdims=0)


def _interactions(b: GraphBuilder, config: DlrmConfig, features: list[str]) -> str:
    """The product of every pair of different features, `[B, width] .. -> [B, pairs]`."""
    count = len(features)
    stacked = b.op("Concat", *(b.unsqueeze(feature, 1) for feature in features), axis=1)
    products = b.op("MatMul", stacked, b.op("Transpose", stacked, perm=(0, 2, 1)))
    rows, columns = np.tril_indices(count, -1)
    lower = b.constant("lower_triangle", rows * count + columns)
    return b.op("Gather", b.op("Flatten", products, axis=1), lower, axis=1)
