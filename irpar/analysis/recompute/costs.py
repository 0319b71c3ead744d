"""What it costs to run a node again."""

from irpar.analysis.cost.device import node_seconds
from irpar.analysis.cost.model import CostModel, in_femtoseconds
from irpar.analysis.cost.network import Network
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.cost.node import whole_work
from irpar.analysis.memory.liveness import value_bytes
from irpar.analysis.types.control_flow import assumed_runs
from irpar.ir import Graph, Module, Node
from irpar.ops.collectives import KINDS, sends
from irpar.ops.collectives.local import collective_axes
from irpar.ops.effects import is_communication
from irpar.ops.memory_copies import START, copied_bytes, is_copy, source_memory, target_memory

ASSUMED = "h100-nvlink-ib"
"""The network that is taken where that of the module does not know both devices and links."""


def timed(network: str) -> Network:
    """A network by which a step has a time: that of a module, or ASSUMED."""
    given = network_of(network)
    return given if given.knows_seconds and given.device is not None else network_of(ASSUMED)


class Costs:
    """Femtoseconds of nodes and collectives of local programs, by a network; by default `timed` of the module's.

    What runs on the host takes the host's time where the network knows it, and a copy that is waited for the link's.
    """

    def __init__(self, module: Module, network: Network | None = None) -> None:
        self._network = network or timed(module.network)
        self._device = CostModel(self._network)
        self._mesh = next(iter(module.meshes.values()), None)

    def of_node(self, node: Node) -> int:
        """What one device takes for a node in a step: in a loop in all trips, in one where nobody knows how many.

        What is sent in bodies of the node is not in it.
        """
        return self._once(node) * assumed_runs(node.graph)

    def of_graph(self, graph: Graph) -> int:
        """What one device takes for all nodes of a graph in a step, those in bodies too; of branches for the slower."""
        return sum(
            max(map(self.of_graph, node.nested_graphs())) if node.holds_graphs else self.of_node(node) for node in graph
        )

    def _once(self, node: Node) -> int:
        if is_copy(node):
            return self._copy(node)
        if node.place == "host" and self._network.host is not None:
            return in_femtoseconds(node_seconds(node, self._network.host))
        if not is_communication(node):
            return self._device.node(node, whole_work(node))
        kind = KINDS.get(node.op_type)
        if not sends(node) or kind is None or self._mesh is None:
            return 0
        seconds = self._network.seconds(kind, collective_axes(node), value_bytes(node.inputs[0]), self._mesh)
        return in_femtoseconds(seconds)

    def _copy(self, node: Node) -> int:
        """A copy that begins takes no time of the device: it is beside what else runs."""
        if node.op_type == START:
            return 0
        return self._device.copy(source_memory(node), target_memory(node), copied_bytes(node)) or 0
