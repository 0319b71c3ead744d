"""Regions of nodes that compute with channels last, chosen by the bytes that are moved."""

from collections.abc import Sequence

from irpar.analysis.kernel_fusion import Stretch
from irpar.analysis.min_cut import MinCut
from irpar.analysis.segments import is_segment, stretches
from irpar.ir import Graph, Node, Value
from irpar.ops.memory_copies import node_place

from .layout import lies_alike
from .operators import unit_of
from .units import Unit, moved, turning
from .writer import Writer

OLDEST_OPSET = 9
"""The first in which all that is written has the operands that it is written with."""


def put_channels_last(graph: Graph) -> int:
    """Let convolutions and what lies between them compute with channels last, where fewer bytes are moved so.

    Results keep their values where something reads them with channels first; bodies, and what the host computes, are
    left alone. Gives the number of nodes that do so.
    """
    versions = {node.version for node in graph if node.identity == ("", "Conv")}
    if not versions or min(versions) < OLDEST_OPSET or any(node.phase == "backward" for node in graph):
        return 0  # Gradients of convolutions read images as they are.
    count = 0
    for nodes in stretches(graph):
        if not is_segment(nodes) or node_place(nodes[0]) == "host":
            continue
        units = _chosen(_units(nodes))
        _Rewriting(graph, units, max(versions)).run()
        count += sum(len(unit.members) for unit in units)
    return count


def _units(nodes: list[Node]) -> list[Unit]:
    """What can be computed with channels last, in order of first nodes; no node twice."""
    inside = set(nodes)
    made = (value for node in nodes for value in node.results)
    kept = {value for value in made if any(user not in inside for user in value.users)}
    taken: set[Node] = set()
    stretch = Stretch(nodes, kept, taken=taken)
    found = []
    for node in nodes:
        unit = None if node in taken else unit_of(node, stretch)
        if unit is not None:
            taken.update(unit.members)
            found.append(unit)
    return found


def _chosen(units: Sequence[Unit]) -> list[Unit]:
    """The units for which, all together, fewest bytes are moved; as few of them as that takes.

    Turning an image costs what reads and writes it, once for all that need it so. A unit that would save more pays for
    not being chosen. That is a minimal cut: on the source's side channels are last.

        Conv -> Relu -> MaxPool -> Flatten     the image is turned behind the MaxPool, where it is smaller
    """
    if all(unit.saved <= 0 for unit in units):
        return []
    makers = {value: unit for unit in units for value in unit.makes}
    readers: dict[Value, list[Unit]] = {}
    for unit in units:
        for value in unit.reads:
            readers.setdefault(value, []).append(unit)
    of_node = {node: unit for unit in units for node in unit.members}
    cut = MinCut()
    for unit in units:
        cut.from_source(unit, max(unit.saved, 0))
        cut.to_sink(unit, max(-unit.saved, 0))
    for value in dict.fromkeys((*makers, *readers)):
        if lies_alike(value.shape):
            continue
        maker, takers = makers.get(value), readers.get(value, [])
        for unit in takers:
            cut.arc(unit, ("last", value))
            if unit.is_fused:
                _price_view(cut, unit, maker, moved(value))
        if maker is None:
            cut.to_sink(("last", value), turning(value))
            continue
        cut.arc(("last", value), maker, turning(value))
        others = {of_node.get(user) for user in value.users} - {maker}
        if others <= {*takers}:
            cut.arc(maker, ("first", value), turning(value))
            for unit in takers:
                cut.arc(("first", value), unit)
        else:
            cut.to_sink(maker, turning(value))
    chosen = cut.source_side()
    return [unit for unit in units if unit in chosen]


def _price_view(cut: MinCut, taker: Unit, maker: Unit | None, cost: int) -> None:
    """What it costs that a kernel reads elements that lie apart: it is turned behind one rather than before it."""
    if maker is None:
        cut.to_sink(taker, cost)
    else:
        cut.arc(taker, maker, cost)
        cut.arc(maker, taker, cost)


class _Rewriting:
    """Writes units in place of their nodes.

    Attributes:
        lasts: what images are with channels last.
    """

    def __init__(self, graph: Graph, units: Sequence[Unit], opset: int) -> None:
        self._graph = graph
        self._opset = opset
        self._units = units
        self._of_node = {node: unit for unit in units for node in unit.members}
        self.lasts: dict[Value, Value] = {}

    def run(self) -> None:
        """Write all of them, each where its last node is."""
        first = {value for unit in self._units for value in unit.makes if self._is_read_first(value, unit)}
        order = [node for node in self._graph if node in self._of_node]
        for node in order:
            unit = self._of_node[node]
            if node is unit.last:
                self._write(unit, first)

    def _is_read_first(self, value: Value, maker: Unit) -> bool:
        """Whether something reads an image with channels first."""
        units = (self._of_node.get(user) for user in value.users)
        return any(unit is None or (unit is not maker and value not in unit.reads) for unit in units)

    def _write(self, unit: Unit, first: set[Value]) -> None:
        w = Writer(self._graph, self._opset, self.lasts, unit.last.next, unit.last)
        for node in unit.members:
            node.detach()
        made = unit.write(w)
        for node in reversed(unit.members):
            node.erase_forced()
        for value, found in zip((*unit.makes, *unit.keeps), made, strict=True):
            if value in unit.makes:
                self.lasts[value] = found
                if value in first:
                    w.turn_back(found, value)
            elif found is not value:
                self._keep(w, value, found)

    def _keep(self, w: Writer, value: Value, found: Value) -> None:
        """Let what reads a value read another one; where a unit or something outside does, let it be that one."""
        if value.is_output or any(user in self._of_node for user in value.users):
            w.node("Identity", [found], results=[value])
        else:
            value.replace_uses(found)
