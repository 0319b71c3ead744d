"""Small collectives of a program from the second time on: what is the same each time has been found the first time.

What goes over the rings each member may send and take this way or as a `Prompt` does. Only here an operand for several
members may lie in a slot, where all of them read it, instead of in the ring to each.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from irpar.ops.collectives.reduced_arrays import reducer
from irpar.runtime.groups.wire.header import HEADER_BYTES

from ..base import Array, Call
from ..recycled import SMALLEST
from ..results import EXECUTED
from ..spmd import Meeting
from .prompt import COPIED, Prompt, Prompts
from .segment import Segment
from .slots import Slots
from .streams import Lane, Payload, Streams, room_of
from .transfers import Transfer

if TYPE_CHECKING:
    from .traffic import Traffic

OFFER = 0
"""The kind of the record by which a rank comes to a collective."""
NOWHERE = -1
"""In place of a slot: the operand is in none."""
IN_SLOT = 1
"""The flag of an offer whose operand lies in a slot, to be read when the record is; the second number: its bytes."""
_HEADER_ROOM = room_of(HEADER_BYTES)
_NUMBERS = NOWHERE, 0, 0
_BYTES = np.dtype(np.uint8)


def next_of(kind: int, lane: Lane, traffic: "Traffic") -> tuple[int, memoryview] | None:
    """First number and payload of the next record of a kind from another rank, if it comes soon; others are read."""
    while traffic.has_come(lane):
        found, number, payload = lane.look()
        if found == kind:
            return number, payload
        traffic.read(lane)
    return None


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
        self._traffic = traffic
        self._facts = meeting.members, meeting.position, meeting.header, meeting.shapes, meeting.expected, meeting.notes
        self._prompts = prompts
        self._finish = finish
        self._agreed: dict[int, bytes] = meeting.notes["agreed"]
        self._length = HEADER_BYTES + operand.nbytes
        self._room = room_of(self._length)
        self._peers = [
            # Bytes as they lie here: of types of less than a byte, one for each element.
            (streams.lane(rank), position, prod(meeting.shapes[position]) * operand.itemsize, meeting.shapes[position])
            for rank, position in prompts.positions.items()
        ]
        self._is_copied = operand.nbytes <= COPIED
        self._slots = slots if len(self._peers) > 1 and COPIED < operand.nbytes <= segment.layout.slot else None
        self._segment = segment
        self._has_read = partial(streams.has_read, tuple(prompts.positions))
        self._new = np.empty if operand.nbytes < SMALLEST else prompts.new
        is_reduced = self._execution.returns_pieces
        self._reduce = reducer(operand.dtype, operand.size, meeting.collective.reduce) if is_reduced else None

    def __call__(self, call: Call) -> Array | None:
        """See the class."""
        traffic, room, operand = self._traffic, self._room, call.operand
        if not traffic.is_idle:
            return None
        for lane, *_ in self._peers:
            if not lane.has_room(room):
                return None
        self._offer(operand)
        operands = [operand] * len(self._facts[0])
        came: list[tuple[Lane, memoryview, Array]] = []
        for lane, position, nbytes, shape in self._peers:
            found = next_of(OFFER, lane, traffic)
            if found is None:
                return self._finish(partial(self._go_on, call, came, None))
            slot, payload = found
            length = HEADER_BYTES if slot != NOWHERE else HEADER_BYTES + nbytes
            if len(payload) != length or bytes(payload[:HEADER_BYTES]) != self._agreed.get(lane.peer):
                return self._finish(partial(self._go_on, call, came, lane))
            if slot == NOWHERE:
                theirs: Array = np.ndarray(shape, operand.dtype, payload, HEADER_BYTES)
            else:
                theirs = np.ndarray(shape, operand.dtype, self._segment.slot(lane.peer, slot, _BYTES, nbytes).data)
            operands[position] = theirs
            came.append((lane, payload, theirs))
        result = self._result(call, operands)
        for lane, payload, _ in came:
            traffic.came(lane, len(payload))
        traffic.look_first_at_last(self._peers)
        return result

    def _offer(self, operand: Array) -> None:
        """Come to the collective, and bring an operand."""
        payload: Payload
        slot = None if self._slots is None else self._slots.find_pooled()
        if self._slots is not None and slot is not None:
            self._segment.slot(self._traffic.rank, slot, operand.dtype, operand.size).reshape(operand.shape)[...] = (
                operand
            )
            payload, numbers = (self._prompts.header,), (slot, operand.nbytes, 0)
            for lane, *_ in self._peers:
                lane.put_sized(OFFER, IN_SLOT, numbers, payload, HEADER_BYTES, _HEADER_ROOM)
            self._slots.free_when(slot, self._has_read())
            self._traffic.offered(self._prompts.positions)
            return
        if self._is_copied:
            payload = (self._prompts.header + operand.tobytes(),)
        else:
            payload = self._prompts.header, np.ascontiguousarray(operand).reshape(-1).view(np.uint8).data
        for lane, *_ in self._peers:
            lane.put_sized(OFFER, 0, _NUMBERS, payload, self._length, self._room)
        self._traffic.offered(self._prompts.positions)

    def _result(self, call: Call, operands: list[Array]) -> Array:
        """From operands of which those of others lie in rings."""
        operand = call.operand
        if self._reduce is not None:
            return self._reduce(operands, self._new(operand.shape, operand.dtype))
        result = self._execution.result(call.collective, operands, self._facts[1])
        theirs = (each for each in operands if each is not operand)
        # What lies in rings and slots is gone afterwards.
        return result.copy() if any(np.may_share_memory(result, each) for each in theirs) else result

    def _go_on(self, call: Call, came: list[tuple[Lane, memoryview, Array]], unread: Lane | None) -> Prompt:
        """What has begun, as a transfer: some members have come; the token of one's record may have been taken."""
        traffic, made = self._traffic, Prompt(Meeting(call, *self._facts), self._prompts)
        for lane, payload, theirs in came:
            made.brought(lane.peer, theirs)
            traffic.came(lane, len(payload))
        traffic.await_rest(made)
        if unread is not None:
            traffic.read(unread)
        return made
