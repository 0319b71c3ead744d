"""An assignment that fits, to which parts of one that does not are added while there is room."""

import time
from collections.abc import Sequence

import numpy as np
from networkx.utils import UnionFind

from .graph import Assignment
from .simulation import Array, Outcome, Simulator


def filled(
    simulator: Simulator, fits: Assignment, wanted: Assignment, limit: int, end: float
) -> tuple[Assignment, Outcome]:
    """Move to the device what another assignment has there, as long as all fits and costs less; in whole parts.

    Parts are what values connect among what differs; those go first whose nodes save most for each byte on the device.
    All are tried together, then each half of them, and so on.

    Args:
        simulator: of the graph.
        fits: an assignment that fits.
        wanted: another.
        limit: bytes on the device.
        end: when to stop, by `time.monotonic`.
    """
    best, outcome = fits, simulator.outcome(fits)
    saved, nbytes = simulator.worth
    found = parts(simulator, np.array(wanted, np.int64) & ~np.array(fits, np.int64))
    waiting = [sorted(found, key=lambda part: -saved[part].sum() / max(1, nbytes[part].sum()))]
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


def parts(simulator: Simulator, labels: Array) -> list[list[int]]:
    """The units with a label, those in one list that values connect and that have the same.

    What next to nothing connects goes apart: two updates that multiply by one number are two parts, and that a third.

    Args:
        simulator: of the graph.
        labels: of each unit; 0: none.
    """
    ones, others = simulator.edges
    joined = simulator.edges[:, (labels[ones] == labels[others]) & (labels[ones] != 0)]
    is_loose = simulator.hubs[joined].any(axis=0)
    together: UnionFind[int] = UnionFind()
    for one, other in joined[:, ~is_loose].T.tolist():
        together.union(one, other)
    around: dict[int, set[int]] = {}
    for one, other in joined[:, is_loose].T.tolist():
        for hub, neighbour in ((one, other), (other, one)):
            if simulator.hubs[hub]:
                around.setdefault(hub, set()).add(together[neighbour])
    for hub, neighbours in around.items():
        if len(neighbours) == 1:
            together.union(hub, *neighbours)
    found: dict[int, list[int]] = {}
    for number in np.flatnonzero(labels).tolist():
        found.setdefault(together[number], []).append(number)
    return list(found.values())
