"""An assignment that fits, to which parts of one that does not are added while there is room."""

import time
from collections.abc import Sequence

from .graph import PlacementGraph
from .simulation import Outcome, Simulator

Assignment = tuple[bool, ...]


def filled(
    graph: PlacementGraph, simulator: Simulator, fits: Assignment, wanted: Assignment, limit: int, end: float
) -> tuple[Assignment, Outcome]:
    """Move to the device what another assignment has there, as long as all fits and costs less; in whole parts.

    Parts are what values connect among what differs. All are tried together, then each half of them, and so on.

    Args:
        graph: it.
        simulator: of the graph.
        fits: an assignment that fits.
        wanted: another.
        limit: bytes on the device.
        end: when to stop, by `time.monotonic`.
    """
    best, outcome = fits, simulator.outcome(fits)
    waiting = [parts(graph, [want and not has for has, want in zip(fits, wanted, strict=True)])]
    while waiting and time.monotonic() < end:
        some = waiting.pop()
        trial = _with(best, some)
        then = simulator.outcome(trial)
        if then.peak <= limit and then.cost < outcome.cost:
            best, outcome = trial, then
        elif len(some) > 1:
            waiting += [some[len(some) // 2 :], some[: len(some) // 2]]
    return best, outcome


def _with(assignment: Assignment, some: Sequence[Sequence[int]]) -> Assignment:
    moved = list(assignment)
    for part in some:
        for number in part:
            moved[number] = True
    return tuple(moved)


def parts(graph: PlacementGraph, chosen: Sequence[object]) -> list[list[int]]:
    """The units that differ from nothing (False), those in one list that values connect and that are chosen alike."""
    root = list(range(len(graph.units)))

    def find(number: int) -> int:
        while root[number] != number:
            root[number] = root[root[number]]
            number = root[number]
        return number

    for value in graph.values:
        for unit in {unit for _, unit in value.reads}:
            if chosen[unit] and chosen[unit] == chosen[value.unit]:
                root[find(unit)] = find(value.unit)
    found: dict[int, list[int]] = {}
    for number in range(len(graph.units)):
        if chosen[number]:
            found.setdefault(find(number), []).append(number)
    return list(found.values())
