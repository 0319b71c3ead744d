"""What a program has to do at least: FLOPs of its products, and bytes that it must read and write once."""

from dataclasses import asdict, dataclass
from typing import Any

from irpar.analysis.cost.node import node_flops
from irpar.analysis.memory.liveness import value_bytes
from irpar.ir import Graph, Value

PRODUCTS = frozenset({"MatMul", "Gemm", "Einsum", "Conv", "Attention", "MatMulNBits"})
"""Operators whose FLOPs the device's rate of products holds for; those of others are few beside."""


@dataclass(frozen=True)
class LeastWork:
    """Of one run.

    Attributes:
        flops: of products.
        nbytes: of weights, inputs and results, each once; of a table that rows are taken from, these rows.
    """

    flops: int
    nbytes: int

    def as_json(self) -> dict[str, Any]:
        """As results have it."""
        return asdict(self)

    def seconds(self, flop_rate: float, byte_rate: float) -> float:
        """The roofline: the longer of arithmetic and memory traffic (Williams, Waterman and Patterson 2009)."""
        return max(self.flops / flop_rate, self.nbytes / byte_rate)


def least_work(graph: Graph, masked_flops: int = 0) -> LeastWork:
    """Count a local graph of one rank.

    Args:
        graph: it.
        masked_flops: what is counted for masked scores, and need not be computed.
    """
    flops = sum(node_flops(node) for node in graph if node.op_type in PRODUCTS)
    read = sum(map(_read_bytes, (*graph.constants, *graph.inputs)))
    return LeastWork(flops - masked_flops, read + sum(map(value_bytes, graph.outputs)))


def _read_bytes(value: Value) -> int:
    rows = [node for node, place in value.uses if node is not None and node.op_type == "Gather" and place == 0]
    if not rows or len(rows) < len(value.uses):
        return value_bytes(value) if value.uses else 0
    return min(value_bytes(value), sum(value_bytes(result) for node in rows for result in node.results))
