"""Collectives that reduce large operands.

Member i reduces piece i of all operands, part by part; where all are to have it (AllReduce) it sends each part that is
done to all others. The order is that of the members, as `results.execute` has it: the same numbers come out, to the
last bit.

An operand that fits into a slot goes there with its header, where one is free: the others read their pieces where they
lie, and the piece that is done is written in place of this member's own. Where all are to have the result of such a
one, no more members reduce than there are cores: the first ones. The others have to do with these alone, which spares
records, and turns on a core.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate, pairwise

from irpar.ops.collectives.arrays import contiguous, cut
from irpar.ops.collectives.record import Execution
from irpar.ops.collectives.reduced_arrays import reduce_arrays
from irpar.ops.collectives.rounds import New, cut_for

from ..base import Array
from ..spmd import Meeting
from .transfers import Parcel, Parts, boxes


class Reduction(Parts):
    """A collective that reduces.

    Args:
        meeting: what the members agree on.
        slot: bytes of a slot.
        execution: of the kind.
        new: makes arrays of a shape and dtype.
        cores: that the ranks share.

    Attributes:
        reducers: the ranks of the members that reduce a piece.
        bounds: where a member's piece of an operand begins and ends, in elements.
        is_poolable: whether an operand fits into a slot.
        pooled: the slot in which this member's lies.

    Raises:
        ValueError: there is no such reduction of these elements, or the blocks do not fit.
    """

    def __init__(self, meeting: Meeting, slot: int, execution: Execution, new: New, cores: int) -> None:
        operand, self._is_all = meeting.operand, execution.returns_pieces
        fits = operand.nbytes <= slot
        self.reducers = meeting.members[:cores] if self._is_all and fits else meeting.members
        super().__init__(meeting, slot)
        reduce_arrays([operand.reshape(-1)[:0]] * 2, meeting.collective.reduce)
        self._operands = self._pieces(execution)
        self._own = self._operands[meeting.position]
        self._whole = new((operand.size,) if self._is_all else self._own.shape, operand.dtype)
        places = cut(self._whole, [piece.size for piece in self._operands], 0) if self._is_all else []
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
        bounds = list(accumulate((piece.size for piece in self._operands), initial=0))
        self.bounds = dict(zip(meeting.members, pairwise(bounds), strict=True))
        reduced = self._operands[: len(self.reducers)]
        self.is_poolable = bounds[-1] <= self.most and all(piece.size for piece in reduced)
        self.pooled: Array | None = None

    def find_peers(self) -> list[int]:
        """See `Shipment.find_peers`."""
        return super().find_peers() if self.reduces else list(self.reducers)

    @property
    def reduces(self) -> bool:
        """Whether this member reduces a piece."""
        return self.meeting.call.rank in self.reducers

    def _pieces(self, execution: Execution) -> list[Array]:
        """Of this member's operand what each member reduces."""
        if self._is_all:
            return cut_for(contiguous(self.meeting.operand), len(self.meeting.members), len(self.reducers))
        assert execution.pieces is not None
        return execution.pieces(self.meeting)

    @property
    def is_read_twice(self) -> bool:
        """Whether other members read the slot of an operand again, for the piece that is done."""
        return self._is_all

    def lies_in(self, slot: Array) -> None:
        """The pieces of the others lie in a slot."""
        self.pooled = slot.view(self.raw)

    def pool(self, slot: Array) -> None:
        """Lay them there."""
        self.lies_in(slot)
        assert self.pooled is not None
        for (rank, (start, end)), piece in zip(self.bounds.items(), self._operands, strict=True):
            if rank != self.meeting.call.rank:
                self.pooled[start:end].reshape(piece.shape)[...] = piece.view(self.raw)

    def join_rest(self, whole: Array, waited: Iterable[int]) -> None:
        """This member's piece of the result is reduced and sent; those of some ranks are still to come."""
        self._whole = whole.reshape(-1)
        places = cut(self._whole, [piece.size for piece in self._operands], 0)
        self._places = dict(zip(self.meeting.members, places, strict=True))
        self._left = dict.fromkeys(waited, 1)
        self._unreduced = 0
        self.absent.clear()
        self.is_sent = True

    def place_of(self, rank: int) -> slice:
        """Where a member's piece of an operand lies in its slot, in bytes."""
        start, end = self.bounds[rank]
        return slice(start * self._own.itemsize, end * self._own.itemsize)

    def parcels(self) -> Iterator[Parcel | None]:
        """Parts that are reduced go first; the others in the same order of parts and members on all members."""
        cut = [
            (member, block.view(self.raw), boxes(block.shape, self.most))
            for member, block in zip(self.meeting.members, self._operands, strict=True)
            if member != self.meeting.call.rank
        ]
        is_held = len(cut) > 1
        for part in range(max(len(parts) for _, _, parts in cut) if self.pooled is None else 0):
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
                into = None if self.pooled is None else self.pooled[slice(*self.bounds[self.meeting.call.rank])]
                yield Parcel(peers, 1, part, self._target.view(self.raw)[self._parts[part]], into=into)

    def take(self, rank: int, way: int, part: int, data: Array, is_held: bool) -> bool:
        """See `Shipment.take`."""
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
        """See `Shipment.released`."""
        while self._free:
            yield self._free.pop()

    @property
    def is_done(self) -> bool:
        """See `Transfer`."""
        return self.is_sent and not self._left and not self._unreduced and not self.absent

    def missing(self) -> set[int]:
        """See `Transfer.missing`."""
        if not self._unreduced:
            return self.absent | self._left.keys()
        part = min(self._held, default=None)
        came = self._held[part].keys() if part is not None else set()
        return {rank for rank in self.peers if rank not in came}

    def held_up(self) -> Collection[int]:
        """See `Transfer.held_up`."""
        return () if self.reduces else self._left.keys() - self.absent

    def result(self) -> Array:
        """See `Transfer.result`."""
        return self._whole.reshape(self.meeting.operand.shape) if self._is_all else self._whole
