"""Segments as a device runs them: with channels last, and one node for what one kernel computes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from irpar.analysis.channels_last import put_channels_last
from irpar.analysis.kernel_fusion import Stretch, slices_first, stand_ins
from irpar.analysis.segments import is_segment, stretches
from irpar.ir import Graph, Node, Value, captured_or_read
from irpar.ir.clone import clone_node, clone_value
from irpar.ops.effects import goes_to_group
from irpar.runtime.instructions import Segment

from .base import Constants
from .computed_constants import take_computed


def fused(segment: Segment, constants: Constants) -> tuple[Segment, frozenset[Value]]:
    """A segment with nodes that a device computes faster in place of others; its graph stays as it is.

    And the constants that it then reads which are computed of the part's when their numbers are asked for.
    """
    if any(node.identity == ("", "Conv") for node in segment.nodes):
        copy = _Copy(segment)
        if put_channels_last(copy.graph):
            computed = take_computed(copy.graph, lambda value: constants.array(copy.original(value)))
            return copy.segment(), frozenset(computed)
    nodes, computed = slices_first(_fused(segment.nodes, segment.outputs, segment.over), {*segment.outputs})
    read = (*segment.constants, *computed)
    return replace(segment, nodes=tuple(nodes), constants=read), frozenset(computed)


def _fused(nodes: Sequence[Node], outputs: Iterable[Value], over: Mapping[Value, Value]) -> tuple[Node, ...]:
    """Nodes with stand-ins for those that one kernel computes; ranks communicate in one order, which nothing passes."""
    computing = {node for node in nodes if not goes_to_group(node)}
    parts = stretches(nodes, computing)
    if len(parts) == 1 and is_segment(parts[0], computing):
        return tuple(stand_ins(Stretch(nodes, {*outputs}, over)))
    found: list[Node] = []
    for part in parts:
        if not is_segment(part, computing):
            found += part
            continue
        own = {value for node in part for value in node.results}
        elsewhere = (
            value for other in parts if other is not part for node in other for value in captured_or_read(node)
        )
        inside = {value: state for value, state in over.items() if value in own}
        found += stand_ins(Stretch(part, {*outputs, *elsewhere}, inside))
    return tuple(found)


class _Copy:
    """A segment as a graph of its own, whose nodes can change.

    Attributes:
        graph: it.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.graph = Graph(segment.graph.name, names=segment.graph.names.heir())
        copies: dict[Value, Value] = {}
        for value in segment.inputs:
            copies[value] = self.graph.adopt_input(clone_value(value))
        for value in segment.constants:
            copies[value] = self.graph.adopt_constant(clone_value(value))
        for node in segment.nodes:
            self.graph.append(clone_node(node, copies, self.graph.names))
        self.graph.set_outputs([copies[value] for value in segment.outputs])
        self._over = {copies[value]: copies[state] for value, state in segment.over.items()}
        own = (*segment.inputs, *segment.constants, *(value for node in segment.nodes for value in node.results))
        self._originals = {copies[value]: value for value in own}

    def original(self, value: Value) -> Value:
        """What a value is a copy of; a new one itself."""
        return self._originals.get(value, value)

    def segment(self) -> Segment:
        """The segment with the copy's nodes, fused."""
        nodes = _fused(tuple(self.graph), self.graph.outputs, self._over)
        for node in nodes:
            node.stand_for(self._originals)
        return replace(self._segment, nodes=nodes, constants=_constants(nodes))


def _constants(nodes: Sequence[Node]) -> tuple[Value, ...]:
    """The constants that nodes read, from around them."""
    read = dict.fromkeys(value for node in nodes for value in captured_or_read(node))
    return tuple(value for value in read if value.is_constant)
