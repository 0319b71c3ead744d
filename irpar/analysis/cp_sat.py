"""How CP-SAT is run: for so long, and the same way each time as far as time allows."""

from typing import TYPE_CHECKING, Any

from irpar.process import import_native

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver

WORKERS = 2
"""Threads of a search, if nothing else is said."""
LARGEST = 1 << 40
"""Costs and bytes are scaled so that a sum of them is below: products of them fit 64 bits."""


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
    cp_model = solver_module()
    solver: CpSolver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.max_time_in_seconds = max(seconds, 0.05)
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    return solver if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None


def is_proven(solver: "CpSolver") -> bool:
    """Whether nothing better than what was found is possible."""
    return bool(solver.objective_value <= solver.best_objective_bound + 1e-6)


def unit_of(total: int) -> int:
    """By what numbers of that sum are divided."""
    return max(1, -(-total // LARGEST))
