"""The cheapest schedule that fits, by a method or by the best of several."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from irpar.analysis.cp_sat import solver_module
from irpar.units import bytes_text

from .chain import Chain, chain_schedules
from .chen import sqrt_schedules
from .retention import BoundedSchedule, least_peak, optimal_schedule
from .saved_sets import cheapest, sweep_schedules
from .simulation import Outcome, lower_bound, simulate
from .training_graph import RecomputeError, TrainingGraph

HEURISTICS = ("sqrt", "sweep", "chain")
"""Methods that search no further than they were written to."""
METHODS = ("auto", "optimal", *HEURISTICS)
"""auto: the best of all, each as far as the size of the graph lets it help."""
MOST_SOLVED = 1200
"""Nodes of a graph that CP-SAT improves on as a whole."""
HEURISTIC_SHARE, ONLY_SHARE = 0.6, 0.75
"""Of the time may go to the heuristics; where nothing is searched after them."""
LEAST_BUDGETS = 4
"""That the chain is planned with to find what holds least, from what any schedule holds to what it is without."""
LEAST_SHARE = 0.6
"""And, where nothing fits that they find, to what holds least."""


@dataclass(frozen=True)
class Solution:
    """A schedule that fits.

    Attributes:
        schedule: nodes in the order in which they run.
        outcome: its peak and cost.
        method: which of the methods found it.
        bound: what no schedule that CP-SAT looks at costs less than; None where nothing is known.
        proven: whether nothing is cheaper, of schedules in the order of the graph with few computations a node, and of
            graphs of more than a few nodes with the forward pass repeated in the backward pass only.
        seconds: that it took.
    """

    schedule: list[int]
    outcome: Outcome
    method: str
    bound: int | None
    proven: bool
    seconds: float


class TooSmallError(RecomputeError):
    """A budget for which no schedule was found.

    Attributes:
        schedule: the one that was found to hold least.
    """

    def __init__(self, graph: TrainingGraph, budget: int, schedule: list[int]) -> None:
        least = simulate(graph, schedule).peak
        super().__init__(
            f"no schedule was found that holds at most {budget:,} bytes ({bytes_text(budget)})",
            notes=(
                f"the least that was found holds {least:,} bytes ({bytes_text(least)})",
                f"none holds less than {lower_bound(graph):,}: a node with its operands and its result does",
            ),
            do=f"give a budget of at least {least:,} bytes, or more time to search",
        )
        self.schedule = schedule


def solve(graph: TrainingGraph, budget: int, method: str = "auto", seconds: float = 30) -> Solution:
    """The cheapest schedule that was found whose peak fits a budget.

    Args:
        graph: it.
        budget: bytes, what is held throughout included.
        method: one of METHODS.
        seconds: of search, by all that searches together. Where they are ample, the same schedule is found each time.

    Raises:
        TooSmallError: no schedule that was found fits: with the least that can be held, as far as was found.
    """
    plain = list(range(len(graph.nodes)))
    if simulate(graph, plain).peak <= budget:
        return Solution(plain, simulate(graph, plain), method, graph.cost, True, 0)
    solver_module()  # Imported once, which is no search.
    begin = time.monotonic()
    end = begin + seconds
    names = [method] if method in HEURISTICS else list(HEURISTICS)
    floor = lower_bound(graph)
    heuristics = Heuristics(graph)
    is_searched = method == "optimal" or (method == "auto" and len(plain) <= MOST_SOLVED)
    until = begin + seconds * (HEURISTIC_SHARE if is_searched else ONLY_SHARE)
    found = _by_heuristics(heuristics, max(budget, floor), names, until)
    best = _best(graph, [*found.values(), plain], budget)
    is_hopeless = budget < floor
    if simulate(graph, best).peak > budget:
        # Not the lowest of what was found above the budget: the least that is said to do must be found again.
        small, is_least = _smallest(heuristics, budget, end)
        found[method] = best = _best(graph, small, budget)
        is_hopeless |= is_least and simulate(graph, best).peak > budget
    exact: BoundedSchedule | None = None
    left = end - time.monotonic()
    if is_searched and not is_hopeless and left > 0:
        exact = optimal_schedule(graph, budget, left, best)
        if exact is not None:
            found["optimal"] = exact.schedule
            best = _best(graph, [exact.schedule, best], budget)
    outcome = simulate(graph, best)
    if outcome.peak > budget:
        raise TooSmallError(graph, budget, best)
    name = next((name for name, schedule in found.items() if schedule == best), method)
    bound = None if exact is None else exact.bound
    proven = exact is not None and exact.proven and outcome.cost == simulate(graph, exact.schedule).cost
    return Solution(best, outcome, name, bound, proven, time.monotonic() - begin)


class Heuristics:
    """What the heuristics find for a graph; what does not depend on a budget is looked for once.

    Args:
        graph: it.
    """

    def __init__(self, graph: TrainingGraph) -> None:
        self.graph = graph
        self._found: dict[str, list[list[int]]] = {}
        self._chain: Chain | None = None

    def schedules(self, name: str, budget: int, end: float = inf) -> list[list[int]]:
        """Those of one, for a budget, found before a time of `time.monotonic`."""
        if name == "chain":
            self._chain = self._chain or Chain(self.graph, end)
            self._chain.end = end
            return chain_schedules(self._chain, budget)
        if name not in self._found:
            self._found[name] = (sqrt_schedules if name == "sqrt" else sweep_schedules)(self.graph, end)
        return self._found[name]


def _by_heuristics(heuristics: Heuristics, budget: int, names: Sequence[str], end: float) -> dict[str, list[int]]:
    """What they find, each in its share of the time, of which what one leaves goes to the others."""
    found: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        now = time.monotonic()
        schedules = heuristics.schedules(name, budget, now + (end - now) / (len(names) - place))
        schedule = cheapest(heuristics.graph, schedules, budget)
        if schedule is not None:
            found[name] = schedule
    return found


def _best(graph: TrainingGraph, schedules: Sequence[list[int]], budget: int) -> list[int]:
    best = cheapest(graph, schedules, budget)
    assert best is not None
    return best


def _smallest(heuristics: Heuristics, budget: int, end: float) -> tuple[list[list[int]], bool]:
    """Schedules that hold little: the same whatever the budget, as far as time lasts; the least where none else fits.

    So that what is said to be the least that was found can be had where it is asked for. And whether none holds less.
    """
    graph = heuristics.graph
    plain = list(range(len(graph.nodes)))
    floor, most = lower_bound(graph), simulate(graph, plain).peak
    now = time.monotonic()
    stop = now + (end - now) * LEAST_SHARE
    found = [plain, *heuristics.schedules("sqrt", floor, stop), *heuristics.schedules("sweep", floor, stop)]
    for number in range(LEAST_BUDGETS):
        found += heuristics.schedules("chain", floor + (most - floor) * number // LEAST_BUDGETS, stop)
    seed = _best(graph, found, 0)
    left = stop - time.monotonic()
    if left > 0 and len(graph.nodes) <= MOST_SOLVED and simulate(graph, seed).peak > max(floor, budget):
        least, is_least = least_peak(graph, left, seed, max(floor, budget))
        return [*found, list(least)], is_least
    return found, False
