"""irpar calibrate: the fit, the file, and a run of it."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irpar import models
from irpar.analysis.cost.network import Disk
from irpar.analysis.cost.network_file import read_network
from irpar.cli import main
from irpar.commands import disk_speed
from irpar.commands.calibration import ALGORITHM, Calibration, Fit, Point, as_yaml, calibrate, fit, fitted
from irpar.commands.disk_speed import DiskSpeed, measure_disk
from irpar.sharding import Axis, IrparError, Mesh
from tests.budget import budget
from tests.patience import patient

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22)


@given(
    st.sampled_from(sorted(ALGORITHM)),
    st.floats(1e-7, 1e-2),
    st.floats(1e6, 1e12),
    st.integers(2, 9),
)
@settings(max_examples=budget(100), deadline=None)
def test_exact_times_give_latency_and_bandwidth_back(kind: str, latency: float, bandwidth: float, ranks: int) -> None:
    true = Fit(latency, bandwidth)
    points = [(kind, size, fitted(kind, size, ranks, true)) for size in SIZES]
    found = fit(points, ranks)
    for point_kind, size, seconds in points:
        assert fitted(point_kind, size, ranks, found) == pytest.approx(seconds, rel=1e-5)


@given(st.lists(st.floats(1e-7, 1.0), min_size=len(SIZES), max_size=len(SIZES)))
@settings(max_examples=budget(100), deadline=None)
def test_any_times_give_something_that_can_be(seconds: list[float]) -> None:
    found = fit([("all_reduce", size, t) for size, t in zip(SIZES, seconds, strict=True)], 4)
    assert found.latency >= 0
    assert 0 < found.bandwidth <= 1e13


def test_the_file_reads_back(tmp_path: Path) -> None:
    kinds = {kind: Fit(1.25e-6, 2e9) for kind in ALGORITHM}
    points = (Point("all_reduce", 1024, 2e-5, 3e-5),)
    disk = DiskSpeed(4e9, 2e9, 1e12)
    rates = {"f32": 1.23456e11}, {"bf16": "no kernel"}, 8e9, 9e-7, 3e-5, 6e9
    made = Calibration(4, "ort", *rates, Fit(2e-6, 1e9), kinds, points, disk, 9.0)
    (tmp_path / "here.yaml").write_text(as_yaml(made))
    network = read_network(tmp_path / "here.yaml")
    assert network.device is not None
    assert (network.device.flops, network.device.launch, network.launch) == ({"f32": 1.235e11}, 9e-7, 3e-5)
    assert network.device.memory == 6e9
    assert network.disk == Disk(1e9, 5e8, 2.5e11)
    mesh = Mesh({"x": 4})
    for kind in ALGORITHM:
        expected = 3e-5 + fitted(kind, 1e6, 4, kinds[kind])
        assert network.seconds(kind, [Axis("x")], 1e6, mesh) == pytest.approx(expected)
    assert json.loads(network.text) == made.fields()
    assert points[0].residual == pytest.approx(0.5)


def test_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_speed, "SIZE", 4 << 20)
    found = measure_disk(tmp_path)
    assert found is not None
    assert 0 < found.write < 1e13
    assert 0 < found.read < 1e13
    assert found.capacity > 0
    assert not list(tmp_path.iterdir())


def test_a_disk_that_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure_disk(tmp_path / "gone") is None
    monkeypatch.setattr(disk_speed, "SIZE", 1 << 60)
    assert measure_disk(tmp_path) is None


@pytest.mark.parametrize("ranks", [0, 1, 65])
def test_ranks_that_cannot_be(ranks: int) -> None:
    with pytest.raises(IrparError, match="cannot be measured"):
        calibrate(ranks)


def test_nothing_else_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.yaml").write_text("dear: diary\n")
    assert main(["calibrate", "-o", str(tmp_path / "notes.yaml")]) == 2
    assert "holds something else" in capsys.readouterr().err
    assert main(["calibrate", "-o", str(tmp_path)]) == 2
    assert "the target is a folder" in capsys.readouterr().err
    assert main(["calibrate", "--engine", "abacus"]) == 2
    assert 'no engine "abacus"' in capsys.readouterr().err
    assert (tmp_path / "notes.yaml").read_text() == "dear: diary\n"


@pytest.mark.slow
def test_a_run_and_its_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.yaml"
    assert main(["calibrate", "--ranks", "2", "-o", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["seconds"] < patient(30)
    assert {point["kind"] for point in told["collectives"]} == set(ALGORITHM)
    network = read_network(path)
    assert json.loads(network.text) == told["network"]
    assert network.device is not None
    assert 1e8 < network.device.rate("f32") < 1e14
    assert 1e8 < network.device.memory_bandwidth < 1e13
    assert network.disk is not None
    assert 1e5 < network.disk.write < 1e13
    models.save(tmp_path / "mlp.onnx", "mlp")
    (tmp_path / "mlp.json").write_text(json.dumps({"mesh": {"tp": 2}, "tensors": {"fc2.weight": [["tp"], None]}}))
    words = ["partition", "mlp.onnx", "-o", "out", "--shardings", "mlp.json", "--network", "here.yaml", "--json"]
    assert main([str(tmp_path / word) if "." in word or word == "out" else word for word in words]) == 0
    predicted = json.loads(capsys.readouterr().out)["predicted"]
    assert 0 < predicted["communication_seconds"] < predicted["step_seconds"] < 1
    # The file that is there is its own: it may be written again.
    assert main(["calibrate", "--ranks", "2", "-o", str(path)]) == 0
    assert "all_reduce" in capsys.readouterr().out
