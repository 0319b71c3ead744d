"""The cost model: what nodes, redistributions and graphs cost, for whoever chooses and for whoever predicts.

    cost = CostModel(network_of("h100-nvlink-ib"))
    cost.collective("all_reduce", [Axis("tp")], 1 << 20, mesh)      (femtoseconds, sent bytes, 1)
    cost.node(node, work)                                           femtoseconds on one device
    cost.graph_seconds(graph)                                       seconds of one device's program

Completion, refinement, the search for redistributions and suggestions add up the same figures that plan.json then
predicts. They are of one device, in each step:

* a collective by `network`: latency, bandwidth and algorithm of its links; by `bytes`, its sent bytes (ring model);
* a node by `device` (roofline: the longer of arithmetic and memory traffic, Williams, Waterman & Patterson 2009);
* a graph as the sum of its nodes and collectives, since nothing overlaps.

What is compared is an amount in one unit: femtoseconds where the network has links, else sent bytes. Integers, so that
sums do not depend on their order. Equal amounts are told apart by launches, and by how many devices share the work.
Suggestions, which know no device, weigh FLOPs, weights and sent bytes against each other as `figures` says.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from irpar.ir import Graph, Memory, Node
from irpar.sharding import Axis, Mesh

from .device import graph_seconds, node_seconds
from .network import Network
from .network_algorithms import ring_bytes
from .node import Work

Key = tuple[int, ...]
"""What collectives cost, to be added and compared: (sent bytes, launches), or (femtoseconds, sent bytes, launches)."""

Cost = tuple[int, int]
"""An amount in the unit of the model, and launches."""

Price = tuple[int, int, int]
"""(amount, minus the number of devices that share the work but for local programs, launches), of one way to run a node.

What a local program saves in work is little beside its launches, so that it does not decide between equals.
"""

FEMTOSECONDS = 1e15
"""In a second."""

CostOf = Callable[[Node], int]
"""What it costs to run a node, in femtoseconds where it is time."""

IMPOSSIBLE: Price = (1 << 200, 0, 0)
"""Of results that should be partial over axes that they are not."""

_PER_BYTE_TOO_MUCH = 1 << 40
"""What a byte for which a device has no room costs: more than any way around it."""
_BOUNDS_BYTES = 24
"""Of the start, the end and the axis of a Slice."""
_LAUNCH = 1e-4
_WORK = 0.5
"""What breaks ties between equal amounts where all is one number: launches, and the share of all FLOPs that a device
computes. Beside femtoseconds they vanish, where computation has its own price."""


@dataclass(frozen=True)
class CostModel:
    """What things cost one device by a network.

    Attributes:
        network: links, device and room.
    """

    network: Network

    @property
    def has_computation(self) -> bool:
        """Whether what nodes compute has a price."""
        return self.network.device is not None

    # -- redistributions --------------------------------------------------------------------------------------------

    @property
    def nothing(self) -> Key:
        """The key of sending nothing."""
        return (0, 0, 0) if self.network.links else (0, 0)

    def collective(self, kind: str, axes: Sequence[Axis], local_bytes: int, mesh: Mesh) -> Key:
        """What a collective costs; that of several is the sum, number by number (`add_keys`).

        Args:
            kind: as plan.json calls it: all_reduce, all_gather, reduce_scatter, all_to_all, permute, broadcast.
            axes: the mesh axes that it runs over.
            local_bytes: the operand that one device holds; of uneven blocks the padded one.
            mesh: the mesh.
        """
        sent = ring_bytes(kind, mesh.group_size(axes), local_bytes)
        if not self.network.links:
            return sent, 1
        return in_femtoseconds(self.network.seconds(kind, axes, local_bytes, mesh)), sent, 1

    def redistribution(self, steps: Iterable[tuple[str, Sequence[Axis], int]], mesh: Mesh) -> Key:
        """What collectives one after the other cost: of each its kind, axes and local bytes (`collective`)."""
        total = self.nothing
        for kind, axes, local_bytes in steps:
            total = add_keys(total, self.collective(kind, axes, local_bytes, mesh))
        return total

    # -- nodes ------------------------------------------------------------------------------------------------------

    def node(self, node: Node, work: Work) -> int:
        """What one device's share of a node computes, in femtoseconds; 0 where nothing is known of the device."""
        device = self.network.device
        return 0 if device is None else in_femtoseconds(node_seconds(node, device, work))

    def slice(self, block_bytes: int) -> int:
        """What it costs to cut a block out of what a device holds, in femtoseconds; 0 where nothing is known of it."""
        device = self.network.device
        return 0 if device is None else in_femtoseconds(device.seconds(0, 2 * block_bytes + _BOUNDS_BYTES))

    def excess(self, held_bytes: int) -> int:
        """What it costs to hold so many bytes at once: nothing, or beyond the room of a device more than anything."""
        room = self.network.memory
        return 0 if room is None else max(0, held_bytes - room) * _PER_BYTE_TOO_MUCH

    @staticmethod
    def scalar(price: Price, work: float) -> float:
        """A price as one number, where prices of many nodes are added in floating point.

        Args:
            price: of one way to run a node.
            work: the node's share of the FLOPs of the whole graph on one device.
        """
        amount, minus_ways, launches = price
        return amount + _LAUNCH * launches - _WORK * work / minus_ways

    # -- graphs -----------------------------------------------------------------------------------------------------

    def graph_seconds(self, graph: Graph) -> float | None:
        """Seconds that one device and its host compute for a graph; None where nothing is known of one that does."""
        device, host = self.network.device, self.network.host
        if device is None:
            return None
        if not any(node.place == "host" for node in graph.walk()):
            return graph_seconds(graph, device)
        return None if host is None else graph_seconds(graph, device, host)

    def copy(self, source: Memory, target: Memory, size: int) -> int | None:
        """What a copy between two memories of a rank costs in femtoseconds; None where that is not known."""
        seconds = self.network.copy_seconds(source, target, size)
        return None if seconds is None else in_femtoseconds(seconds)


def add_keys(first: Key, second: Key) -> Key:
    """The key of two collectives one after the other."""
    return tuple(a + b for a, b in zip(first, second, strict=True))


def in_femtoseconds(seconds: float) -> int:
    """As a model adds them."""
    return round(seconds * FEMTOSECONDS)
