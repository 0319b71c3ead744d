"""How a run of `irpar launch` ended, in words and as an exit code: those of the rank that failed first."""

import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .environment import PEER_FAILED
from .rank_process import RankProcess, error_file

_MISTAKE, _ANSWER = 2, 1
_ASKED = {"INT": signal.SIGINT, "TERM": signal.SIGTERM}
_MEMORY_EVENTS = Path("/sys/fs/cgroup/memory.events")
"""What a container has met, on Linux."""
_BEGINS = re.compile(r"error: |(\w+\.)*[A-Z]\w*(Error|Exception|Interrupt|Exit)\b")
"""An error of a command, or the line of Python's tracebacks that names the exception."""
_CAUSES = {
    "SIGKILL": "out of memory is one cause: see what the system's log says",
    "SIGBUS": "shared memory that is full is one cause (in a container: --shm-size)",
    "SIGSEGV": "a native library crashed",
    "SIGABRT": "a native library gave up",
    "SIGILL": "a native library was built for another processor",
}


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        code: for the shell: 0; that of the rank that failed first, or 128 + the number of a signal.
        rank: the rank that failed first; None where none did.
        text: what to tell, in the form of an error; "" where nothing is to be told.
    """

    code: int
    rank: int | None = None
    text: str = ""


def cause(failed: Sequence[RankProcess], is_irpar: bool) -> RankProcess | None:
    """The first rank that failed for a reason of its own."""
    return next((rank for rank in failed if not (is_irpar and rank.code == PEER_FAILED)), None)


def ending_of_program(first: RankProcess, size: int, seconds: float, last_lines: Sequence[str]) -> Ending:
    """Of a run of any program.

    Args:
        first: the rank that failed first.
        size: how many ranks there are.
        seconds: how long it ran.
        last_lines: what it wrote to standard error last.
    """
    lines = [f"rank {first.rank} of {size} {_how(first)} after {seconds:.1f} s{_why(first)}", *_last_words(last_lines)]
    return Ending(_shell_code(first), first.rank, "\n".join(lines))


def ending_of_irpar(
    first: RankProcess, ranks: Sequence[RankProcess], run_id: str, seconds: float, last_lines: Sequence[str]
) -> Ending:
    """Of a run of irpar, whose ranks left their errors in files.

    What all of them say is nobody's in particular; nor is what rank 0 says, which does the command's own work.
    """
    told = _told(first, run_id)
    if not told:
        if first.code == _ANSWER:
            return Ending(_ANSWER, first.rank)  # Such as that the partition differs.
        return ending_of_program(first, len(ranks), seconds, last_lines)
    code = _MISTAKE if first.code == PEER_FAILED else _shell_code(first)
    start = f"rank {first.rank}"
    is_common = len(ranks) > 1 and all(_told(rank, run_id) == told for rank in ranks)
    is_plain = is_common or first.rank == 0 or told.startswith(start)
    return Ending(code, first.rank, told if is_plain else f"{start}: {told}")


def ending_of_stopped(stopped: Sequence[RankProcess], size: int, notes: Sequence[str]) -> Ending:
    """Of a run that was ended because ranks were stopped.

    Args:
        stopped: those ranks, at least one.
        size: how many ranks there are.
        notes: further lines.
    """
    numbers = ", ".join(str(rank.rank) for rank in stopped)
    who = f"rank {numbers} of {size} was" if len(stopped) == 1 else f"ranks {numbers} of {size} were"
    seconds = max(rank.stopped or 0.0 for rank in stopped)
    lines = [
        f"{who} stopped (by SIGSTOP) for {seconds:.0f} s: the run was ended",
        *notes,
        "do: see what stopped it; IRPAR_TIMEOUT gives more time to ranks that the others wait for",
    ]
    return Ending(_ANSWER, stopped[0].rank, "\n  ".join(lines))


def killed_for_memory() -> int:
    """How many processes the system has killed since this container, or this group of processes, reached its limit."""
    with suppress(OSError, ValueError, IndexError):
        events = dict(line.split() for line in _MEMORY_EVENTS.read_text().splitlines())
        return int(events.get("oom_kill", 0))
    return 0


def notes_on(stopped: Sequence[int], ranks: Sequence[RankProcess], killed: int) -> list[str]:
    """Further lines: of memory, of ranks that were stopped when the run was ended, of such as do not end at all.

    Args:
        stopped: the ranks that were stopped.
        ranks: all ranks.
        killed: processes that were killed for memory during the run.
    """
    notes = [
        f"rank {rank} was stopped (by SIGSTOP, or a debugger): the others may have waited for it" for rank in stopped
    ]
    if killed > 0 and any(rank.code == -signal.SIGKILL for rank in ranks):
        notes.insert(0, "the memory of this container is at its limit: the system killed processes for that (oom_kill)")
    notes += [
        f"rank {rank.rank}, process {rank.group}, was killed and does not end: it is in state {rank.state}"
        for rank in ranks
        if rank.code is None
    ]
    return notes


def _shell_code(rank: RankProcess) -> int:
    assert rank.code is not None
    return rank.code if rank.code >= 0 else 128 - rank.code


def _signal_name(rank: RankProcess) -> str:
    assert rank.code is not None
    try:
        return signal.Signals(-rank.code).name
    except ValueError:
        return f"signal {-rank.code}"


def _how(rank: RankProcess) -> str:
    assert rank.code is not None
    if rank.code < 0:
        return f"was killed by {_signal_name(rank)}"
    by = next((f", as SIG{name} ends it," for name, number in _ASKED.items() if rank.code == 128 + number), "")
    return f"ended with exit code {rank.code}{by}"


def _why(rank: RankProcess) -> str:
    assert rank.code is not None
    known = _CAUSES.get(_signal_name(rank)) if rank.code < 0 else None
    return f"; {known}" if known else ""


def _told(rank: RankProcess, run_id: str) -> str:
    """The error that a rank of irpar left."""
    with suppress(OSError):
        return error_file(run_id, rank.rank).read_text("utf-8", "replace").strip()
    return ""


def _last_words(last_lines: Sequence[str]) -> list[str]:
    """What a program wrote last: from the last line on that begins as an error or an exception does, or one line."""
    lines = [line.rstrip() for line in last_lines if line.strip()]
    begin = next((at for at in reversed(range(len(lines))) if _BEGINS.match(lines[at])), len(lines) - 1)
    return [f"  it said: {line}" if at == 0 else f"    {line}" for at, line in enumerate(lines[max(begin, 0) :])]
