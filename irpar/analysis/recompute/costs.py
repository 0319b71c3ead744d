"""What it costs to run a node again."""

from irpar.analysis.cost.model import CostModel, in_femtoseconds
from irpar.analysis.cost.network import Network
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.cost.node import whole_work
from irpar.analysis.memory.liveness import value_bytes
from irpar.analysis.types.control_flow import runs
from irpar.ir import Module, Node
from irpar.ops.collectives import KINDS, sends
from irpar.ops.collectives.local import collective_axes
from irpar.ops.effects import is_communication

ASSUMED = "h100-nvlink-ib"
"""The network whose device and links are taken where the module's says nothing of them."""


def timed(network: str) -> Network:
    """A network by which a step has a time: that of a module, or where it knows no device or no links, ASSUMED."""
    given = network_of(network)
    return given if given.knows_seconds and given.device is not None else network_of(ASSUMED)


class Costs:
    """Femtoseconds of nodes and collectives of local programs, by the network of the module."""

    def __init__(self, module: Module) -> None:
        given, assumed = network_of(module.network), network_of(ASSUMED)
        self._links: Network = given if given.knows_seconds else assumed
        self._device = CostModel(given if given.device is not None else assumed)
        self._mesh = next(iter(module.meshes.values()), None)

    def of_node(self, node: Node) -> int:
        """What one device takes for a node in a step: in a loop in all trips, in one where nobody knows how many."""
        return self._once(node) * (runs(node.graph) or 1)

    def _once(self, node: Node) -> int:
        if not is_communication(node):
            return self._device.node(node, whole_work(node))
        kind = KINDS.get(node.op_type)
        if not sends(node) or kind is None or self._mesh is None:
            return 0
        seconds = self._links.seconds(kind, collective_axes(node), value_bytes(node.inputs[0]), self._mesh)
        return in_femtoseconds(seconds)
