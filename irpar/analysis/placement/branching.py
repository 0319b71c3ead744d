"""Branch and bound (Land and Doig, 1960) on linear programs, in which units are on the device in part.

Equal layers have many units that can stand for each other: with one of them on the device, or not, nothing costs more,
as another is there instead. So what is decided is how many of them are. Where a solution that costs 100 has 9.4 of 24
updates on the device, there are at most 9 of them, or at least 10: two programs, whose solutions cost 101 and 104, say.
Nothing then costs less than 101, and the first of them is the next to be decided on. Of what can be decided that is
chosen which raises the bounds of both sides most (strong branching, and from then on what was seen there: Achterberg,
Koch and Martin, Branching rules revisited, 2005).
"""

import math
import time
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np

from .relaxation import Counts, Relaxed
from .simulation import Simulator

_MOST_TRIED, _TRIED_SHARE = 3, 0.1
"""At a node so many choices are tried at most, each of at least that share of the largest weight."""
_NEAR_SHARE = 0.25
"""A side is near if its bound is in this part, the lowest, of what is between another bound and the best cost."""
_DIVE_AT, _DIVE_SHARE = 0.6, 0.4
"""After so much of the time one solution is followed to its end, for so much of what is left."""
_WHOLE = 1e-5
"""What is nearer to a whole number is one, for solutions are not exact."""


class Programs(Protocol):
    """Solves linear programs, and keeps the assignments that they lead to."""

    best: int
    """What the cheapest assignment costs that fits."""

    def settled(self, counts: Counts, end: float) -> Relaxed | None:
        """The cheapest with so many of some units; None where that is not found in time, or at all."""

    def may_be_better(self, bound: float) -> bool:
        """Whether something may cost less than the best by more than rounding."""


class _Node(NamedTuple):
    """A node of the search.

    Attributes:
        bound: nothing below it costs less.
        number: of no other node.
        solved: the solution of its program.
        counts: how many of which units are on the device there.
    """

    bound: float
    number: int
    solved: Relaxed
    counts: Counts


class _Choice(NamedTuple):
    """Units of which there is a part too much, or too little, on the device.

    Attributes:
        weight: bytes of one of them times how far they are from a whole number. Of a single unit that is divided by
            the number of those that are alike, for another can be there instead.
        units: their numbers.
        part: that is above a whole number.
        fewer, more: the two sides.
    """

    weight: float
    units: tuple[int, ...]
    part: float
    fewer: Counts
    more: Counts


class _Rises(NamedTuple):
    """How far bounds rose for a whole unit fewer and for one more: the sums of several times."""

    times: int = 0
    fewer: float = 0.0
    more: float = 0.0


