"""irpar partition and irpar train with --store."""

import json
from pathlib import Path

import pytest

from irpar import models
from irpar.cli import main
from irpar.commands.store_options import store_of
from irpar.output.target import EVALUATION
from irpar.passes.store import Store


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "mlp.onnx"
    models.save(path, "mlp")
    return str(path)


def test_what_is_asked_for_stands_in_the_pipeline(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["partition", model, "-o", str(out), "--mesh", "d=1", "--store", "weights=host, prefetch=1"]) == 0
    plan = json.loads((out / "plan.json").read_text())
    assert "join-weights,store{weights=host, prefetch=1},fuse-communication" in plan["pipeline"]
    assert {(copy["from"], copy["to"]) for copy in plan["copies"]} == {("host", "device")}


def test_auto_is_short(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--optimizer", "adam", "--store", "auto, limit-gb=0.0004, seconds=0"]
    assert main(["train", model, "-o", str(out), *options]) == 0
    plan = json.loads((out / "plan.json").read_text())
    assert "store{auto=true, limit-gb=0.0004, seconds=0}" in plan["pipeline"]
    assert plan["ranks"][0]["peak_bytes"] <= 400_000


def test_the_evaluation_of_a_step_has_its_limit(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--optimizer", "adam", "--memory-limit-gb", "0.0004", "--store", "auto, seconds=0"]
    assert main(["train", model, "-o", str(out), *options]) == 0
    plans = [json.loads((folder / "plan.json").read_text()) for folder in (out, out / EVALUATION)]
    assert [plan["memory_limit"] for plan in plans] == [400_000, 400_000]
    assert plans[0]["copies"]
    assert all(rank["peak_bytes"] <= 400_000 for plan in plans for rank in plan["ranks"])


def test_a_quoted_path_is_one_word(model: str, tmp_path: Path) -> None:
    given = {"store": 'auto, path="a,auto, b", limit-gb=1', "pipeline": None, "out": tmp_path / "out"}
    assert store_of(given) == Store(auto=True, path="a,auto, b", limit_gb=1)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--store", "weights=tape"], 'store cannot take "tape" for weights'),
        (["--store", "weights=host}, store{state=host"], "names more passes than one"),
        (["--store", "weights=host", "--pipeline", "dce"], "--store and --pipeline both say what runs"),
    ],
)
def test_what_cannot_be_is_refused(
    options: list[str], told: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["partition", model, "-o", str(tmp_path / "out"), "--mesh", "d=1", *options]) == 2
    assert told in capsys.readouterr().err
