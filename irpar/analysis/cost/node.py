"""FLOPs and bytes of nodes and graphs, from the operator definitions."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from irpar.analysis.memory.liveness import value_bytes
from irpar.analysis.types.control_flow import assumed_trips
from irpar.ir import Graph, Node
from irpar.ops import flops

_IS_STATIC = attrgetter("is_static")


@dataclass(frozen=True)
class Work:
    """What one device does for a node.

    Attributes:
        flops: floating-point operations.
        operands, results: bytes of what it holds of each operand that there is, and of each result.
    """

    flops: float
    operands: Sequence[int]
    results: Sequence[int]


def whole_work(node: Node) -> Work:
    """The work of all of a node; in a local graph that is the share of one device."""
    return Work(node_flops(node), tuple(map(value_bytes, node.inputs)), tuple(map(value_bytes, node.results)))


def node_flops(node: Node) -> int:
    """Floating-point operations of a node; 0 where a type is not static or the op has no definition.

    An If counts its more expensive branch, a Loop or Scan as many trips as are known before it runs, or one.
    """
    nested = [graph_flops(graph) for graph in node.nested_graphs()] if node.holds_graphs else []
    if nested:
        return assumed_trips(node) * max(nested)
    return flops(node) if all(map(_IS_STATIC, (*node.inputs, *node.results))) else 0


def node_bytes(node: Node) -> int:
    """Bytes that a node reads and writes."""
    return sum(map(value_bytes, node.inputs)) + sum(map(value_bytes, node.results))


def graph_flops(graph: Graph) -> int:
    """Floating-point operations of all nodes; in a local graph those of one device."""
    return sum(map(node_flops, graph))
