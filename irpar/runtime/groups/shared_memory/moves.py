"""Collectives that only move what they are given: parts go from an operand to their places in the results."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from irpar.ops.collectives.arrays import block_bounds, nothing_like, resized
from irpar.ops.collectives.broadcast import check_root
from irpar.ops.collectives.permute import source_of

from ..base import Array
from ..spmd import Meeting
from .transfers import Box, Parcel, Parts, blocks_of, boxes


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
        self._result = _KINDS[meeting.collective.kind](self)

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
        result = np.empty(resized(operand.shape, dim, sum(sizes)), operand.dtype)
        for member, place in zip(meeting.members, blocks_of(result, sizes, dim), strict=True):
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
        pieces = blocks_of(operand, cut, split)
        for member, piece, place in zip(meeting.members, pieces, blocks_of(result, sizes, concat), strict=True):
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
        check_root(meeting.collective, len(meeting.members))
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
        return self._result


_KINDS: dict[str, Callable[[Moves], Array]] = {
    "AllGather": Moves._gather,
    "AllToAll": Moves._all_to_all,
    "Broadcast": Moves._broadcast,
    "CollectivePermute": Moves._permute,
}
"""What each kind sends and expects; gives the result, which is filled by what comes."""
