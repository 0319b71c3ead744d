"""Small programs as ranks of `irpar launch`, and what is left of them."""

import io
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from irpar.process import handled
from irpar.runtime.launch.processes import Ending, launch
from tests.patience import patient

IRPAR = [sys.executable, "-P", "-m", "irpar.cli"]
PYTHON = [sys.executable, "-S", "-c"]
"""Starts in some ten milliseconds."""
START = "import os, signal, subprocess, sys, time; rank = int(os.environ['RANK']); "
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Those that whoever started the tests may ignore."""
FOREVER = "time.sleep(60)"
DEAF = "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; "
"""Statements: one that takes for ever; some after which no signal but SIGKILL ends the program."""


def python(program: str, *arguments: str) -> list[str]:
    """A program as a command; it knows its `rank`."""
    return [*PYTHON, START + program, *arguments]


def shell(program: str, *arguments: str) -> list[str]:
    """A line of sh as a command."""
    return ["sh", "-c", program, "sh", *arguments]


def run_ranks(command: list[str], size: int, **options: object) -> tuple[Ending, str, str]:
    """Launch from this process; returns how it ended, standard output and standard error."""
    out, err = io.BytesIO(), io.BytesIO()
    ignored = [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN]
    with handled(dict.fromkeys(ignored, signal.SIG_DFL)):
        ending = launch(command, size, stdout=out, stderr=err, **options)  # type: ignore[arg-type]
    return ending, out.getvalue().decode(), err.getvalue().decode()


def take_signals() -> None:
    """Undo, in a child, that whoever started the tests ignores signals, as shells do for what runs in the background."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


class Launched:
    """`irpar launch` as a process of its own, whose ranks, and all that these start, carry a mark."""

    def __init__(self, size: int, program: str, **options: object) -> None:
        self.mark = f"mark-{uuid.uuid4().hex}"
        words = [*IRPAR, "launch", "-n", str(size), *python(program, self.mark)]
        streams: dict[str, object] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(words, preexec_fn=take_signals, **(streams | options))  # type: ignore[call-overload]

    def wait_for(self, *texts: str) -> str:
        """Wait until each text was in a line of standard output; gives the last of these lines."""
        waiting = set(texts)
        for line in self.process.stdout:
            waiting -= {text for text in waiting if text in line.decode()}
            if not waiting:
                return line.decode().strip()
        raise AssertionError(f"{waiting} was not printed; {self.process.stderr.read().decode()}")

    def end(self, seconds: float = 20) -> tuple[int, str, str]:
        """Wait for it; returns exit code, and what is left of standard output and error."""
        out, err = self.process.communicate(timeout=patient(seconds))
        return self.process.returncode, (out or b"").decode(), (err or b"").decode()

    def ranks(self) -> list[int]:
        """The processes with the mark, without the launcher."""
        return [process for process in marked(self.mark) if process != self.process.pid]

    def check_nothing_left(self, seconds: float = 0.5) -> None:
        """Fail if a process with the mark is still there after so many seconds."""
        deadline = time.monotonic() + patient(seconds)
        while marked(self.mark) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert marked(self.mark) == []


def marked(mark: str) -> list[int]:
    """The processes that have a mark on their command line, and are no zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
