"""All-reduces of middling operands of a program from the second time on; see `Quick`.

What goes over the rings is what a `Reduction` sends and takes whose operand lies in a slot, to the byte: each member
may do it either way. A member that reduces comes to those that do not only with the piece that these wait for: until
then they sleep.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from irpar.ops.collectives.reduced_arrays import reducer
from irpar.ops.collectives.rounds import New
from irpar.runtime.groups.wire.header import HEADER_BYTES

from ..base import Array, Call
from ..spmd import Meeting
from .quick import NOWHERE, OFFER, let_go, next_of
from .reductions import Reduction
from .segment import Segment
from .slots import IN_SLOT, Slots
from .streams import BARE, Lane, Streams, room_of
from .transfers import Transfer

if TYPE_CHECKING:
    from .traffic import Traffic

PIECE = 6
"""The kind of the record that a reduced piece lies where the operand does."""
_HEADER_ROOM = room_of(HEADER_BYTES)
_Came = tuple[Lane, int, int]
"""A member that has come, the slot of its operand, and the bytes of the ring that hold its offer; 0: it came early."""


class QuickReduction:
    """Such an all-reduce. Where another member is not here soon, it goes on as a `Reduction`.

    Args:
        traffic: what else the rank does.
        streams: what it sends, and what comes.
        segment: where slots are.
        slots: those of this rank.
        made: the collective as it was executed the first time.
        new: makes arrays of a shape and dtype.
        finish: gives the result of the transfer that a call makes.
    """

    def __init__(
        self,
        traffic: "Traffic",
        streams: Streams,
        segment: Segment,
        slots: Slots,
        made: Reduction,
        new: New,
        finish: Callable[[Callable[[], Transfer]], Array],
    ) -> None:
        meeting = made.meeting
        self._traffic, self._streams, self._segment, self._slots = traffic, streams, segment, slots
        self._facts = meeting.members, meeting.position, meeting.header, meeting.shapes, meeting.expected, meeting.notes
        self._header = (meeting.header.pack(),)
        self._agreed: dict[int, bytes] = meeting.notes["agreed"]
        positions = {rank: position for position, rank in enumerate(meeting.members)}
        self._peers = [(streams.lane(rank), positions[rank]) for rank in made.peers]
        self._reducers = [
            (streams.lane(rank), slice(*made.bounds[rank])) for rank in made.reducers if rank != meeting.call.rank
        ]
        self._lanes = streams.lanes(made.peers)
        self._first = [lane for lane in self._lanes if lane.peer in made.reducers]
        self._last = [lane for lane in self._lanes if lane.peer not in made.reducers]
        self._reduces = made.reduces
        self._own = slice(*made.bounds[meeting.call.rank])
        self._new, self._finish = new, finish
        self._type: tuple[np.dtype[Any], int] = meeting.operand.dtype, meeting.operand.size
        size = self._own.stop - self._own.start
        self._reduce = reducer(meeting.operand.dtype, size, meeting.collective.reduce)

    def execute(self, call: Call) -> Array | None:
        """See `Quick`."""
        traffic = self._traffic
        if not traffic.is_idle or not all(lane.has_room(_HEADER_ROOM + BARE) for lane in self._lanes):
            return None
        slot = self._slots.find_pooled()
        if slot is None:
            return None
        operand = np.ascontiguousarray(call.operand).reshape(-1)
        self._lay(operand, slot)
        numbers: dict[int, int] = {}
        self._offer(self._first, slot, numbers)
        came: list[_Came] = []
        for lane, _ in self._peers:
            place = lane.peer, numbers.get(lane.peer, lane.begun)
            if place in traffic.early:
                early = self._early(place)
                if early is None:  # Nothing else tells of it any more, and what it sends next is for a transfer.
                    return self._finish(partial(self._meet_rest, call, slot, numbers, came, None))
                came.append((lane, early, 0))
                continue
            found = next_of(OFFER, lane, traffic)
            if found is None:
                return self._finish(partial(self._meet_rest, call, slot, numbers, came, None))
            _, flag, length, theirs, _, _, lane.freed = found
            is_laid = not flag & IN_SLOT and theirs != NOWHERE
            if not is_laid or bytes(lane.payload(length)) != self._agreed.get(lane.peer):
                return self._finish(partial(self._meet_rest, call, slot, numbers, came, lane))
            came.append((lane, theirs, _HEADER_ROOM))
        whole = self._new(call.operand.shape, operand.dtype)
        flat = whole.reshape(-1)
        if self._reduces:
            self._reduce_own(operand, flat, slot, came)
        let_go(came)
        if self._reduces:
            self._offer(self._last, slot, numbers)
            self._send_own(slot, numbers)
        waited = self._join(flat, numbers)
        if waited or not self._streams.is_flushed:
            return self._finish(partial(self._join_rest, call, slot, numbers, whole, waited))
        self._slots.free_when_read(slot, self._lanes)
        traffic.look_first_at_last(self._peers)
        return whole

    def _early(self, place: tuple[int, int]) -> int | None:
        """The slot of a member that came before this one; None where it laid nothing, or brought something else."""
        theirs, offered = self._traffic.early[place]
        if theirs == NOWHERE or offered != self._agreed.get(place[0]):
            return None
        del self._traffic.early[place]
        return theirs

    def _lay(self, operand: Array, slot: int) -> None:
        """Lay the pieces of the others into a slot."""
        lain, own = self._segment.slot(self._traffic.rank, slot, *self._type), self._own
        lain[: own.start], lain[own.stop :] = operand[: own.start], operand[own.stop :]

    def _offer(self, lanes: Iterable[Lane], slot: int, numbers: dict[int, int]) -> None:
        """Come to the collective with some of the others; `numbers` gets which one with each of them it is."""
        for lane in lanes:
            numbers[lane.peer] = lane.begun
            lane.begun += 1
            if lane.backlog or not lane.put_sized(OFFER, 0, (slot, 0, 0), self._header, HEADER_BYTES, _HEADER_ROOM):
                self._streams.send(lane.peer, OFFER, 0, (slot, 0, 0), *self._header)

    def _reduce_own(self, operand: Array, whole: Array, slot: int, came: list[_Came]) -> None:
        """Reduce this member's piece of the operands that have come, and lay it where the others find it."""
        segment, own = self._segment, self._own
        pieces = [operand[own]] * len(self._facts[0])
        for (lane, position), (_, theirs, _) in zip(self._peers, came, strict=True):
            pieces[position] = segment.slot(lane.peer, theirs, *self._type)[own]
        self._reduce(pieces, whole[own])
        segment.slot(self._traffic.rank, slot, *self._type)[own] = whole[own]

    def _send_own(self, slot: int, numbers: dict[int, int]) -> None:
        """Tell the others that this member's piece is reduced."""
        for lane in self._lanes:
            # What was read meanwhile may have been answered, in the room that there was.
            if lane.backlog or lane.written > lane.freed + lane.most:
                self._streams.send(lane.peer, PIECE, 0, (numbers[lane.peer], slot, 0))
            else:
                lane.tell(PIECE, 0, numbers[lane.peer], slot, 0)

    def _join(self, whole: Array, numbers: dict[int, int]) -> list[int]:
        """Take the pieces of the others; the ranks whose pieces have not come soon."""
        for number, (lane, place) in enumerate(self._reducers):
            while (found := next_of(PIECE, lane, self._traffic)) is None or found[3] != numbers[lane.peer]:
                if found is None:
                    return [each.peer for each, _ in self._reducers[number:]]
                self._traffic.read(lane)  # Of another collective.
            lane.freed = found[-1]
            whole[place] = self._segment.slot(lane.peer, found[4], *self._type)[place]
            lane.free(BARE)
        return []

    def _meet_rest(
        self, call: Call, slot: int, numbers: dict[int, int], came: Iterable[_Came], unread: Lane | None
    ) -> Transfer:
        """What has begun, as a transfer: some members have come; the token of one's record may have been taken."""
        traffic, made = self._traffic, self._transfer(call)
        self._offer((lane for lane in self._last if lane.peer not in numbers), slot, numbers)
        made.lies_in(self._segment.slot(traffic.rank, slot, *self._type))
        traffic.take_up(made, slot, numbers)
        for lane, theirs, _ in came:
            traffic.meet(made, lane.peer, theirs, memoryview(self._agreed[lane.peer]))
        let_go(came)
        traffic.await_rest(made)
        if unread is not None:
            traffic.read(unread)
        return made

    def _join_rest(
        self, call: Call, slot: int, numbers: dict[int, int], whole: Array, waited: Iterable[int]
    ) -> Transfer:
        """What has begun, as a transfer: all have come, and this member's piece is sent; some still send theirs."""
        made = self._transfer(call)
        made.join_rest(whole, waited)
        self._traffic.take_up(made, slot, numbers)
        return made

    def _transfer(self, call: Call) -> Reduction:
        made: Reduction = self._facts[-1]["transfer"](Meeting(call, *self._facts))
        return made
