"""Programs whose nodes and weights are scattered over device, host and disk at random, with the copies that this takes."""

import random
from dataclasses import dataclass
from typing import ClassVar

from irpar.ir import DType, Graph, Memory, Module, Node, Place, Value
from irpar.ops import holds_collectives
from irpar.ops.memory_copies import CopyWriter, node_place, put
from irpar.pass_manager import Pass, PassManager, PassResult
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE


@dataclass(frozen=True)
class ScatterPlaces(Pass):
    """Scatter nodes and constants; each value is copied once to where it is read, half of them by copies in flight."""

    name: ClassVar[str] = "scatter-places"
    seed: int = 0

    def run(self, module: Module) -> PassResult:
        for graph in module.graphs:
            # All programs alike, as far as they are.
            _scatter(graph, random.Random(self.seed))
        return PassResult(True)


def scattering(seed: int) -> PassManager:
    """The default passes, with nodes scattered before segments are grouped."""
    passes = [*PassManager.parse(DEFAULT_PIPELINE).passes]
    return PassManager([*passes[:-1], ScatterPlaces(seed), passes[-1]])


def _scatter(graph: Graph, draw: random.Random) -> None:
    writer = CopyWriter(graph)
    for node in graph:
        if not holds_collectives(node) and draw.random() < 0.5:
            put(node, "host")
    for value in graph.constants:
        value.memory = draw.choice(("device", "host", "disk")) if value.dtype is DType.F32 else "device"
    for value in list(graph.values()):
        for place in ("device", "host"):
            if value.memory != place:
                _copy(writer, graph, value, place, draw.random() < 0.5)


def _copy(writer: CopyWriter, graph: Graph, value: Value, place: Place, starts: bool) -> None:
    """Let all that reads a value somewhere else read one copy of it."""
    uses = [(node, index) for node, index in value.uses if not node.is_return and _where(node, graph) == place]
    if not uses:
        return
    readers = {_holder(node, graph) for node, _ in uses}
    first = next(node for node in graph if node in readers)
    if starts:
        begin = graph.first if value.node is None else value.node.next
        copied = writer.wait(writer.start(value, place, begin, why="scattered"), first)
    else:
        copied = writer.copy(value, place, first, why="scattered")
    value.replace_uses(copied, uses)


def _holder(node: Node, graph: Graph) -> Node:
    while node.graph is not graph:
        assert node.graph is not None
        assert node.graph.parent is not None
        node = node.graph.parent
    return node


def _where(node: Node, graph: Graph) -> Memory:
    return node_place(_holder(node, graph))
