"""A collective of one rank while it is underway: what it has to send, and where what comes goes.

Small operands go whole to all members with the header, and each member computes its result from them (`prompt`).
Strings do too, or afterwards (`Texts`). Large operands go in parts, as the slots of the shared memory hold them, once
the receiver has come (`moves`, `reductions`).
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from irpar.ops.collectives.arrays import CARRIERS
from irpar.runtime.groups.wire.header import HEADER_BYTES

from ...messages import decode, encode
from ..base import Array
from ..results import EXECUTED
from ..spmd import Meeting

Box = tuple[slice | int, ...]


@lru_cache(maxsize=64)
def boxes(shape: tuple[int, ...], most: int) -> tuple[Box, ...]:
    """Cut an array into boxes of at most `most` elements, each in one piece in memory where the array is.

    A shape of (2, 3, 4) and at most 8: `[0, 0:2], [0, 2:3], [1, 0:2], [1, 2:3]`.
    """
    if 0 in shape:
        return ()
    inner = 1
    for dim in reversed(range(len(shape))):
        if inner * shape[dim] > most:
            rows = max(1, most // inner)
            return tuple(
                (*place, slice(first, min(first + rows, shape[dim])))
                for place in np.ndindex(shape[:dim])
                for first in range(0, shape[dim], rows)
            )
        inner *= shape[dim]
    return ((),)


@dataclass(frozen=True, eq=False)
class Parcel:
    """A part on its way.

    Attributes:
        targets: the ranks that it goes to.
        way: 0, or 1 on the second way of AllReduce.
        part: its number.
        source: the elements.
        is_held: the receiver may keep it in its slot until the same part of all others has come.
        into: where it goes in the slot that holds the operand; None: it needs a slot.
    """

    targets: tuple[int, ...]
    way: int
    part: int
    source: Array
    is_held: bool = False
    into: Array | None = None


class Transfer(ABC):
    """A collective of one rank.

    Attributes:
        meeting: what the members agree on.
        peers: the ranks of the other members that this one sends to or takes from.
        absent: those of them that have not come yet.
        is_done: whether the result is there and everything is sent.
    """

    __slots__ = ()
    meeting: Meeting
    absent: set[int]

    @property
    @abstractmethod
    def peers(self) -> Iterable[int]: ...

    @property
    @abstractmethod
    def is_done(self) -> bool: ...

    @abstractmethod
    def offer(self) -> tuple[bytes | memoryview, ...]:
        """The header, and what is sent with it, in pieces."""

    @abstractmethod
    def came(self, rank: int, offered: memoryview) -> None:
        """A member has come, and brings this: its header, which has been compared, and what was sent with that."""

    @abstractmethod
    def missing(self) -> set[int]:
        """Ranks of members of which something is still to come."""

    def held_up(self) -> Collection[int]:
        """Ranks of members that have come, but do their part once others have, of which this member knows nothing."""
        return ()

    @abstractmethod
    def result(self) -> Array:
        """The result, once it is done.

        Raises:
            ValueError: the operands have none.
        """


class Shipment(Transfer):
    """A collective of which parts are sent and come after the headers.

    Attributes:
        is_sent: all that this rank has to send is on its way.
    """

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self._peers = self.find_peers()
        self.absent = set(self._peers)
        self.is_sent = False
        self._next: Parcel | None = None
        self._parcels = self.parcels()

    @property
    def peers(self) -> list[int]:
        """See `Transfer`."""
        return self._peers

    def find_peers(self) -> list[int]:
        """The ranks of the members that this one sends to or takes from."""
        return [rank for rank in self.meeting.members if rank != self.meeting.call.rank]

    def offer(self) -> tuple[bytes | memoryview, ...]:
        """See `Transfer.offer`."""
        return (self.meeting.header.pack(),)

    def came(self, rank: int, offered: memoryview) -> None:
        """See `Transfer.came`."""
        self.absent.discard(rank)

    def parcels(self) -> Iterator[Parcel | None]:
        """What is to be sent, in order; None where it must wait for something to come first."""
        yield from ()

    def parcel(self) -> Parcel | None:
        """What is to be sent next; the same until `sent` is called. None where nothing can be sent now."""
        if self._next is None and not self.is_sent:
            try:
                self._next = next(self._parcels)
            except StopIteration:
                self.is_sent = True
        found = self._next
        if found is None or not self.absent.isdisjoint(found.targets):
            return None
        return found

    def sent(self) -> None:
        """The parcel is on its way."""
        self._next = None

    @abstractmethod
    def take(self, rank: int, way: int, part: int, data: Array, is_held: bool) -> bool:
        """A part of a member has come, as bytes.

        Args:
            rank: the member.
            way, part: see `Parcel`.
            data: gone afterwards, unless it is held.
            is_held: whether it may be kept.

        Returns:
            Whether it is kept: then `released` tells when no more.
        """

    def released(self) -> Iterator[tuple[int, int, int]]:
        """Parts that were held and are no longer: rank, way and part."""
        yield from ()


class Texts(Shipment):
    """Strings: all members get those of all, with the header or afterwards.

    Args:
        meeting: what the members agree on.
        room: bytes that can be sent with the header.
        slot: bytes of a part.
    """

    def __init__(self, meeting: Meeting, room: int, slot: int) -> None:
        self._bytes = encode(meeting.operand)
        self._is_offered = len(self._bytes) < room
        self._slot = slot
        self._operands: dict[int, Array] = {meeting.call.rank: meeting.operand}
        self._coming: dict[int, bytearray] = {}
        super().__init__(meeting)
        self.is_sent = self._is_offered

    def offer(self) -> tuple[bytes | memoryview, ...]:
        """The header, and the operand or how many bytes of it will come."""
        how = b"\1" + self._bytes if self._is_offered else b"\0" + len(self._bytes).to_bytes(8, "little")
        return *super().offer(), how

    def came(self, rank: int, offered: memoryview) -> None:
        """See `Transfer.came`."""
        super().came(rank, offered)
        how, content = offered[HEADER_BYTES], offered[HEADER_BYTES + 1 :]
        if how:
            self._operands[rank] = decode(bytes(content))
        else:
            self._coming[rank] = bytearray(int.from_bytes(content, "little"))

    def parcels(self) -> Iterator[Parcel]:
        """The bytes of the operand, where they were not offered."""
        data = np.frombuffer(self._bytes, np.uint8)
        for part, place in enumerate(boxes(data.shape, self._slot)):
            yield Parcel(tuple(self.peers), 0, part, data[place])

    def take(self, rank: int, way: int, part: int, data: Array, is_held: bool) -> bool:
        """See `Shipment.take`."""
        coming = self._coming[rank]
        first = part * self._slot
        coming[first : first + data.size] = data.tobytes()
        if first + data.size == len(coming):
            self._operands[rank] = decode(self._coming.pop(rank))
        return False

    @property
    def is_done(self) -> bool:
        """See `Transfer`."""
        return len(self._operands) == len(self.meeting.members) and self.is_sent

    def missing(self) -> set[int]:
        """See `Transfer.missing`."""
        return {rank for rank in self.meeting.members if rank not in self._operands}

    def result(self) -> Array:
        """See `Transfer.result`."""
        meeting = self.meeting
        operands = [self._operands[rank] for rank in meeting.members]
        found = EXECUTED[meeting.collective.kind].result(meeting.collective, operands, meeting.position)
        return found if found.flags.writeable else found.copy()


class Parts(Shipment):
    """Numbers that go in parts.

    Args:
        meeting: what the members agree on.
        slot: bytes of a part.
    """

    def __init__(self, meeting: Meeting, slot: int) -> None:
        self.most = slot // meeting.operand.itemsize
        self.raw = np.dtype(CARRIERS[meeting.operand.itemsize])
        super().__init__(meeting)
