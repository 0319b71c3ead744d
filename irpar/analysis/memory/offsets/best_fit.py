"""Best fit, step by step: what an allocator would do that knows nothing of the future. Near-linear."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush

from .lifetimes import ALIGNMENT, K, Lifetime, Offsets, aligned, offsets_of


def best_fit(held: Sequence[Lifetime[K]], alignment: int = ALIGNMENT) -> Offsets[K]:
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
        size = aligned(one.nbytes, alignment)
        if not size:  # What has no bytes overlaps with nothing.
            offsets[one.key] = 0
            continue
        offset = holes.take(size)
        if offset is None:
            offset, top = top, top + size
        offsets[one.key] = offset
        heappush(ends, (one.last, offset, size))
    return offsets_of(held, [offsets[one.key] for one in held])


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
