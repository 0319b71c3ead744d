"""Which collectives can be sent together, and in which order a program then runs.

a = AllReduce(p)    b = AllReduce(q)        fused = AllReduce(Concat(p, q))
x = Relu(a)         y = Relu(b)             a, b = Split(fused)    x = Relu(a)    y = Relu(b)

Collectives go in waves (`waves`): those of one are alike and do not depend on each other, so that any of them may be
sent together. So do transfers, a Send and the Recv that takes it; programs then follow the waves, all in one order, so
that no rank waits for one that waits for it. Where it is not known which Recv takes what (`transfers`), what has a
Send, a Recv, a start or a wait between it is not alike: in the program of another rank, these may stand between what
depends on each other.
"""

import heapq
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from irpar.analysis.communication_fusion import FusionMode, FusionSaid
from irpar.analysis.completion.moves import captured
from irpar.analysis.cost.network import Network
from irpar.analysis.cost.together import Packed, Together, packed
from irpar.analysis.gathers import Gathers, gathered
from irpar.analysis.memory.liveness import value_bytes
from irpar.ir import Graph, Node
from irpar.ops.collectives import COLLECTIVES, KINDS, collective_axes, sends
from irpar.ops.effects import is_communication
from irpar.ops.facts import int_attribute
from irpar.sharding import Mesh

from .transfers import Bucket, Transfer

Key = tuple[object, ...]
"""Equal for collectives of one program that can be sent together."""


@dataclass(frozen=True)
class Choice:
    """Which collectives may be merged, as the pass is told, and the module says.

    Attributes:
        told: of kinds of which the module says nothing.
        said: by the module.
        knows_seconds: whether the network does; else auto merges nothing.
        gathers: which parameters may be gathered together.
    """

    told: FusionMode
    said: FusionSaid
    knows_seconds: bool
    gathers: Gathers

    @property
    def is_none(self) -> bool:
        """Whether it is clear from the start that nothing is merged."""
        by_told = self.told.mode == "off" or (self.told.mode == "auto" and not self.knows_seconds)
        return by_told and not self.said.kinds and not self.said.numbers

    def number(self, node: Node) -> int | None:
        """The number with which the tensor of a collective goes; None where nothing is said of it."""
        if not self.said.numbers:
            return None
        values = *node.inputs, *node.results
        return self.said.number_of(tuple(name for value in values for name in (value.source, value.name) if name))

    def mode(self, node: Node) -> FusionMode:
        """How a collective is merged: with all of its number, or as its kind is."""
        found = self.said.kinds.get(KINDS[node.op_type], self.told)
        number = self.number(node)
        if found.mode == "off" or number == 0:
            return FusionMode("off")
        if number is not None:
            return FusionMode("index")
        return FusionMode("off") if found.mode == "auto" and not self.knows_seconds else found


