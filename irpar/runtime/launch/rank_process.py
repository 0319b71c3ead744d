"""One rank as a process of `irpar launch`: its environment, how it is started, and what it is doing."""

import os
import random
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from irpar.process import cores
from irpar.sharding import IrparError

from . import guard
from .environment import ERROR_FILE, LAUNCHER_MARK, RUN_ID
from .run_files import run_file
from .token import TOKEN, TOKEN_FILE, made_token

_PORTS = range(10_000, 32_768)
"""Below those that systems give to outgoing connections, so that none takes one between here and rank 0."""
_OTHERS = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", ERROR_FILE, TOKEN_FILE)
"""What a launcher around this one may have set, and would mislead the ranks."""


class LaunchError(IrparError):
    """The ranks cannot be started."""


@dataclass(eq=False)
class RankProcess:
    """A rank's process, which leads a process group of its own.

    Attributes:
        rank: its number.
        process: as it was started.
        code: its exit code, negative for a signal; None while it runs.
        ended: when it did, by the monotonic clock.
        stopped: for how many seconds it has been seen stopped; None while it is not.
        is_stop_told: whether the user knows.
        has_left: whether its process group is empty, too.
    """

    rank: int
    process: subprocess.Popen
    code: int | None = None
    ended: float = 0.0
    stopped: float | None = None
    is_stop_told: bool = False
    has_left: bool = False

    @classmethod
    def start(cls, command: Sequence[str], rank: int, environ: Mapping[str, str]) -> "RankProcess":
        """Start a rank; its standard output and error are pipes, its input is that of this process for rank 0.

        Raises:
            OSError: the system refuses.
        """
        takes_input = rank == 0 and not _is_terminal(0)
        process = subprocess.Popen(
            command,
            stdin=None if takes_input else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,
        )
        return cls(rank, process)

    @property
    def group(self) -> int:
        """The number of its process, which is that of the group, too."""
        return self.process.pid

    @property
    def state(self) -> str:
        """What the system says that it does: R, S, T (stopped), D ...; "" where that is not known."""
        with suppress(OSError):
            if not guard.sees_processes():
                return ""
            return Path(f"/proc/{self.group}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
        return ""

    @property
    def is_stopped(self) -> bool:
        """Whether it runs, and yet does not: by SIGSTOP, or under a debugger."""
        return self.code is None and self.state in ("T", "t")

    @property
    def is_debugged(self) -> bool:
        """Whether a debugger has stopped it, which lets it go on when its user likes."""
        return self.code is None and self.state == "t"

    def signal(self, number: int) -> None:
        """Send a signal to it and to what it has started, where there is anything left; wake it if it is stopped."""
        if not self.has_left:
            guard.signal_group(self.group, number)
            guard.signal_group(self.group, signal.SIGCONT)


def rank_environment(environ: Mapping[str, str], size: int, run_id: str) -> dict[str, str]:
    """What the environments of all ranks have in common.

    Raises:
        LaunchError: no port is free.
    """
    made = {name: text for name, text in environ.items() if name not in _OTHERS}
    made.setdefault("OMP_NUM_THREADS", str(max(1, cores() // size)))
    # Lines come when they are printed, and the last ones before a crash come at all.
    made.setdefault("PYTHONUNBUFFERED", "1")
    if _is_terminal(1):
        # Tables of rank 0, which writes to a pipe, shall be as wide as the terminal.
        made.setdefault("COLUMNS", str(os.get_terminal_size(1).columns))
    return made | {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        RUN_ID: run_id,
        TOKEN: made_token(),
        LAUNCHER_MARK: str(os.getpid()),
    }


def error_file(run_id: str, rank: int) -> Path:
    """Where a rank of irpar leaves its error."""
    return run_file(run_id, f"error-{rank}")


def _is_terminal(handle: int) -> bool:
    try:
        return os.isatty(handle)
    except OSError:
        return False


def free_port() -> int:
    """A TCP port of this host that nobody listens on."""
    for port in (*random.SystemRandom().sample(_PORTS, 50), 0):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)) as server:
            return int(server.getsockname()[1])
    raise LaunchError("no TCP port of this host is free", do="end what uses so many")
