"""How CP-SAT is run: for so long, and the same way each time as far as time allows."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import cache
from math import gcd
from typing import TYPE_CHECKING, Any, TypeVar

from irpar.process import import_native

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver
    from ortools.sat.python.cp_model import CpSolverSolutionCallback as Callback

T = TypeVar("T")

WORKERS = 2
"""Threads of a search, if nothing else is said."""
STEADY, EARLY = 0.1, 0.6
"""A search that is to be repeatable ends after so many units of work a second, as CP-SAT counts them: a third of
the time on a core of 2025. Where they take longer, what is found in so much of the time counts."""
LARGEST = 1 << 40
"""Costs and bytes are scaled so that a sum of them is below: products of them fit 64 bits."""


@cache
def solver_module() -> Any:
    """OR-Tools' module of CP-SAT, imported when it is first needed: that takes long."""
    return import_native("ortools.sat.python.cp_model")


def run(model: "CpModel", seconds: float, workers: int = WORKERS) -> "CpSolver | None":
    """Search for so long; None where nothing was found.

    Args:
        model: what is searched.
        seconds: the most that it takes.
        workers: threads; 0: one for each core.
    """
    solver = _solver(seconds, workers)
    return solver if _found(_solve(solver, model)) else None


def run_repeatably(
    model: "CpModel", seconds: float, target: int, read: "Callable[[CpSolver | Callback], T]"
) -> tuple[list[T], bool]:
    """All that is found on the way to the least objective, by one thread: the same each time as far as time lasts.

    Args:
        model: what is searched; it has an objective.
        seconds: the most that it takes.
        target: an objective that is good enough.
        read: what is wanted of a solution.

    Returns:
        What was read, the best last. What came late is not in it, but where it is good enough or nothing is better: so
        another search that has as much time, on a machine that is not much busier, finds it again. And whether nothing
        is better than the last.
    """
    cp_model = solver_module()
    solver = _solver(seconds, workers=1)
    solver.parameters.max_deterministic_time = seconds * STEADY
    found: list[T] = []

    class Each(cp_model.CpSolverSolutionCallback):  # type: ignore[misc, name-defined]
        def on_solution_callback(self) -> None:
            is_enough = self.objective_value <= target
            if is_enough or self.wall_time <= seconds * EARLY:
                found.append(read(self))
            if is_enough:
                self.stop_search()

    is_least = bool(_solve(solver, model, Each()) == cp_model.OPTIMAL)
    if is_least:
        found.append(read(solver))
    return found, is_least


def _solver(seconds: float, workers: int) -> "CpSolver":
    solver: CpSolver = solver_module().CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.max_time_in_seconds = max(seconds, 0.05)
    solver.parameters.random_seed = 0
    solver.parameters.catch_sigint_signal = False
    return solver


def _solve(solver: "CpSolver", model: "CpModel", callback: "Callback | None" = None) -> int:
    """Search, in a thread of its own: so signals that end the process reach it, which then ends the search."""
    outcome: Future[int] = Future()

    def search() -> None:
        if outcome.set_running_or_notify_cancel():
            try:
                outcome.set_result(int(solver.solve(model, callback)))
            except BaseException as error:
                outcome.set_exception(error)

    try:
        threading.Thread(target=search, name="CP-SAT").start()
        return outcome.result()
    except BaseException:
        # A signal may come while the thread starts: a search that has not begun does not hear that it is to stop.
        if not outcome.cancel():
            while not outcome.done():
                solver.stop_search()
                wait([outcome], timeout=0.05)
        raise


def _found(status: int) -> bool:
    cp_model = solver_module()
    return status in (cp_model.OPTIMAL, cp_model.FEASIBLE)


def is_proven(solver: "CpSolver") -> bool:
    """Whether nothing better than what was found is possible."""
    return bool(solver.objective_value <= solver.best_objective_bound + 1e-6)


def unit_of(numbers: Iterable[int], largest: int = LARGEST) -> int:
    """By what numbers are divided so that their sum is at most `largest`: what all are multiples of, or more."""
    each = list(numbers)
    common = gcd(*each) or 1
    return common * max(1, -(-sum(each) // (common * largest)))


def is_exact(unit: int, numbers: Iterable[int]) -> bool:
    """Whether nothing is rounded where numbers are divided by a unit."""
    return all(number % unit == 0 for number in numbers)
