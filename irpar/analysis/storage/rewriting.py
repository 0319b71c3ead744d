"""Writing moves into a program: copies between the steps."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from irpar.analysis.newest import Newest
from irpar.ir import Graph, Node, Value
from irpar.ops.memory_copies import CopyWriter

from .moves import Move, Stay
from .steps import Steps


def write_moves(graph: Graph, steps: Steps, moves: Sequence[Move]) -> None:
    """Let items lie where moves say, and come and go when they say.

    Between two steps, first what went beside the one that ends has gone; then what goes now begins to go, what the next
    step needs has come, and what later ones need begins to come. So what comes has the room of what has gone.

        a = f(x); b = g(a); c = h(b, a)         step 0: f   step 1: g   step 2: h
        a = f(x); a.h = Copy(a); b = g(a); a.d = Copy(a.h); c = h(b, a.d)

    In the body of a loop, what comes from the program around it stays as it lies there: the program's moves say where.
    """
    _Writer(graph, steps, moves).write()


_Task = Callable[[Node], None]
"""Puts copies before a node."""


class _Writer:
    def __init__(self, graph: Graph, steps: Steps, moves: Sequence[Move]) -> None:
        self.graph = graph
        self.nodes = list(graph)
        self.steps = steps
        self.copies = CopyWriter(graph)
        self.newest = Newest(graph)
        self.away: dict[Value, Value] = {}
        """Where items lie that are not on the device; what replaces state among them."""
        # What happens between two steps, in this order: by the number of the step that comes.
        self.gone: dict[int, list[_Task]] = defaultdict(list)
        self.going: dict[int, list[_Task]] = defaultdict(list)
        self.come: dict[int, list[_Task]] = defaultdict(list)
        self.coming: dict[int, list[_Task]] = defaultdict(list)
        self.brought = [move.item for move in moves if move.item.is_brought]
        for move in moves:
            self._plan(move)

    def _plan(self, move: Move) -> None:
        item = move.item
        if item.made is None:
            if item.value.owner is self.graph:
                item.value.memory = move.memory
            self.away[item.value] = item.value
        for number, stay in enumerate(move.stays):
            if stay.comes:
                self._plan_coming(item.value, stay, f"read by {self._reader(move, stay).title}")
            if stay.leaves:
                reader = self._reader(move, move.stays[number + 1])
                self._plan_leaving(item.value, move, stay.last, stay.gone, f"not read before {reader.title}")
        if item.replaced is not None:
            made, why = self.steps.of(item.replaced_at), f"replaces {item.value.source_name}, which lies there"
            self._plan_leaving(item.replaced, move, made, move.new_gone, why)

    def _reader(self, move: Move, stay: Stay) -> Node:
        """What reads an item first in a stay."""
        return self.nodes[next(place for place in move.item.reads if self.steps.of(place) >= stay.first)]

    def _plan_coming(self, value: Value, stay: Stay, why: str) -> None:
        def copy(before: Node) -> None:
            self.newest.of[value] = _of_layer(value, self.copies.copy(self.away[value], "device", before, why=why))

        def start(before: Node) -> None:
            begun = _of_layer(value, self.copies.start(self.away[value], "device", before, why=why))
            self.come[stay.first].append(lambda place: self.newest.of.update({value: self.copies.wait(begun, place)}))

        if stay.begin == stay.first:
            self.come[stay.first].append(copy)
        else:
            self.coming[stay.begin].append(start)

    def _plan_leaving(self, value: Value, move: Move, last: int, until: int, why: str) -> None:
        def copy(before: Node) -> None:
            self.away[value] = _of_layer(value, self.copies.copy(value, move.memory, before, why=why))

        def start(before: Node) -> None:
            begun = _of_layer(value, self.copies.start(value, move.memory, before, why=why))
            self.gone[until + 1].append(lambda place: self.away.update({value: self.copies.wait(begun, place)}))

        self.going[last + 1].append(copy if until == last else start)

    def write(self) -> None:
        nodes = self.nodes
        ends = (*self.steps.firsts[1:], len(nodes))
        for step, (first, end) in enumerate(zip(self.steps.firsts, ends, strict=True)):
            self._between(step, nodes[first] if first < len(nodes) else self.graph.return_node)
            for place, node in enumerate(nodes[first:end], first):
                self.newest.let_read(node, self._brought_by(node, place))
        self._between(self.steps.count, self.graph.return_node)
        outputs = [self.away.get(value, value) for value in self.graph.outputs]
        self.graph.set_outputs(outputs, self.graph.output_names)
        self.newest.erase_unread_views()

    def _brought_by(self, node: Node, place: int) -> set[Value]:
        """What bodies of a node bring by themselves."""
        return {item.value for item in self.brought if place not in item.reads} if node.holds_graphs else set()

    def _between(self, step: int, before: Node) -> None:
        for tasks in (self.gone, self.going, self.come, self.coming):
            for task in tasks[step]:
                task(before)


def _of_layer(value: Value, copied: Value) -> Value:
    """Say of a copy where in the model it belongs: where what it copies is made, or read first."""
    node = copied.node
    assert node is not None
    others = [] if value.node is None else [value.node]
    others.extend(user for user in value.users if user is not node)
    node.scope = next((other.scope for other in others if other.scope), None)
    return copied
