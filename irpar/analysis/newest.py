"""Nodes that read what stands for a value from some place on: the same numbers, made again or brought back."""

from collections.abc import Collection

from irpar.ir import Graph, Node, Value, captured_or_read, holder_in
from irpar.ir.clone import clone_node
from irpar.ops import traits
from irpar.ops.recomputed import AGAIN


def view_roots(graph: Graph, *, of_known_sizes: bool = False) -> dict[Value, Value]:
    """The views in a graph, in order, and the value that each is one of: no view itself.

    Args:
        graph: it.
        of_known_sizes: only those whose sizes are constants count; others are no views.
    """
    roots: dict[Value, Value] = {}
    for node in graph:
        if of_known_sizes and not all(value.is_constant for value in node.inputs[1:]):
            continue
        if traits(node).view and node.inputs:
            source = node.inputs[0]
            roots[node.result] = roots.get(source, source)
    return roots


def uses_at(value: Value, node: Node, graph: Graph) -> list[tuple[Node, int]]:
    """Where a node of a graph, or the graphs in it, read a value: of one that many read, in time for this one alone."""
    if not node.holds_graphs:
        return [(node, index) for index, operand in enumerate(node.operands) if operand is value]
    return [use for use in value.uses if holder_in(use[0], graph) is node]


class Newest:
    """What stands for values of a graph, while its nodes are gone through in order.

    A view of a value that something else stands for by now is made again where it is read.

    Args:
        graph: it.

    Attributes:
        of: what stands for a value that is no view; others stand for themselves.
    """

    def __init__(self, graph: Graph) -> None:
        self.of: dict[Value, Value] = {}
        self._graph = graph
        self._roots = view_roots(graph)
        self._views: dict[tuple[Value, Value], Value] = {}

    def let_read(self, node: Node, but: Collection[Value] = ()) -> None:
        """Let a node, and the graphs in it, read the newest of what it reads, but of some values."""
        for value in dict.fromkeys(captured_or_read(node)):
            if value in but:
                continue
            now = self.now(value, node)
            if now is not value:
                value.replace_uses(now, only=uses_at(value, node, self._graph))

    def now(self, value: Value, before: Node) -> Value:
        """The newest that stands for a value; of a view one that is made there."""
        root = self._roots.get(value)
        if root is None:
            return self.of.get(value, value)
        newest = self.of.get(root, root)
        if newest is root:
            return value
        known = self._views.get((value, newest))
        if known is None:
            view = value.node
            assert view is not None
            made = clone_node(view, {view.inputs[0]: self.now(view.inputs[0], before)}, self._graph.names)
            made.phase, made.stage = before.phase, before.stage
            made.name = f"{view.name}.{AGAIN}" if view.name else ""
            made.result.name, made.result.source = f"{value.name}.{AGAIN}", None
            self._graph.insert_before(before, made)
            known = self._views[value, newest] = made.result
        return known

    def erase_unread_views(self) -> None:
        """What nobody reads would hold what it is a view of."""
        for value in reversed(self._roots):
            node = value.node
            if node is not None and traits(node).view and not value.uses:
                node.erase()
