"""What is held on the device at a time, as terms over units."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .graph import BEFORE, PlacedValue, PlacementGraph


class Term(NamedTuple):
    """Bytes that are held at a time, if units are on the device.

    Attributes:
        unit: that has the value.
        before, after: units; one of each must be on the device.
        is_copy: whether the unit must be on the host besides, for elsewhere they are counted, or take no bytes.
        readers: all units that read the value, but for the one that has it.
    """

    unit: int
    before: frozenset[int]
    after: frozenset[int]
    is_copy: bool
    readers: frozenset[int]


class Terms:
    """What may be held at times of one graph; of a value it is the same at all times between two that read it."""

    def __init__(self, graph: PlacementGraph) -> None:
        self._values = [value for value in graph.values if value.nbytes]
        self._made = np.array([value.made for value in self._values], np.int64)
        self._last = np.array([_last_time(value) for value in self._values], np.int64)
        self._times = [[time for time, _ in value.reads] for value in self._values]
        self._known: list[dict[tuple[int, int, bool], tuple[Term, ...]]] = [{} for _ in self._values]
        self._at: dict[int, Counter[Term]] = {}

    def at(self, when: int) -> Counter[Term]:
        """What may be held at a time, and its bytes; what is held alike as one."""
        if when not in self._at:
            self._at[when] = self._find(when)
        return self._at[when]

    def _find(self, when: int) -> Counter[Term]:
        found: Counter[Term] = Counter()
        for number in np.flatnonzero((self._made <= when) & (self._last >= when)).tolist():
            for term in self._of(number, when):
                found[term] += self._values[number].nbytes
        return found

    def _of(self, number: int, when: int) -> tuple[Term, ...]:
        value, times, known = self._values[number], self._times[number], self._known[number]
        key = bisect_right(times, when), bisect_left(times, when), value.until >= when or value.made >= when
        terms = known.get(key)
        if terms is None:
            terms = known[key] = tuple(_terms(value, when))
        return terms


def _last_time(value: PlacedValue) -> int:
    """The last time when a value may be held on the device."""
    read = value.reads[-1][0] if value.reads else BEFORE - 1
    return read if value.shares else max(value.until, value.made, read)


def others_that_read(value: PlacedValue) -> frozenset[int]:
    """The units that read a value, but for the one that has it."""
    return frozenset(unit for _, unit in value.reads if unit != value.unit)


def _terms(value: PlacedValue, when: int) -> Iterator[Term]:
    """Those of a value at a time when it is made."""
    home, readers = frozenset((value.unit,)), others_that_read(value)
    before = frozenset(unit for time, unit in value.reads if time <= when)
    after = frozenset(unit for time, unit in value.reads if time >= when)
    if value.shares:
        if before and after:
            yield Term(value.unit, before, after, True, readers)
    elif max(value.until, value.made) >= when:
        yield Term(value.unit, home, home, False, readers)
        if before - home and after - home:
            yield Term(value.unit, before - home, after - home, True, readers)
    elif after:
        yield Term(value.unit, before | home, after, False, readers)
