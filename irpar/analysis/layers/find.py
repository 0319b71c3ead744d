"""The layers of a graph.

x -> [LayerNorm, MatMul, Add] -> [LayerNorm, MatMul, Add] -> [LayerNorm, MatMul, Add] -> LayerNorm -> y

The nodes in an order, each by a number that equal nodes share: 0 1 2 0 1 2 0 1 2 0. All but the last three come again
three places later; 0 1 2 are a body, found three times. Where a repeat may begin at several places, it begins where the
fewest values cross. What stands elsewhere, or has nodes between that all layers share, is found by following the body's
own values from its last node back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from irpar.ir import Graph, Node, Value, holder_in

from .node_keys import NodeKeys, reads
from .occurrences import Body, Shape, connected_parts, shape_of
from .orders import live_across, order_of_operands
from .repeats import Run, choose_runs

Nodes = tuple[Node, ...]

LEAST = 4
"""Nodes of the smallest body that counts as a layer."""
_PHASES = 4
"""Places at which a repeat may begin that are tried, where as few values cross at each."""


@dataclass(frozen=True)
class Layers:
    """Subgraphs that are equal up to what they read from outside, in the order of the graph.

    Attributes:
        members: the nodes of each; those at one place are alike.
        operands: for each, the values that it reads from outside; those at one place are read at the same places.
        results: (place of a node, which of its results) of what is read outside of any.
    """

    members: tuple[Nodes, ...]
    operands: tuple[tuple[Value, ...], ...]
    results: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """How often the body is there."""
        return len(self.members)

    @property
    def size(self) -> int:
        """Nodes in the body."""
        return len(self.members[0])

    def results_of(self, member: Nodes) -> tuple[Value, ...]:
        """The values that one of the subgraphs gives to others."""
        return tuple(member[place].results[index] for place, index in self.results)


def find_layers(graph: Graph, least: int = LEAST, *, phase: str | None = None) -> list[Layers]:
    """The layers of a graph: maximal, without overlap, each with at least `least` nodes; those that save most first.

    Near-linear in nodes. Nested graphs are looked at as part of the node that holds them.

    Args:
        graph: it.
        least: nodes of the smallest.
        phase: look among the nodes of one phase alone; None: among all.
    """
    keys = NodeKeys()
    numbers = {node: keys.number(node) for node in graph if phase in (None, node.phase)}
    orders = [[node for node in order if node in numbers] for order in (graph, order_of_operands(graph))]
    found = [_Search(graph, order, numbers, least).run() for order in orders]
    return _sorted_layers(
        graph, max(found, key=lambda bodies: sum((len(members) - 1) * len(members[0]) for members in bodies))
    )


def find_layers_in_order(graph: Graph, least: int = LEAST, *, phase: str | None = None) -> list[Layers]:
    """The layers of a graph that stand one behind another: as `find_layers`, of the nodes in the order of the graph."""
    keys = NodeKeys()
    numbers = {node: keys.number(node) for node in graph if phase in (None, node.phase)}
    return _sorted_layers(graph, _Search(graph, list(numbers), numbers, least).run())


def _sorted_layers(graph: Graph, best: Sequence[Sequence[Nodes]]) -> list[Layers]:
    """Equal subgraphs as layers, those that save most first."""
    place = {node: index for index, node in enumerate(graph)}
    layers = [_layers(members, place) for members in best]
    return sorted(layers, key=lambda each: -(each.count - 1) * each.size)


class _Search:
    """Looks for repeats in one order of the nodes."""

    def __init__(self, graph: Graph, order: list[Node], numbers: Mapping[Node, int], least: int) -> None:
        self.order = order
        self.graph = graph
        self.numbers = numbers
        self.least = least
        self.crossing = live_across(order, graph)
        self.by_number: dict[int, list[Node]] = {}
        for node in order:
            self.by_number.setdefault(numbers[node], []).append(node)
        self.bodies: dict[Shape, list[Nodes]] = {}
        self.taken: set[Node] = set()
        self.in_order: set[Nodes] = set()

    def run(self) -> list[list[Nodes]]:
        place = {node: index for index, node in enumerate(self.order)}
        for run, flags in choose_runs([self.numbers[node] for node in self.order], self.least):
            flags[[place[node] for node in self._take(run)]] = True
        self._without_circles()
        return [members for members in self.bodies.values() if len(members) > 1]

    def _take(self, run: Run) -> list[Node]:
        """Take the repetitions of a run, from the place on at which most of them are found; gives their nodes."""
        choices = [self._members(run, start) for start in self._starts(run)]
        most = max(choices, key=lambda bodies: sum((len(members) - 1) * len(members[0]) for members in bodies.values()))
        for shape, members in most.items():
            self.bodies.setdefault(shape, []).extend(members)
        found = [node for members in most.values() for nodes in members for node in nodes]
        self.taken.update(found)
        return found

    def _starts(self, run: Run) -> list[int]:
        """Where a run may begin so that the fewest values cross the borders of its repetitions."""
        if run.length < run.distance:
            return [run.start]
        slack = run.length + run.distance - run.times * run.distance
        borders = [run.start + run.distance * number for number in range(run.times + 1)]
        costs = [sum(self.crossing[border + shift] for border in borders) for shift in range(slack + 1)]
        least = min(costs)
        return [run.start + shift for shift, cost in enumerate(costs) if cost == least][:_PHASES]

    def _members(self, run: Run, start: int) -> dict[Shape, list[Nodes]]:
        """The equal repetitions of a run that begins there, and where else in the graph the same is found."""
        firsts = [start + number * run.distance for number in range(run.times)]
        repetitions = [self.order[first : first + run.size] for first in firsts]
        groups: dict[Shape, list[list[Node]]] = {}
        for nodes in repetitions:
            groups.setdefault(shape_of(nodes, self.numbers), []).append(nodes)
        found: dict[Shape, list[Nodes]] = {}
        own: set[Node] = set()
        for shape, group in groups.items():
            for part in connected_parts(shape) if len(group) > 1 else ():
                if len(part) >= self.least:
                    members = [tuple(nodes[place] for place in part) for nodes in group]
                    self.in_order.update(members)
                    found.setdefault(shape_of(members[0], self.numbers), []).extend(members)
                    own.update(node for nodes in members for node in nodes)
        for shape, known in found.items():
            known.extend(self._elsewhere(shape, own))
        return found

    def _elsewhere(self, shape: Shape, own: set[Node]) -> list[Nodes]:
        """Where a body is found among the nodes that are neither taken nor in `own`, which gets what is found."""
        body = Body(shape, self.numbers)
        found = []
        for last in self.by_number[body.last]:
            nodes = body.at(last, lambda node: node in self.taken or node in own)
            if nodes is not None:
                found.append(nodes)
                own.update(nodes)
        return found

    def _without_circles(self) -> None:
        """Leave out subgraphs that could not be one node each: paths lead out of them and back again.

        Those that stand one behind another in an order of the graph are on no such path among themselves.
        """
        while True:
            stuck = _on_circles(self.graph, [nodes for members in self.bodies.values() for nodes in members])
            if not stuck:
                return
            bad = {nodes for nodes in stuck if nodes not in self.in_order} or set(stuck)
            for shape, members in self.bodies.items():
                self.bodies[shape] = [nodes for nodes in members if nodes not in bad]


def _on_circles(graph: Graph, members: Sequence[Nodes]) -> list[Nodes]:
    """The subgraphs that cannot be put in any order, as one node each, among the other nodes."""
    unit: dict[Node, object] = {node: nodes for nodes in members for node in nodes}
    waits: dict[object, int] = {}
    readers: dict[object, list[object]] = {}
    for node in graph:
        own = unit.get(node, node)
        waits.setdefault(own, 0)
        for value in reads(node):
            producer = None if value is None or value.node is None else value.node
            if producer is None or producer.graph is not graph:
                continue
            other = unit.get(producer, producer)
            if other is not own:
                waits[own] += 1
                readers.setdefault(other, []).append(own)
    ready = [own for own, count in waits.items() if not count]
    while ready:
        for reader in readers.get(ready.pop(), ()):
            waits[reader] -= 1
            if not waits[reader]:
                ready.append(reader)
    return [nodes for nodes in members if waits[nodes]]


def _layers(members: Sequence[Nodes], place: Mapping[Node, int]) -> Layers:
    """Equal subgraphs as layers: nodes in the order of the first, with what they read and give."""
    members = sorted(members, key=lambda nodes: min(place[node] for node in nodes))
    by_place = sorted(range(len(members[0])), key=lambda index: place[members[0][index]])
    ordered = tuple(tuple(nodes[index] for index in by_place) for nodes in members)
    return as_layers(ordered)


def as_layers(members: tuple[Nodes, ...]) -> Layers:
    """Equal subgraphs, whose nodes stand in the same order, as layers."""
    return Layers(members, *_borders(members))


def _borders(members: tuple[Nodes, ...]) -> tuple[tuple[tuple[Value, ...], ...], tuple[tuple[int, int], ...]]:
    """What equal subgraphs read from outside, each value once where it is one in all of them; and what they give."""
    inside = [set(nodes) for nodes in members]
    operands: dict[tuple[Value, ...], None] = {}
    results: dict[tuple[int, int], None] = {}
    for place, nodes in enumerate(zip(*members, strict=True)):
        for values in zip(*map(reads, nodes), strict=True):
            # Equal shapes: what one of them reads from outside, or leaves out, the others do too.
            first = values[0]
            if first is not None and first.node not in inside[0]:
                operands[values] = None
        for index in range(len(nodes[0].results)):
            pairs = zip(nodes, inside, strict=True)
            if any(_is_read_outside(node.results[index], node.graph, own) for node, own in pairs):
                results[place, index] = None
    return tuple(zip(*operands, strict=True)) or ((),) * len(members), tuple(results)


def _is_read_outside(value: Value, graph: Graph | None, inside: set[Node]) -> bool:
    users = value.users
    return not inside.issuperset(users) and any(holder_in(user, graph) not in inside for user in users)
