"""What goes from rank to rank: which Recv takes what which Send sends, over the programs of all ranks.

rank 0: irpar.Send(%a) {channel=3, pairs=[0, 1]}        rank 1: %b = irpar.Recv() {channel=3, pairs=[0, 1]}

What is sent on a channel is taken in order, so that the first Send and the first Recv of a channel are one transfer. It
depends on what its operand depends on, and what reads its result, in another program, depends on it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from irpar.ir import Graph, Node, Value
from irpar.ops.bodies import reached
from irpar.ops.collectives import sends
from irpar.ops.collectives.point_to_point import CHANNELS
from irpar.ops.effects import is_communication
from irpar.ops.facts import int_attribute, ints_attribute
from irpar.ops.op_def import traits


@dataclass(frozen=True)
class Bucket:
    """Collectives, or transfers, that are sent together.

    Attributes:
        ids: in program order, the same on all ranks; of transfers their numbers.
    """

    ids: tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """A tensor that goes from rank to rank.

    Attributes:
        number: the least id of its nodes.
        place: how many others are before it.
        sends, takes: by the number of a program, its Send or Recv; one of each at most.
    """

    number: int
    place: int
    sends: Mapping[int, Node]
    takes: Mapping[int, Node]

    @property
    def pairs(self) -> tuple[int, ...]:
        """Sources and targets in turn."""
        return ints_attribute(self.send, "pairs") or ()

    @property
    def send(self) -> Node:
        """The Send of the first program that has one."""
        return next(iter(self.sends.values()))

    @property
    def values(self) -> list[Value]:
        """What is sent and what is taken, in all programs."""
        return [*(node.inputs[0] for node in self.sends.values()), *(node.result for node in self.takes.values())]


def transfers_of(programs: Sequence[Graph]) -> list[Transfer] | None:
    """All transfers, by number; None where it cannot be told which Recv takes what.

    So it is where something is sent or taken in a body or function, where the nodes of a channel name different pairs,
    or programs have different numbers of them; and where anything is started, and waited for elsewhere.
    """
    if not any(traits(node).point_to_point for graph in programs for node in graph):
        return []
    found: defaultdict[int, list[list[list[Node]]]] = defaultdict(lambda: [[[] for _ in programs] for _ in range(2)])
    collectives: set[int] = set()
    for place, graph in enumerate(programs):
        for node in graph:
            if traits(node).point_to_point:
                found[int_attribute(node, "channel")][not node.inputs][place].append(node)
            elif any(is_communication(inner) and not sends(inner) for inner in reached(node)):
                return None
            collectives.update(int_attribute(inner, "id") for inner in reached(node) if sends(inner))
    made: list[tuple[int, dict[int, Node], dict[int, Node]]] = []
    for sent, taken in found.values():
        nodes = [node for of_program in (*sent, *taken) for node in of_program]
        counts = {len(of_program) for of_program in (*sent, *taken) if of_program}
        if len({ints_attribute(node, "pairs") for node in nodes}) > 1 or len(counts) != 1:
            return None
        for number in range(counts.pop()):
            ends = [{place: each[number] for place, each in enumerate(side) if each} for side in (sent, taken)]
            if not all(ends):
                return None
            ids = [int_attribute(node, "id") for end in ends for node in end.values()]
            made.append((min(ids), ends[0], ends[1]))
    numbers = {number for number, _, _ in made}
    if len(numbers) < len(made) or not numbers.isdisjoint(collectives):
        return None
    made.sort(key=lambda each: each[0])
    return [Transfer(number, place, *ends) for place, (number, *ends) in enumerate(made)]


def free_channels(programs: Sequence[Graph], buckets: Sequence[Bucket]) -> dict[Bucket, int]:
    """A channel for each bucket on which nothing is sent yet; for the first few only where there are not as many."""
    if not buckets:
        return {}
    used = {node.attributes["channel"] for graph in programs for node in graph if traits(node).point_to_point}
    free = (channel for channel in range(min(CHANNELS, len(used) + len(buckets))) if channel not in used)
    return dict(zip(buckets, free, strict=False))
