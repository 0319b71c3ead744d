"""A program that runs beside a process while that is in MPI_Init, where nothing else of it can run, and shortly after.

    python mpi_watcher.py PROCESS SECONDS MESSAGE

Its standard input gets `!` when the process is through, `.` when that has removed the names of what MPICH shares, and
ends when the process does. After SECONDS without `!` it writes MESSAGE and ends the process. What MPICH shares with a
process that ended before the `.` nobody else removes: it does. It imports nothing of irpar, and is fast to start.
"""

import math
import os
import re
import select
import signal
import sys
import time
from pathlib import Path

SHARED = re.compile(r"/dev/shm/mpich_shm_\w+$", re.MULTILINE)
"""Names of memory that MPICH shares on a host, in the map of a process."""
_LEFT = re.compile(r"/dev/shm/(?:mpich_shm|ucx_shm_posix)_\w+$", re.MULTILINE)
"""These, and those that UCX shares under it: it removes its own, but where the process is killed."""
THROUGH, REMOVED = b"!", b"."
_PAUSE = 0.01
"""Seconds between two looks: the names that a process has got since the last one are lost with it."""


def shared_names(process: int, pattern: re.Pattern[str] = SHARED) -> set[str]:
    """The names of shared memory that a process holds; none where that cannot be seen."""
    try:
        return set(pattern.findall(Path(f"/proc/{process}/maps").read_text()))
    except OSError:
        return set()


def remove_names(names: set[str]) -> None:
    """Remove the names; the memory ends with the processes that hold it."""
    for name in names:
        Path(name).unlink(missing_ok=True)


def watch(process: int, seconds: float, message: str) -> None:
    """Wait for the process to be through, and to have removed the names."""
    end = time.monotonic() + seconds
    names: set[str] = set()
    while True:
        if select.select([0], [], [], _PAUSE)[0]:
            told = os.read(0, 1)
            if told == REMOVED:
                return
            if told != THROUGH:
                break
            end = math.inf
        names |= shared_names(process, _LEFT)
        if time.monotonic() > end:
            os.write(2, message.encode())
            os.kill(process, signal.SIGKILL)
            break
    remove_names(names)


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
