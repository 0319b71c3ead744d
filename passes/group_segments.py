"""group-segments: compute nodes between two collectives stand together, in as few segments as the order allows."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Literal

from irpar.analysis.equal_nodes import equal_nodes
from irpar.analysis.memory.liveness import Spans, nested_bytes, uses_of, value_bytes
from irpar.analysis.memory.replaced import Reads, reads_of
from irpar.analysis.twins import twins_of
from irpar.ir import Graph, Module, Node, Value, captured_or_read
from irpar.ops import called_communication, holds_collectives, traits
from irpar.ops.collectives import number_alike
from irpar.ops.memory_copies import node_place, number_copies
from irpar.pass_manager import Pass, PassResult
from irpar.sharding import IrparError

_MOST_ROUNDS = 16
"""Attempts to find an order that holds no more; then the order stays as it came."""


@dataclass(frozen=True)
class GroupSegments(Pass):
    """Decide in which order a device computes, and number the collectives in it.

    Before: local view. After: the same nodes, in the order in which they run; what stands between two nodes of
    communication is one segment, and ids follow order. Communication keeps its order, and so do copies between
    memories; of what stands between two of them the host computes its part behind the device's.

    A node moves to another segment only where its own then is gone, which saves a launch, and no move lets the peak of
    the liveness rise: in the worst case the order stays as it came. Order that was asked for stays in any case: what is
    computed again (as an earlier node computes it) does not move to an earlier segment, nothing moves into an earlier
    phase, and what stands between a start and its wait stays there. What is made of constants alone stands in the
    segment that reads it first, so that it does not wait in memory.

    The fewest slots that stab all intervals in which nodes can run are found from the intervals that end first (the
    greedy choice is optimal on intervals).

    Options:
        order: `fewest` segments, or nodes `as-written`, of which only the collectives are numbered.
    """

    name: ClassVar[str] = "group-segments"
    order: Literal["fewest", "as-written"] = "fewest"

    def run(self, module: Module) -> PassResult:
        """Rearrange each program, and each body in it that communicates."""
        if not module.is_local:
            raise IrparError("group-segments needs the local view", do="run it after localize")
        moved = 0
        if self.order == "fewest":
            bodies = [body for graph in module.graphs for body in graph.graphs()]
            talking = [body for body in bodies if any(map(holds_collectives, body))]
            moved = sum(arrangement.apply() for arrangement in _arrangements(talking))
        numbered = number_alike(module.graphs)
        numbered = number_copies(module.graphs) or numbered
        return PassResult(moved > 0 or numbered, statistics={"moved nodes": moved} if moved else {})


class _Wish(IntEnum):
    """Where the nodes of a segment go if it can be done without."""

    LATER = 0
    EARLIER = 1
    STAY = 2


def _on_host(nodes: Sequence[Node]) -> list[bool]:
    """Which nodes the host computes, that may stand behind what the device does between the same two copies.

    They read nothing of each other there, but for sizes: where one does, no node moves for its place.
    """
    where = {node: node_place(node) for node in nodes}
    sizes = ((value.node, node) for node in nodes if traits(node).reads_sizes for value in node.inputs)
    if any(where.get(maker, where[node]) != where[node] for maker, node in sizes if maker is not None):
        return [False] * len(nodes)
    return [place == "host" for place in where.values()]


def _arrangements(graphs: Iterable[Graph]) -> "list[_Arrangement]":
    """Those of some graphs; of twins the nodes are looked at once."""
    own: list[_Arrangement] = []
    found: list[_Arrangement] = []
    for graph in graphs:
        made = next((made for known in own if (made := known.of_twin(graph)) is not None), None)
        if made is None:
            made = _Arrangement(graph)
            own.append(made)
        found.append(made)
    return found


Targets = tuple[list[int], list[int]]
"""The slots that are used, and the slot of every node."""


class _Arrangement:
    """A graph whose nodes are given slots: slot n is behind the first n nodes of communication.

    Attributes:
        known_targets, known_spans: what was found for the same wishes and the same slots, for twins to take over; in
            values of the graph that was looked at.
        size_of: what such a value takes in this graph.
        nested: what the bodies of each node hold.
        held_for: from `reads_of`; None of a twin.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.known_targets: dict[tuple[_Wish, ...], Targets] = {}
        self.known_spans: dict[tuple[int, ...], Spans] = {}
        self.size_of: Callable[[Value], int] = value_bytes
        self.nodes = list(graph)
        self.nested = list(map(nested_bytes, self.nodes))
        self.on_host = _on_host(self.nodes)
        self.communicates = [holds_collectives(node) for node in self.nodes]
        self.held_for: Reads | None = reads_of(graph)
        self.slots: list[int] = []
        self.barriers: list[int] = []
        self.count = 0
        for node, talks in zip(self.nodes, self.communicates, strict=True):
            self.slots.append(self.count)
            if talks and any(traits(each).starts or traits(each).waits for each in (node, *called_communication(node))):
                self.barriers.append(self.count)
            self.count += talks
        self.reads: list[tuple[int, ...]] = []
        self.of_constants: list[bool] = []
        self._find_reads()
        self.least = self._least_slots()
        own = {slot for slot, talks in zip(self.slots, self.communicates, strict=True) if not talks}
        self.wishes = dict.fromkeys(sorted(own), _Wish.LATER)

    def of_twin(self, graph: Graph) -> "_Arrangement | None":
        """That of a graph that differs in sizes alone from this one, which is as it came; None for any other."""
        twins = twins_of(self.graph, graph)
        if twins is None:
            return None
        made = copy(self)
        made.graph, made.nodes, made.held_for = graph, list(graph), None
        made.nested = list(map(nested_bytes, made.nodes))
        made.size_of = {value: value_bytes(twin) for value, twin in twins.items()}.__getitem__
        made.wishes = dict(self.wishes)
        return made

    def _find_reads(self) -> None:
        """What each node reads of others, and whether it is made of constants alone."""
        index = {node: place for place, node in enumerate(self.nodes)}
        for talks, node in zip(self.communicates, self.nodes, strict=True):
            values = captured_or_read(node)
            producers = tuple(dict.fromkeys([index[value.node] for value in values if value.node in index]))
            is_made = bool(values) and not talks and all(self.of_constants[producer] for producer in producers)
            self.reads.append(producers)
            self.of_constants.append(is_made and all(value.is_constant or value.node in index for value in values))

    def _least_slots(self) -> list[int]:
        """The slots before which nodes must not move, whatever they read."""
        again = {node for node, _ in equal_nodes(self.graph, lambda node: not holds_collectives(node))}
        found: list[int] = []
        phase, since = None, 0
        for node, slot in zip(self.nodes, self.slots, strict=True):
            if node.phase not in (None, phase):
                phase, since = node.phase, slot
            before = bisect_left(self.barriers, slot)
            least = max(since, self.barriers[before - 1] + 1 if before else 0)
            found.append(slot if node in again else least)
        return found

    def apply(self) -> int:
        """Rearrange the graph; returns how many nodes have another slot."""
        most = max(self._held(self.slots, range(len(self.nodes))))
        for _ in range(_MOST_ROUNDS):
            used, targets = self._targets()
            if targets == self.slots:
                break
            order = self._put_into(targets)
            held = self._held(targets, order)
            above = {targets[place] for place, size in zip(order, held[1:], strict=True) if size > most}
            if not above:
                return sum(target != slot for target, slot in zip(targets, self.slots, strict=True))
            self._give_way(above, used)
        self._put_into(self.slots)
        return sum(node is not was for node, was in zip(self.graph, self.nodes, strict=True))

    def _held(self, slots: Sequence[int], order: Sequence[int]) -> list[int]:
        """What the device holds before the first node, and while each runs, in the order in which they stand now.

        Args:
            slots: by which they stand so.
            order: their places.
        """
        spans, sizes = self._spans(tuple(slots))
        first, *held = spans.held(sizes)
        return [first, *(size + self.nested[place] for size, place in zip(held, order, strict=True))]

    def _spans(self, slots: tuple[int, ...]) -> tuple[Spans, Iterable[int]]:
        """The spans by some slots, with the sizes of their values."""
        known = self.known_spans.get(slots)
        if known is not None:
            return known, map(self.size_of, known.values)
        found = uses_of(self.graph, self.held_for).on_device
        if self.held_for is not None:
            self.known_spans[slots] = found
        return found, map(value_bytes, found.values)

    def _put_into(self, slots: Sequence[int]) -> list[int]:
        """Order nodes by slots, in each the host's behind the device's and communication at the end; their places."""
        order = range(len(self.nodes))
        found = sorted(order, key=lambda place: (slots[place], self.communicates[place], self.on_host[place]))
        self.graph.reorder([self.nodes[place] for place in found])
        return found

    def _targets(self) -> Targets:
        """The slots that are used, and the slot of every node; communication keeps its own."""
        wishes = tuple(self.wishes.values())
        if wishes not in self.known_targets:
            self.known_targets[wishes] = self._find_targets()
        return self.known_targets[wishes]

    def _find_targets(self) -> Targets:
        earliest, latest = self._windows()
        occupied = list(self.wishes)
        compute = [place for place, talks in enumerate(self.communicates) if not talks]
        used: list[int] = []
        for place in sorted(compute, key=latest.__getitem__):
            if not used or earliest[place] > used[-1]:
                used.append(occupied[bisect_right(occupied, latest[place]) - 1])
        wishes = self._wishes_between(used)
        targets = list(self.slots)
        for place in compute:
            gap = bisect_left(used, self.slots[place])
            if gap < len(used) and used[gap] == self.slots[place]:
                continue
            can_later = gap < len(used) and used[gap] <= latest[place]
            can_earlier = gap > 0 and used[gap - 1] >= earliest[place]
            is_later = can_later and not (can_earlier and wishes[gap] is _Wish.EARLIER)
            targets[place] = used[gap] if is_later else used[gap - 1]
        self._to_readers(targets, used, earliest, latest)
        return used, targets

    def _to_readers(self, targets: list[int], used: list[int], earliest: list[int], latest: list[int]) -> None:
        """Let what is made of constants alone go to where it is read first."""
        readers: dict[int, int] = {}
        for place in reversed(range(len(self.nodes))):
            if self.of_constants[place]:
                first = min(readers.get(place, latest[place]), latest[place])
                targets[place] = max(used[bisect_right(used, first) - 1], earliest[place])
            target = targets[place]
            for producer in self.reads[place]:
                if target < readers.get(producer, target + 1):
                    readers[producer] = target

    def _wishes_between(self, used: Sequence[int]) -> dict[int, _Wish]:
        """What the segments in front of each used slot wish, one for all: no node may pass what it reads."""
        found: defaultdict[int, _Wish] = defaultdict(lambda: _Wish.LATER)
        for slot, wish in self.wishes.items():
            gap = bisect_left(used, slot)
            if gap == len(used) or used[gap] != slot:
                found[gap] = max(found[gap], wish)
        return found

    def _give_way(self, above: Iterable[int], used: Sequence[int]) -> None:
        """Let segments that were done without, around slots where too much is held, go the other way, or stay."""
        gaps: set[int] = set()
        for slot in above:
            gaps.update((bisect_left(used, slot), bisect_right(used, slot), bisect_left(used, slot + 1)))
        wishes = self._wishes_between(used)
        for slot in self.wishes:
            gap = bisect_left(used, slot)
            if gap in gaps and (gap == len(used) or used[gap] != slot):
                self.wishes[slot] = _Wish(min(wishes[gap] + 1, _Wish.STAY))

    def _windows(self) -> tuple[list[int], list[int]]:
        """Between which slots each node can run."""
        earliest, latest = list(self.least), [self.count] * len(self.nodes)
        for place, slot in enumerate(self.slots):
            if self.communicates[place]:
                continue
            if self.wishes[slot] is _Wish.STAY:
                earliest[place] = slot
            for producer in self.reads[place]:
                least = self.slots[producer] + 1 if self.communicates[producer] else earliest[producer]
                if least > earliest[place]:
                    earliest[place] = least
        for place in reversed(range(len(self.nodes))):
            most = latest[place] = min(latest[place], self._most(place))
            for producer in self.reads[place]:
                if most < latest[producer]:
                    latest[producer] = most
        return earliest, latest

    def _most(self, place: int) -> int:
        """The slot behind which a node must not move, whatever reads it."""
        slot = self.slots[place]
        if self.communicates[place] or self.wishes[slot] is _Wish.STAY:
            return slot
        after = bisect_left(self.barriers, slot)
        return self.barriers[after] if after < len(self.barriers) else self.count
