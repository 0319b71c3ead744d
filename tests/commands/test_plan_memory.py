"""irpar plan-memory: of files and of partitions; and each mistake."""

import json
from pathlib import Path

import pytest

import irpar
from irpar import models
from irpar.analysis.memory.offsets.buffers_file import read_buffers
from tests.command_line import Capture, call, refused

BUFFERS = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"


@pytest.fixture
def buffers(tmp_path: Path) -> Path:
    (tmp_path / "buffers.csv").write_text(BUFFERS)
    return tmp_path / "buffers.csv"


@pytest.fixture(scope="module")
def partition(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan_memory")
    models.save(folder / "gpt.onnx", "gpt")
    irpar.partition(irpar.train_step(folder / "gpt.onnx"), "dp=2").save(folder / "out")
    return folder / "out"


def test_offsets_of_a_file(buffers: Path, tmp_path: Path, capsys: Capture) -> None:
    code, printed, _ = call(capsys, "plan-memory", buffers, "-o", tmp_path / "out.csv")
    assert code == 0
    assert "5 buffers" in printed
    assert "peak         12 bytes" in printed
    assert "lower bound  12 bytes" in printed
    assert "none: no memory is smaller" in printed
    assert read_buffers(tmp_path / "out.csv") == read_buffers(buffers)
    assert (tmp_path / "out.csv").read_text().splitlines()[0] == "id,lower,upper,size,offset"


@pytest.mark.parametrize("words", [(), ("--exact",), ("--exact", "--seconds", "2")])
def test_json(buffers: Path, words: tuple[str, ...], capsys: Capture) -> None:
    code, printed, _ = call(capsys, "plan-memory", buffers, "--alignment", 8, "--json", *words)
    assert code == 0
    facts = json.loads(printed)
    assert facts == {"buffers": 5, "peak": 24, "lower_bound": 24, "gap": 0.0, "is_optimal": True, "file": None}


def test_a_rank_of_a_partition(partition: Path, tmp_path: Path, capsys: Capture) -> None:
    code, printed, _ = call(capsys, "plan-memory", partition, "--rank", 1, "-o", tmp_path / "b.csv", "--json")
    assert code == 0
    plan = json.loads((partition / "plan.json").read_text())
    facts = json.loads(printed)
    assert 0 <= facts["peak"] - plan["ranks"][1]["arena_bytes"] < 64
    held = read_buffers(tmp_path / "b.csv")
    assert len(held) == facts["buffers"]
    assert {entry["input"] for entry in plan["state"]} <= {one.key for one in held}


def test_mistakes(buffers: Path, partition: Path, tmp_path: Path, capsys: Capture) -> None:
    refused(capsys, "--seconds is for --exact alone", "plan-memory", buffers, "--seconds", 3)
    refused(capsys, "--seconds is 0.0", "plan-memory", buffers, "--exact", "--seconds", 0)
    refused(capsys, "--alignment is 0", "plan-memory", buffers, "--alignment", 0)
    refused(capsys, "--rank is for a partition", "plan-memory", buffers, "--rank", 0)
    refused(capsys, "the file exists", "plan-memory", buffers, "-o", buffers)
    assert buffers.read_text() == BUFFERS
    refused(capsys, "cannot read the buffers", "plan-memory", tmp_path / "none.csv")
    refused(capsys, "cannot read the plan", "plan-memory", tmp_path)
    refused(capsys, "rank", "plan-memory", partition, "--rank", 7)
    buffers.write_text("id,lower,upper,size\nb1,0,three,4\n")
    assert "line 2" in refused(capsys, 'upper is "three"', "plan-memory", buffers)
