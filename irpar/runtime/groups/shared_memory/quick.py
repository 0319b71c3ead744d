"""Small collectives of a program from the second time on: what is the same each time has been found the first time.

What goes over the rings is what a `Prompt` sends and takes, to the byte: each member may do it either way.
"""

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
from .prompt import COPIED, Prompt, Prompts
from .streams import Lane, Payload, Streams, room_of
from .transfers import Transfer

if TYPE_CHECKING:
    from .traffic import Traffic

OFFER = 0
"""The kind of the record by which a rank comes to a collective."""
NOWHERE = -1
"""In place of a slot: the operand is in none."""
_NUMBERS = NOWHERE, 0, 0


class QuickPrompt:
    """A small collective of a program; see `Quick`.

    Where another member is not here soon, or brings something else, what has begun goes on as a `Prompt`.

    Args:
        traffic: what else the rank does.
        streams: what it sends, and what comes.
        meeting: as the collective was executed the first time.
        prompts: what makes its prompts.
        finish: gives the result of the transfer that a call makes.
    """

    def __init__(
        self,
        traffic: "Traffic",
        streams: Streams,
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
            (streams.lane(rank), position, HEADER_BYTES + meeting.expected[position], meeting.shapes[position])
            for rank, position in prompts.positions.items()
        ]
        self._is_copied = operand.nbytes <= COPIED
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
        came: list[tuple[Lane, memoryview]] = []
        for lane, position, length, shape in self._peers:
            while True:
                if not traffic.has_come(lane):
                    return self._finish(partial(self._go_on, call, came, None))
                payload = lane.payload(OFFER, length, NOWHERE)
                if payload is not None and bytes(payload[:HEADER_BYTES]) == self._agreed.get(lane.peer):
                    break
                if lane.kind == OFFER:
                    return self._finish(partial(self._go_on, call, came, lane))
                traffic.read(lane)
            operands[position] = np.ndarray(shape, operand.dtype, payload, HEADER_BYTES)
            came.append((lane, payload))
        result = self._result(call, operands)
        for lane, payload in came:
            traffic.came(lane, len(payload))
        return result

    def _offer(self, operand: Array) -> None:
        """Come to the collective, and bring an operand."""
        payload: Payload
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
        own = [each if each is operand else each.copy() for each in operands]
        return self._execution.result(call.collective, own, self._facts[1])

    def _go_on(self, call: Call, came: list[tuple[Lane, memoryview]], unread: Lane | None) -> Prompt:
        """What has begun, as a transfer: some members have come; the token of one's record may have been taken."""
        traffic, made = self._traffic, Prompt(Meeting(call, *self._facts), self._prompts)
        for lane, payload in came:
            made.came(lane.peer, payload)
            traffic.came(lane, len(payload))
        traffic.await_rest(made)
        if unread is not None:
            traffic.read(unread)
        return made
