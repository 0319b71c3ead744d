"""What an assignment costs, copies, and holds on the device: all that the searches are measured by."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .graph import BEFORE, PlacementGraph

Array = np.ndarray[Any, Any]

_FEW_READERS = 16
_TRIFLE = 1e-6
"""Of all bytes."""


@dataclass(frozen=True)
class Outcome:
    """What an assignment comes to.

    Attributes:
        cost: of units and copies, one after the other.
        peak: the most bytes on the device at once.
        at: when.
        to_host, to_device: bytes that are copied.
    """

    cost: int
    peak: int
    at: int
    to_host: int
    to_device: int


def simulate(graph: PlacementGraph, on_device: Sequence[bool]) -> Outcome:
    """What an assignment comes to.

    Raises:
        ValueError: a unit is where it cannot be.
    """
    return Simulator(graph).outcome(on_device)


class Simulator:
    """Simulates assignments of one graph, in time linear in values, reads and times."""

    def __init__(self, graph: PlacementGraph) -> None:
        self.graph = graph
        values = graph.values
        self._unit = np.array([value.unit for value in values], np.int64)
        self._made = np.array([value.made for value in values], np.int64)
        self._until = np.array([max(value.until, value.made) for value in values], np.int64)
        self._bytes = np.array([value.nbytes for value in values], np.int64)
        self._made_bytes = np.array([0 if value.shares else value.nbytes for value in values], np.int64)
        read = [(number, *each) for number, value in enumerate(values) for each in value.reads]
        self._reads = np.array(read, np.int64).reshape(-1, 3)
        self._prices = [unit.host for unit in graph.units], [unit.device for unit in graph.units]

    def outcome(self, on_device: Sequence[bool]) -> Outcome:
        """What an assignment comes to.

        Raises:
            ValueError: a unit is where it cannot be.
        """
        cost = 0
        for number, (far, near, where) in enumerate(zip(*self._prices, on_device, strict=True)):
            price = near if where else far
            if price is None:
                name = self.graph.units[number].name
                raise ValueError(f"{name} cannot be on the {'device' if where else 'host'}")
            cost += price
        to_host, to_device = self.copied(on_device)
        for number in to_host:
            cost += self.graph.values[number].to_host
        for number in to_device:
            cost += self.graph.values[number].to_device
        held = self.held(on_device)
        at = int(held.argmax())
        moved = (int(self._bytes[numbers].sum()) for numbers in (to_host, to_device))
        return Outcome(cost, int(held[at]), at - 1, *moved)

    def copied(self, on_device: Sequence[bool]) -> tuple[Array, Array]:
        """The numbers of the values that are copied to the host, and of those that are to the device."""
        where = np.array(on_device, bool)
        number, reader = self._reads[:, 0], where[self._reads[:, 2]]
        maker = where[self._unit[number]]
        return np.unique(number[maker & ~reader]), np.unique(number[~maker & reader])

    def held(self, on_device: Sequence[bool]) -> Array:
        """The bytes on the device before the first node, while each node runs, and after the last one."""
        where = np.array(on_device, bool)
        count, times = len(self._unit), self.graph.times
        first = np.full(count, times + 1, np.int64)
        last = np.full(count, -2, np.int64)
        near = self._reads[where[self._reads[:, 2]]]
        np.minimum.at(first, near[:, 0], near[:, 1])
        np.maximum.at(last, near[:, 0], near[:, 1])
        made_here = where[self._unit]
        start = np.where(made_here, self._made, first)
        end = np.where(made_here, np.maximum(self._until, last), last)
        size = np.where(made_here, self._made_bytes, self._bytes)
        there = start <= end
        change = np.zeros(times + 3, np.int64)
        np.add.at(change, start[there] + 1, size[there])
        np.subtract.at(change, end[there] + 2, size[there])
        return np.cumsum(change)[: times + 2]

    @cached_property
    def edges(self) -> Array:
        """Units that have something, and those that read it: each pair of different ones once."""
        pairs = np.stack((self._unit[self._reads[:, 0]], self._reads[:, 2]))
        return np.unique(pairs[:, pairs[0] != pairs[1]], axis=1)

    @cached_property
    def hubs(self) -> Array:
        """Whether a unit has next to nothing that many others read: the number 0.9, or the norm of all gradients."""
        _, nbytes = self.worth
        readers = np.bincount(self.edges[0], minlength=len(nbytes))
        return np.asarray((readers > _FEW_READERS) & (nbytes <= _TRIFLE * nbytes.sum()))

    @cached_property
    def worth(self) -> tuple[Array, Array]:
        """Of each unit what it saves to be on the device, copies aside, and the bytes that it has there."""
        saved = np.array([(unit.host or 0) - (unit.device or 0) for unit in self.graph.units], float)
        return saved, np.bincount(self._unit, self._bytes, len(saved))

    @cached_property
    def alike(self) -> list[tuple[int, ...]]:
        """Units that may stand for each other, as in equal layers: they cost and have as much, and so do neighbours.

        A guess that costs little: what they read and when is not compared.
        """
        _, nbytes = self.worth
        kinds: dict[tuple[int | None, int | None, float], int] = {}
        own = [
            kinds.setdefault((unit.host, unit.device, held), len(kinds))
            for unit, held in zip(self.graph.units, nbytes.tolist(), strict=True)
        ]
        around: list[list[tuple[bool, int]]] = [[] for _ in own]
        for one, other in self.edges.T.tolist():
            around[one].append((True, own[other]))
            around[other].append((False, own[one]))
        found: dict[tuple[int, tuple[tuple[bool, int], ...]], list[int]] = {}
        for number, where in enumerate(self.graph.fixed):
            if where is None:
                found.setdefault((own[number], tuple(sorted(around[number]))), []).append(number)
        return [tuple(each) for each in found.values() if len(each) > 1]

    @cached_property
    def least_held(self) -> Array:
        """The bytes that are on the device at least while a node of each unit runs, where the unit is there."""
        made = self._made != BEFORE
        numbers = np.arange(len(made))
        touched = np.concatenate((self._reads, np.stack((numbers, self._made, self._unit), axis=1)[made]))
        number, when, unit = np.unique(touched, axis=0).T
        places, place = np.unique(unit * (self.graph.times + 1) + when, return_inverse=True)
        held = np.bincount(place, self._made_bytes[number], len(places)).astype(np.int64)
        found = np.zeros(len(self.graph.units), np.int64)
        np.maximum.at(found, places // (self.graph.times + 1), held)
        return found

    @cached_property
    def _holders(self) -> Array:
        """Whether a unit only holds something that others read, at no cost on either side."""
        units = self.graph.units
        found = np.array([unit.host == 0 and unit.device == 0 for unit in units], bool)
        is_read = np.zeros(len(units), bool)
        is_read[self._unit[self._reads[:, 0]]] = True
        found[self._unit[self._made != BEFORE]] = False
        found[self.edges[1]] = False
        return found & is_read

    def tidied(self, on_device: Sequence[bool]) -> tuple[bool, ...]:
        """The same, but that what no node makes lies on the host where only nodes there read it."""
        where = np.array(on_device, bool)
        ones, others = self.edges
        is_near = np.zeros(len(where), bool)
        is_near[ones[where[others]]] = True
        return tuple((where & ~(self._holders & ~is_near)).tolist())

    @cached_property
    def smallest(self) -> tuple[bool, ...]:
        """The one that holds least: all on the host that can be, for no less is held with more on the device."""
        return tuple(unit.host is None for unit in self.graph.units)


def worst_times(held: Array, limit: int, most: int, parts: int) -> list[int]:
    """The times when most is held, and more than fits, apart from each other.

    Args:
        held: bytes before the first node, while each node runs, and after the last one.
        limit: bytes.
        most: how many there are at most.
        parts: of so many equal parts of all times no two lie in less than one.
    """
    above = np.flatnonzero(held > limit)
    order = above[held[above].argsort(kind="stable")[::-1]].tolist()
    apart = max(1, len(held) // parts)
    chosen: list[int] = []
    for place in order:
        if all(abs(place - other) >= apart for other in chosen):
            chosen.append(place)
        if len(chosen) == most:
            break
    return [place - 1 for place in chosen]
