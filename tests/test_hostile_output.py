"""What commands write never puts an end to something else: files of other kinds, devices, folders with more in them."""

import errno
import functools
import json
import os
import shutil

import numpy as np
import onnx
import pytest

import irpar.files.atomic
from irpar.api import partition
from irpar.cli import main
from irpar.ir import ArrayTensor
from irpar.ir.text.files import read_text, write_text
from irpar.models import annotations, save
from irpar.models.__main__ import main as models_main
from irpar.onnx_io import load
from irpar.sharding import IrparError
from tests.command_line import call, refused


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """gpt.onnx, its shardings and inputs, and a partition of it in out/."""
    folder = tmp_path_factory.mktemp("output")
    save(folder / "gpt.onnx", "gpt", layers=1)
    (folder / "gpt.json").write_text(json.dumps({"mesh": {"tp": 2}, "tensors": annotations("gpt", None, layers=1)}))
    np.savez(folder / "in.npz", input_ids=np.zeros((4, 32), np.int64))
    words = ["partition", folder / "gpt.onnx", "-o", folder / "out", "--shardings", folder / "gpt.json", "--json"]
    assert main(list(map(str, words))) == 0
    return folder


def content(folder):
    """Every file below a folder with its bytes; other entries with their mode."""
    return {
        path: path.read_bytes() if path.is_file() else path.lstat().st_mode
        for path in sorted(folder.rglob("*"))
        if not path.is_dir()
    }


# -- files --------------------------------------------------------------------------------------------------------

IN_THE_WAY = {
    "m.onnx": b"\x08\x0a",
    "notes.txt": b"dear diary",
    "image.png": b"\x89PNG\xff",
    "empty-line": b"\n\nx = 1\n",
}


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_text_takes_the_place_of_text_only(capsys, tmp_path, base, name):
    (tmp_path / name).write_bytes(IN_THE_WAY[name])
    before = content(tmp_path)
    refused(capsys, "over a file that holds something else", "opt", base / "gpt.onnx", "-o", tmp_path / name)
    assert content(tmp_path) == before


def test_the_model_itself_is_not_replaced_by_its_text(capsys, tmp_path, base):
    shutil.copy(base / "gpt.onnx", tmp_path / "m.onnx")
    before = content(tmp_path)
    refused(capsys, "something else", "opt", tmp_path / "m.onnx", "--pipeline", "cse", "-o", tmp_path / "m.onnx")
    assert content(tmp_path) == before


def test_text_replaces_text_and_empty_files(capsys, tmp_path, base):
    (tmp_path / "a.irpar").touch()
    for pipeline in ("infer-types", "cse"):
        assert call(capsys, "opt", base / "gpt.onnx", "--pipeline", pipeline, "-o", tmp_path / "a.irpar")[0] == 0
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names in (["a.irpar"], ["a.irpar", "a.irpar.data"])


def test_a_data_file_of_something_else_stays(capsys, tmp_path, base):
    (tmp_path / "gpt.data").write_text("mine")
    refused(capsys, "its data file is there, and no text", "opt", base / "gpt.onnx", "-o", tmp_path / "gpt")
    assert (tmp_path / "gpt.data").read_text() == "mine"


def test_a_text_written_over_itself_keeps_its_numbers(tmp_path, base):
    path = tmp_path / "a.irpar"
    write_text(load(base / "gpt.onnx"), path)
    module = read_text(path)
    module.graph.add_constant(ArrayTensor(np.arange(1000)), "added")
    expected = {value.name: value.data.numpy().copy() for value in module.graph.constants}
    write_text(module, path)
    again = {value.name: value.data.numpy() for value in read_text(path).graph.constants}
    assert again.keys() == expected.keys()
    for name, numbers in expected.items():
        np.testing.assert_array_equal(again[name], numbers)


WRITERS = {
    "opt": lambda base, target: ["opt", base / "gpt.onnx", "-o", target],
    "run": lambda base, target: ["run", base / "out", "--inputs", base / "in.npz", "--outputs", target],
}


