"""One process for each rank, all on one machine: they talk over memory that they share."""

from collections.abc import Callable
from contextlib import suppress
from typing import Self

from irpar.runtime.launch.environment import World
from irpar.sharding import IrparError, Mesh, option

from ..errors import MismatchError, PeerError
from .base import Array, Call
from .shared_memory.joining import Joined, join
from .shared_memory.traffic import Traffic
from .shared_memory.transfers import Transfer
from .spmd import QUICK, Finish, Meeting, SpmdGroup


class ProcessGroup(SpmdGroup):
    """One rank of a mesh, with the others in processes of the same machine.

    Args:
        mesh: the mesh of all ranks.
        rank: the one of this process.
        seconds: how long a rank waits for others at a collective.
        joined: what it shares with the others.
    """

    def __init__(self, mesh: Mesh, rank: int, seconds: float, joined: Joined) -> None:
        super().__init__(mesh, rank, seconds)
        self._traffic = Traffic(self, joined)
        self._is_open = True

    @classmethod
    def join(cls, mesh: Mesh, seconds: float) -> Self:
        """See `SpmdGroup.join`."""
        is_alone = mesh.size == 1 and World.of_environment() is None
        world = World(0, 1) if is_alone else World.of_ranks("processes", mesh)
        if world.local_size not in (None, world.size):
            raise IrparError(
                f"{option('group', 'processes')} is for the ranks of one machine, and {world.launcher} has "
                f"{world.local_size} of {world.size} on this one",
                do=f"run with {option('group', 'mpi')}; or, where all are here, set LOCAL_WORLD_SIZE to their number",
            )
        return cls(mesh, world.rank, seconds, join(mesh, world, seconds))

    def begin(self, meeting: Meeting) -> Finish:
        """See `SpmdGroup.begin`."""
        try:
            transfer = self._traffic.begin(meeting)
        except ValueError as error:
            raise self._told(self.mismatch(meeting.call, str(error))) from error
        except (MismatchError, PeerError) as error:
            raise self._told(error) from None
        if QUICK not in meeting.notes:
            meeting.notes[QUICK] = self._traffic.quick(transfer, self._finish)
        return lambda: self._finish(lambda: transfer)

    def _finish(self, begun: Callable[[], Transfer]) -> Array:
        transfer: Transfer | None = None
        try:
            transfer = begun()
            return self._traffic.finish(transfer)
        except ValueError as error:
            if transfer is None:
                raise
            raise self._told(self.mismatch(transfer.meeting.call, str(error))) from error
        except (MismatchError, PeerError) as error:
            raise self._told(error) from None

    def send(self, rank: int, message: bytes) -> None:
        """See `Messenger.send`."""
        try:
            self._traffic.send(rank, message)
        except (MismatchError, PeerError) as error:
            raise self._told(error) from None

    def receive(self, rank: int) -> bytes | memoryview:
        """See `Messenger.receive`."""
        try:
            return self._traffic.receive(rank)
        except (MismatchError, PeerError) as error:
            raise self._told(error) from None

    def post(self, rank: int, channel: int, content: bytes) -> None:
        """See `SpmdGroup.post`."""
        try:
            self._traffic.post(rank, self.runs, channel, content)
        except (MismatchError, PeerError) as error:
            raise self._told(error) from None

    def collect(self, call: Call, rank: int, channel: int) -> bytes | memoryview:
        """See `SpmdGroup.collect`."""
        try:
            return self._traffic.collect(call, rank, self.runs, channel)
        except (MismatchError, PeerError) as error:
            raise self._told(error) from None

    def abort(self, reason: str) -> None:
        """See `Messenger.abort`."""
        if self._is_open:
            self._traffic.watch.tell(self.rank, None, reason)

    def close(self) -> None:
        """See `Group.close`."""
        if self._is_open:
            self._is_open = False
            # What comes too late to be sent is told where it was waited for.
            with suppress(PeerError):
                self._traffic.close()
            # And with them the memory: it would be kept until the next collection of cycles.
            self.forget_collectives()
            del self._traffic

    def _told(self, error: MismatchError | PeerError) -> MismatchError | PeerError:
        """The error, once the others have been told, so that all end with the first one."""
        if isinstance(error, PeerError):
            self._traffic.watch.tell(error.rank, error)
        else:
            self._traffic.watch.tell(self.rank, None, str(error))
        return error
