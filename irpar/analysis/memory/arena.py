"""An arena: one block of memory in which values that live at different times share bytes."""

from collections.abc import Iterator

from irpar.ir import Graph, Node, Value

from .liveness import last_uses, nested_bytes, roots_of, value_bytes
from .offsets.heuristics import place
from .offsets.lifetimes import Lifetime


def arena_bytes(graph: Graph) -> int:
    """Bytes of an arena in which all inputs and results of a graph find room, in its order; constants lie elsewhere."""
    return place(list(lifetimes(graph))).nbytes


def lifetimes(graph: Graph) -> Iterator[Lifetime[Value | Node]]:
    """When each value is held that has bytes of its own, and what a node's bodies hold while it runs."""
    roots = roots_of(graph)
    steps = {node: number for number, node in enumerate(graph, 1)}
    steps[graph.return_node] = len(steps) + 1
    last = last_uses(graph, roots)
    for value in graph.inputs:
        yield Lifetime(value, value_bytes(value), 0, steps[last[value]] if value in last else 0)
    for node in graph:
        step = steps[node]
        if inside := nested_bytes(node):
            yield Lifetime(node, inside, step, step)
        for value in node.results:
            if value not in roots:
                yield Lifetime(value, value_bytes(value), step, steps[last[value]] if value in last else step)
