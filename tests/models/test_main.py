"""The command `python -m irpar.models`."""

import json
import subprocess
import sys

import onnx
import pytest

from irpar.models import annotations, build
from irpar.models.__main__ import main
from tests.patience import patient


def test_the_command_writes_the_model_that_build_returns(tmp_path):
    path = tmp_path / "gpt.onnx"
    command = [sys.executable, "-m", "irpar.models", "gpt", "--layers", "3", "--opset", "21", "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60))
    assert (done.returncode, done.stderr) == (0, "")
    assert "parameters" in done.stdout
    assert onnx.load(path) == build("gpt", layers=3, opset=21)


def test_all_settings_arrive(tmp_path):
    path = tmp_path / "llama.onnx"
    options = (
        "--preset gqa --hidden 128 --heads 8 --kv-heads 2 --ffn 96 --vocab 50 --seq 9 --batch 3 --seed 5 --dynamic"
    )
    assert main(["llama", *options.split(), "--ir-version", "10", "-o", str(path)]) == 0
    expected = build(
        "llama",
        "gqa",
        hidden=128,
        heads=8,
        kv_heads=2,
        ffn=96,
        vocab=50,
        seq=9,
        batch=3,
        seed=5,
        dynamic=True,
        ir_version=10,
    )
    assert onnx.load(path) == expected


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        ("t5 --target 8", {"target": 8}),
        ("moe --routing gather --experts 2 --capacity 5", {"routing": "gather", "experts": 2, "capacity": 5}),
        ("vit --image 8 --patch 2 --classes 3", {"image": 8, "patch": 2, "classes": 3}),
        ("resnet --bottleneck", {"bottleneck": True}),
        ("dlrm --tables 2 --rows 7", {"tables": 2, "rows": 7}),
        ("unet --levels 2", {"levels": 2}),
        ("recurrent --cell gru --bidirectional", {"cell": "gru", "bidirectional": True}),
        ("control --kind scan --steps 3", {"kind": "scan", "steps": 3}),
    ],
)
def test_settings_of_single_families(tmp_path, command, settings):
    path = tmp_path / "model.onnx"
    assert main([*command.split(), "-o", str(path)]) == 0
    assert onnx.load(path) == build(command.split()[0], **settings)


@pytest.mark.parametrize("option", [["--external"], ["--weights", "external"], ["--weights", "none"]])
def test_weights_go_beside_the_model(tmp_path, option):
    assert main(["mlp", *option, "-o", str(tmp_path / "mlp.onnx")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlp.onnx", "mlp.onnx.data"]
    onnx.checker.check_model(str(tmp_path / "mlp.onnx"), full_check=True)


def test_shardings_are_written_in_the_form_that_partition_reads(tmp_path):
    shardings = tmp_path / "shardings.json"
    command = ["gpt", "--tied", "--dp-axis", "", "-o", str(tmp_path / "gpt.onnx"), "--shardings", str(shardings)]
    assert main(command) == 0
    assert json.loads(shardings.read_text()) == {"tensors": annotations("gpt", dp_axis=None, tied=True)}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["gpt", "--hidden", "65"], "error: hidden 65 is not divisible by heads 4"),
        (["mlp", "--heads", "2"], "error: mlp has no setting 'heads'"),
        (["gpt", "--preset", "huge"], "error: no preset 'huge'"),
        (["gpt", "-o", "no/such/folder/gpt.onnx"], "error: "),
    ],
)
def test_a_mistake_is_one_error_and_exit_code_2(command, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == (3 if "-o" in command else 1)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_family_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["elmo"])
    assert stopped.value.code == 2
    assert "invalid choice: 'elmo'" in capsys.readouterr().err
