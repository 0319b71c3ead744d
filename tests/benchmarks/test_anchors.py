"""benchmarks/anchors.py over a folder of two cases made here."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from irpar import models

from .scripts import load_script


@pytest.fixture(scope="module")
def anchors() -> ModuleType:
    return load_script("anchors")


def case(name: str, xla: int, output: list[list[str] | None]) -> dict[str, Any]:
    return {
        "name": name,
        "mesh": {"axes": ["dp", "tp"], "sizes": [2, 4]},
        "annotations": {name: cut for name, cut in models.annotations("mlp").items() if name != "y"},
        "required_outputs": {"y": output},
        "inputs": {"x": {"shape": [8, 64], "dtype": "f32", "kind": "normal", "hi": None, "scale": 1.0}},
        "seed": 7,
        "numerics": True,
        "model": "mlp.onnx",
        "xla_launches_if_combined": 1,
        "sent_bytes": {"xla_gspmd": xla, "xla_shardy": None, "dtensor": None, "best_known": xla},
    }


def write(folder: Path, *cases: dict[str, Any]) -> Path:
    (folder / "cases").mkdir(exist_ok=True)
    models.save(folder / "cases" / "mlp.onnx", "mlp")
    for entry in cases:
        (folder / "cases" / f"{entry['name']}.json").write_text(json.dumps(entry))
    return folder


def test_groups_and_verdicts(anchors: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = [["dp"], None]
    folder = write(tmp_path, case("mlp_same", 1536, output), case("reshard_same", 1536, output))
    assert anchors.main(["--anchors", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "mlp: 1 of 1 at or below XLA" in out
    assert "decided by redistribution: at or below the better XLA: 1 of 1" in out
    assert "at the best known: 2 of 2" in out
    assert "launches at or below XLA's: 2 of 2" in out
    assert "other shardings: none" in out


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("mlp_worse", {"sent_bytes": 1535}, "decided by completion: at or below the better XLA: 0 of 1"),
        ("reshard_worse", {"sent_bytes": 1535}, "decided by redistribution: at or below the better XLA: 0 of 1"),
        ("mlp_above", {"best_known": 1535}, "at the best known: 0 of 1"),
        ("slice_wasted", {}, "below XLA where it is known to waste: 0 of 1"),
        ("mlp_launches", {"xla_launches_if_combined": 0}, "launches at or below XLA's: 0 of 1"),
    ],
)
def test_cases_must_not_be_worse(
    name: str,
    changes: dict[str, int],
    told: str,
    anchors: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    entry = case(name, changes.get("sent_bytes", 1536), [["dp"], None])
    entry["xla_launches_if_combined"] = changes.get("xla_launches_if_combined", 1)
    if "best_known" in changes:
        entry["sent_bytes"] = {**entry["sent_bytes"], "best_known": changes["best_known"]}
    folder = write(tmp_path, entry)
    assert anchors.main(["--anchors", str(folder), "--no-run"]) == 1
    out = capsys.readouterr().out
    assert f"{told}\n  not: {name}\n" in out


def test_refusals_and_no_cases(anchors: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert anchors.main(["--anchors", str(tmp_path)]) == 2
    folder = write(tmp_path, case("mlp_refused", 1536, [["dp"], ["pp"]]))
    assert anchors.main(["--anchors", str(folder)]) == 1
    assert "refused: " in capsys.readouterr().out
