"""What is held on the device at a time, as terms over units."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from .graph import PlacedValue, PlacementGraph


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


def terms_at(graph: PlacementGraph, when: int) -> Counter[Term]:
    """What may be held at a time, and its bytes; what is held alike as one."""
    found: Counter[Term] = Counter()
    for value in graph.values:
        if value.nbytes:
            for term in _terms(value, when):
                found[term] += value.nbytes
    return found


def others_that_read(value: PlacedValue) -> frozenset[int]:
    """The units that read a value, but for the one that has it."""
    return frozenset(unit for _, unit in value.reads if unit != value.unit)


def _terms(value: PlacedValue, when: int) -> Iterator[Term]:
    if value.made > when:
        return
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
