"""What tells whole ways to shard a graph apart, beside what they send."""

from dataclasses import dataclass

from irpar.analysis.completion.flow import Flow
from irpar.analysis.completion.moves import placements_of
from irpar.analysis.cost.model import Cost
from irpar.analysis.cost.network import Network
from irpar.analysis.redistribution import bytes_held


@dataclass(frozen=True)
class Measured:
    """A way to shard the values of a graph.

    Attributes:
        sent: what all moves cost, as nodes run before they are chosen again around them.
        held: bytes that a device holds of the constants.
        work: FLOPs of a device.
    """

    sent: Cost
    held: int
    work: int


def measured(flow: Flow, network: Network, sent: Cost) -> Measured:
    """How a graph is sharded, of which every tensor has a sharding."""
    return Measured(sent, _constants_held(flow), _work(flow, network))


def _work(flow: Flow, network: Network) -> int:
    """FLOPs of a device, as nodes run before they are chosen again around redistributed values."""
    total = 0
    for node, placement in placements_of(flow, network).items():
        view = flow.rule(node)
        if view is not None:
            times = flow.usual_trips_of(node.graph) * max(map(flow.layers_of, node.results), default=1)
            total += times * (view.flops // placement.ways(flow.mesh))
    return total


def _constants_held(flow: Flow) -> int:
    """Bytes that a device holds of the constants as they are sharded."""
    values = (value for graph in flow.trips for value in graph.constants)
    return sum(flow.layers_of(value) * bytes_held(value, value.sharding) for value in values)
