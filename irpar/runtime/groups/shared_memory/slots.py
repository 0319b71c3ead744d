"""The slots of one rank: where data lies on its way to others."""

from collections.abc import Hashable

from ..base import Array
from .segment import Segment

_HELD_SHARE = 2
"""One in so many slots is for data that receivers may keep."""


class Slots:
    """Slots, and which are free.

    Most data is read as soon as its receiver looks, so that its slot is free again, whatever else goes on. Parts of
    reductions are better kept in their slots until the same part of all members has come; but were all slots kept so,
    by several reductions that wait for each other's parts, nothing would move any more. So only one reduction at a time
    has slots for that, and all others share the rest.

    Args:
        segment: where they are.
        rank: whose they are.
    """

    def __init__(self, segment: Segment, rank: int) -> None:
        count = segment.layout.slots
        self._segment = segment
        self._rank = rank
        self._readers = [0] * count
        self._held = range(count // _HELD_SHARE)
        self._free_held = list(self._held)
        self._free = list(range(len(self._held), count))
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
            (self._free_held if slot in self._held else self._free).append(slot)
