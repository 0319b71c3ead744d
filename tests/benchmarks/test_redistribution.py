"""benchmarks/redistribution.py: the greedy that it compares with, and its verdict on small meshes."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from irpar.sharding import Mesh, Sharding

from .scripts import load_script

MESH = Mesh({"x": 2, "y": 4})
BYTES = 64 * 64 * 4


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_script("redistribution")


GREEDY = [
    # A split is free, and makes what is gathered then smaller.
    ([["x"], None], [None, ["y"]], BYTES // 8, BYTES // 8),
    ([["x"], None], [None, ["x"]], BYTES // 4, BYTES // 2),
    # Two dims that want each other's axis: the first is gathered, the second permuted, the first split again.
    ([["x"], ["y"]], [["y"], ["x"]], BYTES // 8 + BYTES // 4 * 3 // 4, BYTES // 8 + BYTES // 4 * 3),
    ([["x"], ["y"]], [["x"], ["y"]], 0, 0),
]


@pytest.mark.parametrize(("source", "target", "sent", "without"), GREEDY)
def test_the_greedy(benchmark: ModuleType, source: object, target: object, sent: int, without: int) -> None:
    old, new = Sharding.of_spec(MESH, source), Sharding.of_spec(MESH, target)  # type: ignore[arg-type]
    assert benchmark.Greedy(old, new, True).run() == sent
    assert benchmark.Greedy(old, new, False).run() == without


def test_the_lower_bound(benchmark: ModuleType) -> None:
    old, new = Sharding.of_spec(MESH, [["x"], None]), Sharding.of_spec(MESH, [None, ["y"]])
    shape = (64, 64)
    assert benchmark.lower_bound(benchmark.regions(old, shape), benchmark.regions(new, shape)) == BYTES // 8


def xla_case(folder: Path, sent: int) -> Path:
    (folder / "cases").mkdir()
    case = {
        "name": "reshard_case",
        "mesh": {"axes": ["x", "y"], "sizes": [2, 4]},
        "annotations": {"x": [["x"], None]},
        "required_outputs": {"y": [None, ["x"]]},
        "inputs": {"x": {"shape": [64, 64]}},
        "sent_bytes": {"xla_gspmd": sent, "xla_shardy": None, "dtensor": None, "best_known": sent},
    }
    (folder / "cases" / "reshard_case.json").write_text(json.dumps(case))
    return folder


@pytest.mark.parametrize(("sent", "above"), [(BYTES // 4, 0), (BYTES // 4 - 1, 1)])
def test_the_verdict(
    benchmark: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sent: int,
    above: int,
) -> None:
    monkeypatch.setattr(benchmark, "MESHES", [({"x": 2, "y": 2}, 2)])
    monkeypatch.setattr(benchmark, "print_speed", lambda: True)
    assert benchmark.main(["--anchors", str(xla_case(tmp_path, sent))]) == above
    out = capsys.readouterr().out
    assert f"irpar sends more than MindSpore's greedy or XLA in {above} cases" in out
    assert "x=2,y=2" in out
