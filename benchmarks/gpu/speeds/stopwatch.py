"""How long runs take: medians of subjects that take turns, waited for, in a row, and the host's part."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

WARM = 3
"""Runs of each subject before anything counts."""
RUNS = 15
"""Of which the medians are reported."""
LEAST = 3
"""Runs that count where time is short."""
IN_A_ROW = 10


@dataclass(frozen=True)
class Subject:
    """Something to time.

    Attributes:
        start: begins a run; the device may still be at it when it comes back.
        wait: until the device is done.
    """

    start: Callable[[], object]
    wait: Callable[[], None]

    def run(self) -> None:
        """A run, waited for."""
        self.start()
        self.wait()


@dataclass(frozen=True)
class Times:
    """Median seconds.

    Attributes:
        waited: of a run that is waited for.
        in_a_row: of each of `IN_A_ROW` runs that are waited for together: the device's time, where the host is faster.
        host: until the call comes back, of runs in a row.
        runs: how many runs the medians are of.
    """

    waited: float
    in_a_row: float
    host: float
    runs: int

    def as_json(self) -> dict[str, Any]:
        """As results have it."""
        return asdict(self)


def measure(subjects: Mapping[str, Subject], seconds: float) -> dict[str, Times]:
    """Time subjects in turn, so that clocks and other load meet all of them.

    Args:
        subjects: by name.
        seconds: for all of it; where they are over, fewer runs count, but not fewer than `LEAST`.
    """
    end = time.monotonic() + seconds
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in subjects}
    for subject in subjects.values():
        for _ in range(WARM):
            subject.run()
    for number in range(RUNS):
        if number >= LEAST and time.monotonic() > end:
            break
        for name, subject in subjects.items():
            found[name].append(_one(subject))
    return {
        name: Times(*(statistics.median(column) for column in zip(*rows, strict=True)), runs=len(rows))
        for name, rows in found.items()
    }


def _one(subject: Subject) -> tuple[float, float, float]:
    """Seconds of a waited run, of each of several in a row, and of the host in one of these."""
    subject.wait()
    begin = time.perf_counter()
    subject.run()
    waited = time.perf_counter()
    asked = [waited]
    for _ in range(IN_A_ROW):
        subject.start()
        asked.append(time.perf_counter())
    subject.wait()
    in_a_row = (time.perf_counter() - waited) / IN_A_ROW
    return waited - begin, in_a_row, statistics.median(after - before for before, after in pairwise(asked))


def median_seconds(function: Callable[[], object], runs: int) -> float:
    """Median seconds of a function that waits for what it starts, after one run that warms up."""
    seconds = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
