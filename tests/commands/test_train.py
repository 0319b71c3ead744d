"""irpar train: what it writes and prints, and each mistake."""

import json
from dataclasses import asdict, fields
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import irpar
from irpar import models
from irpar.commands.train import train_command
from irpar.passes.add_loss import AddLoss
from irpar.passes.optimizer import Optimizer
from irpar.passes.zero import Zero
from irpar.training.settings import Settings
from tests.command_line import Capture, call, refused
from tests.training.programs import batch, samples


def steps_in_onnx_runtime(path: Path, count: int, **feeds: Any) -> list[float]:
    """The losses of a step that stock ONNX Runtime runs in a loop, each result of a state given back as that state."""
    session = ort.InferenceSession(path)
    states: dict[str, Any] = {}  # What they begin with is in the model.
    losses = []
    for _ in range(count):
        results = dict(zip(outputs(session), session.run(None, {**feeds, **states}), strict=True))
        losses.append(float(results["loss"]))
        states = {name.removesuffix(".next"): array for name, array in results.items() if name.endswith(".next")}
    return losses


def outputs(session: ort.InferenceSession) -> list[str]:
    return [value.name for value in session.get_outputs()]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw", "lamb"])
def test_a_step_learns_in_onnx_runtime(optimizer: str, network: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "step.onnx"
    code, printed, _ = call(capsys, "train", network, "-o", out, "--optimizer", optimizer, "--dropout", "a=0.1")
    assert code == 0
    assert "trains 4 tensors of 53 numbers" in printed
    assert "inputs: x : f32[8, 6], target : i64[8], learning_rate : f32[]; states: " in printed
    assert f"written: {out}" in printed
    model = onnx.load(out)
    onnx.checker.check_model(model, full_check=True)
    assert {each.domain for each in model.opset_import} == {""}
    losses = steps_in_onnx_runtime(out, 40, **batch(), learning_rate=np.asarray(0.1, np.float32))
    assert np.mean(losses[-5:]) < losses[0] / 2


def test_the_table_shows_what_stays_on_a_rank(network: Path, tmp_path: Path, capsys: Capture) -> None:
    """53 parameters and two moments of each, and the step; what is constant tells nothing of a step's size."""
    code, printed, _ = call(capsys, "train", network, "-o", tmp_path / "out", "--optimizer", "adamw")
    assert code == 0
    lines = {line.split()[0]: line.split()[1:3] for line in printed.splitlines() if line.strip()}
    assert lines["state"] == [str(53 * 3 * 4 + 8), "B"]
    assert "weights" not in lines


def test_losses_are_those_of_irpar(network: Path, tmp_path: Path, capsys: Capture) -> None:
    options = ("--optimizer", "adamw", "--clip-norm", "1", "--lr", "0.1")
    assert call(capsys, "train", network, "-o", tmp_path / "step.onnx", *options)[0] == 0
    assert call(capsys, "train", network, "-o", tmp_path / "out", "--mesh", "one", *options)[0] == 0
    with irpar.Partition.open(tmp_path / "out").trainer(engine="numpy") as trainer:
        expected = [trainer.step(batch()) for _ in range(4)]
    given = {**batch(), "learning_rate": np.asarray(0.1, np.float32)}
    np.testing.assert_allclose(steps_in_onnx_runtime(tmp_path / "step.onnx", 4, **given), expected, rtol=1e-5)


def test_json_says_what_was_made(network: Path, tmp_path: Path, capsys: Capture) -> None:
    code, printed, _ = call(capsys, "train", network, "-o", tmp_path / "step.onnx", "--no-decay", "b", "--json")
    assert code == 0
    facts = json.loads(printed)
    assert facts["states"] == 13  # Four parameters with two moments each, and a count.
    assert facts["training"]["inputs"] == ["x", "target"]
    assert facts["training"]["classes"] == 3
    assert facts["training"]["settings"]["no_decay"] == ["b"]


def test_what_is_next_works_of_bfloat16(network: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    code, printed, _ = call(capsys, "train", network, "-o", out, "--precision", "bf16")
    assert code == 0
    words = f"next: irpar verify {out} --engine numpy, irpar explain {out}, irpar run {out} --engine numpy --data DATA"
    assert words in printed
    assert "ONNX Runtime has no bfloat16 on CPUs: --engine numpy has, and cupy on GPUs" in printed
    code, printed, _ = call(capsys, "verify", out, "--engine", "numpy")
    assert code == 0
    assert "the partition is equal to ONNX Runtime on the original" in printed


def test_what_is_left_out_is_as_in_python(network: Path, tmp_path: Path, capsys: Capture) -> None:
    """The command, `train_step` and the passes have the same defaults."""
    code, printed, _ = call(capsys, "train", network, "-o", tmp_path / "step.onnx", "--json")
    assert code == 0
    assert json.loads(printed)["training"]["settings"] == json.loads(json.dumps(asdict(Settings())))
    for made in (Optimizer(), Zero(), AddLoss()):
        for each in fields(made):
            assert getattr(made, each.name) == getattr(Settings(), each.name, getattr(made, each.name)), each.name
    parameters = signature(train_command).parameters
    found = {each.name: parameters[f"zero_{each.name}"].default for each in fields(Zero) if each.name != "stage"}
    assert found == {**{name: getattr(Zero(), name) for name in found}, "axes": ",".join(Zero().axes)}


def test_what_is_next_needs_no_weights_where_there_are_none(network: Path, tmp_path: Path, capsys: Capture) -> None:
    code, printed, _ = call(capsys, "train", network, "-o", tmp_path / "out", "--weights", "none")
    assert code == 0
    assert printed.endswith(f"next: irpar explain {tmp_path / 'out'}\n")


def test_a_partition_is_verified_and_shards_samples(network: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    (tmp_path / "shardings.json").write_text(
        '{"tensors": {"w": [null, "tp"], "w.m": [null, "tp"], "grad.u": ["tp", null]}}'
    )
    options = ("--mesh", "dp=2,tp=2", "--shardings", tmp_path / "shardings.json", "--optimizer", "momentum")
    code, printed, err = call(capsys, "train", network, "-o", out, *options)
    assert code == 0, err
    assert "trains 4 tensors of 53 numbers" in printed
    assert "no engine" not in printed
    code, printed, err = call(capsys, "verify", out)
    assert code == 0, err
    assert "no float64 kernel" not in printed + err
    rows = {row["name"]: row["sharding"] for row in irpar.Partition.open(out).plan.state}
    assert rows["w"] == rows["w.m"] == [None, ["tp"]]
    for how, cut in {"data_parallel": [["dp", "tp"], None], "full_batch": [None, None]}.items():
        code, printed, err = call(
            capsys, "train", network, "-o", out, "--force", "--mesh", "dp=2,tp=2", "--dataset-sharding", how
        )
        assert code == 0, err
        assert "no tensor was annotated" not in printed
        inputs = {each["name"]: each["sharding"] for each in irpar.Partition.open(out).plan.inputs}
        assert inputs["x"] == cut
        assert call(capsys, "verify", out)[0] == 0


def test_statistics_of_images(tmp_path: Path, capsys: Capture) -> None:
    models.save(tmp_path / "resnet.onnx", "resnet", preset="tiny")
    code, _, err = call(capsys, "train", tmp_path / "resnet.onnx", "-o", tmp_path / "step.onnx", "--optimizer", "sgd")
    assert code == 0, err
    session = ort.InferenceSession(tmp_path / "step.onnx")
    assert sum("running_var" in name or ".var" in name for name in outputs(session)) > 0
    code, _, err = call(capsys, "train", tmp_path / "resnet.onnx", "-o", tmp_path / "other.onnx", "--freeze-statistics")
    assert code == 0, err
    assert not any("var" in name for name in outputs(ort.InferenceSession(tmp_path / "other.onnx")))


MISTAKES = {
    ("--loss", "hinge"): 'there is no loss "hinge"',
    ("--loss", "output:z"): 'the model has no output "z"',
    ("--loss", "output:y"): "the loss y is f32[8, 3], and no single number",
    ("--loss", "output:y", "--output", "z"): 'output:y names the output, and "z" is named, too',
    ("--loss", "mse", "--class-axis", "1"): "mse has no axis of classes",
    ("--output", "z"): 'the model has no output "z"',
    ("--class-axis", "5"): "the scores have 2 dims, and no axis 5 of classes",
    ("--label-smoothing", "1.5"): "label smoothing of 1.5",
    ("--label-smoothing", "nan"): "label smoothing of nan",
    ("--loss", "mse", "--ignore-index", "1"): "mse has no label smoothing and ignores no targets",
    ("--optimizer", "adagrad"): 'optimizer is the text "adagrad"',
    ("--lr", "-1"): "a learning rate of -1.0",
    ("--lr", "nan"): "a learning rate of nan",
    ("--lr", "fast"): "invalid value for '--lr'",
    ("--optimizer", "momentum", "--momentum", "2"): "momentum of 2.0",
    ("--nesterov",): "adamw has no nesterov",
    ("--optimizer", "sgd", "--betas", "0.8,0.9"): "sgd has no betas",
    ("--optimizer", "sgd", "--momentum", "0.8"): "sgd has no momentum",
    ("--optimizer", "sgd", "--momentum", "0.9"): "sgd has no momentum",
    ("--optimizer", "sgd", "--betas", "0.9,0.999"): "sgd has no betas",
    ("--optimizer", "momentum", "--eps", "1e-3"): "momentum has no eps",
    ("--momentum", "0.8"): "adamw has no momentum",
    ("--betas", "0.9"): 'cannot read --betas "0.9"',
    ("--betas", "0.9,0.9,0.9"): 'cannot read --betas "0.9,0.9,0.9"',
    ("--betas", "0.9,1.5"): "betas of (0.9, 1.5)",
    ("--betas", "a,b"): 'cannot read --betas "a,b"',
    ("--eps", "-1"): "eps of -1.0",
    ("--weight-decay", "-1"): "weight decay of -1.0",
    ("--no-decay", "z*"): 'no-decay "z*" matches no parameter that is trained',
    ("--lr-scale", "z=1"): 'lr-scale "z" matches no parameter that is trained',
    ("--lr-scale", "w"): 'cannot read --lr-scale "w"',
    ("--lr-scale", "w=fast"): 'cannot read --lr-scale "w=fast"',
    ("--lr-scale", "w=-1"): "lr-scale w of -1.0",
    ("--clip-norm", "0"): "clip norm of 0.0",
    ("--loss-scale", "static"): 'loss_scale is the text "static"',
    ("--precision", "fp8"): 'precision is the text "fp8"',
    ("--trainable", "z"): '"z" matches no weight or input of floats',
    ("--freeze", "*"): "no parameter is left to train",
    ("--dropout", "a"): 'cannot read --dropout "a"',
    ("--dropout", "z=0.5"): 'dropout "z" matches no value of floats in the main graph',
    ("--dropout", "a=1"): 'dropout of 1.0 for "a"',
    ("--dataset-sharding", "rows"): 'there is no --dataset-sharding "rows"',
    ("--seed", str(2**63)): "a seed of 9223372036854775808",
    ("--seed", "-1"): "a seed of -1",
    ("--mesh", "dp=2"): "an .onnx file holds the step of one device, and the mesh is dp=2",
    ("--bind", "n=4"): 'no symbol "n" in the inputs of the model',
}


@pytest.mark.parametrize("words", list(MISTAKES), ids=" ".join)
def test_mistakes(words: tuple[str, ...], network: Path, tmp_path: Path, capsys: Capture) -> None:
    refused(capsys, MISTAKES[words], "train", network, "-o", tmp_path / "step.onnx", *words)
    assert not (tmp_path / "step.onnx").exists()


def test_samples_are_sharded_by_an_annotation_or_by_the_option(network: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "s.json").write_text('{"tensors": {"x": ["dp", null]}}')
    words = ("train", network, "-o", tmp_path / "out", "--mesh", "dp=2", "--shardings", tmp_path / "s.json")
    told = "--dataset-sharding full_batch and an annotation both say how x is sharded"
    refused(capsys, told, *words, "--dataset-sharding", "full_batch")
    assert not (tmp_path / "out").exists()


def test_targets_that_are_there(network: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "step.onnx"
    refused(capsys, "the step would replace the model", "train", network, "-o", network)
    refused(capsys, "cannot read the model", "train", tmp_path / "none.onnx", "-o", out)
    out.write_text("mine")
    refused(capsys, "the file exists", "train", network, "-o", out)
    assert out.read_text() == "mine"
    assert call(capsys, "train", network, "-o", out, "--force")[0] == 0
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    refused(capsys, "out exists already", "train", network, "-o", folder)
    assert (folder / "notes.txt").read_text() == "mine"
    refused(capsys, 'an output called "loss" already', "train", out, "-o", tmp_path / "twice.onnx")


def test_a_partition_of_no_step_is_not_trained(network: Path, tmp_path: Path, capsys: Capture) -> None:
    assert call(capsys, "partition", network, "-o", tmp_path / "out", "--mesh", "d=1")[0] == 0
    np.savez(tmp_path / "data.npz", **samples())
    told = "the program is no training step"
    refused(capsys, told, "run", tmp_path / "out", "--data", tmp_path / "data.npz", "--steps", "2")
