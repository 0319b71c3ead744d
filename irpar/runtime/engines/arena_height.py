"""How much of an arena pays: what lies outside it comes and goes, and an arena stays all the while."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from irpar.analysis.engines import writes_out
from irpar.analysis.memory.liveness import nested_bytes, value_bytes
from irpar.analysis.memory.offsets.lifetimes import Lifetime, Offsets
from irpar.ir import Value
from irpar.ops import traits
from irpar.runtime.instructions import Segment

ALLOWED_BYTES = 1 << 19
"""What an arena and what lies outside may take beyond the most that is held at once."""
_HEIGHTS = 256
"""So many heights are tried."""

Ints = np.ndarray[Any, "np.dtype[np.int64]"]


def most_with(held: Sequence[Lifetime[Any]], outside: Iterable[Lifetime[Any]], steps: int) -> int:
    """The most that a segment holds at once, in an arena and outside."""
    return int((_held(outside, steps) + _held(held, steps)).max())


def height(
    held: Sequence[Lifetime[Any]], found: Offsets[Any], outside: Iterable[Lifetime[Any]], steps: int, most: int
) -> int:
    """The largest size of an arena with which nodes take no more memory than they may, arena and outside together.

    What reaches above it is to be allocated when it is made, and freed when nothing reads it any more. An arena of
    4 MB, with 3 MB that are given at the end beside it, takes 7 MB, though never more than 4 are held at once; of
    1 MB, with the other 3 allocated while they are held, it takes 4.

    Args:
        held: what has a place in the arena.
        found: the places.
        outside: what has none.
        steps: how many there are.
        most: the bytes that they may take, but for ALLOWED_BYTES.
    """
    beside = _held(outside, steps)
    ends = {one.key: found.offsets[one.key] + one.nbytes for one in held}
    above = sorted(held, key=lambda one: ends[one.key])
    top = found.nbytes
    while above and top + int(beside.max()) > most + ALLOWED_BYTES:
        step = top - found.nbytes // _HEIGHTS
        moved: list[Lifetime[Any]] = []
        while above and (not moved or ends[above[-1].key] > step):
            moved.append(above.pop())
        beside += _held(moved, steps)
        top = ends[above[-1].key] if above else 0
    return top


def outside_of(segment: Segment, inside: Set[Any], last: Mapping[Value, int]) -> Iterable[Lifetime[Any]]:
    """What a segment holds that has no place in the arena, views and what is written over state apart."""
    for value in segment.inputs:
        if value not in inside:
            yield Lifetime(value, value_bytes(value), 0, last.get(value, len(segment.nodes)))
    for step, node in enumerate(segment.nodes):
        if node.attributes or node.callee is not None:
            yield Lifetime(node, nested_bytes(node), step, step)
        if traits(node).view and not writes_out(node):
            continue
        for value in node.results:
            if value not in inside and value not in segment.over:
                yield Lifetime(value, value_bytes(value), step, last.get(value, step))


def _held(lifetimes: Iterable[Lifetime[Any]], steps: int) -> Ints:
    """The bytes held at each step."""
    change = np.zeros(steps + 1, np.int64)
    for one in lifetimes:
        change[one.first] += one.nbytes
        change[one.last + 1] -= one.nbytes
    return np.cumsum(change)[:steps]
