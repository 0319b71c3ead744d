"""Every bad input as files in a folder and a command line, and what a refusal must look like."""

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from irpar.cli import main
from irpar.models import annotations, save

from .models import MODELS
from .partitions import PARTITIONS
from .shardings import SHARDINGS

MISTAKE = 2
DAMAGED_FILES = {
    "cut in two": lambda content: content[: len(content) // 2],
    "of text": lambda content: b"hello\n",
    "with a field longer than it": lambda content: b"\x08\x08\x3a\xff\xff\xff\xff\x07abc",
    "empty": lambda content: b"",
    "of nothing but a version": lambda content: b"\x08\x08",
    "with a group that never ends": lambda content: b"\x0b" * 1000,
    "nested 10,000 deep": lambda content: nested(10_000),
}
"""What is done to the bytes of a model."""


def nested(depth: int) -> bytes:
    """A graph in an attribute of a node of a graph, and so on, by hand."""
    content = b""
    for _ in range(depth):
        for tag in (b"\x32", b"\x2a", b"\x0a"):  # attribute.g, node.attribute, graph.node
            content = tag + varint(len(content)) + content
    return b"\x08\x0a" + b"\x3a" + varint(len(content)) + content


def varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    content = bytearray()
    while number > 127:
        content.append(number & 127 | 128)
        number >>= 7
    return bytes((*content, number))


@dataclass(frozen=True)
class Case:
    """One bad input.

    Attributes:
        kind: model, shardings or partition.
        told: what the error must say.
        put: writes the files into a folder, given that of the good ones.
        words: the command line, in which {here} is the folder.
    """

    kind: str
    told: str
    put: Callable[[Path, Path], object]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}: {' '.join(self.words[:1])}: {self.told}"

    def command(self, here: Path) -> list[str]:
        """The command line."""
        return [word.format(here=here) for word in self.words]


def make_good(folder: Path) -> Path:
    """gpt.onnx, its shardings and inputs, and a partition of it in out/."""
    save(folder / "gpt.onnx", "gpt", layers=1)
    (folder / "gpt.json").write_text(json.dumps({"mesh": {"dp": 2, "tp": 2}, "tensors": annotations("gpt", layers=1)}))
    np.savez(folder / "in.npz", input_ids=np.zeros((4, 32), np.int64))
    words = ["partition", folder / "gpt.onnx", "-o", folder / "out", "--shardings", folder / "gpt.json", "--json"]
    assert main(list(map(str, words))) == 0
    return folder


def all_cases() -> Iterator[Case]:
    """Every case of every kind."""
    yield from model_cases()
    yield from sharding_cases()
    yield from partition_cases()


def model_cases() -> Iterator[Case]:
    """Bad models, and files that are none."""
    words = ("partition", "{here}/model/m.onnx", "--mesh", "tp=2", "-o", "{here}/out")
    for told in MODELS:
        yield Case(
            "model", told, lambda here, good, told=told: put_model(here, MODELS[told]().SerializeToString()), words
        )
    for name in DAMAGED_FILES:
        yield Case("model", "not an ONNX model", lambda here, good, name=name: put_damaged(here, good, name), words)
    yield Case("model", "No such file", lambda here, good: None, words)
    yield Case("model", "Is a directory", lambda here, good: (here / "model" / "m.onnx").mkdir(parents=True), words)


def put_model(here: Path, content: bytes) -> None:
    """A model among files that it may or may not name."""
    inside = here / "model"
    inside.mkdir()
    (inside / "w.bin").write_bytes(bytes(256))
    (here / "elsewhere.bin").write_bytes(bytes(256))
    (inside / "link.bin").symlink_to(here / "elsewhere.bin")
    (inside / "folder").symlink_to(here)
    (inside / "self.bin").symlink_to("self.bin")
    os.mkfifo(inside / "pipe")
    (inside / "m.onnx").write_bytes(content)


def put_damaged(here: Path, good: Path, name: str) -> None:
    """The good model, damaged."""
    put_model(here, DAMAGED_FILES[name]((good / "gpt.onnx").read_bytes()))


def sharding_cases() -> Iterator[Case]:
    """Bad shardings files for a good model."""

    def put(here: Path, good: Path, told: str) -> None:
        shutil.copy(good / "gpt.onnx", here)
        (here / "s.yaml").write_bytes(SHARDINGS[told].encode("latin-1"))

    words = ("partition", "{here}/gpt.onnx", "--mesh", "dp=2,tp=2", "--shardings", "{here}/s.yaml", "-o", "{here}/out")
    for told in SHARDINGS:
        yield Case("shardings", told, lambda here, good, told=told: put(here, good, told), words)


def partition_cases() -> Iterator[Case]:
    """Damaged partitions, to be run, to be verified and to be packed."""

    def put(here: Path, good: Path, told: str) -> None:
        for name in ("gpt.onnx", "in.npz"):
            shutil.copy(good / name, here)
        shutil.copytree(good / "out", here / "out")
        PARTITIONS[told](here / "out")

    inputs = ("{here}/out", "--inputs", "{here}/in.npz")
    run, pack = (
        ("run", *inputs, "--outputs", "{here}/o.npz"),
        ("pack", "{here}/out", "--rank", "0-1", "-o", "{here}/p.tar"),
    )
    for told in PARTITIONS:
        for words in (run, ("verify", *inputs), pack):
            yield Case("partition", told, lambda here, good, told=told: put(here, good, told), words)


def entries(folder: Path) -> dict[str, tuple[int, bytes | str]]:
    """Everything below a folder: mode, and content or target."""
    found: dict[str, tuple[int, bytes | str]] = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        content: bytes | str = ""
        if stat.S_ISLNK(mode):
            content = os.readlink(path)
        elif stat.S_ISREG(mode):
            content = path.read_bytes()
        found[str(path.relative_to(folder))] = mode, content
    return found


def objection(case: Case, code: int, out: str, err: str) -> str | None:
    """What is wrong with how a command refused a case; None where it is as it should be."""
    if code != MISTAKE:
        return f"exit code {code}, not {MISTAKE}"
    if case.told not in err:
        return f"the error does not say {case.told!r}"
    if not err.startswith("error: ") or len(re.findall(r"^error: ", err, re.MULTILINE)) != 1:
        return "not exactly one error"
    if "\n  do: " not in err:
        return "the error does not say what to do"
    if "Traceback" in err or "internal error" in err:
        return "a traceback"
    return "something was printed to standard output" if out else None
