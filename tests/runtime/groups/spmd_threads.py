"""A group whose ranks are threads of one process: what `SpmdGroup` and the driver do, without processes."""

import queue
import threading
from collections.abc import Callable
from typing import Any, Self

from irpar.runtime.errors import PeerError
from irpar.runtime.executor import Executor
from irpar.runtime.groups import Call
from irpar.runtime.groups.results import EXECUTED
from irpar.runtime.groups.spmd import Finish, Meeting, SpmdGroup
from irpar.runtime.groups.wire.header import Header
from irpar.sharding import Mesh
from tests.patience import patient


class Queues(dict[Any, "queue.Queue[Any]"]):
    """A queue for each key, the same for two threads that ask for a new one at once."""

    def __missing__(self, key: Any) -> "queue.Queue[Any]":
        return self.setdefault(key, queue.Queue())


class Wires:
    """Queues between all threads; a thread that has failed is told to those who wait."""

    def __init__(self) -> None:
        self.data = Queues()
        self.failed: tuple[int, str] | None = None

    def get(self, key: Any, seconds: float) -> Any:
        """What comes next under a key; None after `seconds`."""
        for _ in range(int(seconds / 0.01)):
            if self.failed is not None:
                return None
            try:
                return self.data[key].get(timeout=0.01)
            except queue.Empty:
                continue
        return None


class ThreadRank(SpmdGroup):
    """One rank in a thread."""

    def __init__(self, mesh: Mesh, rank: int, wires: Wires, seconds: float = 5.0) -> None:
        super().__init__(mesh, rank, seconds)
        self.wires = wires
        self.turns: dict[tuple[int, ...], int] = {}

    @classmethod
    def join(cls, mesh: Mesh, seconds: float) -> Self:
        raise NotImplementedError

    def begin(self, meeting: Meeting) -> Finish:
        turn = self.turns[meeting.members] = self.turns.get(meeting.members, 0) + 1
        for peer in meeting.members:
            self.wires.data["data", turn, meeting.members, self.rank, peer].put(
                (meeting.header.pack(), meeting.operand)
            )

        def finish() -> Any:
            came = [
                self._get(("data", turn, meeting.members, peer, self.rank), peer, meeting) for peer in meeting.members
            ]
            meeting.check([Header.unpack(packed) for packed, _ in came])
            operands = [operand for _, operand in came]
            return EXECUTED[meeting.collective.kind].result(meeting.collective, operands, meeting.position)

        return finish

    def _get(self, key: Any, peer: int, meeting: Meeting | None = None) -> Any:
        found = self.wires.get(key, self.seconds)
        if found is not None:
            return found
        if self.wires.failed is not None:
            raise self.failed(*self.wires.failed)
        if meeting is not None:
            raise self.late(meeting.call, {peer: ""})
        raise PeerError(f"no message from rank {peer}", rank=peer)

    def send(self, rank: int, message: bytes) -> None:
        self.wires.data["message", self.rank, rank].put(message)

    def receive(self, rank: int) -> bytes:
        return self._get(("message", rank, self.rank), rank)

    def post(self, rank: int, channel: int, content: bytes) -> None:
        self.wires.data["post", self.runs, channel, self.rank, rank].put(content)

    def collect(self, call: Call, rank: int, channel: int) -> bytes:
        return self._get(("post", self.runs, channel, rank, self.rank), rank)

    def abort(self, reason: str) -> None:
        if self.wires.failed is None:
            self.wires.failed = self.rank, reason

    def close(self) -> None:
        pass


def run_ranks(
    mesh: Mesh, make: Callable[[ThreadRank], Executor], drive: Callable[[Executor], Any], **options: Any
) -> tuple[Any, dict[int, BaseException]]:
    """Let every rank run in a thread, rank 0 as the driver does; returns what it gives, and what ranks raised."""
    wires = Wires()
    raised: dict[int, BaseException] = {}
    given: list[Any] = []

    def rank_thread(rank: int) -> None:
        try:
            with make(ThreadRank(mesh, rank, wires, **options)) as executor:
                if executor.is_driver:
                    given.append(drive(executor))
                else:
                    executor.serve()
        except BaseException as error:
            raised[rank] = error

    threads = [threading.Thread(target=rank_thread, args=(rank,)) for rank in range(mesh.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patient(60))
        assert not thread.is_alive()
    return (given[0] if given else None), raised
