"""Chen, Xu, Zhang & Guestrin, Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174, 2016): segments."""

import time
from math import inf

from .chain import chain_of
from .saved_sets import cheapest, on_demand
from .training_graph import TrainingGraph

MOST_COUNTS = 64
"""Numbers of segments that are tried, the square root among them."""


def sqrt_schedule(graph: TrainingGraph, budget: int, end: float = inf) -> list[int] | None:
    """The cheapest schedule of segments whose peak fits; the one with the least peak where none does."""
    return cheapest(graph, sqrt_schedules(graph, end), budget)


def sqrt_schedules(graph: TrainingGraph, end: float = inf) -> list[list[int]]:
    """The forward pass in segments of equally many blocks, of which only the ends are saved, for several numbers.

    The square root of the number of blocks needs the least where all are equal.
    """
    ends = [block.forward[-1] for block in chain_of(graph)]
    if not ends:
        return []
    root = max(1, round(len(ends) ** 0.5))
    counts = {root, *range(1, len(ends) + 1, max(1, len(ends) // MOST_COUNTS))}
    found: list[list[int]] = []
    for count in sorted(counts, key=lambda count: abs(count - root)):
        if found and time.monotonic() > end:
            break
        found.append(on_demand(graph, _crossing(graph, _evenly(ends, count))))
    return found


def _evenly(ends: list[int], count: int) -> list[int]:
    return [ends[len(ends) * number // count - 1] for number in range(1, count)]


def _crossing(graph: TrainingGraph, cuts: list[int]) -> set[int]:
    """What the forward pass reads across a cut: a cut is after the node that it names."""
    found = set[int]()
    for place in range(graph.backward):
        readers = [reader for reader in graph.readers[place] if reader < graph.backward]
        if readers and any(place <= cut < readers[-1] for cut in cuts):
            found.add(place)
    return found
