"""One rank per process of an MPI job, on any number of hosts (mpi4py; MPICH, Open MPI, and what is like them).

All data go from rank to rank by non-blocking messages over one communicator of all ranks, which tags divide into the
groups of mesh axes. A communicator for each group would have to be made by all its members together, in a call that
cannot be bounded; and the collectives of MPI hang, or worse, where ranks came to different ones.
"""

import hashlib
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np

from irpar.ops.collectives.record import Steps
from irpar.process import cores
from irpar.runtime.driver import DRIVER
from irpar.runtime.errors import PeerError, RunError
from irpar.runtime.groups.base import Array, Call, rank_text
from irpar.runtime.groups.progress import Progress
from irpar.runtime.groups.pulse import LOOK_SECONDS, Silence
from irpar.runtime.groups.spmd import ENDED, QUICK, Finish, Meeting, Quick, SpmdGroup
from irpar.runtime.groups.wire.header import ELSEWHERE, Header, mismatch
from irpar.runtime.groups.words import await_word
from irpar.runtime.launch.environment import World
from irpar.sharding import Axis, Mesh

from .job import Job, wait
from .lines import Lines, give_way
from .neighbours import Neighbours
from .parcels import Parcels
from .prompt import Prompt, Prompts
from .reduction import Reduction, Reductions
from .works import Exchange, Work

_RUN = struct.Struct("<q")
_CONTROL, _MESSAGE, _FIRST_FREE = 1, 2, 16
_MOST_TOLD = 4096
"""Bytes of what a rank tells of itself."""
_FAILED, _WHERE, _CLOSED = b"F", b"W", b"C"
_AT, _IDLE, _COMPUTING = b"A", b"I", b"M"
"""What a rank answers that is asked where it is."""
_TEXTS = {
    _AT: "",
    _IDLE: "is at no collective: it waits for a message",
    _COMPUTING: "is computing",
}

ANSWER_SECONDS = 1.0
"""How long ranks that did not come are waited for to say where they are; those that compute do not."""


@dataclass(frozen=True)
class _Patience:
    """How often a rank looks at what came, and gives its core to others, before it sleeps.

    Attributes:
        idle: where nothing is on its way.
        moving: where MPI moves a little at each look.
        prompt: where a small collective waits.
        busy: how often in that it looks before it gives its core to others.
        pause: seconds that it sleeps first, and twice as long each time after.
    """

    idle: int
    moving: int
    prompt: int
    busy: int
    pause: float


_ALONE, _CROWDED = _Patience(500, 500, 2000, 30, 1e-5), _Patience(2, 4, 10, 0, 1e-4)
"""Where each rank has a core of its own: for about 2 ms, since one that sleeps takes 50 us and more to wake. And where
ranks share cores: who looks keeps others from what it waits for."""
_LONGEST_PAUSE, _MOVING_PAUSE = 1e-3, 5e-5
"""Seconds between two looks at what came: where nothing is on its way, and where MPI moves a little at each."""


_Begun = Exchange | Prompt | Reduction
"""A collective that has begun."""


class MpiGroup(SpmdGroup):
    """One rank of an MPI job; see `SpmdGroup`.

    Data move while this rank waits; those of started collectives also while it computes, by a thread that calls MPI as
    long as one is under way (MPI libraries move nothing large by themselves).
    """

    def __init__(self, mesh: Mesh, job: Job, number: int, seconds: float, neighbours: Neighbours) -> None:
        comm = job.communicators[number]
        super().__init__(mesh, comm.rank, seconds)
        self._job = job
        self._number = number
        self._parcels = Parcels(job.mpi, comm)
        self._lines = Lines(self._parcels)
        self._prompts = Prompts(self._parcels, self._lines)
        self._neighbours = neighbours
        self._ended: Set[int] = frozenset()
        # Two reduce by themselves what both bring.
        self._reductions = Reductions(self._parcels, self._lines, neighbours.cores() if mesh.size > 2 else None)
        self._largest_tag = int(comm.Get_attr(job.mpi.TAG_UB))
        self._begun: defaultdict[int, deque[_Begun]] = defaultdict(deque)
        self._tags: dict[tuple[Axis, ...], int] = {}
        self._failure: PeerError | None = None
        self._has_told = False
        self._doing = (_COMPUTING, b"")
        self._steps = 0  # Goes up as this rank goes from one thing to the next.
        self._where: dict[int, tuple[bytes, bytes]] = {}
        self._closed: set[int] = set()
        self._asked: set[int] = set()
        self._is_open = True
        self._has_left = False
        self._turn = _Turn(self)
        self._patience = _patience(mesh)
        self._found: RunError | None = None
        self._progress = Progress(self._step)
        job.open_groups.append(self)

    @classmethod
    def join(cls, mesh: Mesh, seconds: float) -> Self:
        """See `SpmdGroup.join`."""
        job = Job.enter(mesh, seconds)
        number = job.communicator(seconds)
        if job.neighbours is None:
            job.neighbours = Neighbours.meet(job, seconds)
        return cls(mesh, job, number, seconds, job.neighbours)

    def begin(self, meeting: Meeting) -> Finish:
        """See `SpmdGroup.begin`."""
        self._steps += 1
        with self._turn:
            self._check()
            tag = self._tag(meeting.collective.axes)
            work = self._prompts.begin(meeting, tag) or self._exchange_in_rounds(meeting, tag)
            works = self._begun[tag]
            works.append(work)
            if isinstance(work, Exchange):
                work.advance()
                self._go_on()
            if QUICK not in meeting.notes:
                meeting.notes[QUICK] = self._found_quick(meeting, tag)
        return lambda: self._finish(work, works)

    def _exchange_in_rounds(self, meeting: Meeting, tag: int) -> Exchange:
        return Exchange(meeting, self._parcels, tag, self._reductions.reducers(meeting))

    def _found_quick(self, meeting: Meeting, tag: int) -> Quick | None:
        """What executes a collective that has begun, from the next time on; None where nothing was found for that."""
        works = self._begun[tag]
        prompt = self._prompts.quick(meeting, self._patience.prompt, self._patience.busy)
        if prompt is not None:
            return partial(self._quick, prompt.run, works)
        begin = self._reductions.quick(meeting, tag)
        return None if begin is None else partial(self._quick, begin, works)

    def _quick(self, run: Callable[[Call], Array | _Begun | None], works: deque[_Begun], call: Call) -> Array | None:
        """See `Quick`.

        Args:
            run: of a `QuickPrompt`, or what begins a reduction.
            works: what has begun over its tag: what goes first may wait for more than what is looked for here.
        """
        self._steps += 1
        turn = self._turn
        with turn.lock:
            if works or self._failure is not None or self._found is not None:
                return None
            try:
                found = run(call)
            except turn.failed as error:
                raise turn.told(error) from None
            if found is None or isinstance(found, np.ndarray):
                return found
            works.append(found)
        return self._finish(found, works)

    def start(self, call: Call) -> None:
        """See `Group.start`."""
        super().start(call)
        self._go_on_beside()

    def send(self, rank: int, message: bytes) -> None:
        """See `Messenger.send`."""
        with self._turn:
            self._check()
            self._parcels.post(rank, _MESSAGE, b"", np.frombuffer(message, np.uint8))
            if self.rank == DRIVER:
                self._asked.add(rank)
            self._go_on()
            is_moving = self._parcels.is_moving
        if is_moving:
            self._go_on_beside()

    def post(self, rank: int, channel: int, content: bytes) -> None:
        """See `SpmdGroup.post`."""
        with self._turn:
            self._check()
            head, tag = _RUN.pack(self.runs), self._tag_of_channel(channel)
            self._parcels.post(rank, tag, head, np.frombuffer(content, np.uint8))
            self._go_on()
            is_moving = self._parcels.is_moving
        if is_moving:
            self._go_on_beside()

    def collect(self, call: Call, rank: int, channel: int) -> memoryview:
        """See `SpmdGroup.collect`."""
        work = Work(self._posted(rank, channel))
        with self._while_it(_AT, Header.of(call, self.mesh).pack()):
            if not self._wait(work, self.seconds):
                self._ask([rank])
                self._wait_for(lambda: work.is_done or rank in self._where, ANSWER_SECONDS)
                if not work.is_done:
                    late = self.late(call, {rank: self._text(rank)})
                    self._tell_failed(rank, self.reason_of_late(call, late))
                    raise late
        return work.result.data

    def receive(self, rank: int) -> memoryview:
        """See `Messenger.receive`."""
        message = _Awaited(self, rank)
        with self._while_it(_IDLE):
            fault = await_word(rank, message, rank in self._asked, self.seconds)
        if fault is not None:
            self._tell_failed(rank, fault.reason)
            raise fault.error(self.mesh)
        self._asked.discard(rank)
        return message.result.data

    def abort(self, reason: str) -> None:
        """See `Messenger.abort`."""
        self._tell_failed(self.rank, reason)

    def _tell_failed(self, culprit: int, reason: str) -> None:
        """Tell the others that a rank failed, if they do not know that one did."""
        self._job.has_failed = True
        if self._has_told or self._failure is not None or not self._is_open:
            return
        self._has_told = True
        self._progress.end()
        with self._turn:
            for rank in range(self.mesh.size):
                if rank != self.rank:
                    self._tell(rank, _FAILED, culprit.to_bytes(8) + reason.encode())
            wait(self._parcels.sent, ANSWER_SECONDS)

    def close(self) -> None:
        """See `Group.close`; the others close theirs when they like."""
        if not self._is_open:
            return
        self._is_open = False
        self._progress.end()
        self._closed.add(self.rank)
        try:
            if not self._job.has_failed:
                with self._turn:
                    for rank in range(self.mesh.size):
                        if rank != self.rank:
                            self._tell(rank, _CLOSED, b"")
                # What is large moves only while this rank calls MPI.
                self._wait_for(self._parcels.sent, self.seconds)
                if not any(self._begun.values()):
                    self._forget()  # The program may end MPI itself.
        except RunError:
            self._job.has_failed = True  # Another rank failed, and tells of it.
        except BaseException:
            self._job.has_failed = True
            raise
        finally:
            self._job.open_groups.remove(self)
            self._job.closed[self._number] = self

    def has_ended(self) -> bool:
        """Once it is closed: whether it is on all other ranks, as far as this one knows, and nothing is on its way."""
        try:
            with self._turn:
                while (came := self._parcels.any_arrival(_CONTROL)) is not None:
                    self._hear(*came)
                return len(self._closed) == self.mesh.size and self._is_drained()
        except RunError:
            self._job.has_failed = True
            return False

    def leave(self) -> bool:
        """Once it is closed, and MPI is to end: throw away what still comes; whether nothing is left on its way."""
        if not self._has_left:
            self._has_left = True
            self._parcels.give_up()
        return self._is_drained()

    def _is_drained(self) -> bool:
        """Throw away what comes, once it is closed; whether nothing is on its way."""
        if not (self._parcels.drain() and self._reductions.are_sent()):
            return False
        self._forget()
        return True

    def _forget(self) -> None:
        """Give what is kept of MPI back."""
        self._prompts.forget()
        self._reductions.forget()
        self._lines.forget()

    # -- waiting ------------------------------------------------------------------------------------------------

    def _finish(self, work: _Begun, works: deque[_Begun]) -> Array:
        """The result of one of those that have begun over a tag."""
        if not isinstance(work, Exchange) and self._come_promptly(work, works):
            return work.result
        with self._while_it(_AT, work.meeting.header.pack()):
            if not self._wait(work, self.seconds):
                others = {rank for rank in work.meeting.members if rank != self.rank}
                self._ask(others)
                self._wait_for(lambda: work.is_done or self._where.keys() >= others, ANSWER_SECONDS)
                if not work.is_done:
                    raise self._absence(work)
        return work.result

    def _come_promptly(self, work: Prompt | Reduction, works: deque[_Begun]) -> bool:
        """Look a few times for what a small collective waits for, and for nothing else; whether it has come."""
        with self._turn:
            if work.is_done:
                return True
            if works[0] is not work:  # What goes first may wait for more than what is looked for here.
                return False
            for spins in range(self._patience.prompt):
                if work.advance():
                    works.popleft()
                    return True
                if spins >= self._patience.busy:
                    give_way()
        return False

    @contextmanager
    def _while_it(self, kind: bytes, content: bytes = b"") -> Iterator[None]:
        """What this rank does in here, as it answers others; otherwise it computes."""
        self._doing = kind, content
        try:
            yield
        finally:
            self._steps += 1
            self._doing = _COMPUTING, b""

    def _wait(self, work: Work | Prompt, seconds: float | None) -> bool:
        """Let all go on until one thing is done, or nothing has moved for so long; whether it is done.

        Raises:
            RunError: a rank failed, or its process has ended.
        """
        began = time.monotonic()
        end = None if seconds is None else began + seconds
        look = began + LOOK_SECONDS
        idle, pause, patience = 0, self._patience.pause, self._patience
        moved = self._parcels.moved
        while True:
            with self._turn:
                self._go_on()
                if not isinstance(work, _Begun):
                    work.advance()
            if work.is_done:
                return True
            if self._parcels.moved != moved:
                moved = self._parcels.moved
                idle, pause = 0, patience.pause
                end = None if seconds is None else time.monotonic() + seconds
                continue
            now = time.monotonic()
            if end is not None and now > end:
                return False
            if now > look:
                look = now + LOOK_SECONDS
                self._check_ended()
            idle += 1
            if idle < (patience.moving if self._parcels.is_moving else patience.idle):
                give_way()
            else:
                time.sleep(min(pause, _MOVING_PAUSE if self._parcels.is_moving else _LONGEST_PAUSE))
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _check_ended(self) -> None:
        """Fail where another rank's process had ended at the last look: what it sent before that has come since.

        Raises:
            PeerError: one has.
        """
        before, self._ended = self._ended, self._neighbours.ended()
        if died := before - self._closed:
            error = self.failed(min(died), ENDED)
            self._tell_failed(min(died), ENDED)
            raise error

    def _wait_for(self, is_so: Callable[[], bool], seconds: float) -> bool:
        """Let all go on until something is so; whether it was in time."""

        def is_so_now() -> bool:
            with self._turn:
                self._go_on()
                return is_so()

        return wait(is_so_now, seconds)

    def _go_on_beside(self) -> None:
        """Let what is under way go on while this rank computes, if its MPI lets threads call it."""
        if self._job.mpi.Query_thread() >= self._job.mpi.THREAD_SERIALIZED:
            self._progress.wake()

    def _step(self) -> bool:
        """Let what has been started and sent go on while this rank computes; whether there is more to do."""
        try:
            with self._turn:
                if self._has_told or not (any(self._begun.values()) or self._parcels.is_moving):
                    return False
                self._go_on()
        except RunError as error:
            self._found = error
            return False
        except Exception:
            return False  # It is one collective's, which raises it to who waits for that.
        return True

    def _go_on(self) -> None:
        """Let all that has begun go on, and hear what others tell."""
        self._check()
        self._parcels.sent()
        while (came := self._parcels.any_arrival(_CONTROL)) is not None:
            self._hear(*came)
        for works in self._begun.values():
            # In order: the parcels of the next one come after those of this one.
            while works and works[0].advance():
                works.popleft()

    def _check(self) -> None:
        if (failure := self._failure or self._found) is not None:
            raise failure

    def _hear(self, rank: int, told: bytes) -> None:
        kind, content = told[:1], told[1:]
        if kind == _WHERE:
            if self._is_open:  # Else that it is closed is the last that the others hear.
                doing, content = self._doing
                self._tell(rank, doing, content or self._steps.to_bytes(8))
        elif kind in _TEXTS:
            self._where[rank] = kind, content
        elif kind == _CLOSED:
            self._closed.add(rank)
        else:
            self._job.has_failed = True
            self._failure = self.failed(int.from_bytes(content[:8]), content[8:].decode(errors="replace"))
            raise self._failure

    def _tell(self, rank: int, kind: bytes, content: bytes) -> None:
        self._parcels.post(rank, _CONTROL, b"", np.frombuffer((kind + content)[:_MOST_TOLD], np.uint8))

    def _ask(self, ranks: Iterable[int]) -> None:
        """Ask ranks where they are."""
        with self._turn:
            for rank in ranks:
                self._where.pop(rank, None)
                self._tell(rank, _WHERE, b"")

    def _is_silent(self, silence: Silence) -> bool:
        with self._turn:
            return self._job.driver_is_silent(silence)

    def _absence(self, work: _Begun) -> RunError:
        """Why a collective did not come about, after the others have been asked."""
        mine = work.meeting.header
        where = {rank: Header.unpack(content) for rank, (kind, content) in self._where.items() if kind == _AT}
        here = {rank for rank, header in where.items() if header.meets(mine)}
        # What is waited for may come from a rank that waits for another one itself.
        others = set(work.meeting.members) - {self.rank}
        absent = sorted(set(work.awaited) - here or others - here or others)
        elsewhere = [where[rank] for rank in absent if rank in where and rank not in here]
        if elsewhere:
            what = f"{ELSEWHERE}, for {self.seconds:g} s by now"
            error = mismatch(mine.id, what, [mine.text, *(header.text for header in elsewhere)])
            self.abort(str(error))
            return error
        late = self.late(work.meeting.call, {rank: self._text(rank) for rank in absent})
        # The executor tells nobody of a late peer, and the others would wait for this rank.
        self._tell_failed(absent[0], self.reason_of_late(work.meeting.call, late))
        return late

    def _text(self, rank: int) -> str:
        """What a rank that is at no other collective does; "" where it did not say."""
        kind, content = self._where.get(rank, (b"", b""))
        if kind == _AT:
            return Header.unpack(content).text
        text = _TEXTS.get(kind, "")
        if rank in self._closed:
            text = "is at no collective: it has ended its run"
        return text and f"{rank_text(self.mesh, rank)} {text}"

    # -- what is sent -------------------------------------------------------------------------------------------

    def _tag(self, axes: tuple[Axis, ...]) -> int:
        """The first of two tags of the collectives over these axes, equal on all ranks."""
        found = self._tags.get(axes)
        if found is None:
            digest = hashlib.blake2b(",".join(map(str, axes)).encode(), digest_size=8).digest()
            pairs = (self._largest_tag // 2 - _FIRST_FREE) // 2
            found = self._tags[axes] = _FIRST_FREE + 2 * (int.from_bytes(digest) % pairs)
        return found

    def _tag_of_channel(self, channel: int) -> int:
        """The tag of what goes from rank to rank, none of those of collectives."""
        return self._largest_tag // 2 + channel

    def _posted(self, rank: int, channel: int) -> Steps[Array]:
        """What a rank has posted in this run; what nobody took of an earlier one is thrown away."""
        while True:
            arrival = yield from self._parcels.arrival(rank, self._tag_of_channel(channel), _RUN.size)
            content = self._parcels.new((arrival.size,), np.dtype(np.uint8))
            yield from self._parcels.read(arrival, content)
            if _RUN.unpack(arrival.head) == (self.runs,):
                return content

    def _message(self, rank: int) -> Steps[Array]:
        arrival = yield from self._parcels.arrival(rank, _MESSAGE, 0)
        content = self._parcels.new((arrival.size,), np.dtype(np.uint8))
        yield from self._parcels.read(arrival, content)
        return content


def _patience(mesh: Mesh) -> _Patience:
    """For a rank of this host, of which there are as many as the launcher says, else all of the mesh."""
    world = World.of_environment()
    ranks = mesh.size if world is None or world.local_size is None else world.local_size
    return _ALONE if ranks <= cores() else _CROWDED


class _Turn:
    """One thread's turn to move what is of a group; a context manager by hand, for it begins with every call.

    Attributes:
        lock: held meanwhile.
        failed: the class of MPI's errors.

    Raises:
        RunError: MPI failed in it.
    """

    def __init__(self, group: MpiGroup) -> None:
        self.lock = threading.RLock()
        self.failed: type[Exception] = group._job.mpi.Exception
        self._rank = rank_text(group.mesh, group.rank)

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.lock.release()
        if isinstance(error, self.failed):
            raise self.told(error) from None

    def told(self, error: Exception) -> RunError:
        """An error of MPI, as it is raised."""
        what, *more = str(error).splitlines()
        return RunError(
            f"{self._rank}: MPI failed: {what}",
            notes=tuple(more[:3]),
            do="see what MPI wrote, and whether all hosts of the job live and reach each other",
        )


class _Awaited(Work):
    """The next message of a rank, see `Word`."""

    def __init__(self, group: MpiGroup, rank: int) -> None:
        super().__init__(group._message(rank))
        self._group = group
        self._rank = rank
        self._is_asked = False
        self._was = _AT, b""

    def comes(self, seconds: float) -> bool:
        return self._group._wait(self, seconds)

    def shows_life(self) -> bool:
        """One that computes as it did may hang: a thread of it answers."""
        answer = self._group._where.get(self._rank) if self._is_asked else None
        if not self._is_asked or answer is not None:
            self._is_asked = True
            self._group._ask([self._rank])
        if answer is None:
            return False
        was, self._was = self._was, answer
        return answer != was or was[0] != _COMPUTING

    def is_silent(self, silence: Silence) -> bool:
        return self._group._is_silent(silence)
