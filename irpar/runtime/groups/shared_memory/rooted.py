"""Collectives of ranks that share cores, whose result all members get alike: one member makes it for all.

Where every member tells every other, ranks of which several share a core take longer to tell and to listen than to
reduce. So each lays its operand into a slot and tells the first member alone, the root; this one lays what it makes of
them all into a slot, and tells the others: a gather, and a broadcast of the result.
"""

import math
from functools import partial

import numpy as np

from irpar.ops.collectives.record import Execution
from irpar.ops.collectives.rounds import New
from irpar.runtime.groups.wire.header import HEADER_BYTES

from ..base import Array, Call
from ..results import EXECUTED
from ..spmd import Meeting
from .prompt import Prompt, Prompts
from .quick import OFFER, Member, QuickPrompt, let_go, mark_of, next_of
from .slots import IN_SLOT, MAY_KEEP
from .streams import BARE


class Roots(Prompts):
    """Makes the transfers of one collective of a program, from one time to the next.

    Attributes:
        mark: see `mark_of`.
        is_root: whether this member makes the result.
        shape: of the result.

    Raises:
        ValueError: there is no such reduction of these elements, or the attributes do not fit the operand.
    """

    def __init__(self, meeting: Meeting, new: New) -> None:
        super().__init__(meeting, new)
        root, *others = meeting.members
        self.mark = mark_of(self.header)
        self.is_root = meeting.position == 0
        self.is_reduced_at_once = False
        self.positions = {rank: place for place, rank in enumerate(others, 1)} if self.is_root else {root: 0}
        self.shape = self.shapes[root] = _result_shape(meeting, EXECUTED[meeting.collective.kind])

    @staticmethod
    def fit(meeting: Meeting, room: int) -> bool:
        """Whether all members get the same, which is made of the operands of all and has room in a slot."""
        execution = EXECUTED[meeting.collective.kind]
        if not (len(meeting.members) > 2 and execution.is_shared and execution.reads_all):
            return False
        try:
            elements = math.prod(_result_shape(meeting, execution))
        except ValueError:
            return False  # Whoever executes it tells why.
        most = max(elements, *map(math.prod, meeting.shapes)) * meeting.operand.itemsize
        return elements > 0 and HEADER_BYTES + most <= room

    def __call__(self, meeting: Meeting) -> "Rooted":
        return Rooted(meeting, self)


def _result_shape(meeting: Meeting, execution: Execution) -> tuple[int, ...]:
    result: Array = meeting.operand
    if execution.moves is not None:
        result = execution.moves(meeting, partial(np.empty, dtype=result.dtype)).result
    shape: tuple[int, ...] = result.shape
    return shape


class Rooted(Prompt):
    """Such a collective that has begun.

    Attributes:
        is_sent: what this member lays into a slot lies there.
    """

    __slots__ = ("is_sent", "known")

    def __init__(self, meeting: Meeting, known: Roots) -> None:
        super().__init__(meeting, known)
        self.known = known
        self.is_sent = False

    def content(self) -> Array | None:
        """What this member lays into a slot; None at the root as long as others have still to come."""
        if not self.known.is_root:
            return self.meeting.operand
        return None if self.absent else self.result()

    @property
    def is_done(self) -> bool:
        """See `Transfer`."""
        return self.is_sent and not self.absent

    def result(self) -> Array:
        """See `Transfer.result`."""
        return super().result() if self.known.is_root else self._operands[0]


class QuickRooted(QuickPrompt):
    """Such a collective of a program from the second time on; see `Quick`."""

    __slots__ = ()
    _prompts: Roots

    def execute(self, call: Call) -> Array | None:
        """See `Quick`."""
        if not (self._traffic.is_idle and self._has_room()):
            return None
        return self._make(call) if self._prompts.is_root else self._get(call)

    def _make(self, call: Call) -> Array:
        """Take the operands of all others, and let them have the result."""
        for lane in self._lanes:
            lane.begun += 1
        operands, came = [call.operand] * self._count, list[Member]()
        has_all = self._gather(operands, came)
        slot = self._slots.find_pooled() if has_all and self._has_room() else None
        if slot is None:
            return self._finish(partial(self._go_on, call, came))
        result = self._own[slot][0]
        may_keep = call.into is None and self._slots.let_keep(slot, self._prompts.positions)
        if may_keep and self._reduce is not None:
            self._reduce(operands, result)
        else:
            result[...] = made = self._result(call, operands)
        let_go(came)
        self._tell(slot, IN_SLOT | MAY_KEEP if may_keep else IN_SLOT)
        self._traffic.look_first_at_last(self._peers)
        return self._slots.loans.array(self._traffic.rank, slot, self._type, result.shape) if may_keep else made

    def _get(self, call: Call) -> Array | None:
        """Let the root have the operand, and take the result."""
        slot = self._slots.find_pooled()
        if slot is None:
            return None
        ((lane, _, theirs),) = self._peers
        lane.begun += 1
        self._own[slot][0][...] = call.operand
        self._tell(slot, IN_SLOT | self._slots.keeping(lane.peer))
        found = next_of(OFFER, lane, self._traffic)
        if found is None or not (found[1] & IN_SLOT and self._is_due(lane, found)):
            self._unread = None if found is None else lane
            return self._finish(partial(self._go_on, call, list[Member]()))
        _, flag, _, told, _, _, lane.freed = found
        result = self._taken(call, theirs[told >> 32], told >> 32, bool(flag & MAY_KEEP))
        lane.came += 1
        lane.free(BARE)
        self._traffic.slept_for = None
        return result

    def _taken(self, call: Call, array: Array, slot: int, may_keep: bool) -> Array:
        """The result, which lies in a slot of the root."""
        into = call.into
        if into is None or into.shape != array.shape:
            if may_keep:
                return self._slots.loans.array(self._lanes[0].peer, slot, self._type, array.shape)
            into = self._prompts.new(array.shape, self._type)
        into[...] = array
        return into

    def _has_room(self) -> bool:
        """Whether each of the others can be told."""
        return all(lane.written <= lane.freed + lane.most for lane in self._lanes)

    def _tell(self, slot: int, flag: int) -> None:
        """Lay the header into a slot, before what lies there, and tell the others."""
        self._own[slot][1][:] = self._header
        told, (first, second) = slot << 32 | self._nbytes, self._mark
        for lane in self._lanes:
            lane.tell(OFFER, flag, told, first, second)
        self._slots.free_when_read(slot, self._lanes)

    def _transfer(self, call: Call) -> Rooted:
        """What has begun: a member has laid its operand into a slot by now."""
        made = Rooted(Meeting(call, *self._facts), self._prompts)
        made.is_sent = not self._prompts.is_root
        self._traffic.offer(made)
        return made
