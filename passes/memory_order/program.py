"""A graph as a schedule sees it: which nodes touch which memory, and which must come before which."""

from dataclasses import dataclass, replace
from itertools import pairwise

from irpar.analysis.memory.liveness import bytes_in, last_uses, nested_bytes, roots_of
from irpar.analysis.memory.replaced import held_for, update_of, written_over
from irpar.ir import Graph, Node, Value, captured_or_read
from irpar.ops import called_communication, holds_collectives, traits


@dataclass(frozen=True)
class Program:
    """What a schedule must know; nodes and buffers are numbers.

    A buffer is held from the first node that touches it to the last. So it is in either direction of time, and a
    program that runs backwards is one too.

    Attributes:
        followers: for each node those that must come after it.
        touches: for each node the buffers that it makes or reads.
        inside: for each node the bytes that its bodies hold while it runs.
        touched: for each buffer the nodes that touch it.
        sizes: bytes of each buffer.
        at_start, at_end: buffers that are held before the first node, and after the last.
    """

    followers: list[list[int]]
    touches: list[list[int]]
    inside: list[int]
    touched: list[list[int]]
    sizes: list[int]
    at_start: set[int]
    at_end: set[int]

    def reversed(self) -> "Program":
        """The program from the last node to the first."""
        leaders: list[list[int]] = [[] for _ in self.followers]
        for number, followers in enumerate(self.followers):
            for follower in followers:
                leaders[follower].append(number)
        return replace(self, followers=leaders, at_start=self.at_end, at_end=self.at_start)


def program_of(graph: Graph) -> Program:
    """The program of a graph: its nodes by their places, then barriers."""
    return _Reader(graph).program()


class _Reader:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._nodes = list(graph)
        self._places = {node: place for place, node in enumerate(self._nodes)}
        self._roots = roots_of(graph)
        self._followers: list[list[int]] = [[] for _ in self._nodes]
        self._touches: list[dict[Value, None]] = []
        for node in self._nodes:
            values = (*held_for(node), *node.results)
            roots = (self._roots.get(value, value) for value in values)
            self._touches.append({root: None for root in roots if not root.is_constant and root.owner is graph})

    def program(self) -> Program:
        """All of it."""
        self._follow_data()
        self._follow_communication()
        self._follow_writes()
        self._add_barriers()
        numbers: dict[Value, int] = {}
        for touched in self._touches:
            for value in touched:
                numbers.setdefault(value, len(numbers))
        inputs = [value for value in self._graph.inputs if value in numbers]
        last = last_uses(self._graph, self._roots)
        touches = [[numbers[value] for value in touched] for touched in self._touches]
        touched_by: list[list[int]] = [[] for _ in numbers]
        for place, buffers in enumerate(touches):
            for buffer in buffers:
                touched_by[buffer].append(place)
        return Program(
            followers=self._followers,
            touches=touches,
            inside=[nested_bytes(node) if node.attributes else 0 for node in self._nodes]
            + [0] * (len(touches) - len(self._nodes)),
            touched=touched_by,
            sizes=[bytes_in(value, "device") for value in numbers],
            at_start={numbers[value] for value in inputs},
            at_end={number for value, number in numbers.items() if last.get(value) is self._graph.return_node},
        )

    def _follow_data(self) -> None:
        for place, node in enumerate(self._nodes):
            for producer in dict.fromkeys(value.node for value in captured_or_read(node)):
                if producer in self._places:
                    self._followers[self._places[producer]].append(place)

    def _follow_communication(self) -> None:
        """Communication keeps its order."""
        last = None
        for place, node in enumerate(self._nodes):
            if holds_collectives(node):
                if last is not None:
                    self._followers[last].append(place)
                last = place

    def _follow_writes(self) -> None:
        """What is written over a state comes after all that read the state before."""
        over = {new.node: old for new, old in written_over(self._graph).items()}
        writers = {old: self._places[node] for node, old in over.items() if node is not None}
        for place, touched in enumerate(self._touches):
            for value in touched:
                writer = writers.get(value, -1)
                if place < writer:
                    self._followers[place].append(writer)

    def _add_barriers(self) -> None:
        """Nodes that stand for places which no node passes: around starts and waits, and before the update."""
        first = update_of(self._graph)
        cuts: dict[int, None] = {}
        for place, node in enumerate(self._nodes):
            if node is first or _starts_or_waits(node):
                cuts[place] = None
            if _starts_or_waits(node):
                cuts[place + 1] = None
        begin = 0
        for cut, stop in pairwise((*cuts, len(self._nodes))):
            barrier = len(self._followers)
            for place in range(begin, cut):
                self._followers[place].append(barrier)
            self._followers.append(list(range(cut, stop)))
            # Old state is there until the update begins, read or not.
            is_update = first is not None and cut == self._places[first]
            self._touches.append(dict.fromkeys(self._graph.states) if is_update else {})
            begin = cut


def _starts_or_waits(node: Node) -> bool:
    return holds_collectives(node) and any(
        traits(each).starts or traits(each).waits for each in (node, *called_communication(node))
    )
