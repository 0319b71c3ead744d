"""Segments as a device runs them: nodes that one kernel computes are one node."""

from collections.abc import Mapping
from dataclasses import dataclass

from irpar.analysis.engines import writes_out
from irpar.analysis.kernel_fusion import fuse
from irpar.ir import Graph, Node, Value, clone_node, clone_value
from irpar.runtime.instructions import Segment


@dataclass(frozen=True, eq=False)
class FusedSegment:
    """A copy of a segment, with the nodes irpar.Fused in it.

    Attributes:
        segment: the copy; inputs and outputs stand for those of the given one, in their order.
        constants: the constants that it reads, and those of the given segment that they stand for.
    """

    segment: Segment
    constants: Mapping[Value, Value]


def fused(segment: Segment) -> FusedSegment:
    """A segment with its nodes fused; the graph that it belongs to stays as it is."""
    graph = Graph(segment.graph.name)
    graph.view, graph.ranks = segment.graph.view, segment.graph.ranks
    values: dict[Value, Value] = {}
    for value in segment.inputs:
        values[value] = graph.adopt_input(clone_value(value))
    for value in segment.constants:
        values[value] = graph.adopt_constant(clone_value(value))
    made_of = {node: graph.append(clone_node(node, values, graph.names)) for node in segment.nodes}
    graph.set_outputs([values[value] for value in segment.outputs])
    replaced = {made_of[node].result: values[state] for node, state in segment.over.items()}
    fuse(graph)
    constants = {values[value]: value for value in segment.constants if values[value].has_uses}
    made = Segment(
        segment.index,
        graph,
        tuple(graph),
        tuple(values[value] for value in segment.inputs),
        tuple(constants),
        graph.outputs,
        _over(graph, replaced),
    )
    return FusedSegment(made, constants)


def _over(graph: Graph, replaced: Mapping[Value, Value]) -> dict[Node, Value]:
    """The nodes that can write their one result over a state: those behind which nothing reads it any more."""
    places = {node: place for place, node in enumerate(graph)}
    found: dict[Node, Value] = {}
    for new, state in replaced.items():
        node = new.node
        if node is not None and len(node.results) == 1 and _last_read(state, node, places) < places[node]:
            found[node] = state
    return found


def _last_read(state: Value, writer: Node, places: Mapping[Node, int]) -> int:
    """The place of the last node but one that reads a value, or what may be a view of it."""
    last = -1
    waiting = [state]
    while waiting:
        value = waiting.pop()
        for node in value.users:
            if node is writer and value is state:
                continue
            last = max(last, places.get(node, len(places)))
            if node in places and not writes_out(node):
                waiting += node.results
    return last
