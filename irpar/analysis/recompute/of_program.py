"""The training graphs of a program and of the bodies in it, in their order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from irpar.analysis.cost.model import CostOf
from irpar.analysis.memory.liveness import constant_bytes, last_uses, nested_bytes, roots_of, value_bytes
from irpar.ir import Graph, Node, Value, captured_or_read
from irpar.ops import holds_collectives, traits
from irpar.ops.effects import draws_random_numbers, is_communication

from .graph_tree import GraphTree
from .training_graph import TrainingGraph, TrainingNode

MaySendAgain = Callable[[Node], bool]
"""Whether a collective may run again."""


@dataclass(frozen=True)
class Program:
    """A program as a training graph.

    Attributes:
        source: the program, or a body in one.
        graph: what recompute is decided on. What bodies hold is not in it.
        nodes: of each of its nodes the one in the program; None for an input.
        results: and which of its results.
        bodies: the bodies of its nodes, by the last of the nodes of the graph that stand for the holder.
    """

    source: Graph
    graph: TrainingGraph
    nodes: tuple[Node | None, ...]
    results: tuple[tuple[Value, ...], ...]
    bodies: tuple[tuple[int, "Program"], ...] = ()

    @cached_property
    def parts(self) -> tuple["Program", ...]:
        """This and all bodies in it, each holder before what it holds."""
        return (self, *(part for _, body in self.bodies for part in body.parts))


def of_program(graph: Graph, cost_of: CostOf, may_send_again: MaySendAgain) -> Program:
    """The training graph of a program, and those of the bodies in it.

    A node of several results is as many nodes that run as one, of which the first costs what the node does. What nobody
    reads is held while the node runs. Views are no nodes: who reads them reads what they are views of. Inputs, and
    state that is let go, are nodes that may run only once. So the peak of the whole is that of
    `irpar.analysis.memory.liveness`, where what bodies hold is added.

    Args:
        graph: a local program.
        cost_of: what nodes cost in all their trips.
        may_send_again: which collectives may run again.
    """
    return _Reader(graph, cost_of, may_send_again).read()


def as_tree(programs: Sequence[Program]) -> GraphTree:
    """Programs that are the same but for sizes as one, of which each node has the most bytes and the most cost."""
    graphs = [program.graph for program in programs]
    nodes = [
        replace(
            each[0],
            cost=max(node.cost for node in each),
            mem=max(node.mem for node in each),
            work=max(node.work for node in each),
            keep=any(node.keep for node in each),
            norec=any(node.norec for node in each),
        )
        for each in zip(*(graph.nodes for graph in graphs), strict=True)
    ]
    most = replace(graphs[0], nodes=tuple(nodes), fixed_mem=max(graph.fixed_mem for graph in graphs))
    bodies = zip(*(program.bodies for program in programs), strict=True)
    return GraphTree(most, tuple((each[0][0], as_tree([body for _, body in each])) for each in bodies))


class _Reader:
    def __init__(self, graph: Graph, cost_of: CostOf, may_send_again: MaySendAgain) -> None:
        self.graph = graph
        self.cost_of = cost_of
        self.may_send_again = may_send_again
        self.roots = roots_of(graph)
        self.nodes: list[Node | None] = []
        self.results: list[tuple[Value, ...]] = []
        self.made: list[TrainingNode] = []
        self.edges: set[tuple[int, int]] = set()
        self.bodies: list[tuple[int, Program]] = []
        self.of_value: dict[Value, int] = {}
        self.views: set[Node] = {node for node in graph if traits(node).view and node.inputs}
        self.once = self._only_once()
        outputs = {self.roots.get(value, value) for value in graph.outputs}
        self.kept = outputs
        self.read_values = {
            self.roots.get(value, value) for node in graph for value in captured_or_read(node)
        } | outputs

    def read(self) -> Program:
        fixed = constant_bytes(self.graph) if self.graph.parent is None else 0  # With those of bodies.
        last = last_uses(self.graph, self.roots)
        for value in self.graph.inputs:
            if value in self.graph.states and last[value].is_return:
                fixed += value_bytes(value)
            elif value in self.read_values:
                made = TrainingNode(value.name, 0, value_bytes(value), norec=True, keep=value in self.kept)
                self._add(None, (value,), made)
        ends: dict[Node, list[int]] = {}
        for value in self.graph.states:
            if value in self.of_value:  # Held longer than it is read.
                ends.setdefault(last[value], []).append(self.of_value[value])
        for node in self.graph:
            if node not in self.views:
                self._add_node(node)
            self.edges.update((place, len(self.made) - 1) for place in ends.get(node, ()))
        graph = TrainingGraph(tuple(self.made), tuple(sorted(self.edges)), fixed)
        return Program(self.graph, graph, tuple(self.nodes), tuple(self.results), tuple(self.bodies))

    def _add(self, node: Node | None, results: Sequence[Value], made: TrainingNode) -> int:
        self.nodes.append(node)
        self.results.append(tuple(results))
        self.made.append(made)
        self.of_value.update(dict.fromkeys(results, len(self.made) - 1))
        return len(self.made) - 1

    def _add_node(self, node: Node) -> None:
        read = [value for value in node.results if value in self.read_values]
        large = [value for value in read if self._bytes(value)]
        small = [value for value in node.results if value not in large]
        unread = sum(self._bytes(value) for value in node.results if value not in self.read_values)
        sources = {self.of_value.get(self.roots.get(value, value)) for value in self._operands(node)}
        groups = [[value] for value in large] or [[]]
        groups[-1] += small
        numbers: list[int] = []
        for results in groups:
            made = TrainingNode(
                name=node.name or (node.results[0].name if node.results else node.op_type),
                cost=0 if numbers else self.cost_of(node),
                mem=sum(map(self._bytes, (value for value in results if value in self.read_values))),
                bwd=node.phase in ("backward", "optimizer"),
                keep=any(value in self.kept for value in results),
                norec=node in self.once,
                work=unread + (0 if node.holds_graphs else nested_bytes(node)) if results is groups[-1] else 0,
                joined=bool(numbers),
            )
            number = self._add(node, results, made)
            # All results are there when the node has run.
            self.edges.update((source, number) for source in (*sources, *numbers) if source is not None)
            numbers.append(number)
        for body in node.nested_graphs():
            self.bodies.append((numbers[-1], of_program(body, self.cost_of, self.may_send_again)))

    def _bytes(self, value: Value) -> int:
        """Those of a result; none where it is written over something."""
        return 0 if value in self.roots else value_bytes(value)

    def _operands(self, node: Node) -> Iterator[Value]:
        yield from captured_or_read(node)
        if traits(node).waits and node.inputs[0].node is not None:
            yield from node.inputs[0].node.inputs

    def _only_once(self) -> set[Node]:
        """What must not run again: chance, communication if not allowed, what a view with computed sizes needs."""
        found = {node for node in self.graph if not self._may_repeat(node)}
        for view in self.views:
            computed = [value for value in captured_or_read(view) if not value.is_constant][1:]
            if computed:
                found.update(node for node in map(self._producer, (*computed, view.inputs[0])) if node is not None)
        for node in self.graph:
            if traits(node).starts:
                found.update(producer for value in node.inputs if (producer := self._producer(value)) is not None)
        return found

    def _producer(self, value: Value) -> Node | None:
        return self.roots.get(value, value).node

    def _may_repeat(self, node: Node) -> bool:
        known = traits(node)
        if node.phase == "optimizer" or draws_random_numbers(node) or known.starts or known.waits:
            return False
        if is_communication(node):
            return not known.point_to_point and self.may_send_again(node)
        return not holds_collectives(node)
