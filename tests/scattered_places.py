"""Programs whose nodes and weights are scattered over device, host and disk at random, with the copies that this takes."""

import random
from dataclasses import dataclass
from typing import ClassVar

from irpar.ir import DType, Graph, Memory, Module, Node, Place, Value
from irpar.ir.state_rules import replace_outputs
from irpar.ops import holds_collectives
from irpar.ops.memory_copies import CopyWriter, is_copy, node_place, put
from irpar.pass_manager import Pass, PassManager, PassResult
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE


@dataclass(frozen=True)
class ScatterPlaces(Pass):
    """Scatter nodes, constants and state; each value is copied once to where it is read, half of them in flight."""

    name: ClassVar[str] = "scatter-places"
    seed: int = 0

    def run(self, module: Module) -> PassResult:
        for graph in module.graphs:
            # All programs alike, as far as they are.
            draw = random.Random(self.seed)
            for node in graph:
                if not holds_collectives(node) and draw.random() < 0.5:
                    put(node, "host")
            for value in (*graph.constants, *graph.states):
                if value.dtype is DType.F32:
                    value.memory = draw.choice(("device", "host", "disk"))
            _write_copies(graph, draw)
        return PassResult(True)


@dataclass(frozen=True)
class PlaceOptimizer(Pass):
    """Put the update of a training step on the host, with the state that nothing else reads: ZeRO-Offload's split."""

    name: ClassVar[str] = "place-optimizer"

    def run(self, module: Module) -> PassResult:
        for graph in module.graphs:
            for node in graph:
                if node.phase == "optimizer" and not holds_collectives(node):
                    put(node, "host")
            for value in (*graph.states, *graph.constants):
                if value.users and all(_where(node, graph) == "host" for node in value.users):
                    value.memory = "host"
            _write_copies(graph, random.Random(0))
        return PassResult(True)


def with_pass(placing: Pass, pipeline: str = DEFAULT_PIPELINE) -> PassManager:
    """Passes, with one more before segments are grouped."""
    passes = [*PassManager.parse(pipeline).passes]
    return PassManager([*passes[:-1], placing, passes[-1]])


def scattering(seed: int) -> PassManager:
    """The default passes, with nodes scattered before segments are grouped."""
    return with_pass(ScatterPlaces(seed))


def _write_copies(graph: Graph, draw: random.Random) -> None:
    """Let state end where it begins, and copy each value once to where else it is read."""
    writer = CopyWriter(graph)
    outputs = list(graph.outputs)
    for value, state in graph.states.items():
        if state.output is not None and outputs[state.output].memory != value.memory:
            outputs[state.output] = writer.copy(outputs[state.output], value.memory)
    replace_outputs(graph, list(zip(graph.output_names, outputs, strict=True)))
    for value in list(graph.values()):
        for place in ("device", "host"):
            if value.memory != place:
                _copy(writer, graph, value, place, draw.random() < 0.5)


def _copy(writer: CopyWriter, graph: Graph, value: Value, place: Place, starts: bool) -> None:
    """Let all that reads a value somewhere else read one copy of it."""
    uses = [
        (node, index)
        for node, index in value.uses
        if not (node.is_return or is_copy(node)) and _where(node, graph) == place
    ]
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
