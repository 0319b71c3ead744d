"""Schedules: what they hold and cost; graphs in their JSON form."""

import json
from pathlib import Path

import pytest
from hypothesis import given

from irpar.analysis.recompute import (
    Outcome,
    RecomputeError,
    TrainingGraph,
    TrainingNode,
    read_graph,
    simulate,
    write_graph,
)
from irpar.analysis.recompute.simulation import canonical, held_bytes, without_idle

from .graphs import chain, random_graphs


def test_operands_are_held_while_a_node_runs() -> None:
    graph = chain(3)
    # f0 f1 f2 loss b2 b1 b0: each b reads its f.
    assert list(held_bytes(graph, range(7))) == [1, 2, 3, 4, 5, 4, 3]
    assert simulate(graph, range(7)) == Outcome(5, 7)


def test_a_result_goes_after_its_last_use() -> None:
    graph = chain(3)
    assert list(held_bytes(graph, [0, 1, 2, 3, 4, 0, 1, 5, 6])) == [1, 2, 2, 2, 3, 2, 3, 4, 3]


def test_what_is_kept_is_held_to_the_end_and_work_while_it_runs() -> None:
    nodes = (TrainingNode("a", 1, 2, keep=True), TrainingNode("b", 1, 1, work=5), TrainingNode("c", 1, 1))
    graph = TrainingGraph(nodes, ((0, 1), (1, 2)), fixed_mem=10)
    assert list(held_bytes(graph, range(3))) == [12, 18, 14]


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ([1, 0], "b runs before a, which it reads"),
        ([0, 1, 2, 2], "c may run only once"),
        ([0, 1, 0], "a may run only once"),
    ],
)
def test_what_cannot_run_is_refused(schedule: list[int], said: str) -> None:
    nodes = (TrainingNode("a", 1, keep=True), TrainingNode("b", 1), TrainingNode("c", 1, norec=True))
    with pytest.raises(RecomputeError, match=said):
        simulate(TrainingGraph(nodes, ((0, 1), (1, 2))), schedule)


def test_repetitions_that_nobody_reads_go() -> None:
    graph = chain(3)
    assert without_idle(graph, [0, 1, 2, 3, 0, 1, 4, 5, 6]) == [0, 1, 2, 3, 0, 1, 4, 5, 6]
    assert without_idle(graph, [0, 1, 2, 3, 4, 5, 0, 1, 6]) == [0, 1, 2, 3, 4, 5, 0, 6]
    assert canonical(graph, [0, 1, 2, 3, 1, 0, 0, 1, 4, 5, 6]) == [0, 1, 2, 3, 0, 1, 4, 5, 6]


@given(random_graphs())
def test_a_graph_is_read_back_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, graph: TrainingGraph) -> None:
    path = tmp_path_factory.mktemp("graphs") / "graph.json"
    write_graph(graph, path)
    assert read_graph(path) == graph


@pytest.mark.parametrize("text", ["{", "[]", '{"nodes": [{}], "edges": []}', '{"nodes": [], "edges": [[0]]}'])
def test_what_is_no_graph_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "graph.json"
    path.write_text(text)
    with pytest.raises(RecomputeError, match="holds no training graph"):
        read_graph(path)


def test_edges_lead_forward(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({"nodes": [{"name": "a", "cost": 1}] * 2, "edges": [[1, 0]]}))
    with pytest.raises(RecomputeError, match="no edge leads from node 1 to node 0"):
        read_graph(path)
