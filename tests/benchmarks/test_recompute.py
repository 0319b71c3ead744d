"""benchmarks/recompute.py: its verdict on a known graph, and the gpts that it makes."""

from pathlib import Path
from types import ModuleType

import pytest

from irpar.analysis.recompute import simulate, write_graph
from tests.analysis.recompute.graphs import chain

from .scripts import load_script


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_script("recompute")


@pytest.mark.parametrize(("cost", "good"), [(1.2424, True), pytest.param(1.2, False, marks=pytest.mark.slow)])
def test_the_verdict(
    benchmark: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cost: float,
    good: bool,
) -> None:
    write_graph(chain(16), tmp_path / "linear16.json")
    monkeypatch.setattr(benchmark, "KNOWN", (benchmark.Known("linear16", 0.6, cost),))
    rows = list(benchmark.beside_known(tmp_path, 5))
    assert [row["good"] for row in rows] == [good]
    assert ("MISSED" in benchmark.report({"known": rows, "on": {"known": "two cores"}})) is not good


def test_a_layer_more_is_26_nodes_more(benchmark: ModuleType) -> None:
    sizes = [len(benchmark.gpt(layers).nodes) for layers in (1, 2, 3)]
    assert sizes == [34, 60, 86]
    graph = benchmark.gpt(2)
    assert simulate(graph, range(60)).cost == graph.cost


def test_rows_of_other_layers_stay(benchmark: ModuleType) -> None:
    known = [{"layers": 2, "cost": "1"}, {"layers": 12, "cost": "1"}, {"layers": 96, "cost": "1"}]
    found = benchmark.with_other_layers([{"layers": 20, "cost": "2"}, {"layers": 2, "cost": "2"}], known)
    assert [(row["layers"], row["cost"]) for row in found] == [(2, "2"), (12, "1"), (20, "2"), (96, "1")]
