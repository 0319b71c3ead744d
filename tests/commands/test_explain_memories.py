"""irpar explain OUT NAME and irpar explain OUT --memory: where weights and state lie, and why."""

import json
from pathlib import Path
from typing import Any

import pytest

import irpar
from irpar import models
from irpar.pass_manager.default_pipeline import composed
from tests.command_line import Capture, call

TABLES = 2


def _saved(folder: Path, passes: list[str]) -> tuple[Path, dict[str, Any]]:
    partition = irpar.partition(
        models.build("dlrm", tables=TABLES), "tp=1", pipeline=composed(programs=passes), network="h100-nvlink-ib"
    )
    partition.save(folder / "out")
    return folder / "out", json.loads((folder / "out" / "plan.json").read_text())


@pytest.mark.parametrize(
    ("option", "memory", "where", "why"),
    [
        ("place{host=[tables.*], rest=device}", "host", "on the host", "host=tables.*"),
        ("store{weights=disk, threshold-kb=0}", "disk", "on disk", "store has weights=disk"),
    ],
)
def test_where_a_weight_lies_and_why(
    option: str, memory: str, where: str, why: str, tmp_path: Path, capsys: Capture
) -> None:
    out, plan = _saved(tmp_path, [option])
    told = {entry["value"]: entry for entry in plan["memories"]}
    entry = told["tables.0.weight"]
    assert (entry["kind"], entry["memory"], entry["why"]) == ("constant", memory, why)
    lines = call(capsys, "explain", out, "tables.0.weight")[1].splitlines()
    (line,) = (line for line in lines if "constant of" in line)
    assert line.endswith(f"lies {where}: {why}")
    assert json.loads(call(capsys, "explain", out, "tables.0.weight", "--json")[1])["values"][0]["memories"] == [entry]
    held = call(capsys, "explain", out, "--memory")[1].splitlines()
    (row,) = (line for line in held if line.startswith(where) and "constant" in line and line.endswith(why))
    alike = [other for other in told.values() if (other["memory"], other["why"]) == (memory, why)]
    assert str(len(alike)) in row.split()


def test_all_on_the_device_is_no_word_of_it(tmp_path: Path, capsys: Capture) -> None:
    out, plan = _saved(tmp_path, [])
    assert plan["memories"] == []
    assert "when a run begins" not in call(capsys, "explain", out, "--memory")[1]
