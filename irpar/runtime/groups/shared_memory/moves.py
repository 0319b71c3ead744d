"""Collectives that only move what they are given: parts go from an operand to their places in the results."""

from collections.abc import Iterator

import numpy as np

from irpar.ops.collectives.record import Execution

from ..base import Array
from ..spmd import Meeting
from .transfers import Box, Parcel, Parts, boxes


class Moves(Parts):
    """A collective that only moves.

    Raises:
        ValueError: the attributes do not fit the operand.
    """

    def __init__(self, meeting: Meeting, slot: int, execution: Execution) -> None:
        super().__init__(meeting, slot)
        self._sources: list[tuple[tuple[int, ...], Array]] = []
        self._targets: dict[int, tuple[Array, tuple[Box, ...]]] = {}
        self._left: dict[int, int] = {}
        assert execution.moves is not None
        movement = execution.moves(meeting, lambda shape: np.empty(shape, meeting.operand.dtype))
        self._result = movement.result
        for position, place in movement.receives:
            self._expect(meeting.members[position], place)
        for positions, source in movement.sends:
            self._sources.append((tuple(meeting.members[each] for each in positions), source.view(self.raw)))

    def _expect(self, rank: int, place: Array) -> None:
        """What comes from a member goes to this place."""
        parts = boxes(place.shape, self.most)
        if parts:
            self._targets[rank] = place.view(self.raw), parts
            self._left[rank] = len(parts)

    def parcels(self) -> Iterator[Parcel]:
        """The parts of all sources, those of one number one after the other."""
        cut = [(ranks, source, boxes(source.shape, self.most)) for ranks, source in self._sources]
        for part in range(max((len(parts) for _, _, parts in cut), default=0)):
            for ranks, source, parts in cut:
                if part < len(parts):
                    yield Parcel(ranks, 0, part, source[parts[part]])

    def take(self, rank: int, way: int, part: int, data: Array, is_held: bool) -> bool:
        """See `Shipment.take`."""
        place, parts = self._targets[rank]
        block = place[parts[part]]
        block[...] = data.view(self.raw).reshape(block.shape)
        self._left[rank] -= 1
        if not self._left[rank]:
            del self._left[rank]
        return False

    @property
    def is_done(self) -> bool:
        """See `Transfer`."""
        return self.is_sent and not self._left and not self.absent

    def missing(self) -> set[int]:
        """See `Transfer.missing`."""
        return self.absent | self._left.keys()

    def result(self) -> Array:
        """See `Transfer.result`."""
        return self._result
