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
"""Of what something costs: how far rounding may lead."""


@cache
def _modules() -> tuple[Any, Any]:
    """OR-Tools' modules of models and of what they are written as, imported when they are first needed."""
    return import_native("ortools.math_opt.python.mathopt"), import_native("ortools.math_opt.model_pb2")


@dataclass(frozen=True)
class Solved:
    """A solution.

    Attributes:
        least: nothing costs less.
        values: of each variable.
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
        self._entries: dict[tuple[int, int], float] = {}
        self._basis: tuple[list[Any], list[Any]] | None = None
        """Of the last solution: the status of each variable and of each row that there were."""

    def variable(self, cost: float = 0.0, lower: float = 0.0, upper: float = 1.0) -> int:
        """A variable; returns its number."""
        self._costs.append(cost)
        self._lower.append(lower)
        self._upper.append(upper)
        return len(self._costs) - 1

    def row(self, *terms: Mapping[int, float], least: float = -math.inf, most: float = math.inf) -> None:
        """Hold a sum between bounds.

        Args:
            terms: number of a variable to its factor; what several have is added up.
            least, most: the bounds.
        """
        number = len(self._least)
        self._least.append(least)
        self._most.append(most)
        for each in terms:
            for variable, factor in each.items():
                key = number, variable
                self._entries[key] = self._entries.get(key, 0.0) + factor

    def solve(self, seconds: float) -> Solved | None:
        """The values for which all variables cost least; None where there is no time for it, or no value fits."""
        mathopt, model_pb2 = _modules()
        unit = max(map(abs, self._costs), default=0.0) or 1.0
        model = mathopt.Model.from_model_proto(self._written(model_pb2.ModelProto(), unit))
        parameters = mathopt.SolveParameters(
            time_limit=timedelta(seconds=max(seconds, 0.0)), lp_algorithm=mathopt.LPAlgorithm.DUAL_SIMPLEX
        )
        variables, rows = list(model.variables()), list(model.linear_constraints())
        begin = mathopt.ModelSolveParameters(initial_basis=self._begin(mathopt, variables, rows))
        result = mathopt.solve(model, mathopt.SolverType.GLOP, params=parameters, model_params=begin)
        if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
            return None
        values = result.variable_values(variables)
        basis = result.solutions[0].basis
        self._basis = (
            None
            if basis is None
            else ([basis.variable_status[each] for each in variables], [basis.constraint_status[each] for each in rows])
        )
        least = result.termination.objective_bounds.dual_bound
        return Solved((least - abs(least) * _TOLERANCE) * unit, np.array(values, float))

    def _begin(self, mathopt: Any, variables: Sequence[Any], rows: Sequence[Any]) -> Any:
        """The basis of the last solution, and of what was added since: only new rows are broken then."""
        if self._basis is None:
            return None
        status = mathopt.BasisStatus
        known, held = self._basis
        lower = [status.AT_LOWER_BOUND] * (len(variables) - len(known))
        basic = [status.BASIC] * (len(rows) - len(held))
        return mathopt.Basis(
            variable_status=dict(zip(variables, [*known, *lower], strict=True)),
            constraint_status=dict(zip(rows, [*held, *basic], strict=True)),
        )

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
        entries = sorted(self._entries.items())
        matrix.row_ids.extend([row for (row, _), _ in entries])
        matrix.column_ids.extend([variable for (_, variable), _ in entries])
        matrix.coefficients.extend([factor for _, factor in entries])
        return model
