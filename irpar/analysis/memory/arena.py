"""An arena: one block of memory in which values that live at different times share bytes."""

from bisect import insort
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from irpar.ir import Graph, Node, Value

from .liveness import last_uses, nested_bytes, roots_of, value_bytes

ALIGNMENT = 64
"""Bytes of a cache line, which no two values share."""

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Lifetime(Generic[K]):
    """When something must be held.

    Attributes:
        key: what.
        nbytes: how large it is.
        first, last: the steps through which it is held, both included.
    """

    key: K
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Offsets(Generic[K]):
    """Where everything lies in a block.

    Attributes:
        offsets: bytes from the start of the block.
        nbytes: size of the block.
    """

    offsets: dict[K, int]
    nbytes: int


def place(held: Sequence[Lifetime[K]]) -> Offsets[K]:
    """Offsets at which nothing overlaps with what is held at the same time.

    Step by step each gets the smallest hole that it fits in, or room at the end (best fit, Knuth, TAOCP 1, 2.5).
    """
    offsets: dict[K, int] = {}
    holes: list[tuple[int, int]] = []  # Offset and size, by offset; no two of them touch.
    ends: list[tuple[int, int, int]] = []  # Last step, offset and size of what is held.
    top = 0
    for one in sorted(held, key=lambda one: (one.first, -one.nbytes)):
        while ends and ends[0][0] < one.first:
            _, offset, size = ends.pop(0)
            top = _give_back(holes, offset, size, top)
        size = -(-one.nbytes // ALIGNMENT) * ALIGNMENT
        fitting = [hole for hole in holes if hole[1] >= size]
        if fitting:
            offset, room = min(fitting, key=lambda hole: hole[1])
            holes.remove((offset, room))
            if room > size:
                insort(holes, (offset + size, room - size))
        else:
            offset, top = top, top + size
        offsets[one.key] = offset
        insort(ends, (one.last, offset, size))
    nbytes = max((offsets[one.key] + one.nbytes for one in held), default=0)
    return Offsets(offsets, nbytes)


def _give_back(holes: list[tuple[int, int]], offset: int, size: int, top: int) -> int:
    """Make a hole, one with those that it touches; returns where the last thing that is held ends."""
    for hole in [hole for hole in holes if hole[0] + hole[1] == offset or hole[0] == offset + size]:
        holes.remove(hole)
        offset, size = min(offset, hole[0]), size + hole[1]
    if offset + size == top:
        return offset
    insort(holes, (offset, size))
    return top


def arena_bytes(graph: Graph) -> int:
    """Bytes of an arena in which all inputs and results of a graph find room, in its order; constants lie elsewhere."""
    return place(list(_lifetimes(graph))).nbytes


def _lifetimes(graph: Graph) -> Iterator[Lifetime[Value | Node]]:
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
