"""Collectives in which each member sends a small operand to each other, once, and makes its result of what came.

What goes over MPI is what `Exchange` and `Parcels` send and take for the same collective, to the byte: each member may
do it either way. Here the buffers are kept from one time to the next, and what came is compared with what came before.
"""

import os
import time
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

from .parcels import INLINE, Arrival, Outgoing, Parcels, beginning

give_way = getattr(os, "sched_yield", lambda: time.sleep(0))
"""Gives the core to others."""


class _Peer:
    """What comes of another member.

    Attributes:
        rank: the member.
        position: in the group.
        came: what came, in bytes.
        operand: the operand in it.
    """

    def __init__(self, rank: int, position: int, head_bytes: int, operand: Array) -> None:
        self.rank = rank
        self.position = position
        self.came = np.empty(head_bytes + operand.nbytes, np.uint8)
        self.operand = self.came[head_bytes:].view(operand.dtype).reshape(operand.shape)
        self.head = self.came.data[:head_bytes]


class _Buffers:
    """Where small operands of one shape and dtype lie on their way among the same members; one at a time uses them.

    Attributes:
        sent: what is sent, in bytes.
        head: how it begins.
        operand: the operand in it.
        peers: the other members.
        operands: of all members, in order of position.
        is_used: whether one is under way.
    """

    def __init__(self, meeting: Meeting, head_bytes: int) -> None:
        operand = meeting.operand
        self.sent = np.empty(head_bytes + operand.nbytes, np.uint8)
        self.head = self.sent.data[:head_bytes]
        self.operand = self.sent[head_bytes:].view(operand.dtype).reshape(operand.shape)
        self.peers = [
            _Peer(rank, position, head_bytes, operand)
            for position, rank in enumerate(meeting.members)
            if position != meeting.position
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

    def __init__(self, buffers: _Buffers, head: bytes, result: Callable[[list[Array]], Array]) -> None:
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
        tag: of its messages.
        spins: how often it looks for what comes.
        busy_spins: how often it does before it gives its core to others.
    """

    def __init__(
        self, meeting: Meeting, known: _Known, parcels: Parcels, tag: int, spins: int, busy_spins: int
    ) -> None:
        buffers = known.buffers
        self._facts = meeting.members, meeting.position, meeting.header, meeting.shapes, meeting.expected, meeting.notes
        self._known = known
        self._parcels = parcels
        self.tag = tag
        self._spins, self._busy_spins = spins, busy_spins
        self._isend, self._improbe, self._status = parcels.comm.Isend, parcels.comm.Improbe, parcels.status
        self._sent = buffers.sent, parcels.byte
        self._result = known.result

    def run(self, call: Call) -> "Array | Prompt | None":
        """The result; or what has begun; None where another one has the buffers."""
        known, parcels = self._known, self._parcels
        buffers, byte = known.buffers, parcels.byte
        if buffers.is_used:
            return None
        buffers.head[:] = known.head
        buffers.operand[...] = call.operand
        requests = [(peer.rank, self._isend(self._sent, peer.rank, self.tag)) for peer in buffers.peers]
        waited = buffers.peers
        for peer in buffers.peers:
            message = self._come(peer.rank)
            if message is None:
                return self._go_on(call, waited, requests)
            if self._status.Get_count(byte) != peer.came.size:
                return self._go_on(call, waited, requests, message)
            message.Recv((peer.came, byte))
            first = bytes(peer.head)
            if first != known.agreed.get(peer.rank):
                return self._go_on(call, waited, requests, first)
            parcels.moved += 1
            waited = waited[1:]
        requests = [each for each in requests if not each[1].Test()]
        if requests:
            return self._go_on(call, waited, requests)
        return self._result(buffers.operands)

    def _come(self, rank: int) -> Any:
        """What a member has sent, if it comes soon."""
        improbe, tag, status = self._improbe, self.tag, self._status
        for spins in range(self._spins):
            message = improbe(rank, tag, status)
            if message is not None:
                return message
            if spins >= self._busy_spins:
                give_way()
        return None

    def _go_on(self, call: Call, waited: list[_Peer], requests: list[tuple[int, Any]], came: Any = None) -> "Prompt":
        """What has begun; of the first that is waited for a message may have come."""
        return Prompt(Meeting(call, *self._facts), self._known, self._parcels, self.tag, (waited, requests, came))


class Prompts:
    """The small collectives of one rank.

    Args:
        parcels: what else it sends and receives.
    """

    def __init__(self, parcels: Parcels) -> None:
        self._parcels = parcels
        self._buffers: dict[Any, _Buffers] = {}

    def begin(self, meeting: Meeting, tag: int) -> "Prompt | None":
        """Send the operand of a small collective; None where it is none, or one is under way that has its buffers."""
        notes = meeting.notes
        if "prompt" not in notes:
            notes["prompt"] = self._known(meeting) if _is_small(meeting) else None
        known: _Known | None = notes["prompt"]
        return None if known is None or known.buffers.is_used else Prompt(meeting, known, self._parcels, tag)

    def quick(self, meeting: Meeting, tag: int, spins: int, busy_spins: int) -> QuickPrompt | None:
        """What executes a collective that has begun, from the next time on; None where it is not small."""
        known: _Known | None = meeting.notes["prompt"]
        return None if known is None else QuickPrompt(meeting, known, self._parcels, tag, spins, busy_spins)

    def _known(self, meeting: Meeting) -> _Known:
        operand = meeting.operand
        head = beginning(operand.nbytes, meeting.header.pack())
        key = meeting.members, operand.shape, operand.dtype
        if key not in self._buffers:
            self._buffers[key] = _Buffers(meeting, len(head))
        return _Known(self._buffers[key], head, _result(meeting, self._parcels.new))


def _result(meeting: Meeting, new: New) -> Callable[[list[Array]], Array]:
    """What gives the result from the operands of all members, in memory of its own."""
    operand, collective, position = meeting.operand, meeting.collective, meeting.position
    execution = EXECUTED[collective.kind]
    if execution.moves is not None:
        return lambda operands: execution.result(collective, operands, position)
    make = np.empty if operand.nbytes < SMALLEST else new
    reduce = reducer(operand.dtype, operand.size, collective.reduce)
    return lambda operands: reduce(operands, make(operand.shape, operand.dtype))


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

    Attributes:
        result: set when it is done.
        tag: of its messages.
        awaited: ranks of which something is waited for.
    """

    __slots__ = ("_error", "_known", "_parcels", "_sends", "_waited", "is_done", "meeting", "result", "tag")
    result: Array

    def __init__(
        self,
        meeting: Meeting,
        known: _Known,
        parcels: Parcels,
        tag: int,
        begun: tuple[list[_Peer], list[tuple[int, Any]], Any] | None = None,
    ) -> None:
        self.meeting = meeting
        self.tag = tag
        self.is_done = False
        self._known = known
        self._parcels = parcels
        self._error: BaseException | None = None
        buffers = known.buffers
        self._waited = buffers.peers
        buffers.is_used = True
        if begun is not None:
            self._take_over(*begun)
            return
        buffers.head[:] = known.head
        buffers.operand[...] = meeting.operand
        self._sends: list[tuple[int, Outgoing]] = []
        for peer in buffers.peers:
            outgoing = parcels.post_made(peer.rank, tag, buffers.sent)
            if outgoing is not None:
                self._sends.append((peer.rank, outgoing))

    def _take_over(self, waited: list[_Peer], requests: list[tuple[int, Any]], came: Any) -> None:
        """Go on with what a `QuickPrompt` began, which may have got a message of the first that it waited for.

        Args:
            waited, requests: of members of which something is still to come; what has been sent.
            came: that message; or where it has been received, how it begins; None: there is none.
        """
        self._waited = waited
        self._sends = [
            (rank, outgoing)
            for rank, request in requests
            if (outgoing := self._parcels.sending(request, self._known.buffers.sent)) is not None
        ]
        if came is None:
            return
        try:
            if isinstance(came, bytes):
                self._check(waited[0], waited[0].came.size, came)
            else:
                self._receive(waited[0], came)
        except MismatchError as error:
            self._error = error
        self._waited = waited[1:]

    @property
    def awaited(self) -> list[int]:
        """See the class."""
        return [peer.rank for peer in self._waited] or [rank for rank, _ in self._sends]

    def advance(self) -> bool:
        """See `Work.advance`."""
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
        if self._waited:
            self._waited = [peer for peer in self._waited if not self._has_come(peer)]
            if self._waited:
                return
        if self._sends:
            self._sends = [each for each in self._sends if not each[1].is_done()]
        if not self._sends:
            buffers = self._known.buffers
            self.result = self._known.result(buffers.operands)
            buffers.is_used = False
            self.is_done = True

    def _has_come(self, peer: _Peer) -> bool:
        """Receive what a member has sent, if it has.

        Raises:
            MismatchError: it is at something else.
        """
        parcels = self._parcels
        message = parcels.comm.Improbe(peer.rank, self.tag, parcels.status)
        if message is None:
            return False
        self._receive(peer, message)
        return True

    def _receive(self, peer: _Peer, message: Any) -> None:
        """Receive what a member has sent, of which the last status tells.

        Raises:
            MismatchError: it is at something else.
        """
        parcels = self._parcels
        size = parcels.status.Get_count(parcels.byte)
        if size == peer.came.size:
            message.Recv((peer.came, parcels.byte))
            first = bytes(peer.head)  # Quicker to compare than a memory view.
        else:
            other = bytearray(size)
            message.Recv([other, parcels.byte])
            first = bytes(other)
        parcels.moved += 1
        if first != self._known.agreed.get(peer.rank):
            self._check(peer, size, first)

    def _check(self, peer: _Peer, size: int, first: bytes) -> None:
        """Compare how the first message of a member begins; what agrees needs no look the next time."""
        mine, nbytes = self.meeting.header, self.meeting.expected[peer.position]
        arrival = Arrival(peer.rank, self.tag, first, HEADER_BYTES)
        check_headers(mine, [nbytes], [Header.unpack(arrival.head)])
        if size != peer.came.size or arrival.size != nbytes:
            what = f"rank {peer.rank} sent {arrival.size:,} bytes, where {nbytes:,} are due"
            raise mismatch(mine.id, what, [mine.text], CORRECT_PART)
        self._known.agreed[peer.rank] = first
