"""The linear program of a graph: units are on the device in part.

A variable for each unit, for each copy, and for all that is held at a time and does not follow from one unit. Of a
value that unit u has, that f reads before that time and b after it, of which c is the copy to the device and d the one
to the host, so much is held at least:

    u + b - 1      u has it on the device, where b reads it
    f + b - 1      f and b read it on the device
    b - c          as b reads it, but for the part that is copied there
    u - d          as u has it, but for the part of which the host reads a copy
    f + b - u - c  one copy, which is there for f and for b, is held between them

Without the last three, half of one assignment with half of another would hold less than either does; with them hardly
any unit is left in part.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from irpar.analysis.linear_program import LinearProgram

from .cut import copies
from .graph import PlacementGraph
from .simulation import Array
from .terms import Term, Terms

Counts = Mapping[tuple[int, ...], tuple[int, int]]
"""Of units how many of them are on the device at least, and at most."""

_SMALL = 1e-4
"""Of the limit: of what is held at a time the smallest, so much together, is left out. That makes most of the rows."""


@dataclass(frozen=True)
class Relaxed:
    """A solution.

    Attributes:
        bound: no assignment that fits costs less; infinite where none fits.
        near: of each unit how far it is on the device.
    """

    bound: float
    near: Array


class Relaxation:
    """The linear program, to which times are added at which no more may be held than fits."""

    def __init__(self, graph: PlacementGraph, limit: int, terms: Terms) -> None:
        self.graph = graph
        self._terms = terms
        self.limit = limit
        self._share = 1.0
        self._times: dict[int, int] = {}
        """When to the row of what is held then."""
        self.program = LinearProgram()
        self._copies: dict[tuple[int, frozenset[int]], tuple[int | None, int | None]] = {}
        """(unit, others that read what it has) to copies to the host and to the device; None: it costs nothing."""
        self._either: dict[frozenset[int], int] = {}
        self._held: dict[Term, int] = {}
        self._on_host = sum(unit.host or 0 for unit in graph.units)
        self._counted: dict[tuple[int, ...], int] = {}
        """Units to the row of how many of them are on the device."""
        self._counts: Counts = {}
        for unit, where in zip(graph.units, graph.fixed, strict=True):
            bounds = (0, 1) if where is None else (int(where), int(where))
            self.program.variable((unit.device or 0) - (unit.host or 0), *bounds)
        for number, readers, to_host, to_device in copies(graph):
            self._copies[number, readers] = (
                self._copy(number, readers, to_host, is_to_host=True) if to_host else None,
                self._copy(number, readers, to_device, is_to_host=False) if to_device else None,
            )

    def count(self, counts: Counts) -> None:
        """Let so many of some units be on the device, and any number of those that were counted before."""
        for units in dict.fromkeys((*self._counts, *counts)):
            row = self._counted.get(units)
            if row is None:
                row = self._counted[units] = self.program.row(dict.fromkeys(units, 1.0))
            least, most = counts.get(units, (0, len(units)))
            self.program.set_bounds(row, least, most)
        self._counts = counts

    def _copy(self, unit: int, readers: frozenset[int], cost: int, *, is_to_host: bool) -> int:
        copied = self.program.variable(cost)
        sign = -1 if is_to_host else 1
        for reader in readers:
            self.program.row({copied: 1, unit: sign, reader: -sign}, least=0)
        return copied

    def solve(self, seconds: float) -> Relaxed | None:
        """The cheapest; None where it is not found in time."""
        solved = self.program.solve(seconds)
        if solved is None:
            return None
        return Relaxed(solved.least + self._on_host, solved.values[: len(self.graph.units)].copy())

    @property
    def times(self) -> Collection[int]:
        """When no more may be held than fits."""
        return self._times.keys()

    def set_share(self, share: float) -> None:
        """Let a share of the limit be held, or more than it: the next solution begins at the last one."""
        self._share = share
        for row in self._times.values():
            self.program.set_bounds(row, -math.inf, self._most)

    @property
    def _most(self) -> float:
        return self._share if self.limit else 0.0

    def add_time(self, when: int) -> None:
        """Let no more be held at a time than fits."""
        left = _SMALL * self.limit
        held: dict[int, float] = {}
        for term, nbytes in sorted(self._terms.at(when).items(), key=lambda each: each[1]):
            left -= nbytes
            if left < 0:
                variable = self._variable(term)
                held[variable] = held.get(variable, 0.0) + nbytes / max(1, self.limit)
        self._times[when] = self.program.row(held, most=self._most)

    def _variable(self, term: Term) -> int:
        """How far a term is held."""
        if not term.is_copy and term.before == term.after == {term.unit}:
            return term.unit
        known = self._held.get(term)
        if known is None:
            known = self._held[term] = self.program.variable()
            if term.is_copy:
                self._hold_copy(known, term)
            else:
                self._hold(known, term)
        return known

    def _hold(self, held: int, term: Term) -> None:
        unit, row = term.unit, self.program.row
        to_host, to_device = self._copies.get((unit, term.readers), (None, None))
        for both in term.before & term.after:
            row({held: 1, both: -1}, least=0)
        before, after = self._any(term.before - {unit}), self._any(term.after - {unit})
        if after is None:
            return
        if unit not in term.after:
            row({held: 1, unit: -1}, {after: -1}, least=-1)
            if to_host is not None:
                row({held: 1, unit: -1, to_host: 1}, least=0)
        if to_device is not None:
            row({held: 1, after: -1, to_device: 1}, least=0)
        if before is not None and before != after:
            row({held: 1, before: -1, after: -1}, least=-1)
            if to_device is not None:
                row({held: 1, before: -1, after: -1, unit: 1, to_device: 1}, least=0)

    def _hold_copy(self, held: int, term: Term) -> None:
        """Twice the unit where a copy is counted: where the unit is on the device there is none."""
        to_device = self._copies.get((term.unit, term.readers), (None, None))[1]
        before, after = self._any(term.before), self._any(term.after)
        assert before is not None
        assert after is not None
        self.program.row({held: 1, term.unit: 1}, {before: -1}, {after: -1}, least=-1)
        if to_device is not None:
            self.program.row({held: 1, term.unit: 2, to_device: 1}, {before: -1}, {after: -1}, least=0)

    def _any(self, units: frozenset[int]) -> int | None:
        """How far one of some units is on the device, at least; None: there are none."""
        if len(units) <= 1:
            return next(iter(units), None)
        known = self._either.get(units)
        if known is None:
            known = self._either[units] = self.program.variable()
            for unit in units:
                self.program.row({known: 1, unit: -1}, least=0)
        return known
