"""Small collectives of a program from the second time on: what is the same each time has been found the first time.

An operand and its header lie in a slot, where all other members read them; what goes over the rings is a record without
a payload. Each member may send and take this way, or as a `Prompt` does.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable
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
from .slots import IN_SLOT, TO_FREE, Slots
from .streams import BARE, Lane, Record, Streams, room_of
from .transfers import Transfer

if TYPE_CHECKING:
    from .traffic import Traffic

OFFER = 0
"""The kind of the record by which a rank comes to a collective. Where header and operand lie in a slot (`IN_SLOT`), to
be read when the record is, the first number tells the slot, and in the lower half the bytes; the others the mark of the
header."""
NOWHERE = -1
"""In place of a slot: the operand is in none."""
_MARK = struct.Struct("<qq")
_BYTE = np.dtype(np.uint8)
Member = tuple[Lane, Array, int]
"""A member that has come, its operand, and the bytes of the ring that hold what it offered; 0: it came early."""


def next_of(kind: int, lane: Lane, traffic: "Traffic") -> Record | None:
    """The next record of a kind from another rank, if it comes soon; others are read."""
    while traffic.has_come(lane):
        found = lane.look()
        if found[0] == kind:
            return found
        traffic.read(lane)
    return None


def let_go(came: Iterable[tuple[Lane, object, int]]) -> None:
    """What members brought has been read.

    Args:
        came: the members, with what they brought, and the bytes of the ring that hold what they offered; 0: none does.
    """
    for lane, _, need in came:
        if need:
            lane.came += 1
            lane.free(need)


def mark_of(header: bytes) -> tuple[int, int]:
    """What stands for a header: two headers of one mark are one."""
    first, second = _MARK.unpack(hashlib.blake2b(header, digest_size=_MARK.size).digest())
    return first, second


class QuickPrompt:
    """A small collective of a program; see `Quick`.

    Where another member is not here soon, or brings something else, what has begun goes on as a `Prompt`. Members that
    take it so themselves may have come before this one: what they brought is taken as it is.

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
        *("_new", "_own", "_peers", "_prompts", "_reduce", "_segment", "_slots", "_traffic", "_type", "_unread"),
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
        self._unread: Lane | None = None
        """Where not all members have come: the one whose record's token was taken."""
        self._facts = meeting.members, meeting.position, meeting.header, meeting.shapes, meeting.expected, meeting.notes
        self._prompts = prompts
        self._count, self._type = len(meeting.members), operand.dtype
        self._finish = finish
        self._agreed: dict[int, bytes] = meeting.notes["agreed"]
        self._marks: dict[int, tuple[int, int]] = {}
        """Of headers that have been agreed on, by rank."""
        self._header, self._mark = prompts.header, mark_of(prompts.header)
        self._lanes = streams.lanes(prompts.positions)
        self._peers = [(lane, prompts.positions[lane.peer], self._places(lane.peer)) for lane in self._lanes]
        self._own = {
            each: (place, segment.slot(traffic.rank, each, _BYTE, HEADER_BYTES).data)
            for each, place in self._places(traffic.rank).items()
        }
        self._nbytes = HEADER_BYTES + next(iter(self._own.values()))[0].nbytes
        self._new = None if operand.nbytes < SMALLEST else partial(prompts.new, operand.shape, operand.dtype)
        is_reduced = self._execution.returns_pieces
        self._reduce = reducer(operand.dtype, operand.size, meeting.collective.reduce) if is_reduced else None

    def _places(self, rank: int) -> dict[int, Array]:
        """Where what a rank lays into slots may lie: by slot."""
        shape = self._prompts.shapes[rank]
        return {each: self._segment.laid(rank, each, self._type, shape) for each in self._slots.pooled}

    def execute(self, call: Call) -> Array | None:
        """See `Quick`. It is written out: calls of methods would take as long as what they do."""
        traffic, lanes = self._traffic, self._lanes
        if not traffic.is_idle:
            return None
        for lane in lanes:
            if lane.written > lane.freed + lane.most:
                return None
        slot = self._slots.find_pooled()
        if slot is None:
            return None
        place, head = self._own[slot]
        place[...] = call.operand
        head[:] = self._header
        told, (first, second) = slot << 32 | self._nbytes, self._mark
        for lane in lanes:
            lane.begun += 1
            lane.tell(OFFER, IN_SLOT, told, first, second)
        self._slots.free_when_read(slot, lanes)
        operands = [place] * self._count
        came: list[Member] = []
        if not self._gather(operands, came):
            return self._finish(partial(self._go_on, call, came))
        result = self._result(call, operands)
        let_go(came)
        if traffic.slept_for is not None:
            traffic.look_first_at_last(self._peers)
        return result

    def _gather(self, operands: list[Array], came: list[Member]) -> bool:
        """Take what the others have laid; whether all have come, and `_unread` is set otherwise."""
        traffic, marks, self._unread = self._traffic, self._marks, None
        for lane, position, theirs in self._peers:
            brought = self._early(lane) if traffic.early else None
            need = 0
            if brought is None:
                found = next_of(OFFER, lane, traffic)
                if found is None:
                    return False
                _, flag, length, told, first, second, lane.freed = found
                if flag == IN_SLOT and marks.get(lane.peer) == (first, second):
                    brought, need = theirs[told >> 32], BARE
                elif not flag & IN_SLOT:
                    brought, need = self._offered(lane.peer, lane.payload(length)), room_of(length)
                elif self._is_due(lane, found):
                    brought, need = theirs[told >> 32], BARE
                    self._slots.note_kept(lane.peer, flag)
                if brought is None:
                    self._unread = lane
                    return False
            operands[position] = brought
            came.append((lane, brought, need))
        return True

    def _early(self, lane: Lane) -> Array | None:
        """The operand of a member that came before this one; None where it did not, or brought something else."""
        place = lane.peer, lane.begun - 1
        early = self._traffic.early.get(place)
        brought = None if early is None else self._offered(lane.peer, memoryview(early[1]))
        if brought is not None:
            del self._traffic.early[place]
        return brought

    def _offered(self, peer: int, offered: memoryview) -> Array | None:
        """The operand that was offered with its header; None where another one has been agreed on."""
        if bytes(offered[:HEADER_BYTES]) != self._agreed.get(peer):
            return None
        return np.ndarray(self._prompts.shapes[peer], self._type, offered, HEADER_BYTES)

    def _is_due(self, lane: Lane, found: Record) -> bool:
        """Whether a member brings in a slot what has been agreed on; its header is compared where its mark is new."""
        _, flag, _, told, first, second, _ = found
        if flag & TO_FREE:
            return False
        if self._marks.get(lane.peer) == (first, second):
            return True
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

    def _go_on(self, call: Call, came: list[Member]) -> Prompt:
        """What has begun, as a transfer: some members have come; the token of the record of one may have been taken."""
        made = self._transfer(call)
        for lane, theirs, _ in came:
            made.brought(lane.peer, theirs)
        let_go(came)
        self._traffic.await_rest(made)
        if self._unread is not None:
            self._traffic.read(self._unread)
        return made

    def _transfer(self, call: Call) -> Prompt:
        return Prompt(Meeting(call, *self._facts), self._prompts)
