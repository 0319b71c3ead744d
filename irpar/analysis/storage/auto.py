"""Which items leave the device so that what stays fits, at the least time that computation waits for copies.

    need   ____####____     limit ----------      w is read in steps 0 and 5, a is made in 1 and read in 4:
    step   0 1 2 3 4 5                            w may be away in 1 .. 4, a in 2 and 3

Greedy: as long as some step holds too much, an item leaves for the gap, or all gaps, that take most off such steps for
each second of copies. Then what turns out not to be needed stays, the largest first, and gaps are exchanged while that
lets computation wait less.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from irpar.ir import Graph

from .gaps import Gaps, Numbers, Room
from .items import MovableValue
from .lead import Lead
from .moves import Move
from .steps import Steps
from .timeline import Rates, Timeline, timeline

SECONDS = 5.0
"""For how long gaps are exchanged at most."""


@dataclass(frozen=True)
class FoundMoves:
    """What was found.

    Attributes:
        moves: what comes and goes; with all gaps where the limit is not kept.
        least: the least limit that anything fits in, with these steps.
        timeline: how long copies take.
        fits: whether the limit is kept.
    """

    moves: tuple[Move, ...]
    least: int
    timeline: Timeline
    fits: bool


def solve(
    graph: Graph,
    items: Sequence[MovableValue],
    steps: Steps,
    seconds: Sequence[float],
    rates: Rates,
    room: Room,
    search: float = SECONDS,
) -> FoundMoves:
    """Moves after which the device holds no more than a limit; see above.

    Args:
        graph: the program.
        items: what may move.
        steps: its steps.
        seconds: that they take.
        rates: of copies.
        room: where to, and the limit.
        search: for how many seconds gaps are exchanged.
    """
    return _Search(Gaps(graph, items, steps, rates, room), seconds, rates).run(search)


class _Search:
    def __init__(self, gaps: Gaps, seconds: Sequence[float], rates: Rates) -> None:
        self.gaps, self.seconds, self.rates = gaps, seconds, rates
        self.limit = gaps.room.limit

    def run(self, search: float) -> FoundMoves:
        everything = np.ones(len(self.gaps.all), np.bool_)
        least = int(self.gaps.least.max())
        chosen = self._complete(self.gaps.forced)
        fits = chosen is not None
        if chosen is None:
            chosen = everything
        else:
            chosen = self._better(self._needed(chosen), time.monotonic() + search)
        moves = self._moves(chosen)
        return FoundMoves(moves, least, self._time(moves), fits)

    def _moves(self, chosen: Numbers) -> tuple[Move, ...]:
        return Lead(self.gaps, chosen, self.seconds, self.rates).moves()

    def _time(self, moves: Sequence[Move]) -> Timeline:
        return timeline(moves, self.gaps.steps, self.seconds, self.rates)

    def _complete(self, chosen: Numbers, banned: Sequence[int] = ()) -> Numbers | None:
        """Choose more gaps until all fits; None where nothing is left to choose that helps."""
        chosen, held = chosen.copy(), self.gaps.held(chosen)
        free = np.ones(len(chosen), np.bool_)
        free[list(banned)] = False
        while bool((held > self.limit).any()):
            more = self._best(chosen, free & ~chosen, held)
            if not len(more):
                return None
            for number in more:
                self.gaps.change(held, int(number), -1)
            chosen[more] = True
        return chosen

    def _best(self, chosen: Numbers, free: Numbers, held: Numbers) -> Numbers:
        """The free gaps of one item that take most off steps that hold too much, for each second of copies."""
        gaps = self.gaps
        worth = self._relief(held) * free
        pays = np.zeros(len(gaps.items), np.bool_)
        pays[gaps.item[chosen]] = True
        is_home = pays | (np.bincount(gaps.item, gaps.is_around, len(gaps.items)) == 0)
        goes = gaps.goes * ~pays
        alone = worth * (is_home[gaps.item] | gaps.is_around) / (gaps.comes + goes)[gaps.item]
        counts = np.maximum(np.bincount(gaps.item, worth > 0, len(gaps.items)), 1)
        may_go = np.bincount(gaps.item, free & gaps.is_around, len(gaps.items)) > 0
        together = np.bincount(gaps.item, worth, len(gaps.items)) * may_go / (counts * gaps.comes + goes)
        if not max(alone.max(initial=0), together.max(initial=0)) > 0:
            return np.zeros(0, np.int64)
        if alone.max(initial=0) >= together.max(initial=0):
            return np.array([alone.argmax()])
        own = gaps.item == together.argmax()
        found: Numbers = np.flatnonzero(own & free & ((worth > 0) | gaps.is_around))
        return found

    def _relief(self, held: Numbers) -> Numbers:
        """What each gap takes off steps that hold too much, added up over these."""
        times = np.concatenate([[0], np.cumsum(held > self.limit)])
        excess = np.concatenate([[0], np.cumsum(np.maximum(held - self.limit, 0))])
        first, end, second, last = self.gaps.ranges.T
        in_ranges = [counted[end] - counted[first] + counted[last] - counted[second] for counted in (times, excess)]
        found: Numbers = np.minimum(in_ranges[0] * self.gaps.nbytes, in_ranges[1]).astype(np.float64)
        return found

    def _largest_first(self, chosen: Numbers) -> list[int]:
        numbers = np.flatnonzero(chosen)
        return [int(number) for number in numbers[np.argsort(-self.gaps.nbytes[numbers], kind="stable")]]

    def _needed(self, chosen: Numbers) -> Numbers:
        """Leave out gaps that are not needed, the largest first."""
        chosen, held = chosen.copy(), self.gaps.held(chosen)
        for number in self._largest_first(chosen):
            own = self.gaps.of_item[int(self.gaps.item[number])]
            if self.gaps.forced[number] or (self.gaps.is_around[number] and chosen[own].sum() > 1):
                continue  # What leaves between uses has to lie elsewhere.
            self.gaps.change(held, number, 1)
            if bool((held > self.limit).any()):
                self.gaps.change(held, number, -1)
            else:
                chosen[number] = False
        return chosen

    def _better(self, chosen: Numbers, end: float) -> Numbers:
        """Exchange gaps while computation waits less for copies; where it waits as long, while copies take less."""
        now = self._worth(chosen)
        improved = True
        while improved and now[0] > 0:
            improved = False
            for number in self._largest_first(chosen):
                if time.monotonic() > end:
                    return chosen
                if not chosen[number] or self.gaps.forced[number]:
                    continue
                own = self.gaps.of_item[int(self.gaps.item[number])] if self.gaps.is_around[number] else [number]
                fewer = chosen.copy()
                fewer[own] = False
                other = self._complete(fewer, own)
                if other is None:
                    continue
                other = self._needed(other)
                worth = self._worth(other)
                if worth < now:
                    chosen, now, improved = other, worth, True
        return chosen

    def _worth(self, chosen: Numbers) -> tuple[float, float]:
        found = self._time(self._moves(chosen))
        return round(found.exposed, 12), round(found.copying, 12)
