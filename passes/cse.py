"""cse: merge equal nodes and equal small constants."""

from dataclasses import dataclass
from typing import ClassVar

from irpar.analysis.equal_nodes import equal_constants, equal_nodes, merge_constants
from irpar.analysis.memory.liveness import peak_bytes
from irpar.ir import Module, Node
from irpar.ir.annotate import hand_over
from irpar.ops import traits
from irpar.ops.effects import is_communication
from irpar.pass_manager import PassResult, PassWithinLimit


@dataclass(frozen=True)
class Cse(PassWithinLimit):
    """Let nodes that compute the same be one: the same operator, attributes and operands, in the order of the graph.

    Before: any graph. After: of equal nodes the first is left, unless they draw random numbers, hold graphs, send, copy
    between memories, or differ in phase, stage, place or in how their results lie on the mesh. Nodes in a nested graph
    merge with equal ones before its holder.

    Of the constants only single numbers and short lists of indices merge: equal weights of two layers stay two, since
    each can be annotated for itself. No file is read.
    """

    name: ClassVar[str] = "cse"
    takes_out: ClassVar[str] = "another constant is equal"

    def most_held(self, module: Module) -> int:
        """See `PassWithinLimit.most_held`."""
        return peak_bytes(module)

    def run(self, module: Module) -> PassResult:
        """Merge in all graphs and functions."""
        nodes = constants = 0
        for graph in (*module.graphs, *(function.graph for function in module.functions.values())):
            numbers = equal_constants(graph)
            merge_constants(numbers)
            constants += len(numbers)
            equal = equal_nodes(graph, _is_quiet)
            for node, known in equal:
                for old, new in zip(node.results, known.results, strict=True):
                    hand_over(module, old.name, new.name, f"%{new.name} is equal, and is sharded so")
                node.replace(known.results)
            nodes += len(equal)
        return PassResult(nodes + constants > 0, statistics={"nodes": nodes, "constants": constants})


def _is_quiet(node: Node) -> bool:
    return not (is_communication(node) or traits(node).copies)
