"""Assignments from linear programs: units that are on the device in part are there, or are not."""

import math
import time
from dataclasses import dataclass, field

import numpy as np

from .graph import Assignment, PlacementGraph
from .relaxation import Relaxation, Relaxed
from .simulation import Simulator, worst_times
from .terms import Terms

_NEAR_LIMITS = (1, 0.97, 1.03, 0.9)
"""Of the limit: for how many bytes linear programs are solved. The others lead to assignments that differ a little."""
_MOST_ROUNDS = 24
"""Linear programs of one limit, each of which looks at more times than the one before."""
_MOST_SHARES = 6
"""From which on units are on the device that are there in part: so many are tried of a solution."""
_HALF = 0.5
_MOST_TIMES, _PARTS = 24, 256
"""Times that an assignment adds, where it holds most, and how many parts of all times they lie apart."""


@dataclass
class Rounded:
    """What linear programs led to.

    Attributes:
        bound: nothing that fits costs less.
        assignments: each once: some fit, others hold too much.
        times: when what is held was looked at.
        fits: whether one of them fits.
    """

    bound: int = 0
    assignments: list[Assignment] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    fits: bool = False


def round_relaxations(
    graph: PlacementGraph, limit: int, simulator: Simulator, plain: Assignment, end: float, latest: float
) -> Rounded:
    """Solve linear programs and round what they say; where something then holds too much, look at that time too.

    Args:
        graph: it.
        limit: bytes on the device.
        simulator: of the graph.
        plain: the cheapest assignment without a limit, which does not fit.
        end: when to stop, by `time.monotonic`.
        latest: when to stop even where nothing fits yet but what holds least, which is far from good.
    """
    known = simulator.outcome(plain)
    found = Rounded(known.cost, [], [known.at])
    terms = Terms(graph)
    for share in _NEAR_LIMITS:
        relaxation = Relaxation(graph, round(limit * share), terms)
        for when in found.times:
            relaxation.add_time(when)
        for _ in range(_MOST_ROUNDS):
            solved = relaxation.solve((end if found.fits else latest) - time.monotonic())
            if solved is None:
                return found
            if share == 1:
                found.bound = max(found.bound, math.ceil(solved.bound))
            late = _round(found, solved, simulator, limit) - relaxation.times
            if not late or share != 1:
                break
            for when in late:
                relaxation.add_time(when)
                found.times.append(when)
    return found


def _round(found: Rounded, solved: Relaxed, simulator: Simulator, limit: int) -> set[int]:
    """Add the assignments of a solution; returns times at which these hold most, where they do not fit."""
    near = np.round(solved.near, 6)
    shares = np.unique(near[near > 0])
    if len(shares) > _MOST_SHARES:
        shares = np.quantile(shares, np.linspace(0, 1, _MOST_SHARES), method="nearest")
    late = set()
    for share in dict.fromkeys((*shares.tolist(), _HALF)):
        there = simulator.tidied(near >= share)
        if there not in found.assignments:
            found.assignments.append(there)
        held = simulator.held(there)
        found.fits |= bool(held.max() <= limit)
        late.update(worst_times(held, limit, _MOST_TIMES, _PARTS))
    return late
