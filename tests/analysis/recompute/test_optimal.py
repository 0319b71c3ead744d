"""The cheapest schedule by CP-SAT, beside all that there are."""

from hypothesis import given, settings
from hypothesis import strategies as st

from irpar.analysis.recompute import RecomputeError, simulate, solve
from irpar.analysis.recompute.simulation import lower_bound

from .graphs import chain, least_cost, random_graphs


@settings(deadline=None)
@given(random_graphs(), st.floats(0, 1))
def test_nothing_is_cheaper_than_the_optimum_of_a_small_graph(graph, share):
    whole = simulate(graph, range(len(graph.nodes))).peak
    least = lower_bound(graph)
    budget = least + int((whole - least) * share)
    expected = least_cost(graph, budget)
    try:
        found = solve(graph, budget, "optimal", seconds=20)
    except RecomputeError:
        assert expected is None
        return
    assert simulate(graph, found.schedule) == found.outcome
    assert found.outcome.peak <= budget
    assert found.proven
    assert found.outcome.cost == expected == found.bound


def test_a_node_may_run_more_than_twice():
    # The least memory that a chain of five can do with: its first nodes run again and again.
    graph = chain(5)
    found = solve(graph, 3, "optimal", seconds=20)
    assert found.outcome.cost == least_cost(graph, 3)
    assert max(map(found.schedule.count, found.schedule)) > 2
