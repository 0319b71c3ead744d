"""The collectives of one rank while they are underway: what it has to send, and where what comes goes.

Small operands, and strings, go whole to all members with the header, and each member computes its result from them.
Large ones go in parts, as the slots of the shared memory hold them, once the receiver has come:

    AllReduce       member i reduces share i of all operands, part by part, and sends each part that is done to all
    ReduceScatter   the same, without the second way
    all others      parts of the operand go to where they belong in the results

All reduce in order of position, as `results.execute` does: the same numbers come out, to the last bit.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from irpar.ir import dtype_of_numpy

from ...messages import decode, encode
from ...reduction import reduce_arrays
from ..base import Array
from ..results import EXECUTED, block_bounds, nothing_like, source_of
from ..spmd import Meeting

Box = tuple[slice | int, ...]
_RAW: dict[int, type] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""What elements are moved as, by their bytes: numpy copies its own types faster than those of others."""


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
    """

    targets: tuple[int, ...]
    way: int
    part: int
    source: Array
    is_held: bool = False


class Transfer(ABC):
    """A collective of one rank.

    Attributes:
        meeting: what the members agree on.
        absent: ranks of members that have not come yet.
        is_sent: all that this rank has to send is on its way.
    """

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.header = meeting.header.pack()
        self.absent = {rank for rank in meeting.members if rank != meeting.call.rank}
        self.is_sent = False
        self._next: Parcel | None = None
        self._parcels = self.parcels()

    @property
    def peers(self) -> list[int]:
        """The other members."""
        return [rank for rank in self.meeting.members if rank != self.meeting.call.rank]

    def offer(self) -> bytes:
        """What is sent with the header."""
        return b""

    def came(self, rank: int, offered: memoryview) -> None:
        """A member has come, and brings this with its header."""
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

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether the result is there and everything is sent."""

    @abstractmethod
    def missing(self) -> set[int]:
        """Ranks of members of which something is still to come."""

    @abstractmethod
    def result(self) -> Array:
        """The result, once it is done.

        Raises:
            ValueError: the operands have none.
        """


class Whole(Transfer):
    """All members get all operands: small ones with the header, strings of any size afterwards.

    Args:
        meeting: what the members agree on.
        room: bytes that can be sent with the header.
        slot: bytes of a part.
    """

    def __init__(self, meeting: Meeting, room: int, slot: int) -> None:
        operand = meeting.operand
        self._is_text = operand.dtype.kind in "OUST"
        self._bytes = encode(operand) if self._is_text else np.ascontiguousarray(operand).tobytes()
        self._is_offered = len(self._bytes) <= room
        self._slot = slot
        self._operands: dict[int, Any] = {meeting.call.rank: operand}
        self._coming: dict[int, bytearray] = {}
        super().__init__(meeting)

    def offer(self) -> bytes:
        """The operand, or how many bytes of it will come."""
        return b"\1" + self._bytes if self._is_offered else b"\0" + len(self._bytes).to_bytes(8, "little")

    def came(self, rank: int, offered: memoryview) -> None:
        """See `Transfer.came`."""
        super().came(rank, offered)
        if offered[0]:
            self._operands[rank] = self._array(rank, bytes(offered[1:]))
        else:
            self._coming[rank] = bytearray(int.from_bytes(offered[1:], "little"))

    def _array(self, rank: int, data: bytes | bytearray) -> Array:
        if self._is_text:
            decoded: Array = decode(data)
            return decoded
        meeting = self.meeting
        shape = meeting.shapes[meeting.members.index(rank)]
        dtype = meeting.operand.dtype
        return np.frombuffer(data, dtype).reshape(shape) if data else np.empty(shape, dtype)

    def parcels(self) -> Iterator[Parcel]:
        """The bytes of the operand, where they were not offered."""
        if not self._is_offered:
            data = np.frombuffer(self._bytes, np.uint8)
            for part, place in enumerate(boxes(data.shape, self._slot)):
                yield Parcel(tuple(self.peers), 0, part, data[place])

    def take(self, rank: int, way: int, part: int, data: Array, is_held: bool) -> bool:
        """See `Transfer.take`."""
        coming = self._coming[rank]
        first = part * self._slot
        coming[first : first + data.size] = data.tobytes()
        if first + data.size == len(coming):
            self._operands[rank] = self._array(rank, self._coming.pop(rank))
        return False

    @property
    def is_done(self) -> bool:
        """See `Transfer.is_done`."""
        return len(self._operands) == len(self.meeting.members) and (self._is_offered or self.is_sent)

    def missing(self) -> set[int]:
        """See `Transfer.missing`."""
        return {rank for rank in self.meeting.members if rank not in self._operands}

    def result(self) -> Array:
        """See `Transfer.result`."""
        meeting = self.meeting
        operands = [self._operands[rank] for rank in meeting.members]
        found = EXECUTED[meeting.collective.kind].result(meeting.collective, operands, meeting.position)
        return found if found.flags.writeable else found.copy()


