"""Offsets one after the other, in orders that look at all lifetimes before they begin."""

from collections.abc import Iterator

import numpy as np

from .lifetimes import Ints, Rectangles

_NEVER = np.iinfo(np.int64).max
_UNPLACED = np.int64(-1)
_SHORT = 0.95
"""The share of all that is held for no longer than usual."""


def greedy_offsets(rectangles: Rectangles) -> Iterator[Ints]:
    """What greedy orders find: by size, by area, by the first step, and by how long things are held; larger ones first.

    Each order twice: everything as low as what comes before it allows, and whatever can begin lowest next.
    """
    size, first, steps = -rectangles.size, rectangles.first, -rectangles.steps
    for keys in ((size,), (-size * steps,), (size, first), (size, steps)):
        order = np.lexsort(keys)
        yield lowest_in_order(rectangles, order)
        yield lowest_first(rectangles, rank_of(order))


def lowest_in_order(rectangles: Rectangles, order: Ints) -> Ints:
    """Each as low as those allow that come before it in an order.

    By falling size this is how arenas of ML runtimes are planned ("greedy by size"; Pisarchyk and Lee, Efficient
    Memory Management for Deep Neural Net Inference, 2020).
    """
    beside = _Beside(rectangles)
    begins = np.full(len(rectangles), _UNPLACED)
    for one in order:
        near = beside.of(one)
        lower = begins[near]
        is_placed = lower != _UNPLACED
        near, lower = near[is_placed], lower[is_placed]
        by_begin = lower.argsort()
        near, lower = near[by_begin], lower[by_begin]
        floors = np.concatenate(([0], np.maximum.accumulate(lower + rectangles.size[near])))
        fits = np.concatenate((lower - floors[:-1] >= rectangles.size[one], [True]))
        begins[one] = floors[fits.argmax()]
    return begins


class _Beside:
    """Finds what is held at the same time as something: among those that begin shortly before it ends.

    Few are held for long, and these are all looked at.
    """

    def __init__(self, rectangles: Rectangles) -> None:
        steps = rectangles.last - rectangles.first
        usual = np.quantile(steps, _SHORT, method="higher") if len(rectangles) else 0
        short = np.flatnonzero(steps <= usual)
        self._rectangles = rectangles
        self._short = short[rectangles.first[short].argsort(kind="stable")]
        self._first, self._last = rectangles.first[self._short], rectangles.last[self._short]
        self._long = np.flatnonzero(steps > usual)
        self._from = np.searchsorted(self._first, rectangles.first - usual)
        self._to = np.searchsorted(self._first, rectangles.last, "right")

    def of(self, one: int) -> Ints:
        """What is held at some step at which one is, itself among it."""
        first, last = self._rectangles.first, self._rectangles.last
        around = slice(self._from[one], self._to[one])
        short = self._short[around][self._last[around] >= first[one]]
        long = self._long[(first[self._long] <= last[one]) & (last[self._long] >= first[one])]
        return np.concatenate((short, long))


def lowest_first(rectangles: Rectangles, rank: Ints) -> Ints:
    """Whatever can begin lowest is next, on top of what lies there already; ranks decide between those that can.

    No hole is ever filled: few come to be, since nothing lies higher than what is placed after it begins.
    """
    first, last, size, count = rectangles.first, rectangles.last, rectangles.size, len(rectangles)
    floors = np.zeros(count, np.int64)
    keys = rank.copy()
    for _ in range(count):
        one = keys.argmin()
        keys[one] = _NEVER
        above = (first <= last[one]) & (last >= first[one]) & (keys != _NEVER)
        floors[above] = np.maximum(floors[above], floors[one] + size[one])
        keys[above] = floors[above] * count + rank[above]
    return floors


def rank_of(order: Ints) -> Ints:
    """The place of each in an order."""
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank
