"""The cheapest schedule that fits, by a method or by the best of several."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from irpar.units import bytes_text

from .chain import chain_schedule
from .chen import sqrt_schedule
from .retention import Found, least_peak, optimal_schedule
from .saved_sets import cheapest, sweep_schedule
from .simulation import Outcome, simulate
from .training_graph import RecomputeError, TrainingGraph

Heuristic = Callable[[TrainingGraph, int], list[int] | None]

HEURISTICS: dict[str, Heuristic] = {"sqrt": sqrt_schedule, "sweep": sweep_schedule, "chain": chain_schedule}
"""Methods that search no further than they were written to."""
METHODS = ("auto", "optimal", *HEURISTICS)
"""auto: the best of all, each as far as the size of the graph lets it help."""
MOST_SOLVED = 1200
"""Nodes of a graph that CP-SAT improves on as a whole."""


@dataclass(frozen=True)
class Solution:
    """A schedule that fits.

    Attributes:
        schedule: nodes in the order in which they run.
        outcome: its peak and cost.
        method: which of the methods found it.
        bound: what no schedule of the method costs less than; None where nothing is known.
        proven: whether nothing is cheaper, of schedules in the order of the graph with few computations a node.
        seconds: that it took.
    """

    schedule: list[int]
    outcome: Outcome
    method: str
    bound: int | None
    proven: bool
    seconds: float


def solve(graph: TrainingGraph, budget: int, method: str = "auto", seconds: float = 30) -> Solution:
    """The cheapest schedule that was found whose peak fits a budget.

    Args:
        graph: it.
        budget: bytes, what is held throughout included.
        method: one of METHODS.
        seconds: of search by CP-SAT.

    Raises:
        RecomputeError: no schedule that was found fits: with the least that can be held, as far as was found.
    """
    begin = time.monotonic()
    plain = list(range(len(graph.nodes)))
    if simulate(graph, plain).peak <= budget:
        return Solution(plain, simulate(graph, plain), method, graph.cost, True, time.monotonic() - begin)
    if budget < lower_bound(graph):
        raise _too_small(graph, budget, seconds)
    names = [method] if method in HEURISTICS else list(HEURISTICS)
    found = {name: schedule for name in names if (schedule := HEURISTICS[name](graph, budget)) is not None}
    seed = cheapest(graph, [*found.values(), plain], budget)
    assert seed is not None
    name = next((name for name, schedule in found.items() if schedule == seed), method)
    exact: Found | None = None
    if method == "optimal" or (method == "auto" and len(plain) <= MOST_SOLVED):
        exact = optimal_schedule(graph, budget, seconds - (time.monotonic() - begin), seed)
        if exact is not None and cheapest(graph, [exact.schedule, seed], budget) == exact.schedule:
            seed, name = exact.schedule, "optimal"
    outcome = simulate(graph, seed)
    if outcome.peak > budget:
        raise _too_small(graph, budget, seconds)
    bound = None if exact is None else exact.bound
    proven = exact is not None and exact.proven and name == "optimal"
    return Solution(seed, outcome, name, bound, proven, time.monotonic() - begin)


def lower_bound(graph: TrainingGraph) -> int:
    """Bytes that any schedule holds: of some node its operands, its result and what it works in."""
    return graph.fixed_mem + max(
        (
            node.mem + node.work + sum(graph.nodes[operand].mem for operand in graph.operands[place])
            for place, node in enumerate(graph.nodes)
        ),
        default=0,
    )


def _too_small(graph: TrainingGraph, budget: int, seconds: float) -> RecomputeError:
    """The error for a budget that is not met."""
    floor = lower_bound(graph)
    known = [list(range(len(graph.nodes)))]
    known += [found for heuristic in HEURISTICS.values() if (found := heuristic(graph, floor)) is not None]
    seed: Sequence[int] = min(known, key=lambda schedule: simulate(graph, schedule).peak)
    if len(graph.nodes) <= MOST_SOLVED and simulate(graph, seed).peak > floor:
        seed = least_peak(graph, seconds, seed)
    least = simulate(graph, seed).peak
    return RecomputeError(
        f"no schedule was found that holds at most {budget:,} bytes ({bytes_text(budget)})",
        notes=(
            f"the least that was found holds {least:,} bytes ({bytes_text(least)})",
            f"none holds less than {floor:,}: a node with its operands and its result does",
        ),
        do=f"give a budget of at least {least:,} bytes",
    )
