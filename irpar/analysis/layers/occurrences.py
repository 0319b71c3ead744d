"""Where a body occurs in a graph: from one node of it to the others, along what they read and what reads them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeGuard

from irpar.ir import Node, Value

from .node_keys import reads

Link = tuple[int, int] | None
"""What a node reads: (place in the body, which result); (-1, n) for the nth value from outside; None for nothing."""
Shape = tuple[tuple[int, tuple[Link, ...]], ...]
"""For each node of a body its number and what it reads: equal for bodies that are the same up to what is outside."""


def shape_of(nodes: Sequence[Node], numbers: Mapping[Node, int]) -> Shape:
    """What some nodes are as a body, in that order."""
    links: dict[Value | None, Link] = {None: None}
    for place, node in enumerate(nodes):
        for index, value in enumerate(node.results):
            links[value] = place, index
    outside = 0
    shape = []
    for node in nodes:
        read = reads(node)
        for operand in read:
            if operand not in links:
                links[operand] = -1, outside
                outside += 1
        shape.append((numbers[node], tuple([links[operand] for operand in read])))
    return tuple(shape)


def is_inside(link: Link) -> TypeGuard[tuple[int, int]]:
    """Whether a node reads something that the body makes."""
    return link is not None and link[0] >= 0


def connected_parts(shape: Shape) -> list[list[int]]:
    """The places of a body, those apart that no value connects."""
    parent = list(range(len(shape)))

    def root(place: int) -> int:
        while parent[place] != place:
            parent[place] = place = parent[parent[place]]
        return place

    for place, (_, links) in enumerate(shape):
        for link in links:
            if is_inside(link):
                parent[root(place)] = root(link[0])
    parts: dict[int, list[int]] = {}
    for place in range(len(shape)):
        parts.setdefault(root(place), []).append(place)
    return list(parts.values())


class Body:
    """A body to look for.

    Args:
        shape: what it is; its last node reads, step by step, most of the others.
        numbers: of all nodes of the graph.
    """

    def __init__(self, shape: Shape, numbers: Mapping[Node, int]) -> None:
        self.shape = shape
        self.numbers = numbers
        self.readers: list[list[tuple[int, int, int]]] = [[] for _ in shape]
        for place, (_, links) in enumerate(shape):
            for index, link in enumerate(links):
                if is_inside(link):
                    self.readers[link[0]].append((link[1], place, index))

    @property
    def last(self) -> int:
        """The number of its last node."""
        return self.shape[-1][0]

    def at(self, last: Node, taken: Callable[[Node], bool]) -> tuple[Node, ...] | None:
        """The nodes of which this is the last one; None where they are not the body, or taken."""
        found: dict[int, Node] = {}
        places: dict[Node, int] = {}
        waiting = [(len(self.shape) - 1, last)]
        while waiting or self._one_more_reader(found, places, taken, waiting):
            place, node = waiting.pop()
            if place in found or node in places:
                if found.get(place) is not node:
                    return None
                continue
            if taken(node) or not self._reads_alike(place, node, waiting):
                return None
            found[place], places[node] = node, place
        if len(found) < len(self.shape):
            return None
        nodes = tuple(found[place] for place in range(len(self.shape)))
        return nodes if shape_of(nodes, self.numbers) == self.shape else None

    def _reads_alike(self, place: int, node: Node, waiting: list[tuple[int, Node]]) -> bool:
        """Whether a node may stand at a place; `waiting` gets what it reads of the body."""
        number, links = self.shape[place]
        if self.numbers.get(node) != number:
            return False
        for link, value in zip(links, reads(node), strict=True):
            if is_inside(link):
                if value is None or value.node is None or value.index != link[1]:
                    return False
                waiting.append((link[0], value.node))
        return True

    def _one_more_reader(
        self,
        found: Mapping[int, Node],
        places: Mapping[Node, int],
        taken: Callable[[Node], bool],
        waiting: list[tuple[int, Node]],
    ) -> bool:
        """Where all that was found reads is found too: go on with a node of the body that reads something of it."""
        for place in range(len(self.shape) - 1, -1, -1):
            if place not in found:
                continue
            for result, reader, index in self.readers[place]:
                if reader not in found:
                    candidates = self._readers_of(found[place].results[result], index, self.shape[reader][0])
                    node = next((node for node in candidates if node not in places and not taken(node)), None)
                    if node is None:
                        return False
                    waiting.append((reader, node))
                    return True
        return False

    def _readers_of(self, value: Value, index: int, number: int) -> Iterator[Node]:
        for node in value.users:
            if self.numbers.get(node) == number and reads(node)[index] is value:
                yield node