class Sent:
    """The collectives of one graph, without the bodies in it.

    Attributes:
        nodes: id to collective.
        sends, takes: number of a transfer to its Send, or its Recv.
        before: the ids of those that each depends on, of others only through these. A node in whose bodies there are
            some counts as one, by the id of the first.

    Args:
        graph: it.
        choice: which of them may be merged; None: nobody asks for keys.
        transfers: of each Send and Recv the number of its transfer, where these are known.
    """

    def __init__(self, graph: Graph, choice: Choice | None = None, transfers: Mapping[Node, int] | None = None) -> None:
        self.graph = graph
        transfers = transfers or {}
        self._choice = choice
        self._numbers: dict[Node, int] = {}
        """How many of its kind stand before each."""
        counts: Counter[str] = Counter()
        self.nodes: dict[int, Node] = {}
        self.sends: dict[int, Node] = {}
        self.takes: dict[int, Node] = {}
        self._all: dict[int, list[Node]] = {}
        """The nodes of each, and what holds it in a body."""
        self.before: dict[int, frozenset[int]] = {}
        self._layers = self._gathered_layers()
        self._stretches: dict[Node, int] = {}
        """How many nodes of other communication stand before each: what crosses one may wait for a rank that waits."""
        stretch = 0
        behind: dict[Node, frozenset[int]] = {}
        """Of each node the nearest collectives that it depends on."""
        for node in graph:
            if node not in transfers:
                stretch += any(is_communication(each) and not sends(each) for each in (node, *_inside(node)))
            self._stretches[node] = stretch
            nearest = _union([behind[other] for other in self.made_by(node)])
            first = next(sent_in_order([node]), None)
            if first is not None:
                number = int_attribute(first, "id")
                self._all[number] = [node]
                self.before[number] = nearest
                nearest = frozenset([number])
                if first is node:
                    self.nodes[number] = node
                    self._numbers[node] = counts[node.op_type]
                    counts[node.op_type] += 1
            elif node in transfers:
                number = transfers[node]
                (self.sends if node.inputs else self.takes)[number] = node
                self._all.setdefault(number, []).append(node)
                self.before[number] = self.before.get(number, frozenset()) | nearest
                nearest = frozenset([number])
            behind[node] = nearest

    def _gathered_layers(self) -> dict[Node, Hashable]:
        """Of each gather of a parameter the layers with which it may be sent."""
        if self._choice is None or not self._choice.gathers.layers:
            return {}
        gathers = self._choice.gathers
        return {node: gathers.group(node, parameter) for node, parameter in gathered(self.graph)}

    def made_by(self, node: Node) -> Iterable[Node]:
        """The nodes of the graph that a node reads, those that bodies in it read included."""
        values = [*node.inputs, *(value for value, _ in captured(node))] if node.attributes else node.inputs
        return (value.node for value in values if value.node is not None and value.node.graph is self.graph)

    def key(self, number: int) -> Key | None:
        """What a collective must have in common with those that it is sent with; None where it is sent alone."""
        node = self.nodes[number]
        record = COLLECTIVES.get(node.op_type)
        if record is None or not record.over_axes:
            return None
        assert self._choice is not None
        mode = self._choice.mode(node)
        is_even = record.uneven.keys().isdisjoint(node.attributes)
        values = *node.inputs, *node.results
        # To an older Reshape a 0 is the size that was there.
        is_known = all(value.is_static and 0 not in value.shape for value in values)
        if mode.mode == "off" or not is_even or not is_known:
            return None
        dtype, others = node.inputs[0].dtype, tuple(node.attributes.get(name) for name in record.others)
        segment = bisect_right(mode.indices, self._numbers[node])
        number_said = self._choice.number(node)
        layers = self._layers.get(node) if number_said is None else None
        facts = node.phase, node.stage, node.place, self._stretches[node], segment, number_said, layers
        return node.op_type, collective_axes(node), others, dtype, *facts

    def order(self, buckets: Sequence[Bucket], sequence: Sequence[int] = ()) -> list[Node]:
        """The nodes in an order in which those of a bucket stand together, else as they are as far as it can be.

        A bucket comes where its last collective was; what reads the others waits for it.

        Args:
            buckets: what stands together.
            sequence: the order in which all communication comes, where that may not stay as it is.
        """
        place = {node: number for number, node in enumerate(self.graph)}
        together: dict[Node, tuple[Node, ...]] = {}
        for bucket in buckets:
            for members in self.ends(bucket):
                together.update(dict.fromkeys(members, members))
        waits: dict[Node, int] = {}
        readers: dict[Node, list[Node]] = {}
        for node in place:
            lead = together.get(node, (node,))[0]
            for before in {together.get(other, (other,))[0] for other in self.made_by(node)}:
                readers.setdefault(before, []).append(lead)
                waits[lead] = waits.get(lead, 0) + 1
        sent = dict.fromkeys(together.get(node, (node,))[0] for each in sequence for node in self._all.get(each, ()))
        for before, lead in pairwise(sent):
            readers.setdefault(before, []).append(lead)
            waits[lead] = waits.get(lead, 0) + 1
        leads = dict.fromkeys(together.get(node, (node,))[0] for node in place)
        ready = [(self._place(place, together, lead), lead) for lead in leads if not waits.get(lead)]
        numbered = dict(ready)
        queue = sorted(numbered)
        found: list[Node] = []
        while queue:
            lead = numbered[heapq.heappop(queue)]
            found.extend(together.get(lead, (lead,)))
            for reader in readers.get(lead, ()):
                waits[reader] -= 1
                if not waits[reader]:
                    number = self._place(place, together, reader)
                    numbered[number] = reader
                    heapq.heappush(queue, number)
        assert len(found) == len(place), "collectives of one wave wait for each other"
        return found

    def has_collectives(self, bucket: Bucket) -> bool:
        """Whether these are collectives, not transfers."""
        return bucket.ids[0] in self.nodes

    def ends(self, bucket: Bucket) -> list[tuple[Node, ...]]:
        """The nodes of a bucket that become one: collectives, or Sends and, apart from these, Recvs."""
        found = [
            tuple(of[number] for number in bucket.ids if number in of) for of in (self.nodes, self.sends, self.takes)
        ]
        return [nodes for nodes in found if nodes]

    @staticmethod
    def _place(place: dict[Node, int], together: dict[Node, tuple[Node, ...]], lead: Node) -> int:
        return place[together.get(lead, (lead,))[-1]]


def _union(sets: Sequence[frozenset[int]]) -> frozenset[int]:
    """All elements; one of the sets itself, where that has them all."""
    most = max(sets, key=len, default=frozenset())
    return most if all(each is most or each <= most for each in sets) else most.union(*sets)


