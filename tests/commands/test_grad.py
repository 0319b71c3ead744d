"""irpar grad: what it writes and prints, and each mistake."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from irpar import models
from tests.command_line import Capture, call, refused


@pytest.fixture
def model(tmp_path: Path) -> Path:
    models.save(tmp_path / "mlp.onnx", "mlp", opset=18)
    made = onnx.load(tmp_path / "mlp.onnx")
    made.opset_import[0].version = 17
    onnx.save(made, tmp_path / "mlp.onnx")
    return tmp_path / "mlp.onnx"


def test_gradients_run_in_onnx_runtime(model: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "grads.onnx"
    code, printed, _ = call(capsys, "grad", model, "-o", out, "--wrt", "fc*")
    assert code == 0
    assert "grad.fc1.weight  f32[64, 256]" in printed
    assert "given as input: grad.y : f32[8, 64]" in printed
    assert "opset 17 became 18" in printed
    assert "with its weights in grads.onnx.data beside it" in " ".join(printed.split())
    onnx.checker.check_model(str(out), full_check=True)
    assert {domain.domain for domain in onnx.load(out).opset_import} == {""}
    session = ort.InferenceSession(out)
    random = np.random.default_rng(0)
    feeds = {value.name: random.standard_normal(value.shape).astype(np.float32) for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    assert names == ["grad.fc1.weight", "grad.fc1.bias", "grad.fc2.weight", "grad.fc2.bias"]
    found = dict(zip(names, session.run(None, feeds), strict=True))
    np.testing.assert_allclose(found["grad.fc2.bias"], feeds["grad.y"].sum(axis=0), rtol=1e-5)


def test_outputs_are_kept_and_json_says_all(model: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "grads.onnx"
    code, printed, _ = call(capsys, "grad", model, "-o", out, "--wrt", "x", "--output", "y", "--keep-outputs", "--json")
    assert code == 0
    facts = json.loads(printed)
    assert facts["inputs"] == {"grad.y": "f32[8, 64]"}
    assert facts["outputs"] == {"y": "f32[8, 64]", "grad.x": "f32[8, 64]"}
    assert facts["opset"] == {"before": 17, "after": 18}
    assert facts["saved_activations"]["bytes"] > 0


def test_mistakes(model: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "grads.onnx"
    refused(capsys, '"fc9*" matches no weight or input of floats', "grad", model, "-o", out, "--wrt", "fc9*")
    refused(capsys, '"z" matches no output of floats', "grad", model, "-o", out, "--output", "z")
    refused(capsys, "would replace the model", "grad", model, "-o", model)
    refused(capsys, "a size above 9223372036854775807", "grad", model, "-o", out, "--bind", f"b={2**63}")
    refused(capsys, "a size of 5000 digits", "grad", model, "-o", out, "--bind", "b=" + "9" * 5000)
    assert not out.exists()
    out.write_text("mine")
    refused(capsys, "the file exists", "grad", model, "-o", out)
    assert out.read_text() == "mine"
    out.unlink()
    weights = tmp_path / "grads.onnx.data"
    weights.write_text("mine")
    refused(capsys, "the file exists", "grad", model, "-o", out)
    assert weights.read_text() == "mine"
    refused(capsys, "cannot write the model", "grad", model, "-o", tmp_path / "none" / "grads.onnx")
    refused(capsys, "cannot read the model", "grad", tmp_path / "none.onnx", "-o", tmp_path / "other.onnx")
