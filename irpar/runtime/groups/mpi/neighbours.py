"""What the ranks of an MPI job tell each other of their hosts and processes, so that they see which ends.

Launchers end a job of which a process ends without a word, but not all do, and not always: without one that does, the
others would wait for it as long as a collective may take.
"""

import json
import os
import select
from collections.abc import Set
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Self

from .gather import all_gather_of
from .job import Job


@dataclass(frozen=True)
class _Place:
    """Where a rank runs.

    Attributes:
        host: what tells its host from all others; empty where the system does not say.
        cores: of that, which it may use.
        processes: what tells the numbers of processes there from those in other containers; empty where the system
            does not say.
        process: its own.
    """

    host: str
    cores: tuple[int, ...]
    processes: str
    process: int

    @classmethod
    def own(cls) -> Self:
        """That of this rank."""
        try:
            host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            cores = tuple(sorted(os.sched_getaffinity(0)))
            return cls(host, cores, os.readlink("/proc/self/ns/pid"), os.getpid())
        except (OSError, AttributeError):
            return cls("", (), "", 0)


class Neighbours:
    """The processes of an MPI job.

    Args:
        places: of all ranks.
        rank: this one.
    """

    def __init__(self, places: list[_Place], rank: int) -> None:
        self._places = places
        self._ended: set[int] = set()
        self._ends: dict[int, int] = {}
        own = places[rank]
        if not (own.host and hasattr(os, "pidfd_open")):
            return
        self._poll = select.poll()
        for other, place in enumerate(places):
            if other != rank and (place.host, place.processes) == (own.host, own.processes):
                self._watch(other, place.process)

    @classmethod
    def meet(cls, job: Job, seconds: float) -> Self:
        """All ranks of a job tell each other where they are.

        Raises:
            RunError: not all came in time, or MPI failed.
        """
        with all_gather_of(job, seconds) as gather:
            told = [json.loads(each) for each in gather(json.dumps(astuple(_Place.own())).encode())]
            places = [_Place(host, tuple(cores), *rest) for host, cores, *rest in told]
            # None goes on before all are here: the numbers are still those of the ranks.
            return cls(places, job.mpi.COMM_WORLD.rank)

    def cores(self) -> int | None:
        """The cores that the ranks share; None where they are on several hosts, or the system does not tell."""
        hosts = {place.host for place in self._places}
        if len(hosts) > 1 or "" in hosts:
            return None
        return len({core for place in self._places for core in place.cores})

    def ended(self) -> Set[int]:
        """The ranks of this host whose processes have ended."""
        if self._ends:
            for end, _ in self._poll.poll(0):
                self._poll.unregister(end)
                self._ended.add(self._ends.pop(end))
                os.close(end)
        return frozenset(self._ended)

    def _watch(self, rank: int, process: int) -> None:
        try:
            end = os.pidfd_open(process)
        except ProcessLookupError:
            self._ended.add(rank)
        except OSError:
            return  # The system does not allow it.
        else:
            self._ends[end] = rank
            self._poll.register(end, select.POLLIN)
