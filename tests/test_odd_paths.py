"""File names that are no text (bytes that are no UTF-8), and terminals that cannot show what is printed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import irpar
from irpar.files.native_paths import NativeFolders, is_text

NO_TEXT = os.fsdecode(b"name\xff")
RESULT = "h\N{LATIN SMALL LETTER E WITH ACUTE}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose name is no text, with a model of two weights in a file of their own, so named too."""
    random = np.random.default_rng(0)
    weights = {"v": random.standard_normal((64, 256)), "w": random.standard_normal((256, 64))}
    nodes = [helper.make_node("MatMul", ["x", "v"], [RESULT]), helper.make_node("MatMul", [RESULT, "w"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "odd",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [8, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [8, 64])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=9)
    plain = tmp_path / "plain"
    plain.mkdir()
    onnx.save(model, plain / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    made = tmp_path / NO_TEXT
    try:
        shutil.move(plain, made)
    except OSError:
        pytest.skip("the file system takes text only")
    (made / "m.onnx").rename(made / f"{NO_TEXT}.onnx")
    (made / "s.json").write_text('{"tensors": {"v": [null, ["tp"]]}}')
    np.savez(made / f"{NO_TEXT}.npz", x=np.ones((8, 64), np.float32))
    return made


def _irpar(folder: Path, *arguments: str, **environment: str) -> str:
    command = [sys.executable, "-m", "irpar", *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, env={**os.environ, **environment}, check=False)
    said = (ended.stdout + ended.stderr).decode(errors="replace")
    assert ended.returncode == 0, said
    return said


def test_every_name_may_be_no_text(folder: Path) -> None:
    _irpar(folder, "partition", f"{NO_TEXT}.onnx", "-o", NO_TEXT, "--mesh", "tp=2", "--shardings", "s.json")
    assert irpar.Partition.open(folder / NO_TEXT).plan.mesh is not None
    _irpar(folder, "run", NO_TEXT, "--inputs", f"{NO_TEXT}.npz", "--outputs", f"out{NO_TEXT}.npz")
    assert (folder / f"out{NO_TEXT}.npz").is_file()
    assert "equal" in _irpar(folder, "verify", NO_TEXT)


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, id="LC_ALL=C"),
        pytest.param({"PYTHONIOENCODING": "ascii"}, id="ascii", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_shown_is_escaped(folder: Path, environment: dict[str, str]) -> None:
    arguments = ["--mesh", "tp=2", "--shardings", "s.json"]
    said = _irpar(
        folder, "partition", f"{NO_TEXT}.onnx", "-o", "out", *arguments, "--print-ir-after", "localize", **environment
    )
    assert "\\xe9" in said
    assert "annotated" in _irpar(folder, "explain", "out", **environment)


def test_a_folder_by_a_name_that_is_text(folder: Path) -> None:
    names = NativeFolders()
    found = names.name(folder)
    assert is_text(found)
    assert not is_text(folder)
    assert (Path(found) / "m.bin").is_file()
    assert names.name(Path("/")) == "/"
