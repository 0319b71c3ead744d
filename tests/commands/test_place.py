"""irpar partition and irpar train with --place, --host, --device and --device-memory-gb."""

import json
from pathlib import Path
from typing import Any

import pytest

import irpar
from irpar import models
from irpar.annotations.mindspore import primitive_target
from irpar.cli import main
from irpar.onnx_io import save
from irpar.output.target import EVALUATION


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "dlrm.onnx"
    models.save(path, "dlrm", tables=2)
    return str(path)


def _plan(model: str, out: Path, *options: str, command: str = "partition") -> dict[str, Any]:
    mesh = ["--mesh", "d=1"]
    assert main([command, model, "-o", str(out), *mesh, *options]) == 0
    plan: dict[str, Any] = json.loads((out / "plan.json").read_text())
    return plan


def test_what_is_pinned_stands_in_the_pipeline(model: str, tmp_path: Path) -> None:
    options = "--host", "tables.*", "--device", "top*", "--device", "bottom*", "--device-memory-gb", "1"
    plan = _plan(model, tmp_path / "out", *options)
    said = "join-weights,place{host=[tables.*], device=[top*, bottom*], limit-gb=1},fuse-communication"
    assert said in plan["pipeline"]
    assert plan["memory_limit"] == 10**9
    assert {copy["to"] for copy in plan["copies"]} == {"host", "device"}
    assert any("(device=top*)" in copy["reason"] for copy in plan["copies"])


def test_auto_and_off(model: str, tmp_path: Path) -> None:
    module = irpar.load(model)
    assert primitive_target(module, "tables.*", "CPU") > 0
    said = tmp_path / "said.onnx"
    save(module, said)
    assert "place{host=[tables.*], rest=device}" in _plan(str(said), tmp_path / "said")["pipeline"]
    assert "join-weights,place,fuse" in _plan(str(said), tmp_path / "auto", "--place", "auto")["pipeline"]
    assert "place" not in _plan(str(said), tmp_path / "off", "--place", "off")["pipeline"]


def test_a_step_of_training_has_the_same_options(tmp_path: Path) -> None:
    models.save(tmp_path / "mlp.onnx", "mlp")
    options = "--optimizer", "adam", "--host", "*.m"
    plan = _plan(str(tmp_path / "mlp.onnx"), tmp_path / "out", *options, command="train")
    assert "join-weights,place{host=[*.m]},fuse-communication" in plan["pipeline"]


def test_the_evaluation_of_a_step_is_placed_as_the_step_is(tmp_path: Path) -> None:
    models.save(tmp_path / "mlp.onnx", "mlp")
    options = "--optimizer", "adam", "--host", "*.m", "--device-memory-gb", "1"
    _plan(str(tmp_path / "mlp.onnx"), tmp_path / "out", *options, command="train")
    plan = json.loads((tmp_path / "out" / EVALUATION / "plan.json").read_text())
    assert "place{host=[*.m], limit-gb=1, unmatched=skipped}" in plan["pipeline"]
    assert plan["memory_limit"] == 10**9


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--place", "best"], 'there is no --place "best"'),
        (["--place", "off", "--host", "tables.*"], "--place off leaves all on the device"),
        (["--device-memory-gb", "0"], "--device-memory-gb 0"),
        (["--host", "tables.*", "--pipeline", "dce"], "--host and --pipeline both say what runs"),
        (["--place", "off", "--pipeline", "place{}"], "leave out --place off: place runs where the pipeline has it"),
        (["--host", "tabels.*"], 'no scope, no node, no weight and no input is "tabels.*"'),
    ],
)
def test_what_cannot_be_is_refused(
    options: list[str], told: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["partition", model, "-o", str(tmp_path / "out"), "--mesh", "d=1", *options]) == 2
    assert told in capsys.readouterr().err
