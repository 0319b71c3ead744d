"""Groups whose processes are joined by `Control`: headers, messages and failures go by it, data as the group likes."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from irpar.runtime.driver import DRIVER
from irpar.runtime.errors import PeerError, RunError
from irpar.runtime.groups.base import Array, Call, rank_text
from irpar.runtime.groups.pulse import Pulse, Silence
from irpar.runtime.groups.results import EXECUTED
from irpar.runtime.groups.spmd import Finish, Meeting, SpmdGroup
from irpar.runtime.groups.words import await_word
from irpar.runtime.messages import decode, encode
from irpar.sharding import Mesh

from .control import NOBODY, Control, Frame, LostError
from .header import Header, check_headers

ASK_SECONDS = 0.5
"""How long a rank that gives up waits to be told where the others are."""


@dataclass(frozen=True)
class _Awaited:
    """The next message of a rank, see `Word`."""

    control: Control
    rank: int

    def comes(self, seconds: float) -> bool:
        messages = self.control.peers[self.rank].messages
        return self.control.wait(lambda: [] if messages else [self.rank], seconds)

    def shows_life(self) -> bool:
        return bool(self.control.ask([self.rank], ASK_SECONDS))

    def is_silent(self, silence: Silence) -> bool:
        peer = self.control.peers[self.rank]
        return silence.is_too_long(peer.signs and peer.signs + peer.moved, peer.interval)


class WiredGroup(SpmdGroup):
    """One rank of a mesh in a process of its own, with a connection to each of the others.

    Args:
        mesh: the mesh of all ranks.
        rank: the one of this process.
        seconds: how long a rank waits for others at a collective.
        control: the connections.
    """

    def __init__(self, mesh: Mesh, rank: int, seconds: float, control: Control) -> None:
        super().__init__(mesh, rank, seconds)
        self.control = control
        self._asked: set[int] = set()
        self._pulse = Pulse(control.beat, seconds) if rank == DRIVER else None

    def begin(self, meeting: Meeting) -> Finish:
        """See `SpmdGroup.begin`: members meet, then data moves."""
        self._meet(meeting)
        with self._translated(meeting):
            finish = self.move(meeting)

        def translated() -> Array:
            with self._translated(meeting):
                return finish()

        return translated

    @abstractmethod
    def move(self, meeting: Meeting) -> Finish:
        """Let the data move of members who agree on what they do.

        Raises:
            ValueError: the attributes do not fit the operands; here or when it is finished.
            LostError: a rank failed; here or when it is finished.
        """

    def through_hosts(self, meeting: Meeting) -> Finish:
        """Let members send each other full operands; for what a group cannot move better."""
        peers = {member: self.control.peers[member] for member in meeting.members if member != self.rank}
        numbers = {member: peer.met for member, peer in peers.items()}
        packed = encode(meeting.operand)
        for member, peer in peers.items():
            peer.send_data(numbers[member], packed)

        def finish() -> Array:
            self.wait_for_data(meeting, numbers)
            operands = [
                meeting.operand if member == self.rank else np.asarray(decode(peers[member].data.pop(numbers[member])))
                for member in meeting.members
            ]
            return EXECUTED[meeting.collective.kind].result(meeting.collective, operands, meeting.position)

        return finish

    def wait_for_data(self, meeting: Meeting, numbers: dict[int, int]) -> None:
        """Wait until members have sent what they named so.

        Raises:
            LostError: a rank failed.
            PeerError: they did not come in time.
        """
        peers = self.control.peers

        def missing() -> list[int]:
            return [member for member, number in numbers.items() if number not in peers[member].data]

        if not self.control.wait(missing, self.seconds):
            raise self.gave_up(meeting, missing())

    def gave_up(self, meeting: Meeting, missing: list[int]) -> PeerError:
        """The error of a rank that waited in vain at a collective; all others are told of it.

        Raises:
            PeerError: a rank failed meanwhile, which explains why one that is missing gives no answer.
        """
        return self._gave_up(meeting.call, missing)

    def _gave_up(self, call: Call, missing: list[int]) -> PeerError:
        self.control.where = call.describe(self.mesh)
        here = self.control.ask(missing, ASK_SECONDS)
        if len(here) < len(missing):
            # Ranks that wait for each other give up at one time: the one that was asked may have told all, and ended.
            with self._translated():
                self.control.check()
        error = self.late(call, dict.fromkeys(missing, "") | here)
        self.control.tell_failed(missing[0], self.reason_of_late(call, error))
        return error

    def post(self, rank: int, channel: int, content: bytes) -> None:
        """See `SpmdGroup.post`."""
        with self._translated():
            self.control.check([rank])
        self.control.peers[rank].post(self.runs, channel, content)
        self.control.pump()

    def collect(self, call: Call, rank: int, channel: int) -> bytearray:
        """See `SpmdGroup.collect`."""
        posted = self.control.peers[rank].posted[self.runs, channel]
        self.control.where = call.describe(self.mesh)
        with self._translated():
            has_come = self.control.wait(lambda: [] if posted else [rank], self.seconds)
        if not has_come:
            raise self._gave_up(call, [rank])
        content = posted.popleft()
        if not posted:
            del self.control.peers[rank].posted[self.runs, channel]
        return content

    def send(self, rank: int, message: bytes) -> None:
        """See `Messenger.send`."""
        with self._translated():
            self.control.check([rank])
        self.control.peers[rank].send(Frame.MESSAGE, message)
        self.control.pump()
        if self.rank == DRIVER:
            self._asked.add(rank)
        if self._pulse is not None and self.control.has_more_to_send:
            self._pulse.wake()

    def receive(self, rank: int) -> bytes:
        """See `Messenger.receive`; a rank that was asked for something is given up when it shows no sign of life."""
        self.control.where = (
            f"{rank_text(self.mesh, self.rank)} came to no further collective, and waits for rank {rank}"
        )
        with self._translated():
            fault = await_word(rank, _Awaited(self.control, rank), rank in self._asked, self.seconds)
        if fault is not None:
            self.control.tell_failed(rank, fault.reason)
            raise fault.error(self.mesh)
        self._asked.discard(rank)
        return self.control.peers[rank].messages.popleft()

    def abort(self, reason: str) -> None:
        """See `Messenger.abort`."""
        self.control.tell_failed(self.rank, reason)

    def close(self) -> None:
        """See `Group.close`."""
        if self._pulse is not None:
            self._pulse.end()
        self.control.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _meet(self, meeting: Meeting) -> None:
        """Wait until all members have come to this collective, with operands that fit.

        Raises:
            MismatchError: they came to something else.
            PeerError: another rank failed, or did not come in time.
        """
        others = [member for member in meeting.members if member != self.rank]
        peers = [self.control.peers[other] for other in others]
        self.control.where = meeting.header.text
        packed = meeting.header.pack()
        for peer in peers:
            peer.send(Frame.HEADER, packed)
        with self._translated():
            try:
                have_come = self.control.wait(lambda: [peer.rank for peer in peers if not peer.headers], self.seconds)
            except LostError:
                # That somebody came to something else explains more than that it then ended.
                self._compare(meeting, [peer.rank for peer in peers if peer.headers])
                raise
        if not have_come:
            self._compare(meeting, [peer.rank for peer in peers if peer.headers])
            raise self.gave_up(meeting, [peer.rank for peer in peers if not peer.headers])
        self._compare(meeting, others)
        for peer in peers:
            peer.headers.popleft()
            peer.met += 1

    def _compare(self, meeting: Meeting, came: Iterable[int]) -> None:
        ranks = list(came)
        expected = [meeting.expected[meeting.members.index(rank)] for rank in ranks]
        headers = [Header.unpack(self.control.peers[rank].headers[0]) for rank in ranks]
        check_headers(meeting.header, expected, headers)

    @contextmanager
    def _translated(self, meeting: Meeting | None = None) -> Iterator[None]:
        """Errors as callers know them."""
        try:
            yield
        except LostError as lost:
            if lost.rank != NOBODY:
                raise self.failed(lost.rank, lost.reason) from None
            what, *notes = lost.reason.splitlines()
            raise RunError(what, notes=tuple(note.strip() for note in notes)) from None
        except ValueError as error:
            if meeting is None:
                raise
            raise self.mismatch(meeting.call, str(error)) from error
