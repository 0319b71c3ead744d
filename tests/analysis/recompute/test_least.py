"""The least that can be held: what is said of it, and that it can be had where it is asked for."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings

from irpar.analysis.recompute import RecomputeError, TrainingGraph, TrainingNode, simulate, solve
from irpar.analysis.recompute.simulation import lower_bound

from .graphs import chain, least_cost, random_graphs


def least_said(graph: TrainingGraph, budget: int, seconds: float = 10) -> int:
    """What is said to be the least, where a budget is below."""
    with pytest.raises(RecomputeError) as error:
        solve(graph, budget, seconds=seconds)
    found = re.search(r"at least ([\d,]+) bytes", str(error.value))
    assert found is not None
    return int(found[1].replace(",", ""))


def least_there_is(graph: TrainingGraph) -> int:
    """The least peak of all schedules, by trying budgets."""
    low, high = lower_bound(graph), simulate(graph, range(len(graph.nodes))).peak
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if least_cost(graph, middle) is None else (low, middle)
    return low


@settings(deadline=None, max_examples=8)
@given(random_graphs(most=7))
def test_the_least_of_a_small_graph_is_the_least_there_is(graph: TrainingGraph) -> None:
    least = least_there_is(graph)
    if least:
        assert least_said(graph, least - 1) == least
    assert solve(graph, least, seconds=10).outcome.peak <= least


# Of all sizes the same factor, and none.
@pytest.mark.parametrize("size", [1, 1 << 36, (1 << 36) + 1])
def test_sizes_may_be_huge(size: int) -> None:
    nodes = [(5, 0, 0), (1, 1, 0), (9, 0, 0), (2, 3, 5), (1, 8, 0), (0, 5, 0)]
    graph = TrainingGraph(
        tuple(TrainingNode(f"n{place}", cost, mem * size, work=work) for place, (cost, mem, work) in enumerate(nodes)),
        ((0, 1), (0, 3), (1, 2), (1, 5), (2, 3), (3, 4), (3, 5)),
    )
    least = least_there_is(graph)
    assert least_said(graph, least - 1) == least
    assert solve(graph, least, seconds=10).outcome.cost == least_cost(graph, least)


def test_the_least_is_found_again() -> None:
    # Of nodes that differ, so that no method is optimal.
    graph = chain(6)
    nodes = tuple(replace(node, mem=1 + 3 * place % 7, cost=1 + place % 4) for place, node in enumerate(graph.nodes))
    graph = TrainingGraph(nodes, graph.edges)
    least = least_said(graph, lower_bound(graph) - 1, seconds=5)
    assert solve(graph, least, seconds=5).outcome.peak <= least
