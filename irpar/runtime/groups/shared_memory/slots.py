"""The slots of one rank: where data lies on its way to others."""

from collections.abc import Hashable, Sequence

from ..base import Array
from .segment import Segment
from .streams import Lane

_HELD_SHARE = 2
"""One in so many slots is for data that receivers may keep."""


class Slots:
    """Slots, and which are free.

    Most data is read as soon as its receiver looks, so that its slot is free again, whatever else goes on. Parts of
    reductions are better kept in their slots until the same part of all members has come; but were all slots kept so,
    by several reductions that wait for each other's parts, nothing would move any more. So only one reduction at a time
    has slots for that, and all others share the rest. A few more are for operands that go with the header of their
    collective, before anybody is known to come: where these are taken, operands go as all else does.

    Args:
        segment: where they are.
        rank: whose they are.
    """

    def __init__(self, segment: Segment, rank: int) -> None:
        count, pooled = segment.layout.slots, segment.layout.pooled
        self._segment = segment
        self._rank = rank
        self._readers = [0] * (count + pooled)
        self._held = range(count // _HELD_SHARE)
        self._free_held = list(self._held)
        self._free = list(range(len(self._held), count))
        self._pooled = range(count, count + pooled)
        self._free_pooled = list(self._pooled)
        self._lent: list[tuple[int, Lane, int, Sequence[tuple[Lane, int]]]] = []
        """Those that are free once others have read so much, one of them apart; the latest last."""
        self._owner: Hashable = None

    @property
    def is_free(self) -> bool:
        """Whether `put` has room."""
        return bool(self._free)

    def find(self, owner: Hashable, is_held: bool) -> tuple[int, bool] | None:
        """A free slot, and whether its receiver may keep what is in it; None where there is none.

        Args:
            owner: who asks.
            is_held: whether it may be one that is kept.
        """
        if is_held:
            if len(self._free_held) == len(self._held):
                self._owner = owner
            if self._owner is owner and self._free_held:
                return self._free_held.pop(), True
        return (self._free.pop(), False) if self._free else None

    @property
    def pooled(self) -> range:
        """Those for operands that go with the header of their collective."""
        return self._pooled

    def find_pooled(self) -> int | None:
        """A free slot for an operand that goes with its header; None where there is none."""
        lent = self._lent
        for place, (slot, lane, mark, others) in enumerate(lent):
            if lane.freed >= mark and (not others or all(lane.freed >= mark for lane, mark in others)):
                del lent[place]
                return slot
        return self._free_pooled.pop() if self._free_pooled else None

    def free_when_read(self, slot: int, lanes: Sequence[Lane]) -> None:
        """A slot of an operand is free once others have read all that was sent to them until now."""
        first = lanes[0]
        others = [(lane, lane.written) for lane in lanes[1:]] if len(lanes) > 1 else ()
        self._lent.append((slot, first, first.written, others))

    def lend(self, slot: int, readers: int) -> None:
        """A slot is free again once so many have read it."""
        self._readers[slot] = readers

    def fill(self, slot: int, source: Array, readers: int) -> int:
        """Copy into a slot that `find` found; gives its bytes."""
        self._segment.slot(self._rank, slot, source.dtype, source.size).reshape(source.shape)[...] = source
        self._readers[slot] = readers
        return source.nbytes

    def put(self, source: Array, readers: int) -> int:
        """Copy into a free slot; gives its number."""
        slot = self._free.pop()
        self.fill(slot, source, readers)
        return slot

    def free(self, slot: int) -> None:
        """One of those that it was for has read it."""
        self._readers[slot] -= 1
        if not self._readers[slot]:
            self._list_of(slot).append(slot)

    def _list_of(self, slot: int) -> list[int]:
        if slot in self._pooled:
            return self._free_pooled
        return self._free_held if slot in self._held else self._free
