"""When a program computes, communicates and copies: what of its copies is hidden behind the rest.

    %s = irpar.CopyStart(%h)   Gemm (3 s)   %d = irpar.Wait(%s)      of a copy of 5 s, 2 s are exposed

Started copies run one after the other beside what else the rank does, in the order in which they are started; one that
is not started before is waited for.
"""

from collections.abc import Callable
from dataclasses import dataclass

from irpar.analysis.types.control_flow import assumed_trips
from irpar.ir import Graph, Node, Value
from irpar.ops import holds_collectives, traits
from irpar.ops.bodies import waits_for_copy
from irpar.ops.effects import is_communication
from irpar.ops.facts import CannotTellError
from irpar.ops.memory_copies import copied_bytes, is_copy, node_place, source_memory, target_memory

from .device import node_seconds
from .network import Network


@dataclass(frozen=True)
class CopySeconds:
    """Seconds of the copies of a program.

    Attributes:
        total: of all of them.
        exposed: that the rank waits for them.
    """

    total: float
    exposed: float


def seconds_of_copy(network: Network, node: Node) -> float | None:
    """Seconds of a copy; None where the network does not know what it passes."""
    try:
        return network.copy_seconds(source_memory(node), target_memory(node), copied_bytes(node))
    except CannotTellError:
        return 0.0


def copy_seconds(network: Network, graph: Graph, communication: Callable[[Node], float]) -> CopySeconds | None:
    """Seconds of the copies of a program that runs in its order; None where the network does not know them.

    Args:
        network: what copies and nodes cost.
        graph: a local graph.
        communication: seconds of a node of communication.
    """
    clock = _Clock(network, communication)
    try:
        clock.run(graph)
    except CannotTellError:
        return None
    return CopySeconds(clock.total, clock.exposed)


class _Clock:
    """Where a rank and what copies for it are in time.

    Attributes:
        now: of the rank.
        free: when the last started copy has ended.
        total, exposed: see `CopySeconds`.
    """

    def __init__(self, network: Network, communication: Callable[[Node], float]) -> None:
        self.network = network
        self.communication = communication
        self.now = self.free = self.total = self.exposed = 0.0
        self._ends: dict[Value, float] = {}

    def run(self, graph: Graph) -> None:
        """Let the time of a graph pass.

        Raises:
            CannotTellError: the network does not know what something takes.
        """
        for node in graph:
            if is_copy(node):
                self._copy(node)
            elif waits_for_copy(node):
                self._until(self._ends.pop(node.inputs[0]))
            elif is_communication(node):
                self.now += self.communication(node)
            elif node.holds_graphs and holds_collectives(node):
                self._bodies(node)
            else:
                self.now += self._computing(node)

    def _copy(self, node: Node) -> None:
        seconds = seconds_of_copy(self.network, node)
        if seconds is None:
            raise CannotTellError
        self.total += seconds
        self.free = max(self.now, self.free) + seconds
        if traits(node).starts:
            self._ends[node.result] = self.free
        else:
            self._until(self.free)

    def _until(self, end: float) -> None:
        if end > self.now:
            self.exposed += end - self.now
            self.now = end

    def _computing(self, node: Node) -> float:
        device = self.network.host if node_place(node) == "host" else self.network.device
        if device is None:
            return 0.0
        return node_seconds(node, device)

    def _bodies(self, node: Node) -> None:
        """As often as the longest of the bodies runs; each trip ends with what it has started."""
        found = []
        for body in node.nested_graphs():
            inner = _Clock(self.network, self.communication)
            inner.run(body)
            found.append((inner.now, inner.total, inner.exposed))
        now, total, exposed = max(found)
        trips = assumed_trips(node)
        self.now += trips * now
        self.total += trips * total
        self.exposed += trips * exposed
