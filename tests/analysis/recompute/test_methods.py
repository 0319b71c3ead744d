"""Schedules by each method, on graphs whose best schedules are known."""

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irpar.analysis.recompute import METHODS, RecomputeError, TrainingGraph, TrainingNode, simulate, solve
from irpar.analysis.recompute.chain import chain_of
from irpar.analysis.recompute.saved_sets import cheapest_set, on_demand
from tests import budget as shares
from tests.patience import patient

from .graphs import chain, random_graphs

UNIT = 9
"""Nodes of the forward pass of the chain below: with the loss 19 nodes, whose peak is 11."""


@pytest.mark.parametrize("method", METHODS)
def test_every_method_fits_a_chain_into_less(method: str) -> None:
    graph = chain(UNIT)
    whole = simulate(graph, range(len(graph.nodes)))
    found = solve(graph, 8, method, seconds=10)
    assert simulate(graph, found.schedule) == found.outcome
    assert found.outcome.peak <= 8 < whole.peak
    assert list(dict.fromkeys(found.schedule)) == list(range(len(graph.nodes)))


def test_the_best_of_all_is_never_worse() -> None:
    graph = chain(UNIT)
    for budget in shares.every(2, (6, 7, 8, 9)):
        costs = {}
        for method in METHODS:
            try:
                costs[method] = solve(graph, budget, method, seconds=10).outcome.cost
            except RecomputeError:
                assert method not in ("auto", "optimal", "chain")
        assert costs["auto"] == costs["optimal"] == min(costs.values())
        # A chain of equal nodes is what the dynamic program is optimal for.
        assert costs["chain"] == costs["auto"]


def test_what_fits_stays_as_it_is() -> None:
    graph = chain(4)
    whole = simulate(graph, range(len(graph.nodes)))
    found = solve(graph, whole.peak)
    assert found.outcome == whole
    assert found.proven


def test_a_budget_that_cannot_be_met_says_the_least_that_can() -> None:
    graph = chain(5)
    with pytest.raises(RecomputeError, match="at most 2 bytes") as error:
        solve(graph, 2, seconds=5)
    text = str(error.value)
    least = int(text.rpartition("at least ")[2].split()[0])
    assert solve(graph, least, seconds=10).outcome.peak <= least
    with pytest.raises(RecomputeError, match=f"the least that was found holds {least} bytes"):
        solve(graph, least - 1, seconds=10)


@pytest.mark.parametrize("share", [0.5, 0.15, 0.01])
def test_all_that_searches_ends_in_the_time_that_is_given(share: float) -> None:
    graph = chain(58)
    budget = int(simulate(graph, range(len(graph.nodes))).peak * share)
    begin = time.monotonic()
    try:
        found = solve(graph, budget, seconds=0.5)
    except RecomputeError:
        assert share < 0.5
    else:
        assert found.outcome.peak <= budget
    # What runs on when the time is over are steps of the methods, not searches. A loaded machine takes longer.
    assert time.monotonic() - begin < patient(4)


def test_nothing_is_proven_where_numbers_are_rounded() -> None:
    graph = chain(4)
    many, odd = (
        TrainingGraph(
            tuple(replace(node, cost=(node.cost << 45) + place * more) for place, node in enumerate(graph.nodes)),
            graph.edges,
        )
        for more in (0, 1)
    )
    found, exact, rounded = (solve(each, 5, "optimal", seconds=10) for each in (graph, many, odd))
    assert found.proven
    assert exact.proven
    assert exact.bound == exact.outcome.cost == found.outcome.cost << 45
    assert not rounded.proven
    assert rounded.bound is not None
    assert rounded.bound <= rounded.outcome.cost
    assert rounded.outcome.cost >> 45 == found.outcome.cost


