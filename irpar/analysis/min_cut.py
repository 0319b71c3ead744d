"""The cheapest way to part the nodes of a graph in two: a minimal cut, by Dinic's algorithm.

source -4-> a -1-> b -4-> sink     a stays with the source, b with the sink; the cut costs 1
"""

from collections import deque
from collections.abc import Hashable

UNBOUNDED = 1 << 62
"""A capacity that no cut pays."""
_SOURCE, _SINK = 0, 1


class MinCut:
    """Arcs with what they cost where they lead from the source's side to the sink's."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._arcs: list[list[int]] = [[], []]
        self._heads: list[int] = []
        self._room: list[int] = []

    def from_source(self, node: Hashable, capacity: int) -> None:
        """What a node costs on the sink's side."""
        self._add(_SOURCE, self._number(node), capacity)

    def to_sink(self, node: Hashable, capacity: int) -> None:
        """What a node costs on the source's side."""
        self._add(self._number(node), _SINK, capacity)

    def arc(self, tail: Hashable, head: Hashable, capacity: int = UNBOUNDED) -> None:
        """What it costs that one node is on the source's side, and another one on the sink's."""
        self._add(self._number(tail), self._number(head), capacity)

    def _number(self, node: Hashable) -> int:
        if node not in self._numbers:
            self._numbers[node] = len(self._arcs)
            self._arcs.append([])
        return self._numbers[node]

    def _add(self, tail: int, head: int, capacity: int) -> None:
        """An arc, followed by the one that takes back what flows through it."""
        for node, other, room in ((tail, head, capacity), (head, tail, 0)):
            self._arcs[node].append(len(self._heads))
            self._heads.append(other)
            self._room.append(room)

    def source_side(self) -> set[Hashable]:
        """The fewest nodes that are on the source's side of a cheapest cut."""
        levels = self._levels()
        while levels[_SINK] >= 0:
            tried = [0] * len(self._arcs)
            while path := self._path(levels, tried):
                least = min(self._room[arc] for arc in path)
                for arc in path:
                    self._room[arc] -= least
                    self._room[arc ^ 1] += least
            levels = self._levels()
        return {node for node, number in self._numbers.items() if levels[number] >= 0}

    def _levels(self) -> list[int]:
        """How many arcs with room each node is away from the source; -1 where there is no way."""
        levels = [-1] * len(self._arcs)
        levels[_SOURCE] = 0
        waiting = deque([_SOURCE])
        while waiting:
            node = waiting.popleft()
            for arc in self._arcs[node]:
                head = self._heads[arc]
                if self._room[arc] and levels[head] < 0:
                    levels[head] = levels[node] + 1
                    waiting.append(head)
        return levels

    def _path(self, levels: list[int], tried: list[int]) -> list[int]:
        """Arcs with room from the source to the sink, a level each, none that was tried; none at all: none is left."""
        path: list[int] = []
        node = _SOURCE
        while node != _SINK:
            arcs = self._arcs[node]
            while tried[node] < len(arcs) and not self._leads_on(arcs[tried[node]], levels[node], levels):
                tried[node] += 1
            if tried[node] < len(arcs):
                path.append(arcs[tried[node]])
                node = self._heads[path[-1]]
            elif path:
                node = self._heads[path.pop() ^ 1]
                tried[node] += 1
            else:
                break
        return path

    def _leads_on(self, arc: int, level: int, levels: list[int]) -> bool:
        return self._room[arc] > 0 and levels[self._heads[arc]] == level + 1
