"""`irpar inspect --suggest` on the command line."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from irpar.models import save
from tests.command_line import Capture, call


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save(tmp_path / "gpt.onnx", "gpt", layers=3)
    return tmp_path / "gpt.onnx"


def test_the_file_is_of_use_at_once(capsys: Capture, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = call(capsys, "inspect", model, "--suggest", "dp=2,tp=2")
    assert code == 0
    assert "h.*.attn.q.weight" in out
    assert "heads: 4, 2 a rank" in out
    assert "LayerNormalization needs it" in out
    assert "all_reduce" in out
    assert max(len(line) for line in out.splitlines() if str(model.parent) not in line) <= 80
    file = model.with_name("gpt.shardings.yaml")
    following = f"written to {file}; next: irpar partition {model} -o OUT --shardings {file}"
    assert out.splitlines()[-1] == following
    assert "h.*.mlp.c_fc.weight: [null, [tp]]" in file.read_text()
    folder = model.with_name("out")
    assert call(capsys, "partition", model, "-o", folder, "--shardings", file)[0] == 0
    assert call(capsys, "verify", folder)[0] == 0


def test_it_tells_how_far_it_is(capsys: Capture, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("irpar.commands.progress_report.QUIET_SECONDS", 2.0)
    monkeypatch.setattr("irpar.commands.progress_report.SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr("irpar.commands.progress_report.time.monotonic", itertools.count().__next__)
    code, _, err = call(capsys, "inspect", model, "--suggest", "tp=2")
    assert code == 0
    assert "pass complete-sharding of trial 1: 1 of " in err


def test_json_has_it_all(capsys: Capture, model: Path) -> None:
    target = model.with_name("s.json")
    code, out, _ = call(capsys, "inspect", model, "--suggest", "tp=2", "-o", target, "--json")
    found: dict[str, Any] = json.loads(out)
    assert code == 0
    assert found["file"] == str(target)
    assert {"mesh": found["mesh"], "tensors": found["tensors"]} == json.loads(target.read_text())
    cut = {group["pattern"]: group for group in found["cut"]}
    assert cut["h.*.attn.proj.weight"]["names"] == [f"h.{layer}.attn.proj.weight" for layer in range(3)]
    assert all(group["reason"] for group in (*found["cut"], *found["whole"]))
    assert found["prediction"]["collectives"] == 6


def test_a_file_is_replaced_only_when_asked(capsys: Capture, model: Path) -> None:
    command = ("inspect", model, "--suggest", "tp=2")
    assert call(capsys, *command)[0] == 0
    code, out, err = call(capsys, *command)
    assert (code, out) == (2, "")
    assert "the file of the suggestion exists" in err
    assert call(capsys, *command, "--force")[0] == 0
    file = model.with_name("gpt.shardings.yaml")
    file.write_text("notes of mine\n")
    code, _, err = call(capsys, *command, "--force")
    assert code == 2
    assert "so it stays" in err
    assert file.read_text() == "notes of mine\n"


MISTAKES = [
    (["--suggest", "tp"], 'cannot read "tp"'),
    (["--suggest", ""], "write it as dp=2,tp=4"),
    (["--suggest", "tp=0"], "size 0"),
    (["--suggest", "tp=two"], "is not a mesh"),
    (["--suggest", "tp=1"], "a mesh of one device"),
    (["--suggest", "tp=2,tp=2"], "twice"),
    (["--suggest", "t p=2"], "cannot name a mesh axis"),
    (["--suggest", "tp=99999999"], "devices"),
    (["--suggest", "tp=2", "--tensors", "*"], "ask one at a time"),
    (["--suggest", "tp=2", "-o", "MODEL"], "replace the model"),
    (["--suggest", "tp=2", "-o", "FOLDER"], "a folder"),
    (["--suggest", "tp=2", "-o", "FOLDER/none/s.yaml"], "no such folder"),
    (["--suggest", "tp=2", "--bind", "batch=2"], "no symbol"),
    (["-o", "FOLDER/s.yaml"], "add --suggest"),
    (["--force"], "add --suggest"),
]


@pytest.mark.parametrize(("words", "told"), MISTAKES)
def test_mistakes_are_told_and_nothing_is_written(capsys: Capture, model: Path, words: list[str], told: str) -> None:
    given = [word.replace("MODEL", str(model)).replace("FOLDER", str(model.parent)) for word in words]
    code, out, err = call(capsys, "inspect", model, *given)
    assert (code, out) == (2, "")
    assert told in err
    assert err.startswith("error: ")
    assert "\n  do: " in err
    assert [path.name for path in model.parent.iterdir()] == ["gpt.onnx"]


def test_open_sizes_are_asked_for(capsys: Capture, tmp_path: Path) -> None:
    save(tmp_path / "llama.onnx", "llama", dynamic=True)
    code, _, err = call(capsys, "inspect", tmp_path / "llama.onnx", "--suggest", "tp=2")
    assert code == 2
    assert "do: give each a size: --bind batch=... --bind seq=..." in err
    assert not (tmp_path / "llama.shardings.yaml").exists()
    bound = ["--bind", "batch=2,seq=8"]
    assert call(capsys, "inspect", tmp_path / "llama.onnx", "--suggest", "tp=2", *bound)[0] == 0
