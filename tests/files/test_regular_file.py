"""What is read must be a file: pipes, sockets, devices and folders are refused at once, whatever they are given as."""

import os
import shutil
import socket

import numpy as np
import pytest

import irpar
from irpar import models
from irpar.files.regular_file import open_file, read_bytes, read_text
from tests.command_line import refused


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model, its partition, inputs of it, and what is no file; working there, since a socket's path must be short."""
    folder = tmp_path_factory.mktemp("base")
    models.save(folder / "m.onnx", "mlp")
    before = os.getcwd()
    os.chdir(folder)
    try:
        irpar.partition(irpar.load("m.onnx"), "tp=2").save("out")
        os.mkfifo("pipe")
        os.mkdir("folder")
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("socket")
        np.savez("in.npz", x=np.zeros((8, 64), np.float32))
        yield folder
    finally:
        os.chdir(before)


NO_FILES = {
    "pipe": "it is a named pipe, not a file",
    "socket": "it is a socket, not a file",
    "/dev/zero": "it is a device, not a file",
    "folder": "Is a directory",
}
COMMANDS = (
    ["inspect", "{}"],
    ["partition", "{}", "-o", "new", "--mesh", "tp=2"],
    ["partition", "m.onnx", "-o", "new", "--mesh", "tp=2", "--shardings", "{}"],
    ["partition", "m.onnx", "-o", "new", "--mesh", "tp=2", "--network", "{}"],
    ["run", "out", "--inputs", "{}"],
    ["verify", "out", "--inputs", "{}"],
    ["opt", "{}", "--pipeline", "dce"],
)


@pytest.mark.parametrize("name", NO_FILES)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_is_no_file_is_refused(capsys, base, command, name):
    refused(capsys, NO_FILES[name], *(word.format(base / name) for word in command))
    assert not (base / "new").exists()


@pytest.mark.parametrize("name", NO_FILES)
def test_a_value_of_an_input_that_is_in_no_file_is_refused(capsys, base, tmp_path, name):
    (tmp_path / "x.npy").symlink_to(base / name)
    refused(capsys, NO_FILES[name], "run", base / "out", "--input", f"x={tmp_path / 'x.npy'}")


@pytest.mark.parametrize("name", NO_FILES)
@pytest.mark.parametrize("command", ["run", "verify", "explain", "pack"])
def test_a_plan_that_is_no_file_is_refused(capsys, base, tmp_path, command, name):
    shutil.copytree(base / "out", tmp_path / "out")
    (tmp_path / "out" / "plan.json").unlink()
    (tmp_path / "out" / "plan.json").symlink_to(base / name)
    words = {"run": ["--inputs", "in.npz"], "pack": ["--rank", "0"]}.get(command, [])
    refused(capsys, NO_FILES[name], command, tmp_path / "out", *words)


def test_the_original_of_a_partition_is_no_file(capsys, base):
    refused(capsys, "the original model is no file", "verify", base / "out", "--model", base / "pipe")


def test_a_file_that_is_exchanged_for_a_pipe_is_not_waited_for(base, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("text")
    status = os.stat(tmp_path / "file")
    monkeypatch.setattr(os, "stat", lambda *_, **__: status)
    with pytest.raises(OSError, match="named pipe"):
        open_file(base / "pipe")


def test_ordinary_files_and_links_to_them_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_text(tmp_path / "link", "utf-8-sig") == "one\ntwo\nthree\n"
    assert read_bytes(tmp_path / "link") == (tmp_path / "file").read_bytes()
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)
    assert len(os.listdir("/proc/self/fd")) <= before  # Those of an earlier test may be closed meanwhile.
