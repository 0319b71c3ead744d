"""Prices on bytes (Lagrange): what a limit on memory costs at least, and the assignments on the way to that.

Where the most is held, each byte on the device gets a price, and the cheapest assignment by these prices is a cut. What
it costs with them, less what the limit is worth, is a bound: nothing that fits costs less. Prices rise where more is
held than fits and fall where less is (subgradients). A cut can only price units: what is held because something before
and something after are both on the device is priced by x + y - 1, of the two that say most in the mixture of the
assignments so far.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from .cut import Cut
from .graph import PlacedValue, PlacementGraph
from .simulation import Array, Outcome, Simulator

MOST_STEPS, FEW_STEPS = 150, 10
"""Cuts that are tried; and of a graph of which CP-SAT decides each unit."""
LEAST_STEPS = 25
"""That are tried even where time runs out: what there is before is far from good."""
_TOO_SMALL = 1e-4
"""Of the cost: prices are good enough where the bound is that near."""
_NEW_SHARE = 0.15
"""Of the mixture is the newest assignment."""
_MOST_ROWS = 16
"""Times that have a price."""
_FIRST = 3
"""Of the readers of a value before and after a time, so many and the last are looked at."""
_PATIENCE = 4
"""After so many steps that do not better the bound, steps are half as long."""

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


def price(
    graph: PlacementGraph, limit: int, simulator: Simulator, cut: Cut, known: Known, steps: int, end: float
) -> Priced:
    """Look for the prices with the best bound.

    Args:
        graph: it.
        limit: bytes on the device.
        simulator: of the graph.
        cut: likewise.
        known: an assignment that fits.
        steps: cuts that are tried at most.
        end: when to stop, by `time.monotonic`.
    """
    search = _Search(graph, limit, simulator, cut, known)
    for number in range(1, steps + 1):
        if not search.step() or (number >= LEAST_STEPS and time.monotonic() > end):
            break
    return search.found


class _Search:
    def __init__(self, graph: PlacementGraph, limit: int, simulator: Simulator, cut: Cut, known: Known) -> None:
        self.graph = graph
        self.limit = limit
        self.simulator = simulator
        self.known = known[1].cost
        self.cut = cut
        self.found = Priced(0.0)
        self.rows: dict[int, _Row] = {}
        self.prices: dict[int, float] = {}
        self.to_host = np.array([value.to_host for value in graph.values], np.int64)
        self.to_device = np.array([value.to_device for value in graph.values], np.int64)
        self.mixed = np.array(known[0], float)
        self.mixed_held = simulator.held(known[0]).astype(float)
        self.stride = 1.0
        self.best: tuple[float, dict[int, float]] = (0.0, {})
        self.waited = 0

    def step(self) -> bool:
        """Try the prices, and change them; returns whether there may be better ones."""
        chosen, held, bound = self._cheapest()
        outcome = self.simulator.outcome(chosen)
        if chosen in self.found.assignments:
            self.found.assignments.remove(chosen)
        self.found.assignments.append(chosen)
        self.found.bound = max(self.found.bound, bound)
        if outcome.peak <= self.limit:
            self.known = min(self.known, outcome.cost)
        else:
            self._add_row(outcome.at, held)
        now = self.simulator.held(chosen)
        self.mixed_held += _NEW_SHARE * (now - self.mixed_held)
        if self.mixed_held.max() > self.limit:
            self._add_row(int(self.mixed_held.argmax()) - 1, held)
        if not self.rows or self.known - self.found.bound <= _TOO_SMALL * self.known:
            return False
        self.mixed += _NEW_SHARE * (np.array(chosen, float) - self.mixed)
        self._change_prices(held, bound)
        return True

    def _add_row(self, when: int, held: dict[int, float]) -> None:
        """Look at a time from now on, unless it is looked at, or so many are."""
        if when not in self.rows and len(self.rows) < _MOST_ROWS:
            self.rows[when] = _Row(self.graph, when)
            self.prices[when] = 0.0
            held[when] = float(self.limit)
            self.found.times.append(when)

    def _change_prices(self, held: Mapping[int, float], bound: float) -> None:
        """Take a step (Polyak's); where steps do not better the bound, shorter ones from the best prices."""
        if bound > self.best[0]:
            self.best, self.waited = (bound, self.prices), 0
        else:
            self.waited += 1
        if self.waited == _PATIENCE:
            self.stride, self.waited = self.stride / 2, 0
            self.prices = {when: self.best[1].get(when, price) for when, price in self.prices.items()}
        over = {when: held[when] - self.limit for when in self.rows}
        length = sum(excess * excess for when, excess in over.items() if excess > 0 or self.prices[when])
        # What is known may cost far more than the cheapest does.
        missing = min(self.known, 2 * self.best[0]) - bound
        stride = self.stride * max(0.0, missing) / max(1.0, length)
        self.prices = {when: max(0.0, price + stride * over[when]) for when, price in self.prices.items()}

    def _cheapest(self) -> tuple[tuple[bool, ...], dict[int, float], float]:
        """The cheapest assignment by the prices; what it holds at least; and what anything that fits costs at least."""
        priced = _PricedUnits(self.to_host, self.to_device, self.mixed)
        for when, row in self.rows.items():
            priced.add(when, row, self.prices[when])
            priced.constant -= self.prices[when] * self.limit
        whole = np.rint(priced.units).astype(np.int64)
        prices = {int(number): int(whole[number]) for number in np.flatnonzero(whole)}
        less = self.to_host - priced.to_host, self.to_device - priced.to_device
        chosen = self.cut.cheapest(prices, less)
        # Whole prices are at most half a unit off, each.
        bound = float(whole[np.array(chosen)].sum()) + priced.constant - 0.5 * np.count_nonzero(whole)
        copied = self.simulator.copied(chosen)
        bound += self.simulator.outcome(chosen).cost - sum(
            int(of_values[numbers].sum()) for of_values, numbers in zip(less, copied, strict=True)
        )
        held = self.simulator.held(chosen)
        at_least = {
            when: priced.paid(when, chosen, copied) / each if each else float(held[when + 1])
            for when, each in self.prices.items()
        }
        return chosen, at_least, bound


class _PricedUnits:
    """What units cost on the device for all that is held, and how much less copies cost.

    Attributes:
        to_host, to_device: of each value what its copies still cost.
        mixed: how far each unit is on the device.
        units: of each unit what it costs on the device.
        constant: what anything costs besides.
    """

    def __init__(self, to_host: Array, to_device: Array, mixed: Array) -> None:
        self.to_host, self.to_device = to_host.copy(), to_device.copy()
        self.mixed = np.append(mixed, 1.0)
        self.units = np.zeros(len(mixed))
        self.constant = 0.0
        self._of_row: dict[int, tuple[Array, float, Array, Array]] = {}

    def add(self, when: int, row: "_Row", price: float) -> None:
        """Price what is held in a row.

        Between a unit x that makes something and its last reader y, it is held if both are on the device: y, less what
        it costs that x is not. That is as much less for the copy to the device, as far as that costs so much; likewise
        x, less the copy to the host. The rest counts x + y - 1 where that is most, or nothing.
        """
        units, constant, copies_before = self.units.copy(), self.constant, (self.to_host.copy(), self.to_device.copy())
        value, one, other, nbytes = row.chosen(self.mixed)
        self._add(one, other, price * nbytes)
        value, maker, reader, nbytes = row.between
        left = price * nbytes
        for copies, unit in ((self.to_device, reader), (self.to_host, maker)):
            taken = np.minimum(np.floor(left), copies[value]).astype(np.int64)
            copies[value] -= taken
            np.add.at(self.units, unit, taken)
            left -= taken
        both = self.mixed[maker] + self.mixed[reader] > 1
        self._add(maker[both], reader[both], left[both])
        taken_of = copies_before[0] - self.to_host, copies_before[1] - self.to_device
        self._of_row[when] = self.units - units, self.constant - constant, *taken_of

    def paid(self, when: int, chosen: Sequence[bool], copied: tuple[Array, Array]) -> float:
        """What an assignment that copies so pays for what is held in a row."""
        units, constant, *taken_of = self._of_row[when]
        less = sum(int(taken[numbers].sum()) for taken, numbers in zip(taken_of, copied, strict=True))
        return float(units[np.array(chosen, bool)].sum()) + constant - less

    def _add(self, one: Array, other: Array, amounts: Array) -> None:
        weights = np.zeros(len(self.mixed))
        np.add.at(weights, one, amounts)
        np.add.at(weights, other, amounts)
        self.units += weights[:-1]
        self.constant += float(weights[-1]) - float(amounts.sum())


class _Row:
    """What is held on the device at one time, from below, as sums over units.

    Of each value there are several ways to say that it is held: a unit is on the device, or two are. A way counts
    x + y - 1; where one unit is enough, y is 1 and stands behind the others.

    Attributes:
        between: what is held between a unit that makes it and others that read it, as arrays: the values, the units
            that make and that read them last, bytes.
    """

    def __init__(self, graph: PlacementGraph, when: int) -> None:
        count = len(graph.units)
        ways: list[tuple[int, int, int, int]] = []
        between: list[tuple[int, int, int, int]] = []
        for number, value in enumerate(graph.values):
            if value.nbytes and value.made <= when and not value.shares:
                last = _is_between(value, when)
                if last is None:
                    ways += [(number, *way, value.nbytes) for way in _ways(value, when, count)]
                else:
                    between.append((number, value.unit, last, value.nbytes))
        self._ways = np.array(ways, np.int64).reshape(-1, 4).T
        self.between = np.array(between, np.int64).reshape(-1, 4).T

    def chosen(self, mixed: Array) -> Array:
        """Of each other value the way by which most is held: values, units, units, bytes.

        Args:
            mixed: how far each unit is on the device, and 1.
        """
        value, one, other, _ = self._ways
        held = mixed[one] + mixed[other] - 1
        order = np.lexsort((-held, value))
        first = np.append(True, np.diff(value[order]) > 0) if len(order) else np.zeros(0, bool)
        return self._ways[:, order[first & (held[order] > 0)]]


def _is_between(value: PlacedValue, when: int) -> int | None:
    """The last reader of a value that is held only because of it; None where another unit is enough."""
    before = {value.unit, *(unit for time_, unit in value.reads if time_ <= when)}
    after = [unit for time_, unit in value.reads if time_ >= when]
    if not after or max(value.until, value.made) >= when or before & {*after}:
        return None
    return after[-1]


def _ways(value: PlacedValue, when: int, always: int) -> Iterator[tuple[int, int]]:
    """The ways to say that a value is held at a time when it is made.

    Args:
        value: it.
        when: the time.
        always: what stands for a unit that surely is on the device.
    """
    before = [value.unit, *(unit for time_, unit in value.reads if time_ <= when)]
    after = [unit for time_, unit in value.reads if time_ >= when]
    if max(value.until, value.made) >= when:
        yield value.unit, always
    if after:
        yield from ((unit, always) for unit in {*before} & {*after})
        yield from product({*before[:_FIRST], before[-1]}, {*after[:_FIRST], after[-1]} - {*before})
