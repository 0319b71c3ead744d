"""What the system tells of processes.

A process is told of by the number that it has in /proc. That is not the number that it knows itself by where /proc
shows another namespace of processes; and in a namespace of its own a number means another process. So a process whose
facts matter is known by its number and by when it started.
"""

import os

_START = 19
"""The place of the start among the facts."""


def own_process() -> tuple[int, int]:
    """The number of this process in /proc, and when it started; zeros where that cannot be seen."""
    try:
        process = int(os.readlink("/proc/self"))
    except (OSError, ValueError):
        return 0, 0
    return process, start_of(process)


def process_facts(process: int, start: int | None = None) -> list[str]:
    """The fields of /proc/PID/stat from the state on (man 5 proc: field 3); empty where it cannot be read.

    Args:
        process: its number in /proc.
        start: when it started; with another start it is another process, of which nothing is reported.
    """
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            facts = file.read().rpartition(")")[2].split()
    except OSError:
        return []
    return facts if start is None or int(facts[_START]) == start else []


def process_state(process: int, start: int | None = None) -> str:
    """The letter of a process's state, such as R, S, T; empty where it cannot be seen."""
    return next(iter(process_facts(process, start)), "")


def processor_time(process: int, start: int | None = None) -> int | None:
    """What a process has used of the processors, in ticks (often of 10 ms); None where it cannot be seen."""
    facts = process_facts(process, start)
    return int(facts[11]) + int(facts[12]) if facts else None


def parent_of(process: int) -> int:
    """The parent of a process; 0 where it cannot be seen."""
    facts = process_facts(process)
    return int(facts[1]) if facts else 0


def start_of(process: int) -> int:
    """When a process started, in ticks since the system did: its number may be that of another one later."""
    facts = process_facts(process)
    return int(facts[_START]) if facts else 0
