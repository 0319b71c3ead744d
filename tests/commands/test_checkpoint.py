"""irpar checkpoint: what is in one, onto another mesh, back into the ONNX model; and each mistake."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import irpar
from irpar.output.checkpoint import Checkpoint, checkpoints
from tests.command_line import Capture, call, refused
from tests.training.programs import classifier, on_mesh, same, samples


@pytest.fixture
def steps(trained: Path, data: Path, tmp_path: Path, capsys: Capture) -> Path:
    """The checkpoints of a run, whose loss went down."""
    words = ("run", trained, "--data", data, "--steps", "30", "--every", "10", "--checkpoint", tmp_path / "steps")
    assert call(capsys, *words, "--engine", "numpy", "--schedule", "linear", "--seed", "3")[0] == 0
    return tmp_path / "steps"


def test_show(steps: Path, capsys: Capture) -> None:
    code, printed, _ = call(capsys, "checkpoint", "show", steps)
    assert code == 0
    assert printed.startswith(f"{steps / 'step-00000030'}: step 30, 424 B")
    assert "mesh: tp=2" in printed
    assert "optimizer: momentum" in printed
    assert "kind=linear" in printed
    assert "w.m" in printed
    code, printed, _ = call(capsys, "checkpoint", "show", steps / "step-00000010", "--json")
    facts = json.loads(printed)
    assert (facts["step"], facts["data"]["seed"], facts["epoch"]) == (10, 3, 5)
    assert facts["tensors"]["w.m"] == {"dtype": "f32", "shape": [6, 5], "kind": "moment", "parameter": "w"}


@pytest.mark.parametrize("mesh", ["d=1", "dp=2", "dp=2,tp=2", "z=2"])
def test_reshard(mesh: str, steps: Path, trained: Path, data: Path, tmp_path: Path, capsys: Capture) -> None:
    on_mesh(classifier(), mesh).save(tmp_path / "other")
    code, printed, err = call(
        capsys, "checkpoint", "reshard", steps, "--to", tmp_path / "other", "-o", tmp_path / "new"
    )
    assert code == 0, err
    (made,) = checkpoints(tmp_path / "new")
    assert printed == f"written: {made}\n"
    before, after = Checkpoint.open(steps), Checkpoint.open(made)
    same(after.read(list(after.tensors), {}), before.read(list(before.tensors), {}))
    kept = dict(before.metadata)
    kept["mesh"] = after.metadata["mesh"]
    assert after.metadata == kept
    words = ("--data", data, "--steps", "32", "--resume", "--engine", "numpy", "--checkpoint")
    assert call(capsys, "run", tmp_path / "other", *words, tmp_path / "new")[0] == 0
    assert call(capsys, "run", trained, *words, steps)[0] == 0
    found, wanted = Checkpoint.open(tmp_path / "new"), Checkpoint.open(steps)
    for name in wanted.tensors:
        np.testing.assert_allclose(found.full(name).numpy(), wanted.full(name).numpy(), rtol=1e-5, atol=1e-6)


def test_export_runs_in_onnx_runtime(steps: Path, network: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "new.onnx"
    code, printed, err = call(capsys, "checkpoint", "export", steps, network, "-o", out)
    assert code == 0, err
    assert printed == f"written: {out}: 4 tensors of the checkpoint\n"
    onnx.checker.check_model(out, full_check=True)
    held = Checkpoint.open(steps)
    for each in onnx.load(out).graph.initializer:
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(each), held.full(each.name).numpy())
    x, target = samples()["x"][:8], samples()["target"][:8]
    (scores,) = ort.InferenceSession(out).run(None, {"x": x})
    weights = {name: held.full(name).numpy().astype(np.float64) for name in ("w", "b", "u", "c")}
    wanted = np.tanh(x @ weights["w"] + weights["b"]) @ weights["u"] + weights["c"]
    np.testing.assert_allclose(scores, wanted, rtol=1e-5, atol=1e-5)
    (before,) = ort.InferenceSession(network).run(None, {"x": x})
    assert (scores.argmax(axis=1) == target).sum() > (before.argmax(axis=1) == target).sum()
    # The trained model is one to train, and to partition, as the one that it was made of.
    assert call(capsys, "train", out, "-o", tmp_path / "again", "--mesh", "one")[0] == 0


def test_export_of_a_narrow_step_takes_the_masters(network: Path, data: Path, tmp_path: Path, capsys: Capture) -> None:
    step = irpar.train_step(network, optimizer="sgd", learning_rate=0.1, precision="bf16")
    irpar.partition(step, "d=1").save(tmp_path / "narrow")
    words = ("--data", data, "--steps", "3", "--engine", "numpy", "--checkpoint", tmp_path / "steps")
    assert call(capsys, "run", tmp_path / "narrow", *words)[0] == 0
    assert call(capsys, "checkpoint", "export", tmp_path / "steps", network, "-o", tmp_path / "new.onnx")[0] == 0
    held = Checkpoint.open(tmp_path / "steps")
    for each in onnx.load(tmp_path / "new.onnx").graph.initializer:
        best = f"{each.name}.master" if f"{each.name}.master" in held.tensors else each.name
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(each), held.full(best).numpy())


def test_mistakes(steps: Path, network: Path, trained: Path, tmp_path: Path, capsys: Capture) -> None:
    new = tmp_path / "new.onnx"
    refused(capsys, 'there is no action "delete"', "checkpoint", "delete", steps)
    refused(capsys, "there is no checkpoint", "checkpoint", "show", tmp_path)
    refused(capsys, "there is no checkpoint", "checkpoint", "show", tmp_path / "none")
    refused(capsys, "export needs the model and a file", "checkpoint", "export", steps)
    refused(capsys, "export needs the model and a file", "checkpoint", "export", steps, network)
    refused(capsys, "reshard needs a partition and a folder", "checkpoint", "reshard", steps, "-o", tmp_path / "x")
    refused(capsys, "would replace the model", "checkpoint", "export", steps, network, "-o", network)
    refused(capsys, "cannot read the model", "checkpoint", "export", steps, tmp_path / "none.onnx", "-o", new)
    new.write_text("mine")
    refused(capsys, "the file exists", "checkpoint", "export", steps, network, "-o", new)
    assert new.read_text() == "mine"
    assert call(capsys, "checkpoint", "export", steps, network, "-o", new, "--force")[0] == 0
    new.unlink()
    made = onnx.load(network)
    del made.graph.initializer[0].dims[:]
    made.graph.initializer[0].dims.extend([5, 6])
    onnx.save(made, tmp_path / "other.onnx")
    told = "the checkpoint has w f32[6, 5], the model f32[5, 6]"
    refused(capsys, told, "checkpoint", "export", steps, tmp_path / "other.onnx", "-o", new)
    made = onnx.load(network)
    made.graph.initializer[0].name = made.graph.node[0].input[1] = "other"
    onnx.save(made, tmp_path / "renamed.onnx")
    told = "the checkpoint has w f32[6, 5], the model no such initializer"
    refused(capsys, told, "checkpoint", "export", steps, tmp_path / "renamed.onnx", "-o", new)
    on_mesh(classifier(optimizer="sgd", freeze=["b"]), "d=1").save(tmp_path / "other")
    told = "b: a parameter that the checkpoint has learnt, and this program does not"
    refused(capsys, told, "checkpoint", "reshard", steps, "--to", tmp_path / "other", "-o", tmp_path / "x")
    on_mesh(classifier(optimizer="sgd"), "d=1").save(tmp_path / "plain")  # It has no momentum to keep.
    assert call(capsys, "checkpoint", "reshard", steps, "--to", tmp_path / "plain", "-o", tmp_path / "x")[0] == 0
    on_mesh(classifier(optimizer="adamw"), "d=1").save(tmp_path / "another")
    told = "the checkpoint is not of this program"
    refused(capsys, told, "checkpoint", "reshard", steps, "--to", tmp_path / "another", "-o", tmp_path / "y")
    (steps / "step-00000030" / "rank0.safetensors").unlink()
    refused(capsys, "rank0.safetensors", "checkpoint", "export", steps, network, "-o", new)
    assert not new.exists()
