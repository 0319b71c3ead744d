"""benchmarks/anchors.py over a folder of two cases made here."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from irpar import models

from .scripts import load_script


@pytest.fixture(scope="module")
def anchors() -> ModuleType:
    return load_script("anchors")


def case(name: str, xla: int, output: list[list[str] | None]) -> dict[str, object]:
    return {
        "name": name,
        "mesh": {"axes": ["dp", "tp"], "sizes": [2, 4]},
        "annotations": models.annotations("mlp"),
        "required_outputs": {"y": output},
        "inputs": {"x": {"shape": [8, 64], "dtype": "f32", "kind": "normal", "hi": None, "scale": 1.0}},
        "seed": 7,
        "numerics": True,
        "model": "mlp.onnx",
        "sent_bytes": {"xla_gspmd": xla, "xla_shardy": None, "dtensor": None, "best_known": xla},
    }


def write(folder: Path, *cases: dict[str, object]) -> Path:
    (folder / "cases").mkdir(exist_ok=True)
    models.save(folder / "cases" / "mlp.onnx", "mlp")
    for entry in cases:
        (folder / "cases" / f"{entry['name']}.json").write_text(json.dumps(entry))
    return folder


def test_groups_and_verdicts(anchors: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = [["dp"], None]
    folder = write(tmp_path, case("mlp_same", 1536, output), case("reshard_worse", 1000, output))
    assert anchors.main(["--anchors", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "mlp: 1 of 1 at or below XLA" in out
    assert "decided by redistribution: 0 of 1" in out
    assert "worse: reshard_worse" in out
    assert "other shardings: none" in out


def test_what_completion_decides_must_not_be_worse(
    anchors: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path, case("mlp_worse", 1535, [["dp"], None]))
    assert anchors.main(["--anchors", str(folder), "--no-run"]) == 1
    assert "worse: mlp_worse" in capsys.readouterr().out


def test_refusals_and_no_cases(anchors: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert anchors.main(["--anchors", str(tmp_path)]) == 2
    folder = write(tmp_path, case("mlp_refused", 1536, [["dp"], ["pp"]]))
    assert anchors.main(["--anchors", str(folder)]) == 1
    assert "refused: " in capsys.readouterr().out
