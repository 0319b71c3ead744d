"""Repeats in a sequence of numbers: runs in which each number comes again after the same distance."""

import heapq
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

DISTANCES = 32
"""Distances that are followed up for each length of windows: those at which most windows come again."""


class Run(NamedTuple):
    """`length` numbers from `start` on, of which each comes again `distance` later.

    a b c a b c a b: start 0, length 5, distance 3; two times a b c, and one that is cut short.
    """

    start: int
    length: int
    distance: int

    @property
    def size(self) -> int:
        """Numbers in one repetition."""
        return min(self.length, self.distance)

    @property
    def times(self) -> int:
        """Full repetitions: more than two where they stand one behind another."""
        return max(2, (self.length + self.distance) // self.distance)

    @property
    def weight(self) -> int:
        """Numbers in it; of two repetitions that stand apart one counts: they end where likeness ends, not layers."""
        return self.times * self.size if self.length >= self.distance else self.size


def choose_runs(numbers: Sequence[int], least: int) -> Iterator[tuple[Run, Array]]:
    """Runs with repetitions of at least that size, the largest first.

    With each comes an array of flags, of the places that are taken: mark there what is used of the run. Later runs
    leave these places out.
    """
    sequence = np.asarray(numbers, dtype=np.int64)
    taken = np.zeros(len(sequence), dtype=bool)
    waiting = [(-run.weight, run) for run in _runs(sequence, least)]
    heapq.heapify(waiting)
    while waiting:
        _, run = heapq.heappop(waiting)
        free = _free_part(run, taken)
        if free == run:
            yield run, taken
        elif free.length >= least:
            heapq.heappush(waiting, (-free.weight, free))


def _runs(sequence: Array, least: int) -> list[Run]:
    found = []
    for distance in sorted(_distances(sequence, least)):
        starts, stops = _stretches(sequence[distance:] == sequence[:-distance])
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            run = Run(start, stop - start, distance)
            if run.size >= least:
                found.append(run)
    return found


def _distances(sequence: Array, least: int) -> set[int]:
    """From windows of 1, 2, 4, 8 ... numbers to the next equal one: the most frequent distances of each length.

    Short windows tell of what is repeated within a layer, long ones of layers.
    """
    found: set[int] = set()
    windows, width = np.unique(sequence, return_inverse=True)[1], 1
    while len(windows):
        order = np.argsort(windows, kind="stable")
        ranked = windows[order]
        steps = np.diff(order)[ranked[1:] == ranked[:-1]]
        if not len(steps):
            break
        if 2 * width > least:
            distances, counts = np.unique(steps, return_counts=True)
            chosen = np.lexsort((distances, -counts))[:DISTANCES]
            found.update(distances[chosen].tolist())
        pairs = windows[:-width] * (int(windows.max()) + 1) + windows[width:] if width < len(windows) else windows[:0]
        windows, width = np.unique(pairs, return_inverse=True)[1], 2 * width
    return found


def _stretches(flags: Array) -> tuple[Array, Array]:
    """Where stretches of True begin and end."""
    edges = np.diff(np.concatenate(([0], flags.astype(np.int8), [0])))
    return np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)


def _free_part(run: Run, taken: Array) -> Run:
    """The longest part of a run of which no place is taken."""
    start, length, distance = run
    starts, stops = _stretches(~(taken[start : start + length] | taken[start + distance : start + distance + length]))
    if not len(starts):
        return Run(start, 0, distance)
    longest = int(np.argmax(stops - starts))
    return Run(start + int(starts[longest]), int(stops[longest] - starts[longest]), distance)
