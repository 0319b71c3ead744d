"""One arena for all segments of a program: where the results of all its nodes lie, of those in bodies too."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from irpar.analysis.engines import writes_out
from irpar.analysis.memory.arena import arena_lifetimes
from irpar.analysis.memory.liveness import bytes_in, nested_bytes, uses_of
from irpar.analysis.memory.offsets.heuristics import place
from irpar.analysis.memory.offsets.lifetimes import Lifetime, Offsets, most_held
from irpar.analysis.memory.scratch import scratch_bytes, temporary_bytes
from irpar.analysis.memory.sums import sums_in
from irpar.analysis.segments import live_nodes
from irpar.ir import Graph, Node, TensorType, Value, captured_or_read
from irpar.ops import holds_collectives
from irpar.ops.bodies import waits_for_copy
from irpar.ops.memory_copies import node_place
from irpar.runtime.instructions import Program

from .arena import ArenaLayout, Slot, last_steps, result_lifetimes, rows_of, slots_of, steps_of
from .arena_height import height, most_with
from .numpy_views import Views


def program_layout(program: Program) -> ArenaLayout:
    """Places for the results of all nodes of a program that kernels can write into arrays that they are given.

    They are held over the borders of segments. Scratch of the kernels has places too, and so has what bodies hold in a
    trip: a block beside all that is held while they run. The program's results have none, nor has what communication
    takes: others may hold it longer. With what lies outside, an arena takes no more than the program holds at once.
    """
    graph = program.graph
    over = {value for segment in program.segments for value in segment.over}
    nodes = tuple(live_nodes(graph, program.outputs))
    found, steps, uses = _Block(graph, nodes, program.outputs, over), len(nodes) + 1, uses_of(graph)
    outside = [*found.outside(), *found.inputs(uses.last)]
    nbytes = height(found.held, found.offsets, outside, steps, most_held(arena_lifetimes(graph, uses)))
    places = _Places()
    found.add(places, 0, nbytes)
    writing = tuple(node for node in graph.walk() if not places.slots.keys().isdisjoint(node.results))
    held = [one for one in found.held if found.offsets.offsets[one.key] + one.nbytes <= nbytes]
    rows, leaving = rows_of(held, found.offsets), frozenset(found.leaving)
    return ArenaLayout(writing, places.slots, {}, places.scratch, nbytes, rows, steps_of(nodes), leaving)


class _Places:
    """As `ArenaLayout` has them."""

    def __init__(self) -> None:
        self.slots: dict[Value, Slot] = {}
        self.scratch: dict[Node, tuple[int, int]] = {}


@dataclass(frozen=True)
class _Scratch:
    """What the kernel of a node takes beside operands and results."""

    node: Node


class _Block:
    """A block of memory with the results of the nodes of a graph that can have a place, and what these nodes need.

    Args:
        graph: that.
        nodes: those that run, in order.
        outputs: values that outlive a run.
        over: results that are written elsewhere, and inputs that lie there.

    Attributes:
        leaving: values that are held longer than the block knows of; they have no place.
        held: what has a place.
    """

    def __init__(
        self, graph: Graph, nodes: Sequence[Node], outputs: Iterable[Value], over: Collection[Value] = ()
    ) -> None:
        self._graph = graph
        self._nodes = nodes
        self._over = over
        self._views = Views(nodes)
        writing = frozenset(node for node in nodes if node_place(node) == "device" and writes_out(node))
        fresh = writing | self._views.copies
        self.leaving = _leaving(nodes, outputs, fresh)
        held = dict.fromkeys(outputs, len(nodes))
        self._last = last_steps(nodes, held, fresh)
        # Outside memory goes with its last reader: what a node gives that may be a view, but is none, holds nothing.
        self._last_outside = last_steps(nodes, held, frozenset(filter(self._lets_go, nodes)))
        self._bodies = {node: _bodies_of(node) for node in nodes if node.holds_graphs and node.callee is None}
        self.held = list(self._lifetimes(writing))

    def _lifetimes(self, writing: Collection[Node]) -> Iterator[Lifetime[Any]]:
        for step, node in enumerate(self._nodes):
            if (needed := scratch_bytes(node)) and node_place(node) == "device":
                yield Lifetime(_Scratch(node), needed, step, step)
            if inside := max((body.offsets.nbytes for body in self._bodies.get(node, ())), default=0):
                yield Lifetime(node, inside, step, step)
        yield from result_lifetimes(self._nodes, writing, {*self.leaving, *self._over}, self._last)

    def _lets_go(self, node: Node) -> bool:
        """Whether a node's results hold nothing of what it reads, as views and sequences do, and what is in flight."""
        return node not in self._views.views and all(isinstance(value.type, TensorType) for value in node.results)

    @cached_property
    def offsets(self) -> Offsets[Any]:
        """Where it lies, from the start of the block."""
        return place(self.held)

    def outside(self) -> Iterator[Lifetime[Any]]:
        """What its nodes make and allocate on the way, and their bodies hold, that has no place; views apart.

        So is what is written elsewhere.
        """
        inside = {one.key for one in self.held}
        for step, node in enumerate(self._nodes):
            bodies = self._bodies.get(node)
            beside = nested_bytes(node) if bodies is None else max(body.most_outside() for body in bodies)
            allocated = temporary_bytes(node) if node_place(node) == "device" else 0
            yield Lifetime(node, beside + allocated, step, step)
            if node not in self._views.views and not waits_for_copy(node):
                for value in node.results:
                    if value not in inside and value not in self._over:
                        yield Lifetime(value, bytes_in(value, "device"), step, self._end(value, step))

    def _end(self, value: Value, step: int) -> int:
        """The last step at which something is held; what a copy in flight comes to is the same."""
        copied = [node.result for node in value.users if waits_for_copy(node)]
        return max(self._last_outside.get(each, step) for each in (value, *copied))

    def inputs(self, last: Mapping[Value, Node]) -> Iterator[Lifetime[Value]]:
        """Those of the graph, each held until its last reader has run."""
        steps = steps_of(self._nodes)
        for value in self._graph.inputs:
            if value in self._over:
                continue
            end = last.get(value)
            yield Lifetime(value, bytes_in(value, "device"), 0, 0 if end is None else steps.get(end, len(steps)))

    def most_outside(self) -> int:
        """The most that is held outside at once, what comes into a body included."""
        coming = self.inputs(uses_of(self._graph).last)
        return most_with([], [*self.outside(), *coming], len(self._nodes) + 1)

    def add(self, places: _Places, begin: int, end: int) -> None:
        """Note what lies where, if the block begins at so many bytes of an arena, which ends at `end`."""
        offsets = self.offsets.offsets
        there = [one for one in self.held if begin + offsets[one.key] + one.nbytes <= end]
        places.slots |= slots_of(there, self.offsets, begin)
        for one in there:
            if isinstance(one.key, _Scratch):
                places.scratch[one.key.node] = (begin + offsets[one.key], one.nbytes)
            for body in self._bodies.get(one.key, ()):
                body.add(places, begin + offsets[one.key], end)


def _bodies_of(node: Node) -> tuple[_Block, ...]:
    """Those of the bodies of a node, of which one runs at a time."""
    return tuple(_Block(graph, tuple(graph), graph.outputs, _summed(graph)) for graph in node.nested_graphs())


def _summed(body: Graph) -> set[Value]:
    """The sums of a loop as its body finds and leaves them: what the loop gives is there."""
    return {value for each in sums_in(body) for value in (each.before, each.after)}


def _leaving(nodes: Sequence[Node], outputs: Iterable[Value], fresh: Collection[Node]) -> Set[Value]:
    """What outlives a run or goes to other ranks, and all that this may be a view of; results of `fresh` are none."""
    found = set(outputs)
    for node in reversed(nodes):
        if holds_collectives(node) or (node not in fresh and not found.isdisjoint(node.results)):
            found.update(captured_or_read(node))
    return found