@pytest.mark.parametrize("command", WRITERS)
def test_devices_pipes_and_folders_stay(capsys, tmp_path, base, command):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    before = content(tmp_path)
    for target in (tmp_path / "pipe", tmp_path / "null", "/dev/null", tmp_path, ""):
        refused(capsys, "the target is a", *WRITERS[command](base, target))
    assert content(tmp_path) == before


def test_the_model_builder_leaves_devices_and_pipes(capsys, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "m.onnx.data")
    for words in (["-o", "pipe"], ["-o", "/dev/null"], ["-o", "."], ["-o", "m.onnx", "--external"]):
        words = ["mlp", *(str(tmp_path / word) if not word.startswith(("-", "/")) else word for word in words)]
        assert models_main(words) == 2
        assert "the target is a" in capsys.readouterr().err
    words = ["mlp", "-o", str(tmp_path / "m.onnx"), "--shardings", str(tmp_path / "pipe")]
    assert models_main(words) == 2
    assert "the target is a named pipe" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "m.onnx.data").is_fifo()


def test_arrays_take_the_place_of_npz_files_only(capsys, tmp_path, base):
    words = ["run", base / "out", "--inputs", base / "in.npz", "--outputs", tmp_path / "o"]
    shutil.copy(base / "gpt.onnx", tmp_path / "o")
    refused(capsys, "over a file that is no .npz", *words)
    assert onnx.load(tmp_path / "o") == onnx.load(base / "gpt.onnx")
    shutil.copy(base / "in.npz", tmp_path / "o")
    assert call(capsys, *words)[0] == 0
    assert list(np.load(tmp_path / "o")) == ["logits"]


def test_dumps_go_to_a_folder_of_their_own(capsys, tmp_path, base):
    words = ["opt", base / "gpt.onnx", "--pipeline", "infer-types,cse", "--json", "--dump-ir", tmp_path / "dumps"]
    for _ in range(2):
        assert call(capsys, *words)[0] == 0
    assert [entry.name for entry in sorted((tmp_path / "dumps").iterdir())] == [
        "00-start.irpar",
        "01-infer-types.irpar",
        "02-cse.irpar",
        "tensors.data",
    ]
    (tmp_path / "dumps" / "notes.txt").write_text("mine")
    before = content(tmp_path)
    refused(capsys, "the folder for dumps holds something else: notes.txt", *words)
    assert content(tmp_path) == before


# -- folders ------------------------------------------------------------------------------------------------------


def partition_words(base, out, model=None):
    return ["partition", model or base / "gpt.onnx", "--shardings", base / "gpt.json", "-o", out, "--force"]


