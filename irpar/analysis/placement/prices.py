"""Prices on bytes (Lagrange): what a limit on memory costs at least, and the assignments on the way to that.

Where the most is held, each byte on the device gets a price, and the cheapest assignment by these prices is a cut. What
it costs with them, less what the limit is worth, is a bound: nothing that fits costs less. Prices rise where more is
held than fits and fall where less is (subgradients). A cut can only price units: what is held because something before
and something after are both on the device is priced by x + y - 1, of the two that say most in the mixture of the
assignments so far.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from .cut import Cut
from .graph import PlacedValue, PlacementGraph
from .simulation import Array, Outcome, Simulator

MOST_STEPS = 60
"""Cuts that are tried."""
_TOO_SMALL = 1e-4
"""Of the cost: prices are good enough where the bound is that near."""
_NEW_SHARE = 0.15
"""Of the mixture is the newest assignment."""
_STEADY = 8
"""Steps after which changes of prices are half as large."""

Known = tuple[tuple[bool, ...], Outcome]
"""An assignment, and what it comes to."""


@dataclass
class Priced:
    """What prices led to.

    Attributes:
        bound: nothing that fits costs less.
        assignments: those on the way, each once: some fit, others hold too much.
        times: when more was held than fits.
    """

    bound: float
    assignments: list[tuple[bool, ...]] = field(default_factory=list)
    times: list[int] = field(default_factory=list)


def price(graph: PlacementGraph, limit: int, simulator: Simulator, known: Known, end: float) -> Priced:
    """Look for the prices with the best bound.

    Args:
        graph: it.
        limit: bytes on the device.
        simulator: of the graph.
        known: an assignment that fits.
        end: when to stop, by `time.monotonic`.
    """
    search = _Search(graph, limit, simulator, known)
    for _ in range(MOST_STEPS):
        if not search.step() or time.monotonic() > end:
            break
    return search.found


class _Search:
    def __init__(self, graph: PlacementGraph, limit: int, simulator: Simulator, known: Known) -> None:
        self.graph = graph
        self.limit = limit
        self.simulator = simulator
        self.known = known[1].cost
        self.cut = Cut(graph)
        self.found = Priced(0.0)
        self.rows: dict[int, _Row] = {}
        self.prices: dict[int, float] = {}
        self.mixed = np.array(known[0], float)
        self.scale = 0.0
        self.steps = 0

    def step(self) -> bool:
        """Try the prices, and change them; returns whether there may be better ones."""
        chosen, held, bound = self._cheapest()
        outcome = self.simulator.outcome(chosen)
        if chosen in self.found.assignments:
            self.found.assignments.remove(chosen)
        self.found.assignments.append(chosen)
        self.found.bound = max(self.found.bound, bound)
        if not self.scale:
            self.scale = (self.known - outcome.cost) / max(1, outcome.peak - self.limit)
        if outcome.peak <= self.limit:
            self.known = min(self.known, outcome.cost)
        elif outcome.at not in self.rows:
            self.rows[outcome.at] = _Row(self.graph, outcome.at)
            self.prices[outcome.at] = 0.0 if self.prices else self.scale
            held[outcome.at] = float(self.limit)
            self.found.times.append(outcome.at)
        if not self.rows or self.known - self.found.bound <= _TOO_SMALL * self.known:
            return False
        self.mixed += _NEW_SHARE * (np.array(chosen, float) - self.mixed)
        stride = 0.5 * self.scale / max(1, self.limit) / (1 + self.steps / _STEADY)
        self.prices = {when: max(0.0, each + stride * (held[when] - self.limit)) for when, each in self.prices.items()}
        self.steps += 1
        return True

    def _cheapest(self) -> tuple[tuple[bool, ...], dict[int, float], float]:
        """The cheapest assignment by the prices; what it holds at least; and what anything that fits costs at least."""
        units, constant = np.zeros(len(self.graph.units)), 0.0
        sums = {when: row.weights(self.mixed) for when, row in self.rows.items()}
        for when, (weights, offset) in sums.items():
            units += self.prices[when] * weights
            constant += self.prices[when] * (offset - self.limit)
        whole = np.rint(units).astype(np.int64)
        chosen = self.cut.cheapest({int(number): int(whole[number]) for number in np.flatnonzero(whole)})
        where = np.array(chosen, bool)
        held = {when: float(weights[where].sum()) + offset for when, (weights, offset) in sums.items()}
        # Whole prices are at most half a unit off, each.
        slack = 0.5 * np.count_nonzero(whole) - constant
        return chosen, held, self.simulator.outcome(chosen).cost + float(whole[where].sum()) - slack


class _Row:
    """What is held on the device at one time, from below, as sums over units.

    Of each value there are several ways to say that it is held: a unit is on the device, or two are. A way counts
    x + y - 1; where one unit is enough, y is 1 and stands behind the others.
    """

    def __init__(self, graph: PlacementGraph, when: int) -> None:
        count = len(graph.units)
        ways = [
            (number, *way, value.nbytes)
            for number, value in enumerate(graph.values)
            if value.nbytes and value.made <= when and not value.shares
            for way in _ways(value, when, count)
        ]
        self._value, self._one, self._other, self._bytes = np.array(ways, np.int64).reshape(-1, 4).T

    def weights(self, mixed: Array) -> tuple[Array, float]:
        """Of each unit the bytes that count if it is on the device, and bytes that count besides: never more than held.

        Args:
            mixed: how far each unit is on the device; of each value the way counts by which most is held then.
        """
        there = np.append(mixed, 1.0)
        held = there[self._one] + there[self._other] - 1
        order = np.lexsort((-held, self._value))
        first = np.append(True, np.diff(self._value[order]) > 0) if len(order) else order
        chosen = order[first & (held[order] > 0)] if len(order) else order
        weights = np.zeros(len(mixed) + 1)
        np.add.at(weights, self._one[chosen], self._bytes[chosen])
        np.add.at(weights, self._other[chosen], self._bytes[chosen])
        return weights[:-1], float(weights[-1]) - float(self._bytes[chosen].sum())


def _ways(value: PlacedValue, when: int, always: int) -> Iterator[tuple[int, int]]:
    """The ways to say that a value is held at a time when it is made.

    Args:
        value: it.
        when: the time.
        always: what stands for a unit that surely is on the device.
    """
    before = [unit for time_, unit in value.reads if time_ <= when]
    after = [unit for time_, unit in value.reads if time_ >= when]
    if max(value.until, value.made) >= when:
        yield value.unit, always
    if not after:
        return
    before.insert(0, value.unit)
    for unit in {*before} & {*after}:
        yield unit, always
    yield from {(one, other) for one in (before[0], before[-1]) for other in (after[0], after[-1]) if one != other}
    if len(before) > 1:
        yield before[1], after[-1]
