"""Beam search for offsets below a given end: for the few programs on which greedy orders leave room unused.

The block is filled from below, as skylines are in strip packing. A state is a height for each step, below which nothing
more will lie, and what is placed. The lowest steps, the first of them, are next: something that fits between what rises
beside them is placed there, or they are left empty, which then is wasted up to the lower side of them. So memory is
wasted only where the search says so:

    height  3 3 . . . 2       what is held in steps 2 to 4, in 2 and 3, or in 2 can lie at 0
            0 1 2 3 4 5       else step 2 rises with its neighbours, once they are decided, to 2 at least

A state in which the height of a step and what is still to come there are more than the end is given up. Of all that
come from the states of a round those are kept that have wasted the least for what they have placed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import numpy as np

from .lifetimes import Ints, Rectangles

_DONE = np.iinfo(np.int64).max // 4
"""The height of a step in which everything has its place."""
_WIDTH = 48
"""Of a beam: of 450 buffers twice as wide a one takes twice as long, and finds no more in the same time."""
_RENEWED = 40
"""Beams after which weights are drawn anew."""
_MISSED = 1.3
"""By how much what had no place is worth more to the next beam."""
_LOWER = 0.3
"""How much of what an end is above the bound is to go next."""

Bools = np.ndarray[Any, "np.dtype[np.bool_]"]
Floats = np.ndarray[Any, "np.dtype[np.float64]"]


def beam_search(
    rectangles: Rectangles, bound: int, below: int, tries: int, until: float | None = None
) -> Iterator[Ints]:
    """Offsets that end lower and lower.

    Beams start in turn from the first step and from the last. Each prefers more what the last one from there found no
    place for ("squeaky wheel" optimization, Joslin and Clements, 1999); after some, all weigh things anew, by chance.

    Args:
        rectangles: what is to be placed.
        bound: what no end is below; there the search is over.
        below: the highest end that is of use.
        tries: how many beams, those not counted that find something.
        until: of `time.monotonic`, when to give up.
    """
    if not len(rectangles):
        return
    random = np.random.default_rng(0)
    last = rectangles.last.max()
    sides = rectangles, Rectangles(last - rectangles.last, last - rectangles.first, rectangles.size)
    weights: list[_Weights] = []
    for number in range(tries):
        if number % _RENEWED == 0:
            weights = [_Weights.drawn(random, len(rectangles)) for _ in sides]
        side = number % len(sides)
        end = below
        while end >= bound:
            beam = _Beam(sides[side], end, weights[side])
            begins = beam.search(until)
            if begins is None:
                taste = np.where(beam.missed, _MISSED, 1) * weights[side].taste
                weights[side] = replace(weights[side], taste=taste)
                break
            yield begins
            below = rectangles.top(begins) - 1
            if below < bound:
                return
            end = max(bound, int(below - _LOWER * (below - bound)))
        if until is not None and monotonic() > until:
            return


@dataclass(frozen=True, slots=True)
class _Weights:
    """What a beam prefers.

    Attributes:
        placing: how much placing counts against waste.
        steps, size: exponents of how long and how large what is placed is, beside the area that it covers.
        spare: a part of the end that is taken to be spare in any step beside what is: wasting counts the more the less
            is left, by the logarithm of that.
        taste: of each what it is worth beside that; chance.
    """

    placing: float
    steps: float
    size: float
    spare: float
    taste: Floats

    @classmethod
    def drawn(cls, random: np.random.Generator, count: int) -> "_Weights":
        """Weights by chance, in ranges in which each has been the best for some programs."""
        return cls(
            placing=float(np.exp(random.uniform(np.log(0.02), np.log(3)))),
            steps=random.uniform(-0.3, 1.5),
            size=random.uniform(-0.5, 0.5),
            spare=float(np.exp(random.uniform(np.log(0.003), np.log(0.3)))),
            taste=np.exp(random.uniform(0, 0.7) * random.standard_normal(count)),
        )


@dataclass(slots=True)
class _States:
    """The states of a round, a row each.

    Attributes:
        heights: for each step; heights are doubled, and odd ones are those of steps that are left empty there.
        coming: what is still to be placed in each step, doubled.
        placed: whether each has its place.
        begins: which that is.
        score: what was wasted and placed, as `_Beam` weighs them; less is better.
        mark: equal for equal states.
    """

    heights: Ints
    coming: Ints
    placed: Bools
    begins: Ints
    score: Floats
    mark: Ints

    def take(self, rows: Ints) -> "_States":
        """Some of them, some more than once."""
        return _States(
            self.heights[rows],
            self.coming[rows],
            self.placed[rows],
            self.begins[rows],
            self.score[rows],
            self.mark[rows],
        )


class _Beam:
    """A search for offsets that end at a height or below.

    Attributes:
        missed: where it found none, what had no place when it gave up.
    """

    def __init__(self, rectangles: Rectangles, end: int, weights: _Weights) -> None:
        bounds = np.unique(np.concatenate((rectangles.first, rectangles.last + 1)))
        self.missed: Bools = np.zeros(len(rectangles), np.bool_)
        self._end = 2 * end
        self._size = 2 * rectangles.size
        # Steps between which nothing begins or ends are one, of some length.
        self._from = np.searchsorted(bounds, rectangles.first)
        self._to = np.searchsorted(bounds, rectangles.last + 1)
        self._steps = np.arange(len(bounds) - 1)
        lengths = np.diff(bounds)
        self._coming = np.zeros(len(self._steps), np.int64)
        for begin, stop, size in zip(self._from, self._to, self._size, strict=True):
            self._coming[begin:stop] += size
        self._spare = self._end * weights.spare
        room = np.maximum(self._end - self._coming + self._spare, 1)
        self._lengths = lengths / (self._end * np.sum(lengths / room))
        steps, size = rectangles.steps.astype(np.float64), self._size.astype(np.float64)
        worth = steps ** (1 + weights.steps) * size ** (1 + weights.size) * weights.taste
        self._worth = weights.placing * worth / worth.sum()
        marks = np.random.default_rng(0)
        self._mark = marks.integers(1, _DONE, len(rectangles))
        self._mark_of_step = marks.integers(1, _DONE, len(self._steps))

    def search(self, until: float | None) -> Ints | None:
        """Offsets, or None where none are found."""
        if (self._coming > self._end).any():
            return None
        states = self._start()
        while not (found := states.placed.all(axis=1)).any():
            before, states = states, self._next(states)
            if not len(states.score):
                self.missed = self._missed(before)
            if not len(states.score) or (until is not None and monotonic() > until):
                return None
        return np.asarray(states.begins[found.argmax()] // 2, np.int64)

    def _missed(self, states: _States) -> Bools:
        """What is to lie in the lowest steps of the best state, and cannot."""
        lowest = np.concatenate(([0], np.cumsum(states.heights[0] == states.heights[0].min())))
        return np.asarray(~states.placed[0] & (lowest[self._to] > lowest[self._from]), np.bool_)

    def _start(self) -> _States:
        heights = np.where(self._coming > 0, 0, _DONE)[None]
        nothing = np.zeros((1, len(self._size)), np.int64)
        return _States(heights, self._coming[None], nothing > 0, nothing, np.zeros(1), np.zeros(1, np.int64))

    def _next(self, states: _States) -> _States:
        """The best states that come from some, each of which places one thing more, or leaves steps empty."""
        rows = np.arange(len(states.score))
        heights, steps = states.heights, self._steps
        low = heights.min(axis=1)
        is_low = heights == low[:, None]
        begin = is_low.argmax(axis=1)
        rises = ~is_low & (steps > begin[:, None])
        stop = np.where(rises.any(axis=1), rises.argmax(axis=1), len(steps))
        is_left = low % 2 == 1
        fits = ~states.placed & (self._from >= begin[:, None]) & (self._to <= stop[:, None]) & ~is_left[:, None]
        is_first = fits & (self._from == begin[:, None])
        parents, placed = np.nonzero(is_first)

        # Left empty: until something else can begin; what was left rises to the lower side.
        next_begin = np.where(fits & ~is_first, self._from, stop[:, None]).min(axis=1, initial=len(steps))
        empty_to = np.where(is_left, stop, np.minimum(next_begin, stop))
        before = np.where(begin > 0, heights[rows, begin - 1], _DONE)
        after = np.where(stop < len(steps), heights[rows, np.minimum(stop, len(steps) - 1)], _DONE)
        side = np.minimum(before, after)
        risen = np.where(is_left, np.where(side < _DONE, side // 2 * 2, _DONE), low + 1)
        inside = (steps >= begin[:, None]) & (steps < empty_to[:, None])
        most = np.where(inside, states.coming, 0).max(axis=1)
        empty = np.nonzero(risen + most + (risen % 2) <= self._end)[0]
        room = self._end - heights - states.coming + self._spare
        left = np.maximum(room - (risen - low)[:, None], 1)
        wasted = np.where(inside, self._lengths * np.log(np.maximum(room, 1) / left), 0).sum(axis=1)

        parents = np.concatenate((parents, empty))
        what = np.concatenate((placed, np.full(len(empty), -1)))
        is_empty = what < 0
        score = states.score[parents] + np.where(is_empty, wasted[parents], -self._worth[what])
        of_step = self._mark_of_step[begin] * (2 * risen + 1)
        mark = states.mark[parents] ^ np.where(is_empty, of_step[parents], self._mark[what])
        kept = _best(score, mark)
        parents, what, is_empty = parents[kept], what[kept], is_empty[kept]

        made = states.take(parents)
        made.score, made.mark = score[kept], mark[kept]
        until = np.where(is_empty, empty_to[parents], self._to[what])
        inside = (steps >= begin[parents, None]) & (steps < until[:, None])
        size = np.where(is_empty, 0, self._size[what])
        made.heights += inside * np.where(is_empty, (risen - low)[parents], size)[:, None]
        made.coming -= inside * size[:, None]
        made.heights[made.coming == 0] = _DONE
        filled = np.nonzero(~is_empty)[0]
        made.placed[filled, what[filled]] = True
        made.begins[filled, what[filled]] = low[parents[filled]]
        return made


def _best(score: Floats, mark: Ints) -> Ints:
    """The places of so many that score best, of equal states one."""
    order = np.argsort(score, kind="stable")[: 2 * _WIDTH]
    _, first = np.unique(mark[order], return_index=True)
    return np.asarray(order[np.sort(first)[:_WIDTH]], np.int64)
