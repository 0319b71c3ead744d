"""How CP-SAT is run: on few cores, for so long, and the same way each time as far as time allows."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver

WORKERS = 2
"""Threads of a search."""
LARGEST = 1 << 40
"""Costs and bytes are scaled so that a sum of them is below: products of them fit 64 bits."""


def run(model: "CpModel", seconds: float) -> "CpSolver | None":
    """Search for so long; None where nothing was found."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = WORKERS
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
