"""Assignments from linear programs: units that are on the device in part are there, or are not."""

import math
import time
from dataclasses import dataclass, field

import numpy as np

from .branching import Branching
from .graph import Assignment, PlacementGraph
from .relaxation import Counts, Relaxation, Relaxed
from .simulation import Outcome, Simulator, worst_times
from .terms import Terms

_NEAR_LIMITS = (0.97, 1.03, 0.9)
"""Of the limit: for how many bytes linear programs are solved too, which lead to assignments that differ a little."""
_MOST_ROUNDS = 24
"""Linear programs of one limit, each of which looks at more times than the one before."""
_MOST_SHARES = 6
"""From which on units are on the device that are there in part: so many are tried of a solution."""
_HALF = 0.5
_TRIFLE = 2e-6
"""Of a cost: what better assignments are not looked for. Bounds are that inexact."""
_MOST_TIMES, _PARTS = 24, 256
"""Times that an assignment adds, where it holds most, and how many parts of all times they lie apart."""


@dataclass
class Rounded:
    """What linear programs led to.

    Attributes:
        bound: nothing that fits costs less.
        outcomes: of each assignment; some fit, others hold too much.
        times: when what is held was looked at.
    """

    bound: int
    outcomes: dict[Assignment, Outcome] = field(default_factory=dict)
    times: list[int] = field(default_factory=list)


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
    relaxation = Relaxation(graph, limit, Terms(graph))
    relaxation.add_time(known.at)
    found = Rounded(known.cost, times=[known.at])
    _Search(relaxation, simulator, limit, found, simulator.outcome(simulator.smallest).cost).run(end, latest)
    return found


@dataclass
class _Search:
    """Linear programs of one graph.

    Attributes:
        relaxation: solves them.
        simulator: of the graph.
        limit: bytes on the device.
        found: what they lead to.
        best: what the cheapest assignment costs that fits.
        fits: whether one of `found` does.
    """

    relaxation: Relaxation
    simulator: Simulator
    limit: int
    found: Rounded
    best: int
    fits: bool = False

    def run(self, end: float, latest: float) -> None:
        """Solve the program of all assignments, those of other limits, and those of some assignments each.

        Args:
            end: when to stop.
            latest: when to stop looking at more times where nothing fits yet.
        """
        root = self.settled({}, end, latest)
        if root is None or math.isinf(root.bound):
            return
        self.found.bound = max(self.found.bound, math.ceil(root.bound))
        for share in _NEAR_LIMITS:
            self.relaxation.set_share(share)
            solved = self.relaxation.solve(end - time.monotonic())
            if solved is not None and math.isfinite(solved.bound):
                self._round(solved)
        self.relaxation.set_share(1)
        bound = Branching(self, self.simulator, self.relaxation.graph.fixed, end).bound(root)
        self.found.bound = max(self.found.bound, math.ceil(bound))

    def _look_at(self, times: set[int]) -> bool:
        """Let no more be held at some times than fits; returns whether one of them is new."""
        late = times.difference(self.relaxation.times)
        for when in late:
            self.relaxation.add_time(when)
        self.found.times += late
        return bool(late)

    def may_be_better(self, bound: float) -> bool:
        """Whether something may cost less than the best by more than rounding."""
        return bound < self.best * (1 - _TRIFLE) and math.ceil(bound) < self.best

    def settled(self, counts: Counts, end: float, latest: float = 0.0) -> Relaxed | None:
        """The cheapest with so many of some units, with all times looked at when its assignments hold too much.

        Args:
            counts: how many of which units are on the device.
            end: when to stop.
            latest: when to stop where nothing fits yet, if that is later.
        """
        self.relaxation.count(counts)
        solved = None
        for _ in range(_MOST_ROUNDS):
            tried = self.relaxation.solve((end if self.fits else max(end, latest)) - time.monotonic())
            if tried is None:
                break
            solved = tried
            if not self.may_be_better(solved.bound) or not self._look_at(self._round(solved)):
                break
        return solved

    def _round(self, solved: Relaxed) -> set[int]:
        """Add the assignments of a solution; returns times at which these hold most, where they do not fit."""
        near = np.round(solved.near, 6)
        shares = np.unique(near[near > 0])
        if len(shares) > _MOST_SHARES:
            shares = np.quantile(shares, np.linspace(0, 1, _MOST_SHARES), method="nearest")
        late: set[int] = set()
        for share in dict.fromkeys((*shares.tolist(), _HALF)):
            there = self.simulator.tidied(near >= share)
            if there in self.found.outcomes:
                continue
            outcome = self.found.outcomes[there] = self.simulator.outcome(there)
            if outcome.peak <= self.limit:
                self.fits = True
                self.best = min(self.best, outcome.cost)
            else:
                late.update(worst_times(self.simulator.held(there), self.limit, _MOST_TIMES, _PARTS))
        return late