class Branching:
    """Branch and bound from one solution on.

    Args:
        programs: solves what is to be solved.
        simulator: of the graph.
        fixed: of each unit whether it is on the device; None where that is to be decided.
        end: when to stop, by `time.monotonic`.
    """

    def __init__(self, programs: Programs, simulator: Simulator, fixed: Sequence[bool | None], end: float) -> None:
        self._programs, self._end = programs, end
        now = time.monotonic()
        self._dive_at = now + _DIVE_AT * (end - now)
        self._numbers = count()
        free = [[unit for unit in units if fixed[unit] is None] for units in simulator.alike]
        self._alike = [tuple(units) for units in free if len(units) > 1]
        _, self._bytes = simulator.worth
        self._number_alike = np.ones(len(self._bytes))
        for units in self._alike:
            self._number_alike[list(units)] = len(units)
        self._rises: dict[tuple[int, ...], _Rises] = {}

    def bound(self, root: Relaxed) -> float:
        """What no assignment that fits costs less than; better ones than the best go to the programs.

        Args:
            root: a solution in which no units are counted.
        """
        waiting = [_Node(root.bound, next(self._numbers), root, {})]
        given_up = math.inf
        """The lowest bound of what could not be decided on: there was no time, or what is left out of the program, or
        rounding, keeps its assignment from what it costs."""
        while waiting and self._programs.may_be_better(waiting[0].bound) and time.monotonic() < self._end:
            node: _Node | None = heappop(waiting)
            while node is not None:
                self._dive_once(node)
                if not self._programs.may_be_better(node.bound):
                    heappush(waiting, node)
                    break
                sides = self._sides(node)
                if not sides:
                    given_up = min(given_up, node.bound)
                    break
                lowest = min(node.bound, given_up, waiting[0].bound if waiting else math.inf)
                nearer, farther = sorted(sides)
                heappush(waiting, farther)
                node = nearer if self._is_near(nearer.bound, lowest) else None
                if node is None:
                    heappush(waiting, nearer)
        return min(self._programs.best, given_up, waiting[0].bound if waiting else math.inf)

    def _is_near(self, bound: float, other: float) -> bool:
        return bound <= other + _NEAR_SHARE * (self._programs.best - other)

    def _sides(self, node: _Node) -> list[_Node]:
        """The two sides of the choice that raises bounds most; empty where there is no choice, or no time."""
        choices = self._choices(node)
        known: dict[tuple[int, ...], list[_Node]] = {}
        new = [each for each in choices if each.units not in self._rises]
        for each in [each for each in new if each.weight > _TRIED_SHARE * choices[0].weight][:_MOST_TRIED]:
            sides = self._both(node, each)
            if not sides:
                break
            known[each.units] = sides
        chosen = max((each for each in choices if each.units in self._rises), key=self._score, default=None)
        if chosen is None:
            return []
        return (
            known.get(chosen.units)
            or self._both(node, chosen)
            or max(known.values(), key=lambda sides: min(side.bound for side in sides), default=[])
        )

    def _score(self, choice: _Choice) -> float:
        """The product of how far the bounds of both sides rise, as they did before."""
        times, fewer, more = self._rises[choice.units]
        return max(fewer / times * choice.part, 1.0) * max(more / times * (1 - choice.part), 1.0)

    def _both(self, node: _Node, choice: _Choice) -> list[_Node]:
        """With fewer, and with more; empty where one of them is not solved. Notes how far bounds rise."""
        fewer = self._below(node, choice.fewer, self._end)
        more = fewer and self._below(node, choice.more, self._end)
        if fewer is None or more is None:
            return []
        down, up = (min(side.bound, self._programs.best) - node.bound for side in (fewer, more))
        known = self._rises.get(choice.units, _Rises())
        self._rises[choice.units] = _Rises(
            known.times + 1, known.fewer + down / choice.part, known.more + up / (1 - choice.part)
        )
        return [fewer, more]

    def _below(self, node: _Node, side: Counts, end: float) -> _Node | None:
        counts = {**node.counts, **side}
        solved = self._programs.settled(counts, end)
        return None if solved is None else _Node(max(node.bound, solved.bound), next(self._numbers), solved, counts)

    def _choices(self, node: _Node) -> list[_Choice]:
        """What can be decided at a node, that of most weight first."""
        near = node.solved.near
        alone = np.flatnonzero(np.minimum(near, 1 - near) > _WHOLE).tolist()
        found = []
        for units in (*self._alike, *((unit,) for unit in alone)):
            there = float(near[list(units)].sum())
            below = math.floor(there)
            part = there - below
            lower, upper = node.counts.get(units, (0, len(units)))
            if min(part, 1 - part) > _WHOLE and lower <= below and below + 1 <= upper:
                weight = min(part, 1 - part) * (1 + self._bytes[units[0]])
                if len(units) == 1:
                    weight /= self._number_alike[units[0]]
                found.append(_Choice(weight, units, part, {units: (lower, below)}, {units: (below + 1, upper)}))
        return sorted(found, key=lambda each: -each.weight)

    def _dive_once(self, node: _Node) -> None:
        """Once, late in the search: decide on what weighs most, again and again, to find what costs little."""
        now = time.monotonic()
        if now < self._dive_at:
            return
        self._dive_at = math.inf
        end = now + _DIVE_SHARE * (self._end - now)
        deepest: _Node | None = node
        while deepest is not None and self._programs.may_be_better(deepest.bound):
            choices = self._choices(deepest)
            deepest = self._nearer(deepest, choices[0], end) if choices else None

    def _nearer(self, node: _Node, choice: _Choice, end: float) -> _Node | None:
        """The side that a solution is nearer to; where its bound is not near, that of the lower bound."""
        sides = (choice.more, choice.fewer) if choice.part > 0.5 else (choice.fewer, choice.more)
        one = self._below(node, sides[0], end)
        if one is None or self._is_near(one.bound, node.bound):
            return one
        other = self._below(node, sides[1], end)
        return one if other is None else min(one, other)
