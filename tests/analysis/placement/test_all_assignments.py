"""Placement against all assignments."""

from random import Random

import numpy as np
import pytest

from irpar.analysis.placement import NoRoomError, solve
from irpar.analysis.placement.simulation import Simulator
from tests.budget import budget

from .graphs import all_outcomes, random_graph

GRAPHS = 500
MOST_NODES = 12
SHARES = (0, 0.3, 0.7)
"""Of the way from what must be held at least to what the cheapest assignment holds."""


@pytest.mark.parametrize("seed", range(3))
def test_nothing_that_fits_costs_less(seed: int) -> None:
    _check(Random(seed), most_nodes=7)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(budget(GRAPHS)))
def test_nothing_that_fits_costs_less_in_many_graphs(seed: int) -> None:
    _check(Random(f"many {seed}"), MOST_NODES)


def _check(random: Random, most_nodes: int) -> None:
    graph = random_graph(random, random.randint(1, most_nodes))
    cost, peak = all_outcomes(graph)
    plain = solve(graph)
    assert (plain.outcome.cost, plain.proven) == (cost.min(), True)
    least, most = int(peak.min()), plain.outcome.peak
    for limit in {least + round(share * (most - least)) for share in SHARES}:
        found = solve(graph, limit, seconds=60)
        assert found.outcome.cost == cost[peak <= limit].min()
        assert found.outcome.peak <= limit
        assert found.proven
    linear = solve(graph, least, "linear")
    assert linear.bound <= cost[peak <= least].min() <= linear.outcome.cost
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
