"""The cheapest assignment that fits, by CP-SAT.

A variable for each unit: whether it is on the device. A value is held at a time if the unit that has it or a reader
until then is there, and a reader from then on: an `and` of two `or`s. Of units that may change places (of equal layers)
the first are on the device.
"""

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from irpar.analysis.cp_sat import is_exact, is_proven, run, solver_module, unit_of

from .cut import copies
from .graph import Assignment, PlacementGraph
from .simulation import Simulator, worst_times
from .terms import Term, Terms

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import BoolVarT, CpModel

MOST_ROWS = 8
"""Times that are looked at anew after a search whose result did not fit."""


@dataclass(frozen=True)
class Packed:
    """What was found.

    Attributes:
        assignment: the cheapest that fits; None where none was found.
        bound: nothing that fits costs less.
        proven: whether it is the cheapest.
    """

    assignment: Assignment | None
    bound: int
    proven: bool


def pack(
    graph: PlacementGraph, limit: int, seconds: float, known: Assignment, times: Collection[int] | None = None
) -> Packed:
    """Look for the cheapest assignment that fits.

    Args:
        graph: it.
        limit: bytes on the device.
        seconds: of search.
        known: an assignment to begin with.
        times: when what is held is looked at first; others are added where it does not fit; None: at all times.
    """
    end = time.monotonic() + seconds
    simulator, terms = Simulator(graph), Terms(graph)
    rows = set(range(-1, graph.times + 1)) if times is None else set(times)
    bound = 0
    while True:
        model = _Model(graph, limit, [terms.at(when) for when in sorted(rows)], known)
        solver = run(model.model, end - time.monotonic())
        if solver is None:
            return Packed(None, bound, False)
        bound = max(bound, int(solver.best_objective_bound) * model.unit)
        found = tuple(bool(solver.value(one)) for one in model.there)
        held = simulator.held(found)
        if held.max() <= limit:
            return Packed(found, bound, is_proven(solver) and model.is_exact)
        if time.monotonic() > end:
            return Packed(None, bound, False)
        rows.update(worst_times(held, limit, MOST_ROWS, 4 * MOST_ROWS))


class _Model:
    def __init__(self, graph: PlacementGraph, limit: int, held: Sequence[Counter[Term]], known: Assignment) -> None:
        self.graph = graph
        self.model: CpModel = solver_module().CpModel()
        self.there = [self.model.new_bool_var("") for _ in graph.units]
        self._any: dict[frozenset[int], BoolVarT] = {}
        self._held: dict[tuple[object, ...], BoolVarT] = {}
        for number, where in enumerate(graph.fixed):
            if where is not None:
                self.model.add(self.there[number] == int(where))
        rows = {tuple(sorted(row.items(), key=repr)): row for row in held}
        for row in rows.values():
            if sum(row.values()) > limit:
                self.model.add(sum(nbytes * self._is_held(term) for term, nbytes in row.items()) <= limit)
        self._minimize()
        self._order(list(rows.values()), known)

    def _is_held(self, term: Term) -> "BoolVarT":
        unit, before, after, is_copy, _ = term
        if not is_copy and before == after == {unit}:
            return self.there[unit]
        # Who else reads it does not matter here.
        key = term[:-1]
        known = self._held.get(key)
        if known is None:
            known = self._held[key] = self.model.new_bool_var("")
            no = [self._is_any(before).negated(), self._is_any(after).negated()]
            self.model.add_bool_or([known, *no, *([self.there[unit]] if is_copy else [])])
        return known

    def _is_any(self, units: frozenset[int]) -> "BoolVarT":
        """At least whether one of some units is on the device."""
        if len(units) == 1:
            return self.there[next(iter(units))]
        known = self._any.get(units)
        if known is None:
            known = self._any[units] = self.model.new_bool_var("")
            for unit in units:
                self.model.add_implication(self.there[unit], known)
        return known

    def _minimize(self) -> None:
        units = [(unit.host or 0, unit.device or 0) for unit in self.graph.units]
        moved = copies(self.graph)
        amounts = [cost for pair in (*units, *(costs[2:] for costs in moved)) for cost in pair]
        self.unit = unit_of(amounts)
        self.is_exact = is_exact(self.unit, amounts)
        total = sum(
            (device // self.unit) * there + (host // self.unit) * there.negated()
            for (host, device), there in zip(units, self.there, strict=True)
        )
        for unit, readers, to_host, to_device in moved:
            for cost, goes, comes in ((to_host, False, True), (to_device, True, False)):
                if cost // self.unit:
                    copied = self.model.new_bool_var("")
                    total += (cost // self.unit) * copied
                    home = self.there[unit]
                    for reader in readers:
                        near = self.there[reader]
                        differs = [home if goes else home.negated(), near if comes else near.negated()]
                        self.model.add_bool_or([copied, *differs])
        self.model.minimize(total)

    def _order(self, rows: Sequence[Counter[Term]], known: Assignment) -> None:
        """Let the first of units that may change places be on the device, and begin with what is known, ordered so."""
        begin = list(known)
        for alike in _alike(self.graph, rows):
            count = sum(begin[number] for number in alike)
            for place, number in enumerate(alike):
                begin[number] = place < count
            for one, other in pairwise(alike):
                self.model.add_implication(self.there[other], self.there[one])
        for there, where in zip(self.there, begin, strict=True):
            self.model.add_hint(there, where)


def _alike(graph: PlacementGraph, rows: Sequence[Counter[Term]]) -> list[list[int]]:
    """Units that may change places: whatever an assignment costs and holds, it does so too with them exchanged."""
    told: list[list[object]] = [[unit.host, unit.device] for unit in graph.units]
    for unit, readers, to_host, to_device in copies(graph):
        for one in {unit, *readers}:
            told[one].append(("copy", *_without(one, unit, readers), to_host, to_device))
    for when, row in enumerate(rows):
        for (unit, before, after, is_copy, _), nbytes in row.items():
            for one in {unit, *before, *after}:
                told[one].append((when, *_without(one, unit, before, after), is_copy, nbytes))
    classes: dict[object, list[int]] = {}
    for number, facts in enumerate(told):
        classes.setdefault((facts[0], facts[1], frozenset(Counter(map(repr, facts[2:])).items())), []).append(number)
    return [alike for alike in classes.values() if len(alike) > 1]


def _without(one: int, unit: int, *sets: frozenset[int]) -> tuple[object, ...]:
    """Some units of which one has no number."""
    named = [tuple(sorted(-1 if number == one else number for number in each)) for each in sets]
    return (-1 if unit == one else unit, *named)
