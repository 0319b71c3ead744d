"""The steps in which items are not needed, and what the device holds if they are elsewhere then."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from irpar.analysis.memory.arena import lifetimes
from irpar.analysis.memory.liveness import constant_bytes, uses_of
from irpar.ir import Graph, Memory, Value

from .items import MovableValue
from .steps import Steps
from .timeline import Rates

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Gap:
    """Steps in which an item is not needed.

    Attributes:
        item: the number of the item.
        after, before: the steps of use on both sides; of the gap around all uses, the last and the first.
        is_around: whether it is that; where nothing uses the item, it is the whole program.
    """

    item: int
    after: int
    before: int
    is_around: bool = False


@dataclass(frozen=True)
class Room:
    """What may lie where.

    Attributes:
        limit: bytes that the device may hold.
        memory: kind of items to the memories that they may go to, the first choice first; others stay.
        host: bytes of the host's memory that they may take; None: any number.
        disk: the same of the disk.
    """

    limit: int
    memory: Mapping[str, Sequence[Memory]]
    host: int | None = None
    disk: int | None = None


class Gaps:
    """All gaps of a program.

    Args:
        graph: the program.
        items: what may move.
        steps: its steps.
        rates: of copies.
        room: where to.

    Attributes:
        items: those that may go somewhere.
        used: the steps that need each.
        all: the gaps; those of an item stand together, the one around its uses first.
        of_item: their numbers, by item.
        item: the item of each gap, by its number.
        is_around: whether a gap is one around all uses.
        forced: whether an item is away in a gap in any case.
        whole: what each step holds if nothing moves.
    """

    def __init__(self, graph: Graph, items: Sequence[MovableValue], steps: Steps, rates: Rates, room: Room) -> None:
        self.room = room
        self.steps = steps
        self.items = [item for item in items if room.memory.get(item.kind)]
        self.used = [sorted(dict.fromkeys(map(steps.of, item.touched))) for item in self.items]
        self.whole, self._until = _held(graph, steps, self.items)
        roots = uses_of(graph).roots
        self._shares = [item.replaced is not None and roots.get(item.replaced) is item.value for item in self.items]
        self.all = [gap for number in range(len(self.items)) for gap in self._gaps(number)]
        self.of_item: dict[int, list[int]] = {}
        for number, gap in enumerate(self.all):
            self.of_item.setdefault(gap.item, []).append(number)
        self.item = np.array([gap.item for gap in self.all], np.int64)
        self.is_around = np.array([gap.is_around for gap in self.all], np.bool_)
        self.forced = np.array([gap.is_around and self.items[gap.item].is_brought for gap in self.all], np.bool_)
        self.nbytes = np.array([self.items[gap.item].nbytes for gap in self.all], np.int64)
        self.ranges = np.array([self._ranges(gap) for gap in self.all], np.int64).reshape(-1, 4)
        first = {number: room.memory[item.kind][0] for number, item in enumerate(self.items)}
        self.comes = np.array([rates.coming(item.nbytes, first[n]) for n, item in enumerate(self.items)])
        self.goes = np.array(
            [
                rates.going(item.nbytes, first[n]) if item.made is not None or item.replaced is not None else 0.0
                for n, item in enumerate(self.items)
            ]
        )

    def _gaps(self, number: int) -> Iterator[Gap]:
        item, used = self.items[number], self.used[number]
        if not used:
            yield Gap(number, self.steps.count, self.steps.count, True)
        elif item.made is None:
            yield Gap(number, used[-1], used[0], True)
        for after, before in pairwise(used):
            if before - after > 1:
                yield Gap(number, after, before)

    def _ranges(self, gap: Gap) -> tuple[int, int, int, int]:
        """The steps of a gap as two half-open ranges."""
        if not self.used[gap.item]:
            return 0, self.steps.count, 0, 0
        if not gap.is_around:
            return gap.after + 1, gap.before, 0, 0
        end = max(self._until[gap.item], gap.after) + 1
        return 0, gap.before, gap.after + 1, end

    @property
    def least(self) -> Numbers:
        """What each step holds at least: if the items are away in all gaps."""
        return self.held(np.ones(len(self.all), np.bool_))

    def change(self, held: Numbers, number: int, sign: int) -> None:
        """Take what a gap frees off what steps hold (-1), or put it back (1)."""
        first, end, second, last = self.ranges[number]
        nbytes = sign * self.nbytes[number]
        held[first:end] += nbytes
        held[second:last] += nbytes
        item = self.items[self.item[number]]
        if self.is_around[number] and item.replaced is not None:
            # The new one leaves when it has been read; it is not written over the old one, which is elsewhere.
            made, until = self.steps.of(item.replaced_at), self.steps.of(item.replaced_until)
            if self._shares[self.item[number]]:
                held[made : until + 1] -= nbytes
            else:
                held[until + 1 :] += nbytes

    def held(self, chosen: Numbers) -> Numbers:
        """What each step holds if the items are away in some gaps, by number."""
        held = self.whole.copy()
        for number in np.flatnonzero(chosen):
            self.change(held, int(number), -1)
        return held


def _held(graph: Graph, steps: Steps, items: Sequence[MovableValue]) -> tuple[Numbers, list[int]]:
    """What the device holds in each step if nothing moves: other values at their most, items while a step has them.

    A body has those of the program around it throughout. Also until which step it has each item.
    """
    nodes = max(len(graph), 1)
    at_nodes = np.zeros(nodes + 1, np.int64)
    in_steps = np.zeros(steps.count + 1, np.int64)
    numbers = {item.value: number for number, item in enumerate(items)}
    until = [steps.count - 1] * len(items)
    for one in lifetimes(graph, uses_of(graph)):
        first, last = max(one.first - 1, 0), min(max(one.last - 1, 0), nodes - 1)
        number = numbers.get(one.key) if isinstance(one.key, Value) else None
        if number is not None:
            until[number] = steps.of(last)
            in_steps[steps.of(first)] += one.nbytes
            in_steps[until[number] + 1] -= one.nbytes
        else:
            at_nodes[first] += one.nbytes
            at_nodes[last + 1] -= one.nbytes
    most = np.maximum.reduceat(np.cumsum(at_nodes)[:nodes], steps.firsts) + constant_bytes(graph)
    around = sum(item.nbytes for item in items if item.value.owner is not graph)
    return most + np.cumsum(in_steps)[:-1] + around, until
