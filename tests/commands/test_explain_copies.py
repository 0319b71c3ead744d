"""irpar explain OUT: what is copied between memories, when and why; and `irpar verify` of such a partition."""

import json
from pathlib import Path

import onnx
import pytest

import irpar
from irpar import models
from irpar.units import bytes_text
from tests.command_line import Capture, call, refused
from tests.scattered_places import scattering


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("copies")
    onnx.save(models.build("mlp"), made / "model.onnx")
    partition = irpar.partition(made / "model.onnx", "tp=1", pipeline=scattering(1), network="h100-nvlink-ib")
    partition.save(made / "out")
    return made / "out"


def test_all_of_it(folder: Path, capsys: Capture) -> None:
    code, out, _ = call(capsys, "explain", folder)
    assert code == 0
    plan = json.loads((folder / "plan.json").read_text())
    totals = plan["totals"]["copied_bytes"]
    (all_of_them,) = (line for line in out.splitlines() if line.startswith("all "))
    assert all_of_them.split() == ["all", str(len(plan["copies"])), *bytes_text(totals).split()]
    for entry in plan["copies"]:
        assert f"{entry['from']} to {entry['to']}" in out
    (rank,) = plan["ranks"]
    held = f"a rank holds at most {bytes_text(rank['peak_bytes'])} on the device, {bytes_text(rank['host_bytes'])} on"
    assert held in out
    assert "copies" in next(line for line in out.splitlines() if line.startswith("predicted"))


def test_one_copy_by_its_id_and_by_what_it_copies(folder: Path, capsys: Capture) -> None:
    entry = json.loads((folder / "plan.json").read_text())["copies"][-1]
    expected = f"{entry['id']}  copy from {entry['from']} to {entry['to']}"
    for target in (entry["id"], entry["value"]):
        code, out, _ = call(capsys, "explain", folder, target)
        assert code == 0
        assert expected in out.splitlines()
        assert f"  first read by {entry['reader']}" in out.splitlines()
        assert "  scattered" in out.splitlines()
    code, out, _ = call(capsys, "explain", folder, entry["id"], "--json")
    assert json.loads(out)["copies"] == [entry]
    refused(capsys, "there is no collective 99", "explain", folder, "99")


@pytest.mark.slow
def test_verify(folder: Path, capsys: Capture) -> None:
    code, out, _ = call(capsys, "verify", folder)
    assert (code, out.splitlines()[-1][:22]) == (0, "the partition is equal")


@pytest.mark.slow
def test_no_copy_is_no_word_of_it(tmp_path: Path, capsys: Capture) -> None:
    irpar.partition(models.build("mlp"), "tp=1").save(tmp_path / "out")
    code, out, _ = call(capsys, "explain", tmp_path / "out")
    assert code == 0
    assert "cop" not in out
    assert "copies" not in json.loads(call(capsys, "explain", tmp_path / "out", "--json")[1])
