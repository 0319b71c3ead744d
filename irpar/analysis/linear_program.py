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
"""Of what something costs, or of the unit of costs: how far rounding may lead."""


class _Modules:
    """OR-Tools' solver and what it takes and gives, imported when they are first needed.

    What stands above them, its classes of models, takes several times as long as the solver to turn a model and a basis
    into these messages and back.
    """

    def __init__(self) -> None:
        names = ("model", "model_parameters", "model_update", "parameters", "result", "solution", "callback")
        self.model, self.begin, self.update, self.parameters, self.result, self.solution, self.callback = (
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
        self._solver: Any = None
        """That knows the program as it was at the last solution."""
        self._unit = 1.0
        """Of costs, the largest that there was at the first solution."""
        self._known = (0, 0, 0)
        """How many variables, rows and factors it knows."""
        self._changed: set[int] = set()
        """Rows whose bounds it does not know."""

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

    def set_bounds(self, row: int, least: float, most: float) -> None:
        """Change the bounds of a row."""
        self._least[row], self._most[row] = least, most
        self._changed.add(row)

    def solve(self, seconds: float) -> Solved | None:
        """The values for which all variables cost least; None where they are not found in time, or at all."""
        if seconds <= 0:
            return None
        modules = _modules()
        self._tell(modules)
        parameters = modules.parameters.SolveParametersProto(lp_algorithm=modules.parameters.LP_ALGORITHM_DUAL_SIMPLEX)
        parameters.time_limit.FromTimedelta(timedelta(seconds=seconds))
        found = self._solver.solve(
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
        return Solved((least - max(1.0, abs(least)) * _TOLERANCE) * self._unit, values)

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

    def _tell(self, modules: _Modules) -> None:
        """Let the solver know what was added or changed since the last solution."""
        if self._solver is None:
            self._unit = max(map(abs, self._costs), default=0.0) or 1.0
            model = modules.model.ModelProto()
            objective = model.objective.linear_coefficients
            self._add(model.variables, model.linear_constraints, objective, model.linear_constraint_matrix)
            self._solver = modules.solver.new(
                modules.parameters.SOLVER_TYPE_GLOP, model, modules.parameters.SolverInitializerProto()
            )
        else:
            update = modules.update.ModelUpdateProto()
            rows = sorted(row for row in self._changed if row < self._known[1])
            changed = update.linear_constraint_updates
            for vector, bounds in ((changed.lower_bounds, self._least), (changed.upper_bounds, self._most)):
                vector.ids.extend(rows)
                vector.values.extend([bounds[row] for row in rows])
            objective = update.objective_updates.linear_coefficients
            self._add(
                update.new_variables, update.new_linear_constraints, objective, update.linear_constraint_matrix_updates
            )
            if not self._solver.update(update):  # It knows no such change: another one begins.
                self._solver, self._known = None, (0, 0, 0)
                self._tell(modules)
        self._changed.clear()
        self._known = len(self._costs), len(self._least), len(self._factors)

    def _add(self, variables: Any, constraints: Any, objective: Any, matrix: Any) -> None:
        """Write what the solver does not know yet into messages, costs divided by a unit."""
        variable, row, factor = self._known
        count = len(self._costs) - variable
        variables.ids.extend(range(variable, len(self._costs)))
        variables.lower_bounds.extend(self._lower[variable:])
        variables.upper_bounds.extend(self._upper[variable:])
        variables.integers.extend([False] * count)
        costs = np.array(self._costs[variable:], float) / self._unit
        some = np.flatnonzero(costs)
        objective.ids.extend((some + variable).tolist())
        objective.values.extend(costs[some].tolist())
        constraints.ids.extend(range(row, len(self._least)))
        constraints.lower_bounds.extend(self._least[row:])
        constraints.upper_bounds.extend(self._most[row:])
        matrix.row_ids.extend(self._rows[factor:])
        matrix.column_ids.extend(self._columns[factor:])
        matrix.coefficients.extend(self._factors[factor:])


def _put(vector: Any, values: Sequence[int]) -> None:
    """Let a message have a value for each number from 0 on."""
    vector.ids.extend(range(len(values)))
    vector.values.extend(values)
