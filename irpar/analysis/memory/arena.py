"""An arena: one block of memory in which values that live at different times share bytes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from irpar.ir import Graph, Node, Value
from irpar.ops.memory_copies import node_place

from .liveness import Uses, nested_bytes, uses_of, value_bytes
from .offsets.heuristics import place
from .offsets.lifetimes import Lifetime
from .scratch import Needs, nested_scratch


def arena_bytes(graph: Graph, uses: Uses | None = None, needs: Needs | None = None) -> int:
    """Bytes of an arena in which all that a graph computes on the device finds room, in its order, inputs included.

    Args:
        graph: it.
        uses: from `uses_of`, if they are known.
        needs: what kernels need, for who asks of several graphs.
    """
    return place(list(arena_lifetimes(graph, uses, needs))).nbytes


@dataclass(frozen=True, slots=True)
class Scratch:
    """What the kernel of a node needs beside operands and results, or one in its bodies."""

    node: Node


def arena_lifetimes(
    graph: Graph, uses: Uses | None = None, needs: Needs | None = None
) -> Iterator[Lifetime[Value | Node | Scratch]]:
    """As `lifetimes`, and the scratch of each node."""
    needs = Needs() if needs is None else needs
    yield from cast("Iterator[Lifetime[Value | Node | Scratch]]", lifetimes(graph, uses))
    for step, node in enumerate(graph, 1):
        if node_place(node) == "host":
            continue
        if needed := needs.of(node) + nested_scratch(node):
            yield Lifetime(Scratch(node), needed, step, step)


def lifetimes(graph: Graph, uses: Uses | None = None) -> Iterator[Lifetime[Value | Node]]:
    """When each value is held that has bytes of its own on the device, and what a node's bodies hold while it runs."""
    uses = uses or uses_of(graph)
    roots, last = uses.roots, uses.last
    steps = {node: number for number, node in enumerate(graph, 1)}
    steps[graph.return_node] = len(steps) + 1
    for value in graph.inputs:
        if value in roots or value.memory != "device":
            continue
        yield Lifetime(value, value_bytes(value), 0, steps[last[value]] if value in last else 0)
    for node in graph:
        step = steps[node]
        if inside := nested_bytes(node):
            yield Lifetime(node, inside, step, step)
        for value in node.results:
            if value not in roots and value.memory == "device":
                yield Lifetime(value, value_bytes(value), step, steps[last[value]] if value in last else step)
