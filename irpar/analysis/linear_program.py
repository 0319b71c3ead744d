"""Linear programs, by the simplex method of OR-Tools' GLOP, which takes the same steps each time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import numpy as np

from irpar.process import import_native

Array = np.ndarray[Any, Any]

_TOLERANCE = 1e-6
"""Of what something costs, or of the largest cost of a variable: how far rounding may lead."""


class _Modules:
    """OR-Tools' solver and what it takes and gives, imported when they are first needed.

    What stands above them, its classes of models, takes several times as long as the solver to turn a model and a basis
    into these messages and back.
    """

    def __init__(self) -> None:
        names = ("model", "model_parameters", "parameters", "result", "solution", "callback")
        self.model, self.begin, self.parameters, self.result, self.solution, self.callback = (
            import_native(f"ortools.math_opt.{name}_pb2") for name in names
        )
        self.solver = import_native("ortools.math_opt.core.python.solver")


_modules = cache(_Modules)


@dataclass(frozen=True)
class Solved:
    """A solution.

    Attributes:
        least: nothing costs less; infinite where no values fit.
        values: of each variable; 0 where none fit.
    """

    least: float
    values: Array


class LinearProgram:
    """Variables between two bounds, rows that hold sums of them between two others, and what each variable costs."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._least: list[float] = []
        self._most: list[float] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._factors: list[float] = []
        self._basis: tuple[list[int], list[int]] | None = None
        """Of the last solution: the status of each variable and of each row that there were."""

    def variable(self, cost: float = 0.0, lower: float = 0.0, upper: float = 1.0) -> int:
        """A variable; returns its number."""
        self._costs.append(cost)
        self._lower.append(lower)
        self._upper.append(upper)
        return len(self._costs) - 1

    def row(self, *terms: Mapping[int, float], least: float = -math.inf, most: float = math.inf) -> int:
        """Hold a sum between bounds; returns the number of the row.

        Args:
            terms: number of a variable to its factor; what several have is added up.
            least, most: the bounds.
        """
        number = len(self._least)
        self._least.append(least)
        self._most.append(most)
        entries: dict[int, float] = {}
        for each in terms:
            for variable, factor in each.items():
                entries[variable] = entries.get(variable, 0.0) + factor
        for variable in sorted(entries):
            self._rows.append(number)
            self._columns.append(variable)
            self._factors.append(entries[variable])
        return number

    def set_bounds(self, variable: int, lower: float, upper: float) -> None:
        """Change the bounds of a variable."""
        self._lower[variable], self._upper[variable] = lower, upper

    def set_most(self, row: int, most: float) -> None:
        """Change the upper bound of a row."""
        self._most[row] = most

    def solve(self, seconds: float) -> Solved | None:
        """The values for which all variables cost least; None where they are not found in time, or at all."""
        modules = _modules()
        unit = max(map(abs, self._costs), default=0.0) or 1.0
        parameters = modules.parameters.SolveParametersProto(lp_algorithm=modules.parameters.LP_ALGORITHM_DUAL_SIMPLEX)
        parameters.time_limit.FromTimedelta(timedelta(seconds=max(seconds, 0.0)))
        found = modules.solver.solve(
            self._written(modules.model.ModelProto(), unit),
            modules.parameters.SOLVER_TYPE_GLOP,
            modules.parameters.SolverInitializerProto(),
            parameters,
            self._begin(modules),
            None,
            modules.callback.CallbackRegistrationProto(),
            None,
            None,
        )
        if found.termination.reason == modules.result.TERMINATION_REASON_INFEASIBLE:
            return Solved(math.inf, np.zeros(len(self._costs)))
        if found.termination.reason != modules.result.TERMINATION_REASON_OPTIMAL:
            return None
        solution = found.solutions[0]
        self._basis = list(solution.basis.variable_status.values), list(solution.basis.constraint_status.values)
        values = np.zeros(len(self._costs))
        of_variables = solution.primal_solution.variable_values
        values[list(of_variables.ids)] = list(of_variables.values)
        least = found.termination.objective_bounds.dual_bound
        return Solved((least - max(1.0, abs(least)) * _TOLERANCE) * unit, values)

    def _begin(self, modules: _Modules) -> Any:
        """The basis of the last solution, and of what was added since: only new rows are broken then."""
        begin = modules.begin.ModelSolveParametersProto()
        for unread in (begin.dual_values_filter, begin.reduced_costs_filter):
            unread.filter_by_ids = True
        if self._basis is None:
            return begin
        status = modules.solution
        known, held = self._basis
        basis = begin.initial_basis
        of_new = [status.BASIS_STATUS_AT_LOWER_BOUND] * (len(self._costs) - len(known))
        _put(basis.variable_status, [*known, *of_new])
        of_new = [status.BASIS_STATUS_BASIC] * (len(self._least) - len(held))
        _put(basis.constraint_status, [*held, *of_new])
        basis.basic_dual_feasibility = status.SOLUTION_STATUS_UNDETERMINED
        return begin

    def _written(self, model: Any, unit: float) -> Any:
        """The program as OR-Tools reads it, costs divided by a unit."""
        count, rows = len(self._costs), len(self._least)
        variables, constraints, matrix = model.variables, model.linear_constraints, model.linear_constraint_matrix
        variables.ids.extend(range(count))
        variables.lower_bounds.extend(self._lower)
        variables.upper_bounds.extend(self._upper)
        variables.integers.extend([False] * count)
        costs = np.array(self._costs, float) / unit
        some = np.flatnonzero(costs)
        model.objective.linear_coefficients.ids.extend(some.tolist())
        model.objective.linear_coefficients.values.extend(costs[some].tolist())
        constraints.ids.extend(range(rows))
        constraints.lower_bounds.extend(self._least)
        constraints.upper_bounds.extend(self._most)
        matrix.row_ids.extend(self._rows)
        matrix.column_ids.extend(self._columns)
        matrix.coefficients.extend(self._factors)
        return model


def _put(vector: Any, values: Sequence[int]) -> None:
    """Let a message have a value for each number from 0 on."""
    vector.ids.extend(range(len(values)))
    vector.values.extend(values)
