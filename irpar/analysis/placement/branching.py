"""Branch and bound (Land and Doig, 1960) on linear programs, in which units are on the device in part.

Equal layers have many units that can stand for each other: whether one of them is on the device changes nothing, as
another is there instead. So what is decided is how many of such units are. Of what can be decided next that is chosen
which raises the bounds of both sides most (strong branching, and from then on what was seen there: Achterberg, Koch and
Martin, Branching rules revisited, 2005).
"""

import math
import time
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np

from .relaxation import Counts, Relaxed
from .simulation import Simulator

_MOST_TRIED, _TRIED_SHARE = 3, 0.1
"""So many are tried at once, of those that decide on so much of what the one does that decides on most."""
_NEAR_SHARE = 0.25
"""Of what is between a bound and the best assignment: so much higher bounds are followed at once."""
_DIVE_SHARE = 0.6
"""Of the time, after which one solution is followed to its end, for an assignment that costs little."""
_HALF = 0.5


class Programs(Protocol):
    """Solves linear programs, and keeps the assignments that they lead to."""

    best: int
    """What the cheapest assignment costs that fits."""

    def settled(self, counts: Counts, end: float) -> Relaxed | None:
        """The cheapest with so many of some units; None where the time is over."""

    def may_be_better(self, bound: float) -> bool:
        """Whether something may cost less than the best by more than rounding."""


class _Open(NamedTuple):
    """A solution that is not decided on in all: `counts` are those of which it is one."""

    bound: float
    number: int
    solved: Relaxed
    counts: Counts


class _Choice(NamedTuple):
    """Units of which there are so many on the device, and a part of one.

    Attributes:
        weight: of how many bytes it decides.
        units: it.
        part: of one.
        fewer, more: the two sides.
    """

    weight: float
    units: tuple[int, ...]
    part: float
    fewer: Counts
    more: Counts


class Branching:
    """Branch and bound from one solution on.

    Args:
        programs: solves what is to be solved.
        simulator: of the graph.
        end: when to stop.
    """

    def __init__(self, programs: Programs, simulator: Simulator, end: float) -> None:
        self._programs, self._end = programs, end
        now = time.monotonic()
        self._dive_at = now + _DIVE_SHARE * (end - now)
        self._numbers = count()
        self._alike = simulator.alike
        _, self._bytes = simulator.worth
        self._others = np.ones(len(self._bytes))
        for units in self._alike:
            self._others[list(units)] = len(units)
        self._rises: dict[tuple[int, ...], tuple[float, float]] = {}
        """How far the bound rose for a whole unit fewer, and for one more."""

    def bound(self, root: Relaxed) -> float:
        """What no assignment that fits costs less than; better ones than the best go to the programs.

        Args:
            root: a solution in which no units are counted.
        """
        waiting = [_Open(root.bound, next(self._numbers), root, {})]
        stuck = math.inf
        while waiting and self._programs.may_be_better(waiting[0].bound) and time.monotonic() < self._end:
            here: _Open | None = heappop(waiting)
            while here is not None:
                self._dive_once(here)
                sides = self._sides(here)
                if not sides:
                    # Also where rounding, or what is left out of the program, keeps an assignment from what it costs.
                    stuck = min(stuck, here.bound)
                    break
                lowest = min(here.bound, stuck, waiting[0].bound if waiting else math.inf)
                nearer, farther = sorted(sides)
                heappush(waiting, farther)
                is_followed = self._is_near(nearer.bound, lowest) and self._programs.may_be_better(nearer.bound)
                here = nearer if is_followed else None
                if here is None:
                    heappush(waiting, nearer)
        return min(self._programs.best, stuck, waiting[0].bound if waiting else math.inf)

    def _is_near(self, bound: float, lowest: float) -> bool:
        return bound <= lowest + _NEAR_SHARE * (self._programs.best - lowest)

    def _sides(self, here: _Open) -> list[_Open]:
        """The two sides of the choice that raises the bound most; empty where there is none, or no time is left."""
        choices = self._choices(here)
        known: dict[tuple[int, ...], list[_Open]] = {}
        new = [each for each in choices if each.units not in self._rises]
        for each in [each for each in new if each.weight > _TRIED_SHARE * choices[0].weight][:_MOST_TRIED]:
            sides = known[each.units] = self._both(here, each)
            if not sides:
                return []
            fewer, more = (min(side.bound, self._programs.best) - here.bound for side in sides)
            self._rises[each.units] = fewer / each.part, more / (1 - each.part)
        choices = [each for each in choices if each.units in self._rises]
        if not choices:
            return []
        chosen = max(choices, key=self._rise)
        return known.get(chosen.units) or self._both(here, chosen)

    def _rise(self, choice: _Choice) -> float:
        """How far both bounds will rise, as they did before."""
        fewer, more = self._rises[choice.units]
        return max(fewer * choice.part, 1.0) * max(more * (1 - choice.part), 1.0)

    def _both(self, here: _Open, choice: _Choice) -> list[_Open]:
        """With fewer, and with more; empty where the time is over."""
        sides = [self._below(here, side) for side in (choice.fewer, choice.more)]
        found = [side for side in sides if side is not None]
        return found if len(found) == len(sides) else []

    def _below(self, here: _Open, side: Counts) -> _Open | None:
        counts = {**here.counts, **side}
        solved = self._programs.settled(counts, self._end)
        return None if solved is None else _Open(max(here.bound, solved.bound), next(self._numbers), solved, counts)

    def _choices(self, here: _Open) -> list[_Choice]:
        """What is to be decided, that of most bytes first; one unit of several that are alike decides on little."""
        near = np.round(here.solved.near, 6)
        found = []
        for units in (*self._alike, *((unit,) for unit in np.flatnonzero(near % 1).tolist())):
            there = round(float(near[list(units)].sum()), 6)
            below = math.floor(there)
            part = there - below
            lower, upper = here.counts.get(units, (0, len(units)))
            if part and lower <= below and below + 1 <= upper:
                weight = min(part, 1 - part) * (1 + self._bytes[units[0]])
                weight /= self._others[units[0]] if len(units) == 1 else 1
                found.append(_Choice(weight, units, part, {units: (lower, below)}, {units: (below + 1, upper)}))
        return sorted(found, key=lambda each: -each.weight)

    def _dive_once(self, here: _Open) -> None:
        """Once enough is known: decide on what decides on most, the nearer side, until nothing is to be decided."""
        if time.monotonic() < self._dive_at:
            return
        self._dive_at = math.inf
        deepest: _Open | None = here
        while deepest is not None and self._programs.may_be_better(deepest.bound):
            choices = self._choices(deepest)
            deepest = self._nearer(deepest, choices[0]) if choices else None

    def _nearer(self, here: _Open, choice: _Choice) -> _Open | None:
        """The side that a solution is nearer to; the other one where that costs much, and this less."""
        sides = (choice.more, choice.fewer) if choice.part > _HALF else (choice.fewer, choice.more)
        one = self._below(here, sides[0])
        if one is None or self._is_near(one.bound, here.bound):
            return one
        other = self._below(here, sides[1])
        return one if other is None else min(one, other)
