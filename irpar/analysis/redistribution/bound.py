"""A lower bound of what a redistribution costs: as if any atom could be taken for any other of its size.

What remains of a state then is into how many blocks each dim is sharded; there are few such states. They get their
distance to the goal by one search backwards. The bound is exact for redistributions that need no permutation.

    [@x, @y] -> [@y, @x] on x=2, y=4: 2 x 4 -> 4 x 2 blocks, so at least the AllToAll over 2 devices

Dims that the goal cuts into as many blocks are alike: of states that differ only in their order one is searched.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import lru_cache

from .prices import BytePrices, Prices, divisors
from .space import Counts, prime_factors

Bound = Callable[[Counts], int | None]
"""From counts to the least cost from there; None where the goal cannot be reached."""

_LAUNCH_BITS = 64


def bound_of_bytes(product: int, start: Counts, goal: Counts, whole_bytes: int) -> Bound:
    """The bound by bytes.

    Args:
        product: devices along all atoms.
        start, goal: the counts of both ends.
        whole_bytes: of the full tensor.
    """
    unit = product * product
    # Dims in another order cost the same.
    order = (*sorted(range(len(goal) - 1), key=lambda dim: goal[dim]), -1)
    ascending = tuple(goal[dim] for dim in order)
    known = _units(product, start[-1], ascending)
    mask = (1 << _LAUNCH_BITS) - 1
    seen: dict[Counts, int | None] = {}

    def least(counts: Counts) -> int | None:
        cost = known(tuple(counts[dim] for dim in order))
        if cost is None:
            return None
        return ((cost >> _LAUNCH_BITS) * whole_bytes // unit << _LAUNCH_BITS) + (cost & mask)

    def bound(counts: Counts) -> int | None:
        if counts not in seen:
            seen[counts] = least(counts)
        return seen[counts]

    return bound


@lru_cache(maxsize=8192)
def _units(product: int, partial: int, goal: Counts) -> Bound:
    """For a tensor of product**2 bytes: all blocks are whole numbers of bytes, however it is sharded."""
    return distances(product, partial, goal, product * product, BytePrices())


def distances(product: int, partial: int, goal: Counts, whole_bytes: int, prices: Prices) -> Bound:
    """The least cost from counts, with dims that are alike in any order, to the goal.

    The search backwards goes only as far as it is asked about.

    Args:
        product: devices along all atoms.
        partial: how many partial values there are at the start.
        goal: where to.
        whole_bytes: of the full tensor.
        prices: what collectives cost.
    """
    ordered, price = _order(goal), lru_cache(maxsize=None)(prices.least)
    found: dict[Counts, int] = {}
    queue = [(0, ordered(goal))]
    best = {ordered(goal): 0}
    seen: dict[Counts, int | None] = {}

    def search(wanted: Counts) -> int | None:
        while queue and wanted not in found:
            cost, counts = heapq.heappop(queue)
            if counts in found:
                continue
            found[counts] = cost
            for before, step in _before(product, partial, goal, counts, whole_bytes, price):
                before, more = ordered(before), cost + step
                known = best.get(before)
                if known is None or more < known:
                    best[before] = more
                    heapq.heappush(queue, (more, before))
        return found.get(wanted)

    def distance(counts: Counts) -> int | None:
        if counts not in seen:
            seen[counts] = search(ordered(counts))
        return seen[counts]

    return distance


def _order(goal: Counts) -> Callable[[Counts], Counts]:
    """Puts counts in one order of those that differ only in the order of dims that are alike."""
    places = defaultdict[int, list[int]](list)
    for dim, count in enumerate(goal[:-1]):
        places[count].append(dim)
    alike = [dims for dims in places.values() if len(dims) > 1]
    known: dict[Counts, Counts] = {}

    def ordered(counts: Counts) -> Counts:
        made = known.get(counts)
        if made is None:
            found = list(counts)
            for dims in alike:
                for dim, count in zip(dims, sorted(counts[dim] for dim in dims), strict=True):
                    found[dim] = count
            made = known[counts] = tuple(found)
        return made

    return ordered if alike else lambda counts: counts


def _before(
    product: int, partial: int, goal: Counts, counts: Counts, whole_bytes: int, price: Callable[[str, int, int], int]
) -> Iterator[tuple[Counts, int]]:
    """What leads to counts in one step: the counts before, and what the step costs.

    Of dims that are alike now and in the goal, those that come first stand for all.
    """
    cut = math.prod(counts[:-1])
    size = whole_bytes // cut
    here, last = counts[-1], len(counts) - 1
    free = product // (cut * here)
    classes = defaultdict[tuple[int, int], list[int]](list)
    for dim, count in enumerate(counts[:-1]):
        classes[goal[dim], count].append(dim)
    gathered, reduced = divisors(free), divisors(partial // here) if partial % here == 0 else ()
    gathers = [(n, price("AllGather", n, size // n)) for n in gathered]
    for (_, count), (dim, *_) in classes.items():
        others = [(alike[alike[0] == dim], many) for (_, many), alike in classes.items() if alike != [dim]]
        ahead, behind = counts[:dim], counts[dim + 1 :]
        for n, cost in gathers:
            yield (*ahead, count * n, *behind), cost
        for n in divisors(count):
            fewer, cost = (*ahead, count // n, *behind), price("AllToAll", n, size)
            for other, many in others:
                yield _with(fewer, other, many * n), cost
            if n in reduced:
                yield _with(fewer, last, here * n), price("ReduceScatter", n, size * n)
        for n in set(prime_factors(count)):
            yield (*ahead, count // n, *behind), 0
    for n in gathered:
        if n in reduced:
            yield _with(counts, last, here * n), price("AllReduce", n, size)
    for n in divisors(here):
        if goal[-1] % here == 0:
            yield _with(counts, last, here // n), 0


def _with(counts: Counts, place: int, count: int) -> Counts:
    return (*counts[:place], count, *counts[place + 1 :])
