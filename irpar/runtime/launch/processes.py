"""The parent of all ranks on one machine: one process each, and one end for all.

It sets the environment that torchrun sets (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`,
`MASTER_PORT`), `IRPAR_RUN_ID`, `IRPAR_TOKEN` and `IRPAR_LAUNCHER`, and divides the cores among the ranks by
`OMP_NUM_THREADS`, unless that is set. Each rank leads a process group of its own. Standard input goes to rank 0, unless
it is a terminal.

A rank that is stopped would keep the others waiting for ever: the run is ended after a time, or soon where nothing else
is left to run. A debugger may stop a rank for as long as it likes.

Where a rank fails, or a signal comes, all ranks get SIGTERM (or that signal), and after a grace SIGKILL, with all that
they have started, so that everything ends within 10 seconds. Should the launcher itself be killed, its guard does so.
"""

import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import BinaryIO

from irpar.process import handled

from . import guard
from .ending import Ending, cause, ending_of_irpar, ending_of_program, ending_of_stopped, killed_for_memory, notes_on
from .environment import ERROR_FILE, TIMEOUT
from .rank_process import LaunchError, RankProcess, error_file, rank_environment
from .relay import STDERR, STDOUT, Relay, Writable
from .run_files import OwnedRun

GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""
_SETTLE = 2.0
"""Seconds for other ranks of irpar to end by themselves: the first to end need not be the one that failed first."""
_LEFTOVER = 1.0
"""Seconds for what a rank has started to end after it."""
_STUCK = 2.0
"""Seconds after SIGKILL until a process that does not end is given up."""
_STOPPED = 5.0
"""Seconds after which the user is told of a stopped rank; as much later than ranks give up it ends the run."""
_UNREAD = 2.0
"""Seconds that the reader of the output gets when a signal has ended the run."""
_LOOK = 0.5
_LOOK_AT_END = 0.02
_FORWARDED = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


def launch(
    command: Sequence[str],
    size: int,
    *,
    stdout: Writable,
    stderr: Writable,
    environ: Mapping[str, str] | None = None,
    is_irpar: bool = False,
    seconds: float = TIMEOUT,
) -> Ending:
    """Run a command once for each rank, and wait until all have ended; on the main thread.

    Args:
        command: the program and its arguments.
        size: how many ranks.
        stdout, stderr: where what the ranks print goes; see `relay`.
        environ: the environment; None: that of this process.
        is_irpar: whether the command is irpar's own, whose ranks leave their errors to the launcher.
        seconds: how long ranks wait for each other: for little longer a rank may be stopped.

    Raises:
        LaunchError: a rank cannot be started.
        RunFilesError: the folder of shared memory cannot be used.
        OSError: the ranks ended well, and what they printed could not be written.
    """
    if os.name != "posix":
        raise LaunchError("irpar launch needs a POSIX system", do="run all ranks in one process: irpar run OUT")
    with OwnedRun() as run:
        variables = rank_environment(os.environ if environ is None else environ, size, run.id)
        return _Launcher(list(command), size, variables, run, Relay(stdout, stderr), is_irpar, seconds).run()


@dataclass
class _End:
    """How the run is being ended.

    Attributes:
        signal: the one that came from outside; None where a rank failed.
        deadline: when SIGKILL is due, or was.
        stopped: the ranks that were stopped when it began.
        is_for_stopped: whether it was begun because of them.
        is_killed: whether SIGKILL was sent.
    """

    signal: int | None
    deadline: float
    stopped: tuple[int, ...] = ()
    is_for_stopped: bool = False
    is_killed: bool = False


class _Launcher:
    def __init__(
        self,
        command: list[str],
        size: int,
        environ: Mapping[str, str],
        run: OwnedRun,
        relay: Relay,
        is_irpar: bool,
        seconds: float,
    ) -> None:
        self._command = command
        self._size = size
        self._environ = environ
        self._run = run
        self._relay = relay
        self._is_irpar = is_irpar
        self._seconds = seconds
        self._ranks: list[RankProcess] = []
        self._failed: list[RankProcess] = []
        self._signals: list[int] = []
        self._end: _End | None = None
        self._begin = self._looked = time.monotonic()
        self._killed_before = killed_for_memory()
        # Signals ring it, those of ranks that end included.
        self._heard, self._bell = os.pipe()
        os.set_blocking(self._bell, False)

    def run(self) -> Ending:
        """Start, wait, and tell how it ended."""
        with ExitStack() as stack:
            stack.callback(os.close, self._heard)
            stack.callback(os.close, self._bell)
            stack.enter_context(self._hearing())
            watch = stack.enter_context(self._guarded())
            problem = self._start_all(watch)
            self._relay.start()
            if problem is not None:
                self._begin_end(None, signal.SIGTERM)
            while not self._is_over():
                self._listen()
                self._look(watch)
            self._finish()
        if problem is not None:
            raise problem
        return self._ending()

    # -- starting -------------------------------------------------------------------------------------------------

    def _start_all(self, watch: BinaryIO) -> LaunchError | None:
        for number in range(self._size):
            if self._signals:
                break
            try:
                self._start(number, watch)
            except OSError as error:
                return LaunchError(
                    f"rank {number} of {self._size} cannot be started: {error.strerror or error}",
                    where=self._command[0],
                    do="check the program, and that the machine can take so many processes (ulimit -u, ulimit -n)",
                )
        return None

    def _start(self, number: int, watch: BinaryIO) -> None:
        own = {ERROR_FILE: str(error_file(self._run.id, number))} if self._is_irpar else {}
        rank = RankProcess.start(self._command, number, {**self._environ, **own})
        self._ranks.append(rank)
        _write(watch, b"+%d\n" % rank.group)
        for stream, pipe in ((STDOUT, rank.process.stdout), (STDERR, rank.process.stderr)):
            assert pipe is not None
            self._relay.follow(number, stream, os.dup(pipe.fileno()))
            pipe.close()

    @contextmanager
    def _hearing(self) -> Iterator[None]:
        """Signals are noted, and wake the loop; those that this process was started to ignore stay ignored."""
        numbers = [number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
        with handled({**dict.fromkeys(numbers, self._note), signal.SIGCHLD: lambda *_: None}):
            bell_before = signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(bell_before)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._signals.append(number)

    @contextmanager
    def _guarded(self) -> Iterator[BinaryIO]:
        """The guard, and what to write to it; see there."""
        words = [sys.executable, "-I", "-S", guard.__file__, self._run.prefix, str(GRACE)]
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                bufsize=0,
            )
        except OSError as error:
            raise LaunchError(
                f"no process can be started: {error.strerror or error}",
                where=sys.executable,
                do="see that the machine can take so many processes (ulimit -u), and so many open files (ulimit -n)",
            ) from error
        assert process.stdin is not None
        watch: BinaryIO = process.stdin  # type: ignore[assignment]
        try:
            yield watch
            _write(watch, b".\n")
        finally:
            watch.close()  # Without the full stop the guard ends what is left.
            process.wait()

    # -- watching -------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Wait until something happens, or a moment."""
        if select.select([self._heard], [], [], _LOOK if self._end is None else _LOOK_AT_END)[0]:
            os.read(self._heard, 4096)

    def _look(self, watch: BinaryIO) -> None:
        """See which ranks have ended, and do what is due."""
        now = time.monotonic()
        for rank in self._ranks:
            if rank.code is None and (code := rank.process.poll()) is not None:
                rank.code, rank.ended = code, now
                if code != 0 and self._end is None:
                    self._failed.append(rank)
            if rank.code is not None and not rank.has_left:
                self._look_after(rank, watch, now - rank.ended)
        self._reap_orphans()
        if self._end is not None:
            self._press(self._end, now)
        elif self._signals:
            # At SIGINT Python prints a traceback as long as irpar has not begun to listen.
            self._begin_end(self._signals[0], signal.SIGTERM if self._is_irpar else self._signals[0])
        elif self._failed and now - self._failed[0].ended >= self._settling():
            self._begin_end(None, signal.SIGTERM)
        else:
            # A longer pause was none of the ranks': this process was stopped itself, perhaps together with them.
            self._watch_stopped(min(now - self._looked, 2 * _LOOK))
        self._looked = now

    def _look_after(self, rank: RankProcess, watch: BinaryIO, seconds: float) -> None:
        """What a rank has started, and left behind so many seconds ago, is ended after it."""
        late = seconds - _LEFTOVER
        if not guard.has_members(rank.group) or late > GRACE + _STUCK:
            rank.has_left = True
            _write(watch, b"-%d\n" % rank.group)
        elif self._end is None and late > 0:
            rank.signal(signal.SIGKILL if late > GRACE else signal.SIGTERM)

    def _watch_stopped(self, passed: float) -> None:
        """Tell of ranks that are stopped, for which the others wait; end the run where that takes too long.

        Args:
            passed: seconds since the last look.
        """
        for rank in self._ranks:
            if not rank.is_stopped:
                rank.stopped = None
            elif rank.stopped is None:
                rank.stopped = 0.0
            else:
                rank.stopped += passed
        self._tell_of_stopped()
        living = [rank for rank in self._ranks if rank.code is None]
        held = [rank.stopped for rank in living if rank.stopped is not None and not rank.is_debugged]
        if not held or self._failed:
            return
        is_last = len(held) == len(living) < self._size
        if (min(held) > _STOPPED and is_last) or max(held) > self._seconds + _STOPPED:
            self._begin_end(None, signal.SIGTERM, is_for_stopped=True)

    def _tell_of_stopped(self) -> None:
        for rank in self._ranks:
            if (rank.stopped or 0) > _STOPPED and not rank.is_stop_told:
                rank.is_stop_told = True
                self._relay.tell(
                    f"irpar launch: rank {rank.rank} is stopped (by SIGSTOP, or a debugger); "
                    f"kill -CONT {rank.group} lets it go on"
                )

    def _settling(self) -> float:
        """Seconds from the first failure until the others are ended."""
        is_clear = not self._is_irpar or any((rank.code or 0) < 0 for rank in self._failed)
        return 0.0 if is_clear or all(rank.code is not None for rank in self._ranks) else _SETTLE

    def _begin_end(self, came: int | None, number: int, *, is_for_stopped: bool = False) -> None:
        stopped = tuple(rank.rank for rank in self._ranks if rank.is_stopped)
        self._end = _End(came, time.monotonic() + GRACE, stopped, is_for_stopped)
        for rank in self._ranks:
            rank.signal(number)

    def _press(self, end: _End, now: float) -> None:
        """SIGKILL for what did not listen, and for all at the second Ctrl-C."""
        if not end.is_killed and (now > end.deadline or self._signals.count(signal.SIGINT) > 1):
            end.is_killed, end.deadline = True, now
            for rank in self._ranks:
                rank.signal(signal.SIGKILL)

    def _is_over(self) -> bool:
        if self._end is None:
            return len(self._ranks) == self._size and all(rank.has_left for rank in self._ranks)
        is_given_up = self._end.is_killed and time.monotonic() > self._end.deadline + _STUCK
        return is_given_up or all(rank.has_left for rank in self._ranks)

    def _reap_orphans(self) -> None:
        """As process 1 of a container: what others leave behind are its children then, for which it must wait."""
        if os.getpid() != 1:
            return
        own = {rank.group for rank in self._ranks if rank.code is None}
        with suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and found.si_pid not in own:
                os.waitpid(found.si_pid, 0)

    # -- the end --------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Wait until what the ranks wrote is passed on; not for long where a signal said to end."""
        before, begin = len(self._signals), time.monotonic()
        seconds = _UNREAD if self._signals else math.inf
        is_passed_on = self._relay.finish(lambda: len(self._signals) > before or time.monotonic() > begin + seconds)
        if not is_passed_on and self._end is None:
            self._end = _End(self._signals[-1], time.monotonic())
        self._reap_orphans()

    def _ending(self) -> Ending:
        if self._end is not None and self._end.signal is not None:
            return Ending(128 + self._end.signal)
        if self._end is not None and self._end.is_for_stopped:
            ranks = [rank for rank in self._ranks if rank.rank in self._end.stopped]
            return ending_of_stopped(ranks, self._size, notes_on((), self._ranks, 0))
        first = cause(self._failed, self._is_irpar) or next(iter(self._failed), None)
        if first is None:
            if self._relay.failure is not None:
                raise self._relay.failure
            return Ending(0)
        seconds, last_lines = first.ended - self._begin, self._relay.last_lines(first.rank)
        if self._is_irpar:
            ending = ending_of_irpar(first, self._ranks, self._run.id, seconds, last_lines)
        else:
            ending = ending_of_program(first, self._size, seconds, last_lines)
        stopped = self._end.stopped if self._end else ()
        notes = notes_on(stopped, self._ranks, killed_for_memory() - self._killed_before)
        return Ending(ending.code, ending.rank, "\n  ".join([ending.text, *notes]) if ending.text else "")


def _write(watch: BinaryIO, line: bytes) -> None:
    with suppress(OSError):  # Somebody killed the guard.
        watch.write(line)
