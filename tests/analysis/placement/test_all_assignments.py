"""Placement against all assignments."""

import time
from random import Random

import numpy as np
import pytest

from irpar.analysis.placement import NoRoomError, solve
from irpar.analysis.placement.graph import PlacedValue, PlacementGraph, Unit
from irpar.analysis.placement.simulation import Simulator
from tests.budget import budget

from .graphs import all_outcomes, layered_graph, random_graph

GRAPHS = 500
MOST_NODES = 12
SECONDS, LATE = 2, 4
"""Of a search, and how much later it may end on a machine that is busy."""
SHARES = (0, 0.3, 0.7)
"""Of the way from what must be held at least to what the cheapest assignment holds."""


@pytest.mark.parametrize("seed", range(3))
def test_nothing_that_fits_costs_less(seed: int) -> None:
    _check(Random(seed), most_nodes=7)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(budget(GRAPHS)))
def test_nothing_that_fits_costs_less_in_many_graphs(seed: int) -> None:
    _check(Random(f"many {seed}"), MOST_NODES)


@pytest.mark.parametrize("seed", range(budget(200, least=20)))
def test_nothing_that_fits_costs_less_in_equal_layers(seed: int) -> None:
    """How many of the units that are alike are on the device is decided, not which of them."""
    random = Random(f"layers {seed}")
    _check_all(layered_graph(random, random.randint(2, 5)))


def test_units_of_equal_layers_are_alike() -> None:
    found = {frozenset(units) for units in Simulator(layered_graph(Random(0), 5)).alike}
    # The last node has no other behind it, and the first none before it.
    assert found == {frozenset({3, 6, 9}), frozenset({1, 4, 7, 10, 13}), frozenset({2, 5, 8, 11, 14})}


def _check(random: Random, most_nodes: int) -> None:
    _check_all(random_graph(random, random.randint(1, most_nodes)))


def _check_all(graph: PlacementGraph) -> None:
    cost, peak = all_outcomes(graph)
    plain = solve(graph)
    assert (plain.outcome.cost, plain.proven) == (cost.min(), True)
    least, most = int(peak.min()), plain.outcome.peak
    for limit in {least + round(share * (most - least)) for share in SHARES}:
        found = solve(graph, limit, seconds=60)
        assert found.outcome.cost == cost[peak <= limit].min()
        assert found.outcome.peak <= limit
        assert found.proven
        linear = solve(graph, limit, "linear", seconds=60)
        assert linear.outcome.cost == found.outcome.cost
        assert linear.proven
    with pytest.raises(NoRoomError, match=f"holds {least:,} bytes") as told:
        solve(graph, least - 1)
    assert told.value.least == least


@pytest.mark.parametrize("seed", range(budget(64, least=2)))
def test_what_is_found_is_what_it_says(seed: int) -> None:
    random = Random(f"outcome {seed}")
    graph = random_graph(random, 6)
    cost, peak = all_outcomes(graph)
    outcome = solve(graph, int(np.median(peak)) if np.median(peak) >= peak.min() else None).outcome
    assert ((cost == outcome.cost) & (peak == outcome.peak)).any()


@pytest.mark.parametrize("seed", range(budget(64, least=2)))
def test_what_a_unit_holds_at_least_is_held_wherever_the_others_are(seed: int) -> None:
    random = Random(f"least {seed}")
    graph = random_graph(random, 8)
    least = Simulator(graph).least_held
    for number, where in enumerate(graph.fixed):
        if where is not False:
            there = [True if unit == number else None for unit in range(len(graph.units))]
            _, peak = all_outcomes(graph.pinned(there))
            assert least[number] <= peak.min()


def test_what_has_no_room_by_itself_is_never_on_the_device() -> None:
    """A node that reads 6 and makes 3 bytes, and one that reads these: the second of them fits a limit of 8."""
    units = tuple(Unit(name, host=5, device=0) for name in ("large", "small"))
    values = (PlacedValue("x", 6, 0, reads=((0, 0),)), PlacedValue("y", 3, 0, 0, ((1, 1),)))
    graph = PlacementGraph(units, values, 2)
    assert Simulator(graph).least_held.tolist() == [9, 3]
    found = solve(graph, 8)
    assert found.on_device == (False, True)
    assert (found.plain, found.proven, found.method) == ((True, True), True, "cut")


def test_searches_end_in_time() -> None:
    """Updates of many weights, of which any so many fit: branch and bound has no end."""
    random = Random(0)
    units, values = [], []
    for number in range(60):
        units += [Unit(f"update {number}", random.randint(50, 60), 1), Unit(f"state {number}")]
        size = random.randint(90, 110)
        values.append(
            PlacedValue(f"m {number}", size, 2 * number + 1, reads=((number, 2 * number),), until=60, to_device=90)
        )
    graph = PlacementGraph(tuple(units), tuple(values), 60)
    plain = solve(graph)
    begin = time.monotonic()
    found = solve(graph, int(0.4 * plain.outcome.peak), seconds=SECONDS)
    assert time.monotonic() - begin < SECONDS + LATE
    assert found.gap < 0.05
