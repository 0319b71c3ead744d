"""Small collectives of a program from the second time on: what is the same each time has been found the first time.

An operand and its header lie in a slot, where all other members read them; what goes over the rings is a record without
a payload. Each member may send and take this way, or as a `Prompt` does.
"""

import hashlib
import struct
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from irpar.ops.collectives.reduced_arrays import reducer
from irpar.runtime.groups.wire.header import HEADER_BYTES

from ..base import Array, Call
from ..recycled import SMALLEST
from ..results import EXECUTED
from ..spmd import Meeting
from .prompt import Prompt, Prompts
from .segment import Segment
from .slots import Slots
from .streams import BARE, Lane, Record, Streams
from .transfers import Transfer

if TYPE_CHECKING:
    from .traffic import Traffic

OFFER = 0
"""The kind of the record by which a rank comes to a collective."""
NOWHERE = -1
"""In place of a slot: the operand is in none."""
IN_SLOT = 1
"""The flag of an offer whose header and operand lie in a slot, to be read when the record is. The first number: the
slot, and in the lower half the bytes; the others: the mark of the header."""
_MARK = struct.Struct("<qq")
_BYTE = np.dtype(np.uint8)
_Came = list[tuple[Lane, Array]]
"""Members that have come, and their operands."""


def next_of(kind: int, lane: Lane, traffic: "Traffic") -> Record | None:
    """The next record of a kind from another rank, if it comes soon; others are read."""
    while traffic.has_come(lane):
        found = lane.look()
        if found[0] == kind:
            return found
        traffic.read(lane)
    return None


def mark_of(header: bytes) -> tuple[int, int]:
    """What stands for a header: two headers of one mark are one."""
    first, second = _MARK.unpack(hashlib.blake2b(header, digest_size=_MARK.size).digest())
    return first, second


class QuickPrompt:
    """A small collective of a program; see `Quick`.

    Where another member is not here soon, or brings something else, what has begun goes on as a `Prompt`.

    Args:
        traffic: what else the rank does.
        streams: what it sends, and what comes.
        segment: where slots are.
        slots: those of this rank.
        meeting: as the collective was executed the first time.
        prompts: what makes its prompts.
        finish: gives the result of the transfer that a call makes.
    """

    __slots__ = (
        *("_agreed", "_count", "_execution", "_facts", "_finish", "_header", "_lanes", "_mark", "_marks", "_nbytes"),
        *("_new", "_own", "_peers", "_prompts", "_reduce", "_segment", "_slots", "_traffic"),
    )

    def __init__(
        self,
        traffic: "Traffic",
        streams: Streams,
        segment: Segment,
        slots: Slots,
        meeting: Meeting,
        prompts: Prompts,
        finish: Callable[[Callable[[], Transfer]], Array],
    ) -> None:
        operand, self._execution = meeting.operand, EXECUTED[meeting.collective.kind]
        self._traffic, self._segment, self._slots = traffic, segment, slots
        self._facts = meeting.members, meeting.position, meeting.header, meeting.shapes, meeting.expected, meeting.notes
        self._count = len(meeting.members)
        self._prompts = prompts
        self._finish = finish
        self._agreed: dict[int, bytes] = meeting.notes["agreed"]
        self._marks: dict[int, tuple[int, int]] = {}
        """Of headers that have been agreed on, by rank."""
        self._header, self._mark = prompts.header, mark_of(prompts.header)
        self._lanes = streams.lanes(prompts.positions)
        self._peers = [(lane, prompts.positions[lane.peer], self._places(lane.peer, meeting)) for lane in self._lanes]
        self._own = {
            each: (place, segment.slot(traffic.rank, each, _BYTE, HEADER_BYTES).data)
            for each, place in self._places(traffic.rank, meeting).items()
        }
        self._nbytes = HEADER_BYTES + operand.nbytes
        self._new = None if operand.nbytes < SMALLEST else partial(prompts.new, operand.shape, operand.dtype)
        is_reduced = self._execution.returns_pieces
        self._reduce = reducer(operand.dtype, operand.size, meeting.collective.reduce) if is_reduced else None

    def _places(self, rank: int, meeting: Meeting) -> dict[int, Array]:
        """Where an operand of a rank may lie: by slot."""
        shape = meeting.shapes[meeting.members.index(rank)]
        return {each: self._segment.laid(rank, each, meeting.operand.dtype, shape) for each in self._slots.pooled}

    def execute(self, call: Call) -> Array | None:
        """See `Quick`."""
        traffic, operand = self._traffic, call.operand
        if not traffic.is_idle:
            return None
        for lane in self._lanes:
            if lane.written > lane.freed + lane.most:
                return None
        slot = self._slots.find_pooled()
        if slot is None:
            return None
        place, head = self._own[slot]
        place[...] = operand
        head[:] = self._header
        told, (first, second) = slot << 32 | self._nbytes, self._mark
        for lane in self._lanes:
            lane.begun += 1
            lane.tell(OFFER, IN_SLOT, told, first, second)
        self._slots.free_when_read(slot, self._lanes)
        operands = [place] * self._count
        came: _Came = []
        for lane, position, theirs in self._peers:
            found = next_of(OFFER, lane, traffic)
            if found is None:
                return self._finish(partial(self._go_on, call, came, None))
            _, flag, _, told, first, second, lane.freed = found
            if flag != IN_SLOT or (self._marks.get(lane.peer) != (first, second) and not self._agrees(lane, found)):
                return self._finish(partial(self._go_on, call, came, lane))
            operands[position] = theirs[told >> 32]
            came.append((lane, operands[position]))
        result = self._result(call, operands)
        for lane in self._lanes:
            lane.came += 1
            lane.free(BARE)
        if traffic.slept_for is not None:
            traffic.look_first_at_last(self._peers)
        return result

    def _agrees(self, lane: Lane, found: Record) -> bool:
        """Whether a member's header, of which the mark is new, is one that has been agreed on."""
        _, _, _, told, first, second, _ = found
        header = self._segment.slot(lane.peer, told >> 32, _BYTE, HEADER_BYTES).tobytes()
        agrees = header == self._agreed.get(lane.peer)
        if agrees:
            self._marks[lane.peer] = first, second
        return agrees

    def _result(self, call: Call, operands: list[Array]) -> Array:
        """From operands that lie in slots, and are gone afterwards."""
        if self._reduce is not None:
            into = call.into
            if into is None and self._new is not None:
                into = self._new()
            return self._reduce(operands, into)
        result = self._execution.result(call.collective, operands, self._facts[1])
        return result.copy() if any(np.may_share_memory(result, each) for each in operands) else result

    def _go_on(self, call: Call, came: _Came, unread: Lane | None) -> Prompt:
        """What has begun, as a transfer: some members have come; the token of one's record may have been taken."""
        traffic, made = self._traffic, Prompt(Meeting(call, *self._facts), self._prompts)
        for lane, theirs in came:
            made.brought(lane.peer, theirs)
            lane.came += 1
            lane.free(BARE)
        traffic.await_rest(made)
        if unread is not None:
            traffic.read(unread)
        return made
