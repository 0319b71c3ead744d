"""Collectives of small operands: all members get them with the headers, and each computes its result."""

from collections.abc import Iterable

import numpy as np

from irpar.ops.collectives.reduced_arrays import reduce_arrays
from irpar.ops.collectives.rounds import New
from irpar.runtime.groups.wire.header import HEADER_BYTES

from ..base import Array
from ..results import EXECUTED
from ..spmd import Meeting
from .transfers import Transfer

COPIED = 4096
"""Bytes of an operand that are copied in less time than a view of them takes."""


class Prompts:
    """Makes the transfers of one collective of a program, from one time to the next.

    Attributes:
        header: how what this rank sends begins.
        positions: of the other members that this one hears, by rank.
        shapes: of what each member brings, by rank.
        is_reduced_at_once: two members reduce their operands, and both get the result: it is computed from what came
            where that lies.
        new: makes arrays of a shape and dtype.

    Raises:
        ValueError: there is no such reduction of these elements.
    """

    def __init__(self, meeting: Meeting, new: New) -> None:
        self.header = meeting.header.pack()
        self.positions = {rank: place for place, rank in enumerate(meeting.members) if place != meeting.position}
        self.shapes = dict(zip(meeting.members, meeting.shapes, strict=True))
        execution = EXECUTED[meeting.collective.kind]
        if execution.pieces is not None:
            reduce_arrays([meeting.operand.reshape(-1)[:0]] * 2, meeting.collective.reduce)
        self.is_reduced_at_once = execution.returns_pieces and len(self.positions) == 1
        self.new = new

    def __call__(self, meeting: Meeting) -> "Prompt":
        return Prompt(meeting, self)


class Prompt(Transfer):
    """A collective of small operands that has begun."""

    __slots__ = ("_known", "_operands", "_result", "absent", "meeting")

    def __init__(self, meeting: Meeting, known: Prompts) -> None:
        self.meeting = meeting
        self.absent = set(known.positions)
        self._known = known
        self._result: Array | None = None
        self._operands: list[Array] = [meeting.operand] * len(meeting.members)

    @property
    def peers(self) -> Iterable[int]:
        """See `Transfer`."""
        return self._known.positions

    def offer(self) -> tuple[bytes | memoryview, ...]:
        """The header and the operand."""
        operand = self.meeting.operand
        if operand.nbytes <= COPIED:
            return (self._known.header + operand.tobytes(),)
        return self._known.header, np.ascontiguousarray(operand).reshape(-1).view(np.uint8).data

    def came(self, rank: int, offered: memoryview) -> None:
        """See `Transfer.came`."""
        dtype = self.meeting.operand.dtype
        self.brought(rank, np.ndarray(self._known.shapes[rank], dtype, offered, HEADER_BYTES))

    def brought(self, rank: int, operand: Array) -> None:
        """A member has come, and brings an operand, which is gone afterwards."""
        meeting, known = self.meeting, self._known
        position = known.positions[rank]
        self.absent.remove(rank)
        if known.is_reduced_at_once:
            self._operands[position] = operand
            self._result = reduce_arrays(
                self._operands, meeting.collective.reduce, known.new(operand.shape, operand.dtype)
            )
        else:
            self._operands[position] = operand.copy()

    @property
    def is_done(self) -> bool:
        """See `Transfer`."""
        return not self.absent

    def missing(self) -> set[int]:
        """See `Transfer.missing`."""
        return self.absent

    def result(self) -> Array:
        """See `Transfer.result`."""
        if self._result is None:
            collective = self.meeting.collective
            self._result = EXECUTED[collective.kind].result(collective, self._operands, self.meeting.position)
        return self._result
