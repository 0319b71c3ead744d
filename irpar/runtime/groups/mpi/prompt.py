"""Collectives in which each member sends a small operand to each other, once, and makes its result of what came.

What goes over MPI is what `Exchange` and `Parcels` send and take for the same collective, to the byte: each member may
do it either way. Here buffers and requests are kept from one time to the next, and what came is compared with what came
before.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from irpar.ops.collectives.arrays import is_text
from irpar.ops.collectives.reduced_arrays import reduce_arrays, reducer
from irpar.ops.collectives.rounds import New, empty_like, is_one_round
from irpar.runtime.errors import MismatchError
from irpar.runtime.groups.base import Array, Call
from irpar.runtime.groups.recycled import SMALLEST
from irpar.runtime.groups.results import EXECUTED
from irpar.runtime.groups.spmd import Meeting
from irpar.runtime.groups.wire.header import CORRECT_PART, HEADER_BYTES, Header, check_headers, mismatch

from .lines import HEAD_BYTES, Line, Lines, content_in, give_way, room
from .parcels import INLINE, Arrival, Parcels, beginning

_Result = Callable[[list[Array], Array | None], Array]


class _Peer:
    """Another member.

    Attributes:
        line: what comes of it.
        position: in the group.
        operand: where its operand comes.
        sending: the request that sends it what lies in the buffers.
    """

    def __init__(self, line: Line, position: int, operand: Array, sending: Any) -> None:
        self.line = line
        self.rank = line.rank
        self.position = position
        self.nbytes = HEAD_BYTES + operand.nbytes
        self.operand = content_in(line.came, HEAD_BYTES, operand)
        self.sending = sending


class _Buffers:
    """Where small operands of one shape and dtype lie on their way among the same members; one at a time uses them.

    Attributes:
        head: how what is sent begins.
        operand: the operand in it.
        peers: the other members.
        operands: of all members, in order of position.
        is_used: whether one is under way.
    """

    def __init__(self, meeting: Meeting, parcels: Parcels, lines: list[Line], tag: int) -> None:
        operand = meeting.operand
        sent = room(HEAD_BYTES, operand.nbytes)
        self.sent = sent
        self.head = sent.data[:HEAD_BYTES]
        self.operand = content_in(sent, HEAD_BYTES, operand)
        positions = (position for position in range(len(meeting.members)) if position != meeting.position)
        self.peers = [
            _Peer(line, position, operand, parcels.comm.Send_init((sent, parcels.byte), line.rank, tag))
            for line, position in zip(lines, positions, strict=True)
        ]
        self.operands = [peer.operand for peer in self.peers]
        self.operands.insert(meeting.position, self.operand)
        self.is_used = False


class _Known:
    """A collective of a program, from one time to the next.

    Attributes:
        buffers: others of this kind have the same.
        head: how what this rank sends begins.
        result: of the operands that lie in the buffers.
        agreed: by rank, how that of others does, once it has been compared.
    """

    def __init__(self, buffers: _Buffers, head: bytes, result: _Result) -> None:
        self.buffers = buffers
        self.head = head
        self.result = result
        self.agreed: dict[int, bytes] = {}


class QuickPrompt:
    """A small collective of a program from the second time on; see `Quick`.

    Where another member is not here soon, or brings something else, what has begun goes on as a `Prompt`.

    Args:
        meeting: as the collective was executed the first time.
        known: what is the same each time.
        parcels: what else the rank sends and receives.
        spins: how often it looks for what comes.
        busy_spins: how often it does before it gives its core to others.
    """

    def __init__(self, meeting: Meeting, known: _Known, parcels: Parcels, spins: int, busy_spins: int) -> None:
        buffers = known.buffers
        self._facts = meeting.members, meeting.position, meeting.header, meeting.shapes, meeting.expected, meeting.notes
        self._known = known
        self._buffers = buffers
        self._parcels = parcels
        self._spins, self._busy_spins = spins, busy_spins
        self._starts = [peer.line.request.Start for peer in buffers.peers]
        self._starts += [peer.sending.Start for peer in buffers.peers]
        self._lines = [peer.line for peer in buffers.peers]
        self._are_sent = [peer.sending.Test for peer in buffers.peers]
        self._result = known.result

    def run(self, call: Call) -> "Array | Prompt | None":
        """The result; or what has begun; None where another one has the buffers."""
        known, buffers = self._known, self._buffers
        if buffers.is_used:
            return None
        buffers.head[:] = known.head
        buffers.operand[...] = call.operand
        for start in self._starts:
            start()
        for place, line in enumerate(self._lines):
            if not line.has_come() and not self._comes(line.has_come):
                return self._go_on(call, place)
            if bytes(line.head) != known.agreed.get(line.rank):  # Quicker to compare than a memory view.
                return self._go_on(call, place, self._parcels.status.Get_count(self._parcels.byte))
        for is_sent in self._are_sent:
            if not is_sent() and not self._comes(is_sent):
                return self._go_on(call, len(self._lines))
        self._parcels.moved += 1
        return self._result(buffers.operands, call.into)

    def _comes(self, is_done: Callable[[], bool]) -> bool:
        """Whether something is done soon."""
        spins = 0
        while not is_done():
            spins += 1
            if spins > self._busy_spins:
                if spins > self._spins:
                    return False
                give_way()
        return True

    def _go_on(self, call: Call, place: int, came: int | None = None) -> "Prompt":
        """What has begun, from one member on; of that so many bytes may have come, which nobody has looked at."""
        return Prompt(Meeting(call, *self._facts), self._known, self._parcels, (place, came))


class Prompts:
    """The small collectives of one rank.

    Args:
        parcels: what else it sends and receives.
        lines: where what comes lies.
    """

    def __init__(self, parcels: Parcels, lines: Lines) -> None:
        self._parcels = parcels
        self._lines = lines
        self._buffers: dict[Any, _Buffers] = {}

    def begin(self, meeting: Meeting, tag: int) -> "Prompt | None":
        """Send the operand of a small collective; None where it is none, or one is under way that has its buffers."""
        notes = meeting.notes
        if "prompt" not in notes:
            notes["prompt"] = self._known(meeting, tag) if _is_small(meeting) else None
        known: _Known | None = notes["prompt"]
        return None if known is None or known.buffers.is_used else Prompt(meeting, known, self._parcels)

    def quick(self, meeting: Meeting, spins: int, busy_spins: int) -> QuickPrompt | None:
        """What executes a collective that has begun, from the next time on; None where it is not small."""
        known: _Known | None = meeting.notes["prompt"]
        return None if known is None else QuickPrompt(meeting, known, self._parcels, spins, busy_spins)

    def forget(self) -> None:
        """Give the requests back to MPI; nothing of them is on its way."""
        for buffers in self._buffers.values():
            for peer in buffers.peers:
                peer.sending.Free()
        self._buffers.clear()

    def _known(self, meeting: Meeting, tag: int) -> _Known:
        operand = meeting.operand
        head = beginning(operand.nbytes, meeting.header.pack())
        key = tag, meeting.members, operand.shape, operand.dtype
        if key not in self._buffers:
            others = (rank for position, rank in enumerate(meeting.members) if position != meeting.position)
            lines = [self._lines.of(rank, tag, HEAD_BYTES) for rank in others]
            self._buffers[key] = _Buffers(meeting, self._parcels, lines, tag)
        return _Known(self._buffers[key], head, _result(meeting, self._parcels.new))


def _result(meeting: Meeting, new: New) -> _Result:
    """What gives the result from the operands of all members, in memory of its own or in what it is given for that."""
    operand, collective, position = meeting.operand, meeting.collective, meeting.position
    execution = EXECUTED[collective.kind]
    if execution.moves is not None:
        return lambda operands, into: execution.result(collective, operands, position)
    make = np.empty if operand.nbytes < SMALLEST else new
    reduce = reducer(operand.dtype, operand.size, collective.reduce)
    return lambda operands, into: reduce(operands, make(operand.shape, operand.dtype) if into is None else into)


def _is_small(meeting: Meeting) -> bool:
    """Whether all members send operands of one size to all others in one round, and what is made of them is new."""
    operand = meeting.operand
    execution = EXECUTED[meeting.collective.kind]
    if is_text(operand.dtype) or operand.nbytes > INLINE:
        return False
    if any(nbytes != operand.nbytes for nbytes in meeting.expected):
        return False  # Elements of less than a byte are packed on their way.
    try:
        if execution.moves is not None:
            execution.moves(meeting, empty_like(meeting))
            is_joined = execution.reads_all and execution.is_shared and not execution.gives_operands
            return is_joined and execution.exchange is None and len(set(meeting.shapes)) == 1
        reduce_arrays([operand.reshape(-1)[:0]] * 2, meeting.collective.reduce)
    except ValueError:
        return False  # `Exchange` tells.
    return is_one_round(execution, meeting)


class Prompt:
    """A small collective that has begun; see `Exchange`, as which it is used.

    Args:
        meeting: that.
        known: what is the same each time.
        parcels: what else the rank sends and receives.
        begun: where a `QuickPrompt` began it: the place of the first member of which something is waited for, and how
            many bytes came of that, if any; None: nothing has begun.

    Attributes:
        result: set when it is done.
        awaited: ranks of which something is waited for.
    """

    __slots__ = ("_error", "_is_listening", "_known", "_parcels", "_sends", "_waited", "is_done", "meeting", "result")
    result: Array

    def __init__(
        self, meeting: Meeting, known: _Known, parcels: Parcels, begun: tuple[int, int | None] | None = None
    ) -> None:
        self.meeting = meeting
        self.is_done = False
        self._known = known
        self._parcels = parcels
        self._error: BaseException | None = None
        buffers = known.buffers
        buffers.is_used = True
        self._waited = buffers.peers
        self._is_listening = begun is not None
        if begun is None:
            buffers.head[:] = known.head
            buffers.operand[...] = meeting.operand
            for peer in buffers.peers:
                peer.sending.Start()
        self._sends = [
            (peer.rank, outgoing)
            for peer in buffers.peers
            if (outgoing := parcels.sending(peer.sending, buffers.sent)) is not None
        ]
        if begun is not None:
            self._take_over(*begun)

    def _take_over(self, place: int, came: int | None) -> None:
        self._waited = self._waited[place:]
        if came is None:
            return
        try:
            self._check(self._waited[0], came)
        except MismatchError as error:
            self._error = error
        self._waited = self._waited[1:]

    @property
    def awaited(self) -> list[int]:
        """See the class."""
        return [peer.rank for peer in self._waited] or [rank for rank, _ in self._sends]

    def advance(self) -> bool:
        """See `Work.advance`; called when all that began before it over its tag is done."""
        if self._error is not None:
            raise self._error
        if not self.is_done:
            try:
                self._advance()
            except BaseException as error:
                self._error = error
                raise
        return self.is_done

    def _advance(self) -> None:
        if not self._is_listening:
            self._is_listening = True
            for peer in self._waited:
                peer.line.request.Start()
        if self._waited:
            self._waited = [peer for peer in self._waited if not self._has_come(peer)]
            if self._waited:
                return
        if self._sends:
            self._sends = [each for each in self._sends if not each[1].is_done()]
        if not self._sends:
            buffers = self._known.buffers
            self.result = self._known.result(buffers.operands, self.meeting.call.into)
            buffers.is_used = False
            self.is_done = True

    def _has_come(self, peer: _Peer) -> bool:
        """Whether a member's message has come, which must be what is due.

        Raises:
            MismatchError: it is at something else.
        """
        if not peer.line.has_come():
            return False
        self._parcels.moved += 1
        if bytes(peer.line.head) != self._known.agreed.get(peer.rank):
            self._check(peer, self._parcels.status.Get_count(self._parcels.byte))
        return True

    def _check(self, peer: _Peer, size: int) -> None:
        """Compare how the first message of a member begins; what agrees needs no look the next time.

        Raises:
            MismatchError: it is at something else.
        """
        mine, nbytes = self.meeting.header, self.meeting.expected[peer.position]
        first = bytes(peer.line.head)
        arrival = Arrival(peer.rank, 0, first, HEADER_BYTES)
        check_headers(mine, [nbytes], [Header.unpack(arrival.head)])
        if size != peer.nbytes or arrival.size != nbytes:
            what = f"rank {peer.rank} sent {arrival.size:,} bytes, where {nbytes:,} are due"
            raise mismatch(mine.id, what, [mine.text], CORRECT_PART)
        self._known.agreed[peer.rank] = first