@settings(deadline=None, max_examples=shares.budget(20, least=10))
@given(random_graphs(most=12), st.integers(0, 11), st.floats(0, 1))
def test_any_graph_gets_a_schedule_that_holds_what_is_said(graph: TrainingGraph, first: int, share: float) -> None:
    nodes = [TrainingNode(node.name, node.cost, node.mem, place >= first) for place, node in enumerate(graph.nodes)]
    graph = TrainingGraph(tuple(nodes), graph.edges, graph.fixed_mem)
    whole = simulate(graph, range(len(nodes)))
    for method in ("sqrt", "sweep", "chain"):
        try:
            found = solve(graph, int(whole.peak * (1 - share / 2)), method, seconds=0.2)
        except RecomputeError:
            continue
        assert simulate(graph, found.schedule) == found.outcome
        assert found.outcome.peak <= whole.peak * (1 - share / 2)


def test_blocks_end_where_one_result_goes_on() -> None:
    # x -> a -> b -> (x + b): the sum ends a block, since only its result is read after it.
    names = ("x", "a", "b", "sum", "loss", "dsum", "da")
    nodes = tuple(TrainingNode(name, 1, 1, name.startswith("d")) for name in names)
    edges = ((0, 1), (1, 2), (0, 3), (2, 3), (3, 4), (4, 5), (1, 6), (5, 6))
    blocks = chain_of(TrainingGraph(nodes, edges))
    assert [block.forward for block in blocks] == [(0,), (1, 2, 3), (4,)]
    assert [block.backward for block in blocks] == [(), (6,), (5,)]


def test_the_saved_set_recomputes_what_is_cheap() -> None:
    # Of two results of the same size that the backward pass reads, the one that costs less is computed again.
    nodes = [TrainingNode("x", 0, 1, norec=True), TrainingNode("dear", 9, 4), TrainingNode("cheap", 1, 4)]
    nodes += [TrainingNode("loss", 1, 0), TrainingNode("d", 1, 1, bwd=True)]
    edges = ((0, 1), (1, 2), (2, 3), (3, 4), (1, 4), (2, 4))
    graph = TrainingGraph(tuple(nodes), edges)
    saved = cheapest_set(graph, 5)
    assert saved is not None
    assert 1 in saved
    assert 2 not in saved
    assert on_demand(graph, saved) == [0, 1, 2, 3, 2, 4]


@settings(deadline=None, max_examples=shares.budget(160))
@given(random_graphs(most=9), st.integers(1, 8), st.sets(st.integers(1, 8)), st.floats(0, 1))
def test_results_of_a_node_run_as_one(graph: TrainingGraph, first: int, joined: set[int], share: float) -> None:
    nodes = [
        replace(node, bwd=place >= first, joined=place in joined and place != first)
        for place, node in enumerate(graph.nodes)
    ]
    edges = {(place - 1, place) for place, node in enumerate(nodes) if node.joined} | set(graph.edges)
    graph = TrainingGraph(tuple(nodes), tuple(sorted(edges)), graph.fixed_mem)
    budget = int(simulate(graph, range(len(nodes))).peak * (1 - share / 2))
    for method in METHODS:
        try:
            found = solve(graph, budget, method, seconds=0.5)
        except RecomputeError:
            continue
        # A schedule in which a result comes without the others is refused by the simulation.
        assert simulate(graph, found.schedule) == found.outcome
        assert found.outcome.peak <= budget


@pytest.mark.parametrize("unit", [1, 1 << 20])
def test_few_large_costs_come_before_many_small_ones_whatever_their_unit(unit: int) -> None:
    # Six nodes of cost 1 are computed again rather than one of cost 7, which is as large.
    names = ["x", *(f"cheap{number}" for number in range(6)), "dear", "loss", "d"]
    costs = [0, *[unit] * 6, 7 * unit, unit, unit]
    sizes = [1, *[0] * 5, 4, 4, 0, 1]
    nodes = [
        TrainingNode(name, cost, size, bwd=name == "d", norec=name == "x")
        for name, cost, size in zip(names, costs, sizes, strict=True)
    ]
    edges = (*((place, place + 1) for place in range(9)), (6, 9), (7, 9))
    saved = cheapest_set(TrainingGraph(tuple(nodes), edges), 5)
    assert saved is not None
    assert 7 in saved
    assert 6 not in saved