def sent_in_order(nodes: Iterable[Node]) -> Iterator[Node]:
    """The collectives among nodes and in their bodies, in the order in which a device comes to them."""
    return (each for node in nodes for each in (node, *_inside(node)) if sends(each))


def _inside(node: Node) -> Iterable[Node]:
    return (inner for body in node.nested_graphs() for inner in body.walk()) if node.attributes else ()


@dataclass(frozen=True)
class Gain:
    """Which collectives go together: where that is faster by the network model (`Together`), or as the mode says.

    Attributes:
        mesh: of the collectives.
        network: whose links take time to start.
        choice: how they are merged.
    """

    mesh: Mesh
    network: Network
    choice: Choice

    def buckets(self, numbers: Sequence[int], programs: Sequence[Sent]) -> list[Bucket]:
        """Collectives that could all be sent together, in as few buckets as hold them where that is to be."""
        first = programs[0].nodes[numbers[0]]
        sent = [self._packed([program.nodes[number] for program in programs]) for number in numbers]
        return self._cut(
            numbers, sent, first, Together(self.network, self.mesh, KINDS[first.op_type], collective_axes(first))
        )

    def buckets_of_transfers(self, transfers: Sequence[Transfer]) -> list[Bucket]:
        """The same of transfers."""
        first = transfers[0]
        sizes = [max(map(value_bytes, transfer.values)) for transfer in transfers]
        together = Together(self.network, self.mesh, KINDS[first.send.op_type], (), pairs=first.pairs)
        sent = [packed(None, None, size, size) for size in sizes]
        return self._cut([transfer.number for transfer in transfers], sent, first.send, together)

    def _cut(self, numbers: Sequence[int], sent: Sequence[Packed], first: Node, together: Together) -> list[Bucket]:
        mode = self.choice.mode(first)
        if mode.mode == "index":
            ranges = [range(len(numbers))]
        else:
            together = replace(together, most_bytes=round(mode.size_mb * 1e6))
            ranges = together.buckets(sent, by_size=mode.mode == "size")
        found = [tuple(numbers[place] for place in bucket) for bucket in ranges]
        return [Bucket(ids) for ids in found if len(ids) > 1]

    def key_of_transfer(self, transfer: Transfer) -> Key | None:
        """What a transfer must have in common with those that it is sent with; None where it is sent alone."""
        ends = transfer.sends, transfer.takes
        mode, values = self.choice.mode(transfer.send), transfer.values
        # To an older Reshape a 0 is the size that was there.
        if mode.mode == "off" or not all(value.is_static and 0 not in value.shape for value in values):
            return None
        facts = [(place, node.phase, node.stage, node.place) for end in ends for place, node in end.items()]
        segment = bisect_right(mode.indices, transfer.place)
        return transfer.pairs, len(transfer.sends), values[0].dtype, *facts, segment, self.choice.number(transfer.send)

    @staticmethod
    def _packed(nodes: Sequence[Node]) -> Packed:
        """A collective, in the program with the largest blocks."""
        node = max(nodes, key=lambda node: value_bytes(node.inputs[0]))
        sizes = value_bytes(node.inputs[0]), value_bytes(node.results[0])
        return packed(*cut_and_joined(node), *sizes)


def cut_and_joined(node: Node) -> tuple[int | None, int | None]:
    """The dim of its operand of which a collective sends each member a block, and that along which it joins theirs."""
    entries = [entry for entry in COLLECTIVES[node.op_type].uneven.values() if entry is not None]
    dims = {where: int_attribute(node, dim) for dim, where in entries}
    return dims.get("result"), dims.get("operand")


@dataclass(frozen=True)
class PackedBlock:
    """How the block of one collective stands in a row that is sent with others.

    Attributes:
        cut, joined: from `cut_and_joined`.
        members: devices of the group.
        operand, result: shapes.
    """

    cut: int | None
    joined: int | None
    members: int
    operand: tuple[int, ...]
    result: tuple[int, ...]

    @cached_property
    def rows(self) -> int:
        """Rows of the operand: what goes to one member each, where it is cut."""
        return 1 if self.cut is None else self.members

    @cached_property
    def rows_after(self) -> int:
        """Rows of the result: what comes from one member each, where these are joined."""
        return 1 if self.joined is None else self.members

    @property
    def width(self) -> int:
        """Elements of a row."""
        return math.prod(self.operand) // self.rows

    def split(self, shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
        """A shape with the members apart from the rest of a dim."""
        return (*shape[:dim], self.members, shape[dim] // self.members, *shape[dim + 1 :])

    def to_front(self, dim: int) -> list[int]:
        """The permutation that brings the members of a shape that is split there to the front."""
        return [dim, *(place for place in range(len(self.operand) + 1) if place != dim)]

    def from_front(self, dim: int) -> list[int]:
        """The permutation back."""
        return [*range(1, dim + 1), 0, *range(dim + 1, len(self.operand) + 1)]
