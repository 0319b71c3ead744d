"""Choosing one state for each of many variables so that a sum of small cost tables is least.

Variables are eliminated one after the other, the one with the smallest joint table first: exact on chains and trees,
and wherever no joint table grows too large. Where one would, a variable is held at its start first, so that the result
is never worse than the start. Bertele and Brioschi, Nonserial Dynamic Programming (1972).
"""

import heapq
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MOST_ENTRIES = 1 << 15
"""Of a joint table."""


class Elimination:
    """Variables 0, 1, ... with `sizes` states each.

    problem = Elimination([2, 3])
    problem.add((0, 1), costs)      costs of shape [2, 3]
    problem.solve([0, 0])
    """

    def __init__(self, sizes: Sequence[int], most_entries: int = MOST_ENTRIES) -> None:
        self._sizes = list(sizes)
        self._most = most_entries
        self._tables: dict[int, tuple[tuple[int, ...], Array]] = {}
        self._of: list[set[int]] = [set() for _ in sizes]
        self._joints: list[tuple[tuple[int, ...], int] | None] = [None] * len(sizes)
        self._next = 0

    def add(self, scope: Sequence[int], costs: Array) -> None:
        """A cost for every combination of states of some variables; a variable may stand in `scope` once only."""
        costs = np.asarray(costs, np.float64)
        order = sorted(range(len(scope)), key=scope.__getitem__)
        self._put(tuple([scope[place] for place in order]), costs.transpose(order) if len(order) > 1 else costs)

    def _put(self, scope: tuple[int, ...], table: Array) -> None:
        self._tables[self._next] = scope, table
        for variable in scope:
            self._of[variable].add(self._next)
            self._joints[variable] = None
        self._next += 1

    def solve(self, start: Sequence[int]) -> list[int]:
        """The states of all variables. The tables are used up."""
        chosen = list(start)
        solved: list[tuple[int, tuple[int, ...], Array]] = []
        waiting = set(range(len(self._sizes)))
        queue = [(self._joint(variable)[1], variable) for variable in waiting]
        heapq.heapify(queue)
        while queue:
            size, variable = heapq.heappop(queue)
            if variable not in waiting:
                continue
            scope, now = self._joint(variable)
            if now > size and queue and now > queue[0][0]:
                heapq.heappush(queue, (now, variable))
                continue
            if now > self._most:
                self._hold(max(scope, key=lambda other: (len(self._of[other]), other)), start, waiting)
                heapq.heappush(queue, (now, variable))
                continue
            rest, best = self._eliminate(variable, scope)
            waiting.discard(variable)
            solved.append((variable, rest, best))
            for other in rest:
                heapq.heappush(queue, (self._joint(other)[1], other))
        for variable, rest, best in reversed(solved):
            chosen[variable] = int(best[tuple(chosen[other] for other in rest)])
        return chosen

    def _joint(self, variable: int) -> tuple[tuple[int, ...], int]:
        """The variables that share a table with one, itself included, and the entries of their joint table."""
        known = self._joints[variable]
        if known is None:
            scope = sorted({variable}.union(*[self._tables[table][0] for table in self._of[variable]]))
            known = self._joints[variable] = tuple(scope), math.prod([self._sizes[other] for other in scope])
        return known

    def _take(self, variable: int) -> list[tuple[tuple[int, ...], Array]]:
        """Remove the tables of a variable."""
        taken = []
        for number in sorted(self._of[variable]):
            scope, table = self._tables.pop(number)
            for other in scope:
                if other != variable:
                    self._of[other].discard(number)
                    self._joints[other] = None
            taken.append((scope, table))
        self._of[variable].clear()
        self._joints[variable] = None
        return taken

    def _eliminate(self, variable: int, scope: tuple[int, ...]) -> tuple[tuple[int, ...], Array]:
        """Put the least over a variable's states for its tables; returns what the choice depends on, and the choice."""
        tables = [
            table if inner == scope else table.reshape([self._sizes[other] if other in inner else 1 for other in scope])
            for inner, table in self._take(variable)
        ]
        total = tables[0] if tables else np.zeros(self._sizes[variable])
        for table in tables[1:]:
            total = total + table
        axis = scope.index(variable)
        rest = scope[:axis] + scope[axis + 1 :]
        best = total.argmin(axis)
        if rest:
            self._put(rest, total.min(axis))
        return rest, best

    def _hold(self, variable: int, start: Sequence[int], waiting: set[int]) -> None:
        """Leave a variable at its start."""
        waiting.discard(variable)
        for scope, table in self._take(variable):
            axis = scope.index(variable)
            rest = scope[:axis] + scope[axis + 1 :]
            if rest:
                self._put(rest, table.take(start[variable], axis))
