"""Offsets one after the other, in orders that look at all lifetimes before they begin."""

from collections.abc import Iterator

import numpy as np

from .lifetimes import Ints, Rectangles

_NEVER = np.iinfo(np.int64).max


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
    count = len(rectangles)
    begins = np.zeros(count, np.int64)
    placed = np.zeros((4, count), np.int64)  # First and last step, begin and end, sorted by begin.
    for number, one in enumerate(order):
        first, last, size = rectangles.first[one], rectangles.last[one], rectangles.size[one]
        known = placed[:, :number]
        _, _, lower, upper = known[:, (known[0] <= last) & (known[1] >= first)]
        upper = np.maximum.accumulate(upper)
        floors = np.concatenate(([0], upper))
        fits = np.concatenate((lower - floors[:-1] >= size, [True]))
        begin = floors[fits.argmax()]
        place = np.searchsorted(known[2], begin)
        placed[:, place + 1 : number + 1] = placed[:, place:number]
        placed[:, place] = first, last, begin, begin + size
        begins[one] = begin
    return begins


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
