"""The process that a command runs in: its standard streams, and the signals that end it."""

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

INTERRUPTED = 130
_SOON = 0.02
"""Seconds after which a signal comes again."""
_ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopped(KeyboardInterrupt):
    """A signal asks the process to end; raised where it is, so that what is half-written goes."""


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def handled(handlers: "Mapping[signal.Signals, signal._HANDLER]") -> Iterator[None]:
    """Signals are handled so in here; as before where this is not the main thread, which alone can change that."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Signals:
    """Ctrl-C, SIGTERM and SIGHUP: all of them clean up, and end the process with 128 + their number.

    A signal that the process was started to ignore (nohup) stays ignored.

    Attributes:
        code: the exit code, once a signal came; else 0.
        ends: whether a command is all that this process does.
    """

    def __init__(self) -> None:
        self.code = 0
        self.ends = False
        self._answered: list[signal.Signals] = []

    def leave_at_once(self) -> None:
        """From here on a signal ends the process where it is: nothing was begun, and imports may not be interrupted."""
        self._install(_leave)

    def clean_up(self) -> None:
        """From here on a signal raises `Stopped`: a command runs, after which the process ends."""
        self.ends = True
        self._install(self._stop)
        sys.unraisablehook = self._unraisable

    @contextmanager
    def held(self) -> Iterator[None]:
        """In here a signal waits until the end: a native module that is interrupted on import aborts the process."""
        mine = [number for number in _ENDING if signal.getsignal(number) == self._stop]
        came: list[int] = []
        try:
            with handled(dict.fromkeys(mine, lambda number, _: came.append(number))):
                yield
        finally:
            if came:
                self._stop(came[0], None)

    def _install(self, handler: "signal._HANDLER") -> None:
        self._answered = [number for number in _ENDING if signal.getsignal(number) != signal.SIG_IGN]
        for number in self._answered:
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if _is_importing(frame):
            # What an exception interrupts there aborts the process, or is lost.
            self._comes_again(number)
            return
        self.code = 128 + number
        for other in _ENDING:
            # Cleaning up is not interrupted, but by a second Ctrl-C.
            signal.signal(other, _leave if other == signal.SIGINT else signal.SIG_IGN)
        raise Stopped

    def _comes_again(self, number: int) -> None:
        again = threading.Timer(_SOON, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()

    def _unraisable(self, lost: "sys.UnraisableHookArgs") -> None:
        """What Python cannot raise where it happens, in a `__del__` say, it tells of; but a signal is to be heard."""
        if not issubclass(lost.exc_type, Stopped):
            sys.__unraisablehook__(lost)
            return
        for number in self._answered:
            signal.signal(number, self._stop)
        self._comes_again(self.code - 128)


SIGNALS = Signals()


def import_native(name: str) -> Any:
    """A module that is native, or imports one, whole even where a signal comes meanwhile."""
    with SIGNALS.held():
        return import_module(name)


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a frame runs inside an import."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _leave(number: int, _: FrameType | None) -> NoReturn:
    os._exit(128 + number)


class _UntilNobodyReads(io.FileIO):
    """A stream that also takes what is written when its reader has gone: work and exit code stay as they are."""

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write, or pretend to."""
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def mend_streams() -> None:
    """Let the standard streams be usable: open where they were closed, quiet where nobody reads, of any character."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number, so that no file of ours is taken for the stream.
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stdout = _mended(sys.stdout, 1)
    sys.stderr = _mended(sys.stderr, 2)


def _mended(stream: TextIO | None, number: int) -> TextIO:
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    return io.TextIOWrapper(
        io.BufferedWriter(_UntilNobodyReads(number, "w", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=bool(stream.line_buffering) or number == 2,
    )


def end_streams() -> None:
    """Write what is left; what cannot be written is not tried again when the process ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # What the stream still holds has to go somewhere: Python tells of it with a traceback, from 3.13 on.
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
                stream.flush()