class Parts(Transfer):
    """Numbers that go in parts.

    Args:
        meeting: what the members agree on.
        slot: bytes of a part.
    """

    def __init__(self, meeting: Meeting, slot: int) -> None:
        self.most = slot // meeting.operand.itemsize
        self.raw = np.dtype(_RAW[meeting.operand.itemsize])
        super().__init__(meeting)


class Moves(Parts):
    """Collectives that only move: AllGather, AllToAll, Broadcast, CollectivePermute.

    Raises:
        ValueError: the attributes do not fit the operand.
    """

    def __init__(self, meeting: Meeting, slot: int) -> None:
        super().__init__(meeting, slot)
        self._sources: list[tuple[tuple[int, ...], Array]] = []
        self._targets: dict[int, tuple[Array, tuple[Box, ...]]] = {}
        self._left: dict[int, int] = {}
        self._result = getattr(self, f"_{_PLANS[meeting.collective.kind]}")()

    def _expect(self, rank: int, place: Array) -> None:
        """What comes from a member goes to this place; its own it takes at once."""
        parts = boxes(place.shape, self.most)
        if parts:
            self._targets[rank] = place.view(self.raw), parts
            self._left[rank] = len(parts)

    def _send(self, ranks: tuple[int, ...], source: Array) -> None:
        if ranks:
            self._sources.append((ranks, source.view(self.raw)))

    def _gather(self) -> Array:
        meeting, dim = self.meeting, self.meeting.collective.dim
        operand, rank = meeting.operand, meeting.call.rank
        sizes = [shape[dim] for shape in meeting.shapes]
        result = np.empty((*operand.shape[:dim], sum(sizes), *operand.shape[dim + 1 :]), operand.dtype)
        for member, place in zip(meeting.members, _blocks(result, sizes, dim), strict=True):
            if member == rank:
                place[...] = operand
            else:
                self._expect(member, place)
        self._send(tuple(self.peers), operand)
        return result

    def _all_to_all(self) -> Array:
        meeting, collective = self.meeting, self.meeting.collective
        operand, position = meeting.operand, meeting.position
        split, concat, count = collective.split_dim, collective.concat_dim, len(meeting.members)
        bounds = block_bounds(operand.shape[split], collective.split_sizes, count, split)
        cut = [last - first for first, last in pairwise(bounds)]
        shape = list(operand.shape)
        shape[split] = cut[position]
        # Where both are one dim the blocks that come are cut from it, all alike.
        sizes = [cut[position] if split == concat else each[concat] for each in meeting.shapes]
        shape[concat] = sum(sizes)
        result = np.empty(shape, operand.dtype)
        pieces = _blocks(operand, cut, split)
        for member, piece, place in zip(meeting.members, pieces, _blocks(result, sizes, concat), strict=True):
            if member == meeting.call.rank:
                place[...] = piece
            else:
                self._send((member,), piece)
                self._expect(member, place)
        return result

    def _from(self, source: int) -> Array:
        """The operand of the member at a position."""
        meeting, members = self.meeting, self.meeting.members
        if source == meeting.position:
            return meeting.operand
        result = np.empty(meeting.shapes[source], meeting.operand.dtype)
        self._expect(members[source], result)
        return result

    def _broadcast(self) -> Array:
        meeting, root = self.meeting, self.meeting.collective.root
        if not 0 <= root < len(meeting.members):
            raise ValueError(f"root {root} is not in a group of {len(meeting.members)}")
        if root == meeting.position:
            self._send(tuple(self.peers), meeting.operand)
        return self._from(root)

    def _permute(self) -> Array:
        meeting, count = self.meeting, len(self.meeting.members)
        sources = [source_of(meeting.collective, count, position) for position in range(count)]
        to = [member for member, source in zip(meeting.members, sources, strict=True) if source == meeting.position]
        self._send(tuple(member for member in to if member != meeting.call.rank), meeting.operand)
        source = sources[meeting.position]
        return nothing_like(meeting.operand) if source is None else self._from(source)

    def parcels(self) -> Iterator[Parcel]:
        """The parts of all sources, those of one number one after the other."""
        cut = [(ranks, source, boxes(source.shape, self.most)) for ranks, source in self._sources]
        for part in range(max((len(parts) for _, _, parts in cut), default=0)):
            for ranks, source, parts in cut:
                if part < len(parts):
                    yield Parcel(ranks, 0, part, source[parts[part]])

    def take(self, rank: int, way: int, part: int, data: Array, is_held: bool) -> bool:
        """See `Transfer.take`."""
        place, parts = self._targets[rank]
        block = place[parts[part]]
        block[...] = data.view(self.raw).reshape(block.shape)
        self._left[rank] -= 1
        if not self._left[rank]:
            del self._left[rank]
        return False

    @property
    def is_done(self) -> bool:
        """See `Transfer.is_done`."""
        return self.is_sent and not self._left and not self.absent

    def missing(self) -> set[int]:
        """See `Transfer.missing`."""
        return self.absent | self._left.keys()

    def result(self) -> Array:
        """See `Transfer.result`."""
        return self._result  # type: ignore[no-any-return]