def put(path, text="mine"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


MORE = {
    "a note": ("notes.txt", lambda out: put(out / "notes.txt")),
    "in a part": ("part0/notes.txt", lambda out: put(out / "part0" / "notes.txt")),
    "in another folder": ("mine", lambda out: put(out / "mine" / "notes.txt")),
    "a part that is a file": ("part7", lambda out: put(out / "part7")),
    "a part that is a link": ("part7", lambda out: (out / "part7").symlink_to(out.parent)),
    "a model that is a folder": ("part7/model.onnx", lambda out: put(out / "part7" / "model.onnx" / "notes.txt")),
    "a hidden file": (".git", lambda out: put(out / ".git" / "config")),
    "five": ("1, 2, 3 and 2 more", lambda out: [put(out / name) for name in "12345"]),
}


@pytest.mark.parametrize("more", MORE)
def test_force_replaces_a_partition_and_nothing_more(capsys, tmp_path, base, more):
    out = tmp_path / "out"
    shutil.copytree(base / "out", out)
    told, add = MORE[more]
    add(out)
    before = content(tmp_path)
    err = refused(capsys, "holds more than a partition", *partition_words(base, out))
    assert f"remove: {told}\n" in err
    assert content(tmp_path) == before


def test_force_replaces_a_partition_with_leftovers(capsys, tmp_path, base):
    out = tmp_path / "out"
    shutil.copytree(base / "out", out)
    put(out / ".r.npz.01234567.new")
    (out / "part7").mkdir()
    assert call(capsys, *partition_words(base, out))[0] == 0
    assert sorted(path.name for path in out.iterdir()) == ["part0", "part1", "plan.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_read_is_not_replaced(capsys, tmp_path, base):
    out = tmp_path / "out"
    shutil.copytree(base / "out", out)
    before = content(tmp_path)
    part = out / "part0" / "model.onnx"
    refused(capsys, "model.onnx lies in", "partition", part, "--mesh", "tp=2", "-o", out, "--force")
    (tmp_path / "link.onnx").symlink_to(part)
    refused(capsys, "link.onnx lies in", "partition", tmp_path / "link.onnx", "--mesh", "tp=2", "-o", out, "--force")
    (tmp_path / "link.onnx").unlink()
    words = ["partition", base / "gpt.onnx", "-o", out, "--force", "--shardings", out / "plan.json"]
    refused(capsys, "plan.json lies in", *words)
    assert content(tmp_path) == before


def test_external_data_inside_the_target_is_not_replaced(tmp_path, base):
    """A model beside a partition whose weights are the partition's own."""
    out = tmp_path / "out"
    shutil.copytree(base / "out", out)
    save(tmp_path / "m.onnx", "mlp", weights="external")
    model = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    os.replace(tmp_path / "m.onnx.data", out / "part0" / "weights.bin")
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "out/part0/weights.bin" if entry.key == "location" else entry.value
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    before = content(tmp_path)
    with pytest.raises(IrparError, match=r"weights.bin lies in .*out"):
        partition(load(tmp_path / "m.onnx"), "tp=2").save(out, force=True)
    assert content(tmp_path) == before


@pytest.mark.parametrize(("out", "told"), [(".", "the current folder"), ("", "the current"), ("..", "a folder around")])
def test_the_current_folder_is_not_replaced(capsys, tmp_path, base, monkeypatch, out, told):
    shutil.copytree(base / "out", tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out")
    before = content(tmp_path)
    for words in (partition_words(base, out), partition_words(base, out)[:-1]):
        refused(capsys, f"a partition cannot be written over {told}", *words)
    assert content(tmp_path) == before


# -- the demo -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt.onnx", "gpt.shardings.json"])
def test_the_demo_replaces_only_what_a_demo_left(capsys, tmp_path, name):
    put(tmp_path / name)
    refused(capsys, "is of no earlier demo", "demo", "-o", tmp_path)
    assert content(tmp_path) == {tmp_path / name: b"mine"}


def test_the_demo_looks_at_its_partition_first(capsys, tmp_path):
    put(tmp_path / "partition" / "notes.txt")
    refused(capsys, "holds no partition", "demo", "-o", tmp_path)
    assert list(content(tmp_path)) == [tmp_path / "partition" / "notes.txt"]


@pytest.mark.parametrize("file", ["gpt.onnx", "gpt.shardings.json", "partition"])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_demo_on_a_full_disk_leaves_nothing(capsys, tmp_path, monkeypatch, file, is_there):
    folder = tmp_path / "demo"
    if is_there:
        put(folder / "notes.txt")
    before = content(tmp_path)

    def full(real, path, *words):
        if path.name.startswith(f".{file}."):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *words)

    for name in ("_new_file", "_new_folder"):
        monkeypatch.setattr(f"irpar.files.atomic.{name}", functools.partial(full, getattr(irpar.files.atomic, name)))
    refused(capsys, "No space left on device", "demo", "-o", folder)
    assert content(tmp_path) == before
    assert folder.exists() == is_there


def test_a_partition_that_was_being_replaced_when_its_process_was_killed(capsys, tmp_path, base):
    """Where folders cannot exchange their names: both are named, whatever is asked for next."""
    out = tmp_path / "out"
    words = partition_words(base, out)[:-1]
    assert call(capsys, *words)[0] == 0
    old, new = tmp_path / ".out.01234567.old", tmp_path / ".out.76543210.new"
    shutil.copytree(out, new)
    out.rename(old)
    for command in (words, ["verify", out], ["explain", out]):
        code, _, err = call(capsys, *command)
        assert code == 2
        assert f"  what was there is now {old}\n  what was to take its place is {new}\n" in err
    assert f"mv {old} {out}" in call(capsys, *words)[2]
    assert call(capsys, *words, "--force")[0] == 0
    assert call(capsys, *words, "--force")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
