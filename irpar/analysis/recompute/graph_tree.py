"""Schedules of a training graph and of the bodies that its nodes hold, which share a budget."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from .simulation import Outcome, held_bytes, lower_bound, simulate
from .solution import Solution, TooSmallError, solve
from .training_graph import TrainingGraph

Schedules = list[list[int]]
"""Of a graph and of all bodies in it, each holder before what it holds."""

BODIES_SHARE = 0.5
"""Of the time goes to the bodies alone, where the graph around them could be recomputed instead."""
ALONE_SHARE = 0.8
"""Where it could not."""
AROUND_SHARE = 0.6
"""Of what is then left goes to the graph around bodies alone, the rest to both together."""


@dataclass(frozen=True)
class GraphTree:
    """A training graph, and those of the bodies that its nodes hold.

    Attributes:
        graph: it, without what bodies hold. Costs in a body are those of all trips.
        bodies: each with the node that holds it: what it holds is held beside all that is held while that node runs.
    """

    graph: TrainingGraph
    bodies: "tuple[tuple[int, GraphTree], ...]" = ()

    @cached_property
    def size(self) -> int:
        """How many graphs there are, itself included."""
        return 1 + sum(body.size for _, body in self.bodies)

    @cached_property
    def plain(self) -> Schedules:
        """The schedules in which nothing runs again."""
        own = list(range(len(self.graph.nodes)))
        return [own, *(schedule for _, body in self.bodies for schedule in body.plain)]

    def apart(self, schedules: Schedules) -> list[Schedules]:
        """Those of each body."""
        left = iter(schedules[1:])
        return [list(islice(left, body.size)) for _, body in self.bodies]

    def around(self, peaks: Sequence[int]) -> TrainingGraph:
        """The graph with what its bodies hold at their peaks."""
        work: dict[int, int] = {}
        for (place, _), held in zip(self.bodies, peaks, strict=True):
            work[place] = max(work.get(place, 0), held)
        nodes = list(self.graph.nodes)
        for place, held in work.items():
            nodes[place] = replace(nodes[place], work=nodes[place].work + held)
        return replace(self.graph, nodes=tuple(nodes))

    def outcome(self, schedules: Schedules) -> Outcome:
        """What comes of schedules: the peak of the whole, and the cost of all."""
        inside = [body.outcome(each) for (_, body), each in zip(self.bodies, self.apart(schedules), strict=True)]
        own = simulate(self.around([each.peak for each in inside]), schedules[0])
        return Outcome(own.peak, own.cost + sum(each.cost for each in inside))


@dataclass(frozen=True)
class FoundSchedules:
    """Schedules that were found.

    Attributes:
        schedules: they.
        outcome: their peak and cost.
        method: the methods that found them.
        bound, proven: as of a solution, of a graph without bodies; of others nothing is known.
    """

    schedules: Schedules
    outcome: Outcome
    method: str
    bound: int | None = None
    proven: bool = False


def solve_tree(tree: GraphTree, budget: int, method: str, end: float) -> FoundSchedules:
    """The cheapest schedules that were found whose peak fits a budget; those that hold least where none do.

    What bodies are recomputed for is the room that is left where they run, and a body runs in each trip: so what is
    around them is recomputed instead where that costs less, and also where bodies alone do not fit.

        budget 10: x(4) Scan(x){ body that holds 8 }      the body is to hold 6

    Args:
        tree: what is scheduled.
        budget: bytes.
        method: one of METHODS.
        end: when to stop, by `time.monotonic`.
    """
    if not tree.bodies:
        return _alone(tree.graph, budget, method, end)
    plain = FoundSchedules(tree.plain, tree.outcome(tree.plain), method)
    if plain.outcome.peak <= budget:
        return replace(plain, proven=True, bound=plain.outcome.cost)
    peaks = [body.outcome(body.plain).peak for _, body in tree.bodies]
    is_choice = lower_bound(tree.around(peaks)) <= budget
    inner = _within(tree, tree.plain[0], budget, method, _after(BODIES_SHARE if is_choice else ALONE_SHARE, end))
    found = [inner]
    if is_choice:
        found.append(_around(tree, tree.plain, budget, method, _after(AROUND_SHARE, end)))
    best = _best(found, budget)
    if best.outcome.peak > budget:
        outer = _around(tree, inner.schedules, budget, method, _after(AROUND_SHARE, end))
        best = _best([best, outer, _within(tree, outer.schedules[0], budget, method, end)], budget)
    return best


def _after(share: float, end: float) -> float:
    """When a share of the time that is left is over."""
    now = time.monotonic()
    return now + (end - now) * share


def _best(found: Sequence[FoundSchedules], budget: int) -> FoundSchedules:
    return min(found, key=lambda each: (max(each.outcome.peak, budget), each.outcome.cost))


def _alone(graph: TrainingGraph, budget: int, method: str, end: float) -> FoundSchedules:
    """A graph without bodies."""
    one = _solved(graph, budget, method, end)
    return FoundSchedules([one.schedule], one.outcome, one.method, one.bound, one.proven)


def _solved(graph: TrainingGraph, budget: int, method: str, end: float) -> Solution:
    seconds = end - time.monotonic()
    try:
        return solve(graph, budget, method, seconds)
    except TooSmallError as error:
        return Solution(error.schedule, simulate(graph, error.schedule), method, None, False, seconds)


def _within(tree: GraphTree, schedule: list[int], budget: int, method: str, end: float) -> FoundSchedules:
    """Each body in the room that a schedule of what is around it leaves."""
    room: dict[int, int] = {}
    for place, held in zip(schedule, held_bytes(tree.graph, schedule), strict=True):
        room[place] = min(room.get(place, budget), budget - held)
    schedules, methods = [schedule], dict[str, None]()
    for number, (place, body) in enumerate(tree.bodies):
        found = solve_tree(body, room[place], method, _after(1 / (len(tree.bodies) - number), end))
        schedules += found.schedules
        if found.schedules != body.plain:
            methods[found.method] = None
    return FoundSchedules(schedules, tree.outcome(schedules), " and ".join(methods) or method)


def _around(tree: GraphTree, schedules: Schedules, budget: int, method: str, end: float) -> FoundSchedules:
    """The graph itself, around bodies that run as they are scheduled."""
    bodies = tree.apart(schedules)
    peaks = [body.outcome(each).peak for (_, body), each in zip(tree.bodies, bodies, strict=True)]
    one = _solved(tree.around(peaks), budget, method, end)
    made = [one.schedule, *schedules[1:]]
    return FoundSchedules(made, tree.outcome(made), one.method)
