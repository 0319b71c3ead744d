"""Collectives on what a loop reads from outside: they leave the loop, and run once instead of at each trip."""

from collections.abc import Iterator

from irpar.ir import Graph, Module, Node
from irpar.ops.collectives import FREE
from irpar.ops.effects import is_collective
from irpar.ops.facts import int_attribute

_LOOPS = frozenset({"Loop", "Scan"})


def leave_loops(module: Module) -> int:
    """Move collectives in bodies of Loop and Scan before these, where their operand is there already.

    What runs in a branch of an If, and in a loop in it, stays in the branch. Of several programs all do so alike.

    Returns:
        How many collectives of the first program were moved.
    """
    count = 0
    while True:
        found = [dict(_movable(graph)) for graph in module.graphs]
        agreed = set.intersection(*(set(each) for each in found))
        if not agreed:
            return count
        for each in found:
            for key in each:
                if key in agreed:
                    _move(each[key])
        count += len(agreed)


def _movable(graph: Graph) -> Iterator[tuple[object, Node]]:
    """The collectives that may leave a loop, by what they are called in all programs."""
    for node in graph.walk():
        if not is_collective(node) or node.graph is None:
            continue
        if _outside(node) is not node.graph:
            is_free = node.op_type in FREE
            yield node if is_free else int_attribute(node, "id"), node


def _outside(node: Node) -> Graph:
    """The outermost graph in which the operand is there, reached through loops alone."""
    graph, value = node.graph, node.inputs[0]
    assert graph is not None
    while graph is not value.owner or value.is_constant:
        holder = graph.parent
        if holder is None or holder.graph is None or holder.domain or holder.op_type not in _LOOPS:
            break
        graph = holder.graph
    return graph


def _move(node: Node) -> None:
    """Move a collective before the loop that it may leave."""
    target, value = _outside(node), node.inputs[0]
    before = node
    while before.graph is not target:
        assert before.graph is not None
        assert before.graph.parent is not None
        before = before.graph.parent
    if value.graph is not None and value.is_constant and _is_inside(value.graph, target):
        target.lift_constant(value)
    target.insert_before(before, node.detach())


def _is_inside(graph: Graph, other: Graph) -> bool:
    """Whether a graph is nested in another one."""
    while graph is not other and graph.parent is not None and graph.parent.graph is not None:
        graph = graph.parent.graph
        if graph is other:
            return True
    return False
