"""What the forward pass saves for the backward pass, and schedules that recompute the rest when it is first read."""

import time
from collections.abc import Collection, Iterator
from math import inf
from typing import TYPE_CHECKING

from irpar.analysis.cp_sat import run, solver_module, unit_of

from .simulation import canonical, simulate
from .training_graph import TrainingGraph

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import BoolVarT, CpModel

LIMITS = 40
"""Sizes of saved sets that a sweep tries; of graphs of more than FEW nodes as many as make LIMITS * FEW nodes."""
FEW = 120
LEAST_LIMITS = 8
MOST_NODES = 2000
"""Of a graph whose sets are swept."""
MOST_SECONDS = 2
"""Of search for one set."""


def on_demand(graph: TrainingGraph, saved: Collection[int]) -> list[int]:
    """The schedule that holds of the forward pass what is saved, and recomputes the rest just before it is read.

    What was recomputed is held until its last use.

        f0 f1 f2 | b2 b1 b0, saved {f1}        f0 f1 f2 | f2 b2 b1 f0 b0
    """
    listed = list(range(graph.backward))
    there = {place for place in listed if place in saved or not graph.may_repeat(place)}
    for place in range(graph.backward, len(graph.nodes)):
        listed += sorted(_missing(graph, graph.operands[place], there))
        listed.append(place)
        there.add(place)
    return canonical(graph, listed)


def _missing(graph: TrainingGraph, wanted: Collection[int], there: set[int]) -> list[int]:
    """What has to be recomputed for some results; it is there then."""
    found: list[int] = []
    waiting = [place for place in wanted if place not in there]
    while waiting:
        place = waiting.pop()
        if place not in there:
            there.update(graph.together[place])
            found += graph.together[place]
            waiting += [
                operand for one in graph.together[place] for operand in graph.operands[one] if operand not in there
            ]
    return found


def needed(graph: TrainingGraph) -> list[int]:
    """The nodes of the forward pass whose results the backward pass reads, in order."""
    first = graph.backward
    return [place for place in range(first) if graph.readers[place] and graph.readers[place][-1] >= first]


def cheapest_set(
    graph: TrainingGraph, limit: int, given: Collection[int] = (), seconds: float = MOST_SECONDS
) -> frozenset[int] | None:
    """The saved set of at most so many bytes for which the least has to be recomputed; None where there is none.

    What the backward pass reads is saved or recomputed; of what is recomputed the operands are too. Each is recomputed
    once: the selection problem behind PyTorch's min-cut partitioner, here with the bytes as a constraint.

    Args:
        graph: it.
        limit: bytes.
        given: what is saved in any case.
        seconds: of search.
    """
    model: CpModel = solver_module().CpModel()
    first = graph.backward
    saved = {place: model.new_bool_var("") for place in range(first)}
    again: dict[int, BoolVarT] = {}
    for place in range(first):
        if graph.may_repeat(place):
            again[place] = again[place - 1] if graph.nodes[place].joined else model.new_bool_var("")
    for place in given:
        model.add(saved[place] == 1)
    for place in needed(graph):
        model.add_bool_or([saved[place], *([again[place]] if place in again else [])])
    for place, repeats in again.items():
        for operand in graph.operands[place]:
            model.add_bool_or([repeats.negated(), saved[operand], *([again[operand]] if operand in again else [])])
    by_bytes = unit_of(graph.nodes[place].mem for place in saved)
    model.add(sum(-(-graph.nodes[place].mem // by_bytes) * one for place, one in saved.items()) <= limit // by_bytes)
    by_cost = unit_of(graph.nodes[place].cost for place in again)
    # What is repeated for nothing costs something, all of it together less than any cost.
    weight = len(again) + 1
    model.minimize(sum((graph.nodes[place].cost // by_cost * weight + 1) * one for place, one in again.items()))
    solver = run(model, seconds)
    return None if solver is None else frozenset(place for place, one in saved.items() if solver.value(one))


def sweep(
    graph: TrainingGraph, given: Collection[int] = (), count: int = LIMITS, end: float = inf
) -> Iterator[frozenset[int]]:
    """The cheapest saved sets for several limits, from all that the backward pass reads down to what must be saved.

    Args:
        graph: it.
        given: what is saved in any case.
        count: how many limits.
        end: when to stop, by `time.monotonic`.
    """
    everything = frozenset(needed(graph)) | frozenset(given)
    yield everything
    total = sum(graph.nodes[place].mem for place in everything)
    last = everything
    for number in range(count - 1, -1, -1):
        limit = total * number // count
        if sum(graph.nodes[place].mem for place in last) <= limit:
            continue
        left = end - time.monotonic()
        if left <= 0:
            return
        found = cheapest_set(graph, limit, given, min(left, MOST_SECONDS))
        if found is None:
            return
        last = found
        yield found


def sweep_schedules(graph: TrainingGraph, end: float = inf) -> list[list[int]]:
    """The schedules of a sweep."""
    if graph.backward == len(graph.nodes) or len(graph.nodes) > MOST_NODES:
        return []
    count = max(LEAST_LIMITS, min(LIMITS, LIMITS * FEW // len(graph.nodes)))
    return [on_demand(graph, saved) for saved in sweep(graph, count=count, end=end)]


def cheapest(graph: TrainingGraph, schedules: Collection[list[int]], budget: int) -> list[int] | None:
    """The cheapest of some schedules that fits; the one with the least peak where none does."""

    def rank(schedule: list[int]) -> tuple[int, int]:
        outcome = simulate(graph, schedule)
        return (max(outcome.peak, budget), outcome.cost)

    return min(schedules, key=rank, default=None)
