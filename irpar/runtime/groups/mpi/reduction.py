"""All-reduces of middling operands: each member reduces a piece of all operands, and sends it to the others.

Where ranks share the cores of one host, no more members reduce than there are cores: the first ones. The others have to
do with these alone, which spares messages, and turns on a core.

What goes over MPI is what `Exchange` and `Parcels` send and take for the same collective, to the byte: each member may
do it either way. Here buffers and requests are kept from one time to the next, and one call of MPI looks for all that
is waited for.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from irpar.ops.collectives.arrays import cut_flat, is_text
from irpar.ops.collectives.record import Steps
from irpar.ops.collectives.reduced_arrays import reduce_arrays, reducer
from irpar.ops.collectives.rounds import cut_for, is_one_round
from irpar.runtime.groups.base import Array, Call
from irpar.runtime.groups.results import EXECUTED
from irpar.runtime.groups.spmd import Meeting
from irpar.runtime.groups.wire.header import CORRECT_PART, Header, check_headers, mismatch

from .lines import HEAD_BYTES, Line, Lines, content_in, room
from .parcels import INLINE, Arrival, Parcels, beginning
from .works import Work, partners_of

_SIZE_BYTES = len(beginning(0, b""))
"""Of a parcel of the second round, before its content."""


class _Peer:
    """Another member.

    Attributes:
        rank: that.
        position: in the group.
        first: what comes of it in the first round, and in it `operand`: of its operand the piece that this member
            reduces.
        second: what comes in the second round, and in it `reduced`: the piece that it has reduced, if it does.
        part: where that lies among all elements.
        head, piece: what is sent to it in the first round: how that begins, and of the operand the piece it reduces.
        sent: all of that.

    Args:
        own: like the piece that this member reduces.
        like: like the piece that the other one reduces.
    """

    def __init__(self, position: int, lines: tuple[Line, Line], own: Array, part: slice, like: Array) -> None:
        self.first, self.second = lines
        self.rank = self.first.rank
        self.position = position
        self.part = part
        self.operand = content_in(self.first.came, HEAD_BYTES, own)
        self.reduced = content_in(self.second.came, _SIZE_BYTES, like)
        self.sent = room(HEAD_BYTES, like.nbytes)
        self.head = self.sent.data[:HEAD_BYTES]
        self.piece = content_in(self.sent, HEAD_BYTES, like)


class _Buffers:
    """Where operands of one shape and dtype lie on their way among the same members; one at a time uses them.

    Attributes:
        peers: the other members that it sends to or takes from.
        reducers: those of them that reduce.
        reduces: whether this member does.
        own: where the piece that this member reduces lies among all elements.
        reduced: that piece, as it is sent.
        came: the requests that take what comes, in the order of the peers: of the first round, then of the second.
        sends: those that send, likewise.
        is_used: whether one is under way.
    """

    def __init__(self, meeting: Meeting, parcels: Parcels, lines: Lines, tag: int, reducers: int | None) -> None:
        count = len(meeting.members)
        pieces = cut_for(meeting.operand, count, reducers or count)
        ends = np.cumsum([piece.size for piece in pieces]).tolist()
        parts = [slice(end - piece.size, end) for piece, end in zip(pieces, ends, strict=True)]
        mine, comm, byte = meeting.position, parcels.comm, parcels.byte
        self.own = parts[mine]
        self.sent = room(_SIZE_BYTES, pieces[mine].nbytes)
        self.sent[:_SIZE_BYTES] = np.frombuffer(beginning(pieces[mine].nbytes, b""), np.uint8)
        self.reduced = content_in(self.sent, _SIZE_BYTES, pieces[mine])
        self.peers = []
        for place in partners_of(meeting, reducers):
            rank = meeting.members[place]
            both = lines.of(rank, tag, HEAD_BYTES), lines.of(rank, tag + 1, _SIZE_BYTES)
            self.peers.append(_Peer(place, both, pieces[mine], parts[place], pieces[place]))
        self.reducers = [peer for peer in self.peers if peer.piece.size]
        self.reduces = pieces[mine].size > 0
        self.came = (
            [peer.first.request for peer in self.peers],
            [peer.second.request for peer in self.reducers],
        )
        self.sends = (
            [comm.Send_init((peer.sent, byte), peer.rank, tag) for peer in self.peers],
            [comm.Send_init((self.sent, byte), peer.rank, tag + 1) for peer in self.peers if self.reduces],
        )
        self.is_used = False


class _Known:
    """A collective of a program, from one time to the next.

    Attributes:
        buffers: others of this kind have the same.
        heads: how what is sent to each peer begins.
        agreed: how what each peer sends does, once it has been compared.
    """

    def __init__(self, buffers: _Buffers, meeting: Meeting) -> None:
        header = meeting.header.pack()
        self.buffers = buffers
        self.heads = [beginning(peer.piece.nbytes, header) for peer in buffers.peers]
        self.agreed: list[bytes | None] = [None] * len(buffers.peers)
        own = buffers.own
        self.reduce = reducer(meeting.operand.dtype, own.stop - own.start, meeting.collective.reduce)


class Reductions:
    """The middling all-reduces of one rank.

    Args:
        parcels: what else it sends and receives.
        lines: where what comes lies.
        cores: that all ranks share; None: they are on several hosts.
    """

    def __init__(self, parcels: Parcels, lines: Lines, cores: int | None) -> None:
        self._parcels = parcels
        self._lines = lines
        self._cores = cores
        self._buffers: dict[Any, _Buffers] = {}

    def quick(self, meeting: Meeting, tag: int) -> "Callable[[Call], Reduction | None] | None":
        """What begins a collective, from the next time on; None where it is none of these.

        It gives None where another one is under way that has its buffers. Nothing may be under way over the tag.
        """
        reducers = self.reducers(meeting)
        if not _is_middling(meeting, reducers):
            return None
        key = tag, meeting.members, meeting.operand.shape, meeting.operand.dtype
        if key not in self._buffers:
            self._buffers[key] = _Buffers(meeting, self._parcels, self._lines, tag, reducers)
        known = _Known(self._buffers[key], meeting)
        facts = meeting.members, meeting.position, meeting.header, meeting.shapes, meeting.expected, meeting.notes
        parcels = self._parcels

        def begin(call: Call) -> Reduction | None:
            return None if known.buffers.is_used else Reduction(Meeting(call, *facts), known, parcels)

        return begin

    def reducers(self, meeting: Meeting) -> int | None:
        """How many members reduce; None where all do, or nothing is reduced so."""
        cores, count = self._cores, len(meeting.members)
        return cores if cores is not None and cores < count and _is_middling(meeting, cores) else None

    def are_sent(self) -> bool:
        """Whether nothing that was sent is on its way."""
        every = (request for buffers in self._buffers.values() for some in buffers.sends for request in some)
        return all(request.Get_status() for request in every)

    def forget(self) -> None:
        """Give the requests back to MPI; nothing of them is on its way."""
        for buffers in self._buffers.values():
            for some in buffers.sends:
                for request in some:
                    request.Free()
        self._buffers.clear()


def _is_middling(meeting: Meeting, reducers: int | None) -> bool:
    """Whether pieces of the operands are reduced, each of which is sent with how its parcel begins.

    Args:
        meeting: of the collective.
        reducers: how many members reduce one; None: all.
    """
    operand = meeting.operand
    execution = EXECUTED[meeting.collective.kind]
    if not execution.returns_pieces or is_text(operand.dtype) or is_one_round(execution, meeting):
        return False
    if any(nbytes != operand.nbytes for nbytes in meeting.expected):
        return False  # Elements of less than a byte are packed on their way.
    try:
        reduce_arrays([operand.reshape(-1)[:0]] * 2, meeting.collective.reduce)
    except ValueError:
        return False  # `Exchange` tells.
    return max(piece.nbytes for piece in cut_flat(operand, reducers or len(meeting.members))) <= INLINE


class Reduction(Work):
    """Such an all-reduce that has begun; see `Exchange`, as which it is used."""

    def __init__(self, meeting: Meeting, known: _Known, parcels: Parcels) -> None:
        super().__init__(self._reduced())
        self.meeting = meeting
        self._known = known
        self._parcels = parcels
        known.buffers.is_used = True

    @property
    def awaited(self) -> list[int]:
        """Ranks of which something is waited for."""
        buffers = self._known.buffers
        peers, reducers = buffers.peers, buffers.reducers
        waited = zip((*buffers.came, *buffers.sends), (peers, reducers, peers, peers), strict=True)
        for requests, ranks in waited:
            late = [peer.rank for peer, each in zip(ranks, requests, strict=False) if not each.Get_status()]
            if late:
                return late
        return []

    def _reduced(self) -> Steps[Array]:
        """The rounds; what comes in the second one is waited for from the beginning, since others may be quicker."""
        known, buffers, operand = self._known, self._known.buffers, self.meeting.operand
        start = self._parcels.start_all
        flat = np.ascontiguousarray(operand).reshape(-1)
        for peer, head in zip(buffers.peers, known.heads, strict=True):
            peer.head[:] = head
            peer.piece[...] = flat[peer.part]
        start([*buffers.came[0], *buffers.came[1], *buffers.sends[0]])
        yield from self._parcels.ended(buffers.came[0])
        self._check()
        pieces = [peer.operand for peer in buffers.peers]
        pieces.insert(self.meeting.position, flat[buffers.own])
        if buffers.reduces:
            known.reduce(pieces, buffers.reduced)
            start(buffers.sends[1])
        result = self._parcels.new(operand.shape, operand.dtype)
        whole = result.reshape(-1)
        whole[buffers.own] = buffers.reduced
        yield from self._parcels.ended(buffers.came[1])
        for peer in buffers.reducers:
            self._check_size(peer, peer.second.head, peer.reduced)
            whole[peer.part] = peer.reduced
        for sends in buffers.sends:
            yield from self._parcels.ended(sends)
        buffers.is_used = False
        return result

    def _check(self) -> None:
        """Compare how the first parcels begin; what agrees needs no look the next time.

        Raises:
            MismatchError: a member is at something else.
        """
        meeting, agreed = self.meeting, self._known.agreed
        for place, peer in enumerate(self._known.buffers.peers):
            first = bytes(peer.first.head)  # Quicker to compare than a memory view.
            if first != agreed[place]:
                arrival = Arrival(peer.rank, 0, first, HEAD_BYTES)
                check_headers(meeting.header, [meeting.expected[peer.position]], [Header.unpack(arrival.head)])
                self._check_size(peer, first, peer.operand)
                agreed[place] = first

    def _check_size(self, peer: _Peer, head: bytes | memoryview, due: Array) -> None:
        size = Arrival(peer.rank, 0, bytes(head), 0).size
        if size != due.nbytes:
            header = self.meeting.header
            what = f"rank {peer.rank} sent {size:,} bytes, where {due.nbytes:,} are due"
            raise mismatch(header.id, what, [header.text], CORRECT_PART)
