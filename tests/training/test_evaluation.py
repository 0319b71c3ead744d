"""Evaluation beside training: the model as it is used, on the state of the step, in every group that runs here."""

import json
import tarfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import irpar
from irpar import models
from tests.command_line import Capture, call, refused


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """12 images with their classes."""
    random = np.random.default_rng(0)
    model = models.build("resnet", preset="tiny")
    dims = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    classes = model.graph.output[0].type.tensor_type.shape.dim[1].dim_value
    images = random.standard_normal((12, *dims[1:])).astype(np.float32)
    arrays = {model.graph.input[0].name: images, "target": random.integers(0, classes, 12)}
    np.savez(tmp_path / "data.npz", **arrays)
    return tmp_path / "data.npz"


@pytest.mark.parametrize("group", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_evaluation_is_the_loss_of_the_exported_model(
    group: str, data: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.save(tmp_path / "resnet.onnx", "resnet", preset="tiny")
    batch = irpar.load(tmp_path / "resnet.onnx").graph.inputs[0].tensor_type.static_shape[0]
    out, folder = tmp_path / "out", tmp_path / "steps"
    options = ["--mesh", "dp=2", "--optimizer", "momentum", "--lr", "0.05", "--dataset-sharding", "data_parallel"]
    assert call(capsys, "train", tmp_path / "resnet.onnx", "-o", out, *options)[0] == 0
    run = ["run", out, "--data", data, "--steps", "3", "--checkpoint", folder, "--eval-data", data, "--group", group]
    code, printed, _ = call(capsys, *run, "--json")
    assert code == 0
    (loss,) = json.loads(printed)["evaluations"].values()
    assert call(capsys, "checkpoint", "export", folder, tmp_path / "resnet.onnx", "-o", tmp_path / "new.onnx")[0] == 0
    session = ort.InferenceSession(tmp_path / "new.onnx")
    arrays = np.load(data)
    name = session.get_inputs()[0].name
    losses = []
    for first in range(0, 12 - batch + 1, batch):
        (scores,) = session.run(None, {name: arrays[name][first : first + batch]})
        wide = scores.astype(np.float64)
        logs = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
        losses.append(-logs[np.arange(batch), arrays["target"][first : first + batch]].mean())
    assert loss == pytest.approx(np.mean(losses), rel=1e-4)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1] == {"step": 3, "evaluation_loss": loss}


def in_training_mode(training_mode: int) -> onnx.ModelProto:
    """A model whose Dropout and BatchNormalization are in training mode, or are not."""
    mode, statistics = f"bool {{{training_mode}}}", ", m, v" if training_mode else ""
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[6, 4] x) => (float[6, 4] y)
        <float[4] one = {{1, 2, 3, 4}}, float[4] mean = {{0, 0.5, 1, 0}}, float[4] var = {{1, 2, 1, 3}}> {{
          ratio = Constant <value = float {{0.5}}> ()
          mode = Constant <value = {mode}> ()
          d = Dropout (x, ratio, mode)
          y{statistics} = BatchNormalization <training_mode = {training_mode}> (d, one, mean, mean, var)
        }}""")


def test_a_model_in_training_mode_is_evaluated_as_it_is_used(tmp_path: Path, capsys: Capture) -> None:
    onnx.save(in_training_mode(1), tmp_path / "model.onnx")
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal((6, 4)).astype(np.float32) for name in ("x", "target")}
    np.savez(tmp_path / "data.npz", **arrays)
    words = ("--mesh", "dp=3", "--loss", "mse", "--lr", 0, "--freeze", "mean", "--dataset-sharding", "data_parallel")
    assert call(capsys, "train", tmp_path / "model.onnx", "-o", tmp_path / "out", "--optimizer", "sgd", *words)[0] == 0
    with irpar.Partition.open(tmp_path / "out").trainer(engine="numpy") as trainer:
        found = trainer.evaluate([arrays])
    (wanted,) = ort.InferenceSession(in_training_mode(0).SerializeToString()).run(None, {"x": arrays["x"]})
    assert found == pytest.approx(np.square(wanted - arrays["target"]).mean(), rel=1e-5)


def test_mistakes(data: Path, tmp_path: Path, capsys: Capture) -> None:
    models.save(tmp_path / "mlp.onnx", "mlp")
    step = irpar.train_step(tmp_path / "mlp.onnx", loss="mse")
    irpar.partition(step, "one=1").save(tmp_path / "bare")
    random = np.random.default_rng(0)
    np.savez(tmp_path / "mlp.npz", x=random.random((8, 64), np.float32), target=random.random((8, 64), np.float32))
    run = ("run", tmp_path / "bare", "--data", tmp_path / "mlp.npz", "--steps", "1")
    refused(capsys, "the partition has no evaluation program", *run, "--eval-data", tmp_path / "mlp.npz")
    refused(capsys, "--eval-every is for training", "run", tmp_path / "bare", "--eval-every", "2")


def test_a_pack_has_the_evaluation_program(tmp_path: Path, capsys: Capture) -> None:
    models.save(tmp_path / "mlp.onnx", "mlp")
    assert (
        call(capsys, "train", tmp_path / "mlp.onnx", "-o", tmp_path / "out", "--mesh", "dp=2", "--loss", "mse")[0] == 0
    )
    assert call(capsys, "pack", tmp_path / "out", "--rank", "0-1", "-o", tmp_path / "out.tar")[0] == 0
    with tarfile.open(tmp_path / "out.tar") as pack:
        pack.extractall(tmp_path / "there", filter="data")
    random = np.random.default_rng(0)
    np.savez(tmp_path / "mlp.npz", x=random.random((8, 64), np.float32), target=random.random((8, 64), np.float32))
    data = tmp_path / "mlp.npz"
    run = ("run", tmp_path / "there" / "out", "--data", data, "--steps", "1", "--eval-data", data)
    code, printed, _ = call(capsys, *run)
    assert (code, "evaluation after step 1: loss" in printed) == (0, True)


@pytest.mark.parametrize("mesh", ["one", "dp=2"])
def test_a_batch_weighs_as_much_as_targets_of_it_count(mesh: str, tmp_path: Path, capsys: Capture) -> None:
    """One in which none does weighs nothing."""
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["": 20]> g (float[4, 3] x) => (float[4, 5] y) { y = MatMul(x, w) }"""
    )
    random = np.random.default_rng(0)
    weight = random.standard_normal((3, 5)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, tmp_path / "m.onnx")
    words = ["--mesh", mesh, "--ignore-index", "-100", "--dataset-sharding", "data_parallel"]
    assert call(capsys, "train", tmp_path / "m.onnx", "-o", tmp_path / "out", *words)[0] == 0
    x, target = random.standard_normal((12, 3)).astype(np.float32), random.integers(0, 5, 12)
    target[[1, 2, 3, 5, 8, 9, 10, 11]] = -100
    logs = (scores := (x @ weight).astype(np.float64)) - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    wanted = -np.mean([logs[row, label] for row, label in enumerate(target) if label >= 0])
    with irpar.Partition.open(tmp_path / "out").trainer(engine="numpy") as trainer:
        batches = ({"x": x[first : first + 4], "target": target[first : first + 4]} for first in (0, 4, 8))
        assert trainer.evaluate(batches) == pytest.approx(wanted, rel=1e-5)
