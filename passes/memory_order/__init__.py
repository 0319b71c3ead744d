"""memory-order: an order in which a device holds less at once."""

from dataclasses import dataclass
from typing import ClassVar

from irpar.analysis.memory.liveness import peak
from irpar.ir import Graph, Module
from irpar.pass_manager import Pass, PassResult
from irpar.sharding import IrparError
from irpar.units import bytes_text

from .program import program_of
from .schedule import least_peak


@dataclass(frozen=True)
class MemoryOrder(Pass):
    """Let each device compute in an order in which it holds less at its peak.

    Before: local view. After: the same nodes in another order, with a lower peak of liveness, or as they came.

    Communication keeps its order, and so is in one order on all ranks; what stands between a start and its wait stays
    there, and the update of a training step stays behind all else, for it replaces the state. What shrinks what is held
    runs as early as it can, what lets it grow as late as it can, from the first node on and from the last one back;
    the best of these orders is the next one to improve. Bodies are ordered before what holds them.

    Results are the same bits: no node reads anything else than before.
    """

    name: ClassVar[str] = "memory-order"

    def run(self, module: Module) -> PassResult:
        """Order each program and each body in it."""
        if not module.is_local:
            raise IrparError("memory-order needs the local view", do="run it after localize")
        before = max(peak(graph).total_bytes for graph in module.graphs)
        moved = sum(_order(body) for graph in module.graphs for body in reversed(list(graph.graphs())))
        if not moved:
            return PassResult(False)
        after = max(peak(graph).total_bytes for graph in module.graphs)
        note = f"a rank holds {bytes_text(after)} at most, {bytes_text(before)} before"
        return PassResult(True, (note,), {"moved nodes": moved, "fewer bytes": before - after})


def _order(graph: Graph) -> int:
    """Put the nodes of a graph in a better order; returns how many stand elsewhere then."""
    nodes = list(graph)
    found = least_peak(program_of(graph))
    order = [nodes[number] for number in found if number < len(nodes)]
    moved = sum(node is not other for node, other in zip(nodes, order, strict=True))
    if not moved:
        return 0
    before = peak(graph).activation_bytes
    graph.reorder(order)
    if peak(graph).activation_bytes < before:
        return moved
    # What is written over state depends on the order, of which a schedule knows the old one.
    graph.reorder(nodes)
    return 0
