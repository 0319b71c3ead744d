"""One execution: a damaged file, a command, and whether its end is one that may be."""

import contextlib
import io
import os
import re
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from irpar import cli

from .targets import Target

MOST_SECONDS = 10
MOST_BYTES = 2 << 30
FINE = (0, 1, 2)
"""Exit codes that may be: 1 is what `verify` says of a partition that differs."""


class SlowError(BaseException):
    """A command takes too long; nothing in irpar catches this."""


@dataclass(frozen=True)
class Fault:
    """Something that may not be.

    Attributes:
        what: one line; equal faults have equal ones.
        text: what was printed, or the traceback.
    """

    what: str
    text: str


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Let this process have little more memory than it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def execute(target: Target, random: Random, here: Path) -> Fault | None:
    """Damage something, and hand it to a command; what is wrong with how that ends.

    The folder `here` is one that `prepare_folder` made; the damaged file stays in it.
    """
    target.change(random, here)
    words = target.choose(random, here)
    (here / "words").write_text("\n".join(words))
    return judge(words, here)


def judge(words: list[str], here: Path) -> Fault | None:
    """Run a command, and say what is wrong with how it ends."""
    _clear(here)
    out, err = io.StringIO(), io.StringIO()
    with _crashes() as crashes, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with _alarm():
                code = cli.main(words)
        except SlowError:
            return Fault(f"{words[0]} takes more than {MOST_SECONDS} s", traceback.format_exc())
        except Exception as error:
            return Fault(f"{words[0]} raises {_place(error)}", traceback.format_exc())
    told = err.getvalue()
    if crashes:
        return Fault(f"{words[0]} ends with {code}: {crashes[0][0]}", crashes[0][1])
    if "there is not enough memory" in told:
        return Fault(f"{words[0]} takes more than {MOST_BYTES >> 30} GB", told)
    if code not in FINE:
        return Fault(f"{words[0]} ends with {code}: {told.splitlines()[:1]}", told)
    if code == 2:
        return _objection(words, told)
    return None


def _objection(words: list[str], told: str) -> Fault | None:
    """What is wrong with an error."""
    if len(re.findall(r"^error: ", told, re.MULTILINE)) != 1:
        return Fault(f"{words[0]} does not print one error", told)
    if "\n  do: " not in told:
        return Fault(f"{words[0]} does not say what to do: {re.sub(r'[0-9]+', '#', told.splitlines()[0])[:80]}", told)
    return None


@contextlib.contextmanager
def _crashes() -> Iterator[list[tuple[str, str]]]:
    """Collects what irpar takes for bugs in itself, with tracebacks."""
    found: list[tuple[str, str]] = []
    tell: Callable[[Exception], int] = cli._tell

    def note(error: Exception) -> int:
        code = tell(error)
        if code == cli.BUG:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            found.append((_place(cause), "".join(traceback.format_exception(error))))
        return code

    cli._tell = note
    try:
        yield found
    finally:
        cli._tell = tell


def _place(error: BaseException) -> str:
    """The kind of an exception, and the last line of irpar that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/tests/" not in frame.filename and "site-packages" not in frame.filename]
    last = (ours or list(frames))[-1]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno} in {last.name}"


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    def ring(number: int, frame: Any) -> None:
        raise SlowError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _clear(here: Path) -> None:
    """Remove what the command before wrote."""
    shutil.rmtree(here / "made", ignore_errors=True)
    for name in ("made.irpar", "made.irpar.data", "o.npz"):
        (here / name).unlink(missing_ok=True)
    for path in here.glob("irpar-*.irpar*"):
        path.unlink()


def keep_reproducers(here: Path) -> None:
    """Let what crashed passes leave behind go to the folder, which is cleared."""
    os.environ["TMPDIR"] = str(here)
    import tempfile

    tempfile.tempdir = str(here)
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000))
