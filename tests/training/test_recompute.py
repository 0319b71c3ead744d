"""Recompute from the command line: what it says, and the same numbers in a run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from irpar import models
from irpar.analysis.recompute_said import RecomputeSaid, say_recompute
from irpar.annotations.mindspore import hsdp
from irpar.onnx_io import save
from irpar.training.step import make_step
from tests.command_line import call, refused
from tests.training.programs import CLASSIFIER, data_file, with_weights

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def network(tmp_path: Path) -> Path:
    save(with_weights(CLASSIFIER), tmp_path / "classifier.onnx")
    return tmp_path / "classifier.onnx"


def train(capsys: Capture, network: Path, out: str, *options: Any) -> tuple[int, str, str]:
    return call(capsys, "train", network, "-o", network.parent / out, "--optimizer", "sgd", "--no-cache", *options)


def test_a_run_has_the_same_losses(network: Path, tmp_path: Path, capsys: Capture) -> None:
    data, losses = data_file(tmp_path), []
    mesh = ("--mesh", "dp=2", "--dataset-sharding", "data_parallel")
    for out, options in (("plain", ()), ("less", ("--recompute", "*")), ("zero", ("--recompute", "*", "--zero", 1))):
        code, printed, _ = train(capsys, network, out, *mesh, *options)
        assert code == 0
        assert ("computed again: ranks hold" in printed) == (out != "plain")
        metrics = tmp_path / f"{out}.jsonl"
        run = ("run", tmp_path / out, "--data", data, "--steps", 3, "--metrics", metrics)
        assert call(capsys, *run)[0] == 0
        losses.append([json.loads(line).get("loss") for line in metrics.read_text().splitlines()])
    assert losses[0] == losses[1] == losses[2]


def test_a_pattern_of_whole_layers_that_lowers_little(tmp_path: Path, capsys: Capture) -> None:
    models.save(tmp_path / "gpt.onnx", "gpt", layers=3)
    _, wide, _ = train(capsys, tmp_path / "gpt.onnx", "wide", "--recompute", "h.*")
    assert "that lowers little" in wide
    assert '"h.*/*" names what is inside of them' in wide
    _, inside, _ = train(capsys, tmp_path / "gpt.onnx", "inside", "--recompute", "h.*/*")
    assert "computed again: ranks hold" in inside
    assert "that lowers little" not in inside
    _, node, _ = train(capsys, tmp_path / "gpt.onnx", "node", "--recompute", "/h.0/mlp/act/Tanh")
    assert "that lowers little" not in node
    said = refused(capsys, "the program takes inputs, and none are given", "run", tmp_path / "wide")
    assert "do: train: --data DATA --steps N" in said


def test_the_loop_over_micro_batches_is_looked_into(network: Path, tmp_path: Path, capsys: Capture) -> None:
    data, losses = data_file(tmp_path), []
    for out, options in (("plain", ()), ("match", ("--recompute", "*"))):
        code, printed, _ = train(capsys, network, out, "--micro-batches", 2, *options)
        assert code == 0
        assert ("computed again: ranks hold" in printed) == (out == "match")
        metrics = tmp_path / f"{out}.jsonl"
        assert call(capsys, "run", tmp_path / out, "--data", data, "--steps", 2, "--metrics", metrics)[0] == 0
        losses.append([json.loads(line).get("loss") for line in metrics.read_text().splitlines()])
    assert losses[0] == losses[1]
    said = refused(
        capsys,
        "give a budget of at least",
        "train",
        network,
        "-o",
        tmp_path / "no",
        "--micro-batches",
        2,
        "--memory-budget",
        0.1,
    )
    assert "the least that was found holds" in said


def test_a_budget_says_what_it_does(network: Path, tmp_path: Path, capsys: Capture) -> None:
    code, printed, _ = train(capsys, network, "out", "--memory-budget", 1)
    assert code == 0
    assert "which fits" in printed
    peak = json.loads((tmp_path / "out" / "plan.json").read_text())["ranks"][0]["peak_bytes"]
    code, printed, _ = train(capsys, network, "gb", "--memory-budget-gb", peak / 1e9)
    assert code == 0
    said = refused(
        capsys, "give a budget of at least", "train", network, "-o", tmp_path / "no", "--memory-budget", 0.01
    )
    assert "the least that was found holds" in said
    least = re.search(r"--memory-budget-gb [0-9.]+", said)
    assert least is not None
    code, printed, _ = train(capsys, network, "least", *least.group().split())
    assert code == 0
    assert "which fits" in printed or "computed again" in printed


def test_mistakes(network: Path, tmp_path: Path, capsys: Capture) -> None:
    given = ("train", network, "-o", tmp_path / "no")
    both = ("--recompute", "*", "--memory-budget", 0.5)
    refused(capsys, "--recompute and --memory-budget both say what is computed again", *given, *both)
    refused(capsys, "--recompute and --pipeline both say what runs", *given, "--recompute", "*", "--pipeline", "dce")
    refused(capsys, "--memory-budget 0", *given, "--memory-budget", 0)
    refused(capsys, "--memory-budget 2", *given, "--memory-budget", 2)
    refused(capsys, 'there is no --recompute-method "best"', *given, *both[2:], "--recompute-method", "best")
    for name, value in (("--recompute-method", "chain"), ("--recompute-seconds", 3)):
        refused(capsys, f"{name} without a budget", *given, name, value)
        refused(capsys, f"{name} without a budget", *given, *both[:2], name, value)
    onnx = ("train", network, "-o", tmp_path / "no.onnx", "--recompute", "*")
    refused(capsys, "an .onnx file leaves the order", *onnx)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("options", [("--recompute", "*"), ("--memory-budget", 1), ("--zero", 1)])
def test_what_the_model_asks_for_stays(
    options: tuple[Any, ...], network: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The step itself asks for sharded optimizer state, and that all is computed again.
    def asking(model: Any, settings: Any, bind: Any) -> Any:
        module, notes = make_step(model, settings, bind)
        hsdp(module, threshold=0, optimizer_level="level3")
        say_recompute(module, RecomputeSaid("*"), True)
        return module, notes

    monkeypatch.setattr("irpar.training.step.make_step", asking)
    mesh = ("--mesh", "dp=2", "--dataset-sharding", "data_parallel")
    code, _, _ = train(capsys, network, "out", *mesh, *options)
    assert code == 0
    pipeline = json.loads((tmp_path / "out" / "plan.json").read_text())["pipeline"]
    assert pipeline.count(",zero") == 1
    assert (",zero," if options[0] == "--zero" else ",zero{stage=3") in pipeline
    assert pipeline.count("recompute{match=[*]") == (2 if options[0] == "--recompute" else 1)
    assert ("recompute{budget=1" in pipeline) == (options[0] == "--memory-budget")
