"""Assignments from linear programs: units that are on the device in part are there, or are not."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import numpy as np

from .graph import Assignment, PlacementGraph
from .relaxation import Relaxation, Relaxed
from .simulation import Simulator, worst_times
from .terms import Terms

_NEAR_LIMITS = (0.97, 1.03, 0.9)
"""Of the limit: for how many bytes linear programs are solved too, which lead to assignments that differ a little."""
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
        cost: of the cheapest of them that fits; infinite where none does.
    """

    bound: int = 0
    assignments: list[Assignment] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    cost: float = math.inf


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
    search = _Search(relaxation, simulator, limit, end, latest, Rounded(known.cost, [], [known.at]))
    search.run()
    return search.found


@dataclass
class _Search:
    relaxation: Relaxation
    simulator: Simulator
    limit: int
    end: float
    latest: float
    found: Rounded

    def run(self) -> None:
        """Solve the program of all assignments, those of other limits, and those of some assignments each."""
        root = self._settled(is_root=True)
        if root is None:
            return
        for share in _NEAR_LIMITS:
            self.relaxation.set_share(share)
            solved = self._solved()
            if solved is None:
                return
            if math.isfinite(solved.bound):
                self._round(solved)
        self.relaxation.set_share(1)
        self._branch(root)

    def _solved(self) -> Relaxed | None:
        until = self.latest if math.isinf(self.found.cost) else self.end
        return self.relaxation.solve(until - time.monotonic())

    def _settled(self, *, is_root: bool = False) -> Relaxed | None:
        """The cheapest, with all times looked at when its assignments hold too much; None where there is no time."""
        for _ in range(_MOST_ROUNDS):
            solved = self._solved()
            if solved is None or math.isinf(solved.bound):
                break
            if is_root:
                self.found.bound = max(self.found.bound, math.ceil(solved.bound))
            late = self._round(solved).difference(self.relaxation.times)
            if not late:
                break
            for when in late:
                self.relaxation.add_time(when)
                self.found.times.append(when)
        return solved

    def _branch(self, root: Relaxed) -> None:
        """Branch and bound (Land and Doig, 1960): what is on the device in part is there, or not; least bound first.

        Args:
            root: a solution in which no unit is fixed.
        """
        numbers = count()
        waiting: list[tuple[float, int, Relaxed, Mapping[int, bool]]] = [(root.bound, next(numbers), root, {})]
        stuck = math.inf
        while waiting and waiting[0][0] < self.found.cost:
            bound, _, solved, fixed = waiting[0]
            unit = _most_in_part(solved, self.simulator)
            if unit is None:
                # What is left out of the program, or rounding, keeps this assignment from what it costs.
                stuck = min(stuck, bound)
                heappop(waiting)
                continue
            branches = []
            for side in (True, False):
                self.relaxation.fix({**fixed, unit: side})
                below = self._settled()
                if below is None:
                    break
                branches.append((max(bound, below.bound), next(numbers), below, {**fixed, unit: side}))
            else:
                heappop(waiting)
                for each in branches:
                    heappush(waiting, each)
                continue
            break
        least = min(self.found.cost, stuck, waiting[0][0] if waiting else math.inf)
        self.found.bound = max(self.found.bound, math.ceil(least))

    def _round(self, solved: Relaxed) -> set[int]:
        """Add the assignments of a solution; returns times at which these hold most, where they do not fit."""
        near = np.round(solved.near, 6)
        shares = np.unique(near[near > 0])
        if len(shares) > _MOST_SHARES:
            shares = np.quantile(shares, np.linspace(0, 1, _MOST_SHARES), method="nearest")
        late = set()
        for share in dict.fromkeys((*shares.tolist(), _HALF)):
            there = self.simulator.tidied(near >= share)
            if there not in self.found.assignments:
                self.found.assignments.append(there)
            held = self.simulator.held(there)
            if held.max() <= self.limit:
                self.found.cost = min(self.found.cost, self.simulator.outcome(there).cost)
            late.update(worst_times(held, self.limit, _MOST_TIMES, _PARTS))
        return late


def _most_in_part(solved: Relaxed, simulator: Simulator) -> int | None:
    """The unit that is on the device in part and for which it matters most where it is; None: there is none."""
    near = np.round(solved.near, 6)
    far = np.minimum(near, 1 - near)
    if not far.any():
        return None
    saved, _ = simulator.worth
    return int(np.argmax(far * (1 + np.abs(saved))))
