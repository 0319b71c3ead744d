"""An arena: one block of memory in which values that live at different times share bytes."""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
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
    holes = _Holes()
    ends: list[tuple[int, int, int]] = []  # A heap of last step, offset and size of what is held.
    top = 0
    for one in sorted(held, key=lambda one: (one.first, -one.nbytes)):
        while ends and ends[0][0] < one.first:
            _, begin, size = heappop(ends)
            top = holes.give_back(begin, size, top)
        size = -(-one.nbytes // ALIGNMENT) * ALIGNMENT
        if not size:  # What has no bytes overlaps with nothing.
            offsets[one.key] = 0
            continue
        offset = holes.take(size)
        if offset is None:
            offset, top = top, top + size
        offsets[one.key] = offset
        heappush(ends, (one.last, offset, size))
    nbytes = max((offsets[one.key] + one.nbytes for one in held), default=0)
    return Offsets(offsets, nbytes)


class _Holes:
    """Free places below the end of what is held, no two of which touch; a step takes the logarithm of their number."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []  # (size, offset), sorted: the smallest that fits, then the lowest.
        self._starts: dict[int, int] = {}  # Offset to size.
        self._stops: dict[int, int] = {}  # End to offset.

    def take(self, size: int) -> int | None:
        """The offset of the smallest hole of at least that size, which is smaller then; None where there is none."""
        index = bisect_left(self._by_size, (size, -1))
        if index == len(self._by_size):
            return None
        room, offset = self._by_size[index]
        self._remove(offset)
        if room > size:
            self._add(offset + size, room - size)
        return offset

    def give_back(self, offset: int, size: int, top: int) -> int:
        """Make a hole, one with those that it touches; returns where the last thing that is held ends."""
        if (before := self._stops.get(offset)) is not None:
            size += self._remove(before)
            offset = before
        if offset + size in self._starts:
            size += self._remove(offset + size)
        if offset + size == top:
            return offset
        self._add(offset, size)
        return top

    def _add(self, offset: int, size: int) -> None:
        insort(self._by_size, (size, offset))
        self._starts[offset], self._stops[offset + size] = size, offset

    def _remove(self, offset: int) -> int:
        size = self._starts.pop(offset)
        del self._stops[offset + size], self._by_size[bisect_left(self._by_size, (size, offset))]
        return size


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
