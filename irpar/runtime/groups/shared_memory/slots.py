"""The slots of one rank: where data lies on its way to others."""

import math
import weakref
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from irpar.runtime.groups.wire.header import HEADER_BYTES

from ..base import Array
from .segment import Segment
from .streams import Lane

IN_SLOT, TO_FREE, MAY_KEEP, _TELLS, _BITS = 1, 2, 4, 8, 4
"""The flag of an offer: header and operand lie in a slot; its sender waits to be told that it was read; what lies there
may be kept there; and from bit 4 on the flag tells which pooled slots of the receiver the sender keeps."""
_KEPT_SHARE = 2
"""Members may keep what lies in one of so many pooled slots; the others are for what goes on."""
_HELD_SHARE = 2
"""One in so many slots is for data that receivers may keep."""


class Slots:
    """Slots, and which are free.

    Most data is read as soon as its receiver looks, so that its slot is free again, whatever else goes on. Parts of
    reductions are better kept in their slots until the same part of all members has come; but were all slots kept so,
    by several reductions that wait for each other's parts, nothing would move any more. So only one reduction at a time
    has slots for that, and all others share the rest. A few more are for operands that go with the header of their
    collective, before anybody is known to come: where these are taken, operands go as all else does. In some of these
    results may lie that other ranks keep as they are, for as long as their programs hold them.

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
        self.loans = Loans(segment)  # Of this rank.
        self._kept: dict[int, int] = {}
        """By rank, which of those that are pooled it keeps, or may: bits, as `Loans.bits` has them."""

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
        lent, kept = self._lent, self._kept_bits() if self._kept else 0
        for place, (slot, lane, mark, others) in enumerate(lent):
            is_read = lane.freed >= mark and (not others or all(lane.freed >= mark for lane, mark in others))
            if is_read and not kept >> self._pooled.index(slot) & 1:
                del lent[place]
                return slot
        return self._free_pooled.pop() if self._free_pooled else None

    def _kept_bits(self) -> int:
        """Those of which this rank or another keeps what lies there."""
        bits = self.loans.bits(self._rank)
        for each in self._kept.values():
            bits |= each
        return bits

    def keeping(self, rank: int) -> int:
        """The flag that tells a rank which of its slots this one keeps."""
        return _TELLS | self.loans.bits(rank) << _BITS

    def note_kept(self, rank: int, flag: int) -> None:
        """A rank tells which slots it keeps, if it does."""
        if flag & _TELLS:
            self._kept[rank] = flag >> _BITS

    def let_keep(self, slot: int, ranks: Iterable[int]) -> bool:
        """Let ranks keep what lies in a slot, that is pooled, for as long as they like; False where too many do."""
        if self._kept_bits().bit_count() >= len(self._pooled) // _KEPT_SHARE:
            return False
        bit = 1 << self._pooled.index(slot)
        for rank in ranks:
            self._kept[rank] = self._kept.get(rank, 0) | bit
        return True

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

    def lay(self, slot: int, header: bytes, content: Array, readers: int) -> int:
        """Copy a header and what belongs to it into a slot that `find` found; gives the bytes of both."""
        self._segment.slot(self._rank, slot, np.dtype(np.uint8), HEADER_BYTES).data[:] = header
        self._segment.laid(self._rank, slot, content.dtype, content.shape)[...] = content
        self._readers[slot] = readers
        return HEADER_BYTES + content.nbytes

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


class Loans:
    """What a rank keeps of what lies in pooled slots, of its own and of others.

    Args:
        segment: where they are.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._first = segment.layout.slots
        self._lent: dict[tuple[int, int], weakref.ref[Array]] = {}

    def array(self, rank: int, slot: int, dtype: "np.dtype[Any]", shape: tuple[int, ...]) -> Array:
        """What lies behind the header in a slot of a rank, to be read as long as anybody holds it."""
        memory = self._segment.slot(rank, slot, np.dtype(np.uint8), self._segment.layout.slot).data.toreadonly()
        # Views of views refer to the last array that lies in no other one: this.
        holder = np.frombuffer(memory, dtype, math.prod(shape), HEADER_BYTES)
        self._lent[rank, slot] = weakref.ref(holder, partial(self._take_back, (rank, slot)))
        return holder.reshape(shape)

    def bits(self, rank: int) -> int:
        """Which of a rank's pooled slots this one keeps: 1 for the first of them, 2 for the next, 4, and so on."""
        return sum(1 << slot - self._first for owner, slot in tuple(self._lent) if owner == rank)

    def _take_back(self, place: tuple[int, int], _: object) -> None:
        """Nobody holds it any more."""
        del self._lent[place]
