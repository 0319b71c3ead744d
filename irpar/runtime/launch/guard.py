"""A process of its own that watches over `irpar launch`: where the launcher is killed, it ends the ranks.

It needs nothing but Python's own library, so that it starts in some ten milliseconds and stays small. The launcher
keeps its standard input open, writes `+PID` for each rank that it starts and `-PID` for each that has ended with all of
its process group, and `.` at the end of the run. When the input ends without it, the launcher is dead.

    python -I -S guard.py PREFIX SECONDS
"""

import glob
import os
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress

_PAUSE = 0.02


def remove_files(prefix: str) -> None:
    """Remove the files whose paths begin so."""
    for path in glob.glob(f"{glob.escape(prefix)}*"):
        with suppress(OSError):
            os.unlink(path)


def signal_group(group: int, number: int) -> bool:
    """Send a signal to all processes of a group; False where there are none (or all are zombies, on some systems)."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def sees_processes() -> bool:
    """Whether the numbers in /proc are those that this process knows: it may show another namespace of processes."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def has_members(group: int) -> bool:
    """Whether a process group has members other than zombies, for which nobody may ever wait."""
    if not signal_group(group, 0):
        return False
    if not sees_processes():
        return True
    found = glob.glob("/proc/[0-9]*/stat")
    for path in found:
        with suppress(OSError), open(path, "rb") as file:
            state, _, member_of = file.read().rpartition(b")")[2].split()[:3]
            if int(member_of) == group and state not in (b"Z", b"X"):
                return True
    return not found


def end_groups(groups: Collection[int], grace: float) -> None:
    """End process groups: SIGTERM, and SIGKILL after `grace` seconds for what is still there."""
    for group in groups:
        signal_group(group, signal.SIGTERM)
        signal_group(group, signal.SIGCONT)  # What is stopped would not hear it.
    deadline = time.monotonic() + grace
    left = list(groups)
    while left and time.monotonic() < deadline:
        time.sleep(_PAUSE)
        left = [group for group in left if has_members(group)]
    for group in left:
        signal_group(group, signal.SIGKILL)


def main(prefix: str, grace: float) -> None:
    """Watch until the run ends, or the launcher."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        if line == b".\n":
            return
        if line.endswith(b"\n"):
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    end_groups(groups, grace)
    remove_files(prefix)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
