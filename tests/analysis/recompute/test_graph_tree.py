"""Schedules of graphs whose nodes hold bodies: what is recomputed where, within one budget."""

import time
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from irpar.analysis.recompute import FoundSchedules, GraphTree, TrainingGraph, TrainingNode, simulate, solve_tree
from irpar.analysis.recompute.simulation import held_bytes

from .graphs import chain, random_graphs

BODY = chain(4)
"""9 nodes, whose peak is 6."""


def holder(around: int, body: TrainingGraph, cost: int = 1, mem: int = 1) -> GraphTree:
    """A result that is held while a node runs which holds a body, for what comes after that."""
    nodes = (TrainingNode("a", cost, around), TrainingNode("loop", 10, mem), TrainingNode("y", 1, 1))
    return GraphTree(TrainingGraph(nodes, ((0, 1), (0, 2), (1, 2))), ((1, GraphTree(body)),))


def solved(tree: GraphTree, budget: int) -> FoundSchedules:
    return solve_tree(tree, budget, "auto", time.monotonic() + 10)


def test_what_a_body_holds_is_held_beside_what_is_around_it() -> None:
    tree = holder(4, BODY)
    assert tree.outcome(tree.plain).peak == 4 + 1 + simulate(BODY, range(9)).peak
    graph = tree.around([6])
    assert list(held_bytes(graph, range(3))) == [4, 11, 6]


def test_a_body_is_recomputed_in_the_room_that_is_left() -> None:
    found = solved(holder(4, BODY), 9)
    own, body = found.schedules
    assert own == [0, 1, 2]
    assert simulate(BODY, body).peak <= 4
    assert found.outcome.peak <= 9


def test_what_is_around_a_body_is_recomputed_where_that_costs_less() -> None:
    # %a is not read by the loop: once more after it instead of a few nodes of the body.
    tree = holder(4, BODY, cost=1)
    nodes = (
        TrainingNode("x", 0, 1, norec=True),
        TrainingNode("a", 1, 4),
        TrainingNode("b", 1, 1),
        *tree.graph.nodes[1:],
    )
    tree = GraphTree(TrainingGraph(nodes, ((0, 1), (1, 2), (2, 3), (1, 4), (3, 4), (0, 4))), ((3, GraphTree(BODY)),))
    assert tree.outcome(tree.plain).peak == 13
    found = solved(tree, 9)
    assert found.schedules == [[0, 1, 2, 3, 1, 4], *tree.plain[1:]]
    # Neither is enough alone.
    least = solved(tree, 7)
    assert least.outcome.peak <= 7
    assert least.schedules[0] == [0, 1, 2, 3, 1, 4]
    assert least.schedules[1] != tree.plain[1]


def test_what_fits_stays_as_it_is() -> None:
    tree = holder(4, BODY)
    found = solved(tree, 11)
    assert found.schedules == tree.plain
    assert found.proven


def test_the_least_that_was_found_is_what_can_be_had() -> None:
    tree = holder(4, BODY)
    found = solved(tree, 1)
    least = found.outcome.peak
    assert least < 11
    assert solved(tree, least).outcome.peak <= least


@settings(deadline=None, max_examples=6)
@given(random_graphs(most=6), st.lists(random_graphs(most=6), min_size=1, max_size=2), st.floats(0.5, 1))
def test_any_graph_with_bodies_holds_what_is_said(
    around: TrainingGraph, inside: list[TrainingGraph], share: float
) -> None:
    bodies = [GraphTree(replace(body, fixed_mem=0)) for body in inside]
    bodies[0] = GraphTree(bodies[0].graph, ((0, bodies[-1]),))
    tree = GraphTree(around, tuple((len(around.nodes) - 1, body) for body in bodies))
    whole = tree.outcome(tree.plain)
    budget = int(whole.peak * share)
    found = solve_tree(tree, budget, "auto", time.monotonic() + 0.1)
    assert tree.outcome(found.schedules) == found.outcome
    assert len(found.schedules) == tree.size
    assert found.outcome.peak <= max(budget, whole.peak)
    assert found.outcome.cost >= whole.cost
