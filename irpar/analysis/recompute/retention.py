"""The cheapest schedule by CP-SAT over retention intervals.

Moccasin (Bartan, Li, Teague, Lott & Dilkina, arXiv 2304.14463): each computation of a node is an interval, from when it
runs to when its result goes, and at any time the intervals together hold at most the budget. Before each new node of
the graph stands a stage, in which others run again in the order of the graph, each at most once (the schedules of
Checkmate; Jain et al., arXiv 1910.02653).

    times of three nodes    stage 0: 0    stage 1: 3 4    stage 2: 6 7 8    a new node i at 3 i + i; again v at 3 i + v
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from irpar.analysis.cp_sat import is_exact, is_proven, run, run_repeatably, solver_module, unit_of

from .simulation import simulate, without_idle
from .training_graph import TrainingGraph

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import BoolVarT, CpModel, CpSolver, CpSolverSolutionCallback, IntervalVar, IntVar

MOST_COMPUTATIONS = 4
"""Of a node, that are tried one after the other; of a graph of so few nodes that it is TINY as many as it has nodes."""
TINY = 16
SMALL = 32
"""Nodes of a graph of which everything may run again at any time; of larger ones the forward pass in the backward."""
MOST_AREA, MOST_BYTES = 1 << 61, 1 << 52
"""Bytes times steps fit 64 bits, and bytes a float: what is more is rounded."""
FIRST_SHARE = 0.6
"""Of the time goes to the first number of computations; each further one gets that of what is left."""


@dataclass(frozen=True)
class BoundedSchedule:
    """A schedule.

    Attributes:
        schedule: it.
        bound: no schedule with so many computations a node costs less, of those that are looked at.
        proven: whether it is the best of them; never said where bytes or costs had to be rounded.
    """

    schedule: list[int]
    bound: int
    proven: bool


def optimal_schedule(
    graph: TrainingGraph, budget: int, seconds: float, seed: Sequence[int] | None = None
) -> BoundedSchedule | None:
    """The cheapest schedule whose peak fits a budget, as far as time allows; None where none was found.

    Args:
        graph: it.
        budget: bytes.
        seconds: of search.
        seed: a schedule to begin with.
    """
    end = time.monotonic() + seconds
    best: BoundedSchedule | None = None
    most = _most_computations(graph)
    for computations in range(2, most + 1):
        left = end - time.monotonic()
        if left < min(1, seconds / 4) and best is not None:
            break
        is_last = computations == most
        until = end - (0 if is_last else left * (1 - FIRST_SHARE))
        model = _Model(graph, budget, computations)
        start = best.schedule if best is not None else seed
        if start is not None:
            model.begin_with(start)
        # It took time to write the model too.
        found = model.cheapest(until - time.monotonic())
        if found is None:
            continue
        if best is not None and _cost(graph, found) >= _cost(graph, best):
            # One more computation a node does not help: what was proven of fewer stands.
            best = BoundedSchedule(best.schedule, best.bound, best.proven and found.proven)
            break
        best = found
    return best


def least_peak(graph: TrainingGraph, seconds: float, seed: Sequence[int], target: int) -> tuple[Sequence[int], bool]:
    """The schedule that holds least, as far as time allows; the seed where none that was found holds less.

    Args:
        graph: it.
        seconds: of search. With as many the same is found again: see `irpar.analysis.cp_sat.run_repeatably`.
        seed: a schedule to begin with.
        target: bytes that are few enough.

    Returns:
        It, and whether `optimal_schedule` finds none that holds less.
    """
    end = time.monotonic() + seconds
    model = _Model(graph, simulate(graph, seed).peak, _most_computations(graph) if len(graph.nodes) <= SMALL else 2)
    model.begin_with(seed)
    found, is_least = model.smallest(end - time.monotonic(), target)
    best = min([seed, *found[-1:]], key=lambda schedule: simulate(graph, schedule).peak)
    return best, is_least and model.is_exact and len(graph.nodes) <= SMALL


def _most_computations(graph: TrainingGraph) -> int:
    return max(MOST_COMPUTATIONS, len(graph.nodes) if len(graph.nodes) <= TINY else 0)


def _cost(graph: TrainingGraph, found: BoundedSchedule) -> int:
    return simulate(graph, found.schedule).cost


@dataclass(frozen=True)
class _Interval:
    """A computation: when it runs, the last time that its result is read, and whether there is one; None: there is."""

    start: "IntVar | int"
    end: "IntVar"
    there: "BoolVarT | None"


class _Model:
    """Retention intervals of a graph, each node computed at most so often."""

    def __init__(self, graph: TrainingGraph, budget: int, computations: int) -> None:
        self.graph = graph
        self.budget = budget
        self.model: CpModel = solver_module().CpModel()
        self.width = len(graph.nodes)
        self.reach = list(self._reaches())
        self.times = [list(self._stages(place)) for place in range(self.width)]
        self.intervals = [self._intervals(place, computations) for place in range(self.width)]
        self._join()
        self.reads: list[tuple[BoolVarT, int, int, int, int]] = []
        for place in range(self.width):
            for number in range(len(self.intervals[place])):
                for operand in graph.operands[place]:
                    self._read(place, number, operand)
        self._hold()

    def _is_repeatable(self, place: int) -> bool:
        return self.graph.may_repeat(place) and not (self._is_restricted and self.graph.nodes[place].bwd)

    @property
    def _is_restricted(self) -> bool:
        """Whether only the forward pass runs again, and only in the backward pass."""
        return self.width > SMALL and self.graph.backward < self.width

    def _reaches(self) -> Iterator[int]:
        """Of each node the last stage in which its result may be read."""
        reach = list(range(self.width))
        for place in reversed(range(self.width)):
            if self.graph.nodes[place].keep:
                reach[place] = self.width - 1
            for reader in self.graph.readers[place]:
                reach[place] = max(reach[place], reach[reader] if self._is_repeatable(reader) else reader)
            results = self.graph.together[place]
            if place == results[0]:
                reach[place : results[-1] + 1] = [max(reach[one] for one in results)] * len(results)
        return iter(reach)

    def _stages(self, place: int) -> Iterator[int]:
        """When a node may run again."""
        if self._is_repeatable(place):
            first = self.graph.together[place][-1] + 1
            for stage in range(
                max(first, self.graph.backward) if self._is_restricted else first, self.reach[place] + 1
            ):
                if not self.graph.nodes[stage].joined:
                    yield stage * self.width + place

    def _intervals(self, place: int, computations: int) -> list[_Interval]:
        cp_model = solver_module()
        first = place * self.width + place
        last = self.reach[place] * self.width + self.width
        end = last if self.graph.nodes[place].keep else first
        found = [_Interval(first, self.model.new_int_var(end, last, ""), None)]
        for _ in range(min(computations - 1, len(self.times[place]))):
            there = self.model.new_bool_var("")
            start = self.model.new_int_var_from_domain(cp_model.Domain.from_values(self.times[place]), "")
            until = self.model.new_int_var(self.times[place][0], last, "")
            self.model.add(start <= until)
            self.model.add(start > found[-1].end).only_enforce_if(there)
            before = found[-1].there
            if before is not None:
                self.model.add_implication(there, before)
            found.append(_Interval(start, until, there))
        return found

    def _join(self) -> None:
        """The results of a node are computed together."""
        for place, node in enumerate(self.graph.nodes):
            if node.joined:
                for one, before in zip(self.intervals[place], self.intervals[place - 1], strict=True):
                    if one.there is not None and before.there is not None:
                        self.model.add(one.there == before.there)
                        self.model.add(one.start == before.start + 1)

    def _read(self, place: int, number: int, operand: int) -> None:
        """A computation reads a result that is there when it runs."""
        reader = self.intervals[place][number]
        options = []
        for which, source in enumerate(self.intervals[operand]):
            if len(self.intervals[operand]) == 1:
                held = self.model.add(source.end >= reader.start)
                if reader.there is not None:
                    held.only_enforce_if(reader.there)
                return
            chosen = self.model.new_bool_var("")
            self.model.add(source.end >= reader.start).only_enforce_if(chosen)
            if source.there is not None:
                self.model.add(source.start < reader.start).only_enforce_if(chosen)
                self.model.add_implication(chosen, source.there)
            options.append(chosen)
            self.reads.append((chosen, operand, which, place, number))
        if reader.there is not None:
            options.append(reader.there.negated())
        self.model.add_bool_or(options)

    def _hold(self) -> None:
        """At any time the results that are there fit the room, with what a node holds while it runs."""
        sizes = [
            (one, nbytes, whole)
            for place, node in enumerate(self.graph.nodes)
            for one in self.intervals[place]
            for nbytes, whole in ((node.mem, True), (node.work, False))
            if nbytes
        ]
        all_bytes = [nbytes for _, nbytes, _ in sizes]
        self.unit = unit_of(all_bytes, min(MOST_BYTES, MOST_AREA // (self.width * self.width + self.width + 1)))
        self.is_exact = is_exact(self.unit, all_bytes)
        self.room = self.model.new_int_var(0, max(0, self.budget - self.graph.fixed_mem) // self.unit, "")
        held = [self._held(one, whole) for one, _, whole in sizes]
        self.model.add_cumulative(held, [-(-nbytes // self.unit) for nbytes in all_bytes], self.room)

    def _held(self, one: _Interval, whole: bool) -> "IntervalVar":
        """When a computation holds something: to its last use, or while it runs."""
        if not whole:
            if one.there is None:
                return self.model.new_fixed_size_interval_var(one.start, 1, "")
            return self.model.new_optional_fixed_size_interval_var(one.start, 1, one.there, "")
        size = self.model.new_int_var(1, self.width * self.width + self.width, "")
        if one.there is None:
            return self.model.new_interval_var(one.start, size, one.end + 1, "")
        return self.model.new_optional_interval_var(one.start, size, one.end + 1, one.there, "")

    # -- search ----------------------------------------------------------------------------------------------------

    def begin_with(self, schedule: Sequence[int]) -> None:
        """Let the search begin with a schedule; its repetitions are in the order of the graph within a stage."""
        runs, ends = self._runs(schedule)
        for place, intervals in enumerate(self.intervals):
            for number, one in enumerate(intervals):
                there = number < len(runs[place])
                if one.there is not None:
                    self.model.add_hint(one.there, there)
                    if there:
                        self.model.add_hint(one.start, runs[place][number])  # type: ignore[arg-type]
                if there:
                    self.model.add_hint(one.end, ends[place][number])
        for chosen, operand, which, place, number in self.reads:
            if number < len(runs[place]) and which < len(runs[operand]):
                when = runs[place][number]
                newest = max((index for index, run in enumerate(runs[operand]) if run < when), default=0)
                self.model.add_hint(chosen, which == newest)
            else:
                self.model.add_hint(chosen, False)

    def _runs(self, schedule: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
        """Of each node the times at which a schedule runs it, and until when each result is read."""
        runs: list[list[int]] = [[] for _ in range(self.width)]
        ends: list[list[int]] = [[] for _ in range(self.width)]
        stage = 0
        for place in schedule:
            when = stage * self.width + place
            for operand in self.graph.operands[place]:
                ends[operand][-1] = when
            runs[place].append(when)
            ends[place].append(when)
            stage += place == stage
        for place, node in enumerate(self.graph.nodes):
            if node.keep:
                ends[place][-1] = self.reach[place] * self.width + self.width
        return runs, ends

    def cheapest(self, seconds: float) -> BoundedSchedule | None:
        """The cheapest schedule that fits."""
        repeated = [
            (self.graph.nodes[place].cost, one.there)
            for place, intervals in enumerate(self.intervals)
            for one in intervals
            if one.there is not None
        ]
        costs = [cost for cost, _ in repeated]
        unit = unit_of(costs)
        self.model.minimize(sum(cost // unit * there for cost, there in repeated))
        solver = run(self.model, seconds)
        if solver is None:
            return None
        bound = self.graph.cost + int(solver.best_objective_bound) * unit
        # What is rounded proves nothing.
        return BoundedSchedule(
            self._schedule(solver), bound, is_proven(solver) and is_exact(unit, costs) and self.is_exact
        )

    def smallest(self, seconds: float, target: int) -> tuple[list[list[int]], bool]:
        """Schedules with a lower and lower peak, down to a target; and whether the last has the least."""
        self.model.minimize(self.room)
        enough = max(0, target - self.graph.fixed_mem) // self.unit
        return run_repeatably(self.model, seconds, enough, self._schedule)

    def _schedule(self, solver: "CpSolver | CpSolverSolutionCallback") -> list[int]:
        found = [
            (solver.value(one.start), place)
            for place, intervals in enumerate(self.intervals)
            for one in intervals
            if one.there is None or solver.value(one.there)
        ]
        return without_idle(self.graph, [place for _, place in sorted(found)])