_PLANS = {
    "AllGather": "gather",
    "AllToAll": "all_to_all",
    "Broadcast": "broadcast",
    "CollectivePermute": "permute",
}


def _blocks(array: Array, sizes: list[int], dim: int) -> list[Array]:
    """Views of the blocks of a dim."""
    before = (slice(None),) * dim
    ends = np.cumsum(sizes).tolist()
    return [array[(*before, slice(end - size, end))] for size, end in zip(sizes, ends, strict=True)]


class Reduction(Parts):
    """AllReduce and ReduceScatter.

    Raises:
        ValueError: there is no such reduction of these elements, or the blocks do not fit.
    """

    def __init__(self, meeting: Meeting, slot: int) -> None:
        super().__init__(meeting, slot)
        collective, operand, count = meeting.collective, meeting.operand, len(meeting.members)
        reduce_arrays([operand.reshape(-1)[:0]] * 2, collective.reduce)
        self._is_all = collective.kind == "AllReduce"
        if self._is_all:
            operand = np.ascontiguousarray(operand).reshape(-1)
            bounds = [operand.size * each // count for each in range(count + 1)]
            dim = 0
        else:
            dim = collective.dim
            bounds = block_bounds(operand.shape[dim], collective.sizes, count, dim)
        sizes = [last - first for first, last in pairwise(bounds)]
        self._operands = _blocks(operand, sizes, dim)
        self._own = self._operands[meeting.position]
        self._whole = np.empty(operand.shape if self._is_all else self._own.shape, operand.dtype)
        places = _blocks(self._whole, sizes, 0) if self._is_all else []
        self._places = dict(zip(meeting.members, places, strict=False))
        self._target = self._places.get(meeting.call.rank, self._whole)
        self._parts = boxes(self._own.shape, self.most)
        self._held: dict[int, dict[int, Array]] = {}
        self._kept: set[tuple[int, int]] = set()
        self._free: list[tuple[int, int, int]] = []
        self._reduced: deque[int] = deque()
        self._unreduced = len(self._parts)
        self._left = {rank: len(boxes(place.shape, self.most)) for rank, place in self._places.items()}
        self._left.pop(meeting.call.rank, None)
        self._left = {rank: left for rank, left in self._left.items() if left}

    def parcels(self) -> Iterator[Parcel | None]:
        """Parts that are reduced go first; the others in the same order of parts and members on all members."""
        cut = [
            (member, block.view(self.raw), boxes(block.shape, self.most))
            for member, block in zip(self.meeting.members, self._operands, strict=True)
            if member != self.meeting.call.rank
        ]
        is_held = len(cut) > 1
        for part in range(max(len(parts) for _, _, parts in cut)):
            for member, block, parts in cut:
                yield from self._second()
                if part < len(parts):
                    yield Parcel((member,), 0, part, block[parts[part]], is_held)
        sent_back = self._is_all
        while sent_back and (self._unreduced or self._reduced):
            if not self._reduced:
                yield None
            yield from self._second()

    def _second(self) -> Iterator[Parcel]:
        peers = tuple(self.peers)
        while self._reduced:
            part = self._reduced.popleft()
            if self._is_all:
                yield Parcel(peers, 1, part, self._target.view(self.raw)[self._parts[part]])

    def take(self, rank: int, way: int, part: int, data: Array, is_held: bool) -> bool:
        """See `Transfer.take`."""
        if way == 1:
            place = self._places[rank]
            place.view(self.raw)[boxes(place.shape, self.most)[part]] = data.view(self.raw)
            self._left[rank] -= 1
            if not self._left[rank]:
                del self._left[rank]
            return False
        held = self._held.setdefault(part, {})
        data = data.view(self._own.dtype)
        if len(held) < len(self.meeting.members) - 2:
            held[rank] = data if is_held else data.copy()
            if is_held:
                self._kept.add((part, rank))
            return is_held
        held[rank] = data
        self._reduce(part, self._held.pop(part))
        return False

    def _reduce(self, part: int, held: dict[int, Array]) -> None:
        meeting, box = self.meeting, self._parts[part]
        held[meeting.call.rank] = self._own[box].reshape(-1)
        target = self._target[box].reshape(-1)
        reduce_arrays([held[rank] for rank in meeting.members], meeting.collective.reduce, target)
        self._reduced.append(part)
        self._unreduced -= 1
        for rank in held:
            if (part, rank) in self._kept:
                self._kept.remove((part, rank))
                self._free.append((rank, 0, part))

    def released(self) -> Iterator[tuple[int, int, int]]:
        """See `Transfer.released`."""
        while self._free:
            yield self._free.pop()

    @property
    def is_done(self) -> bool:
        """See `Transfer.is_done`."""
        return self.is_sent and not self._left and not self._unreduced and not self.absent

    def missing(self) -> set[int]:
        """See `Transfer.missing`."""
        if not self._unreduced:
            return self.absent | self._left.keys()
        part = min(self._held, default=None)
        came = self._held[part].keys() if part is not None else set()
        return {rank for rank in self.peers if rank not in came}

    def result(self) -> Array:
        """See `Transfer.result`."""
        return self._whole.reshape(self.meeting.operand.shape) if self._is_all else self._whole


def transfer(meeting: Meeting, room: int, slot: int) -> Transfer:
    """The transfer of a collective.

    Args:
        meeting: what the members agree on.
        room: bytes of an operand that can be sent with the header.
        slot: bytes of a part.

    Raises:
        ValueError: the attributes do not fit the operand.
    """
    operand = meeting.operand
    longest = max(int(np.prod(shape, dtype=np.int64)) for shape in meeting.shapes) * operand.itemsize
    if dtype_of_numpy(operand.dtype).text == "str" or longest <= room:
        return Whole(meeting, room, slot)
    kind = Moves if meeting.collective.kind in _PLANS else Reduction
    return kind(meeting, slot)
