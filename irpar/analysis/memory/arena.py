"""An arena: one block of memory in which values that live at different times share bytes."""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from operator import attrgetter
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
    spans = (uses or uses_of(graph)).on_device
    held: Iterator[Lifetime[Value | Node]] = map(
        Lifetime, spans.values, map(value_bytes, spans.values), spans.first, spans.last
    )
    inside: list[Lifetime[Value | Node]] = [
        Lifetime(node, nbytes, step, step) for step, node in enumerate(graph, 1) if (nbytes := nested_bytes(node))
    ]
    return merge(inside, held, key=attrgetter("first")) if inside else held
