"""The report, in which parts gather: gpu_check.json, and gpu_check.md for people."""

import json
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .findings import MOST_FAILURES, Findings, markdown_table

NAME = "gpu_check"
FORMAT = "irpar-gpu-check/2"
Made = dict[str, Any]


def read(folder: Path) -> dict[str, Made]:
    """What each part found when it last ran, with `date` and `machine`; nothing where there is no such report."""
    path = folder / f"{NAME}.json"
    made: Made = json.loads(path.read_text()) if path.is_file() else {}
    parts: dict[str, Made] = made["parts"] if made.get("format") == FORMAT else {}
    return parts


def merge(
    folder: Path, facts: Mapping[str, Any], parts: Mapping[str, Findings], lines: Callable[[str, Findings], list[str]]
) -> tuple[Path, Path]:
    """Put what parts found into both files, in the place of what was there of them.

    Args:
        folder: where; made if it is not there.
        facts: of the machine.
        parts: what each part found.
        lines: the tables of a part, in Markdown.

    Returns:
        The paths of the JSON and of the Markdown file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ran = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": dict(facts)}
    known = read(folder) | {name: found.as_json() | ran for name, found in parts.items()}
    data, text = folder / f"{NAME}.json", folder / f"{NAME}.md"
    _replace(data, json.dumps({"format": FORMAT, "parts": known}, indent=1) + "\n")
    _replace(text, "\n".join(markdown(known, lines)) + "\n")
    return data, text


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    os.replace(fresh, path)


def markdown(parts: Mapping[str, Made], lines: Callable[[str, Findings], list[str]]) -> list[str]:
    """The lines of the readable report."""
    rows = [
        (
            name,
            verdict(Findings.of_json(made)),
            made["checks"],
            made["failed"],
            f"{made['seconds']:.0f} s",
            made["date"],
            made["machine"].get("commit"),
        )
        for name, made in parts.items()
    ]
    made = [
        "# irpar on a GPU",
        "",
        "Written by `python benchmarks/gpu/check.py`; benchmarks/gpu/README.md explains it. Parts that have not run "
        "again are as they were.",
        "",
        *markdown_table(("part", "", "checks", "failed", "took", "date", "commit"), rows),
        *_machines(parts),
    ]
    for name, part in parts.items():
        made += ["", f"## {name}", "", *_part(Findings.of_json(part), part["failed"], lines, name)]
    return made


def _machines(parts: Mapping[str, Made]) -> list[str]:
    """What parts ran on; those on the same are one table."""
    made: list[str] = []
    machines = {json.dumps(part["machine"], sort_keys=True): part["machine"] for part in parts.values()}
    for machine in machines.values():
        names = [name for name, part in parts.items() if part["machine"] == machine]
        rows = [(name, fact) for name, fact in machine.items() if fact is not None]
        made += ["", *markdown_table((", ".join(names), "version"), rows)]
    return made


def _part(found: Findings, failed: int, lines: Callable[[str, Findings], list[str]], name: str) -> list[str]:
    made: list[str] = []
    if found.failures:
        made += ["Failed:", "", *(f"- {_line(text)}" for text in found.failures[:MOST_FAILURES])]
        made += [f"- and {failed - MOST_FAILURES} more"] * (failed > MOST_FAILURES) + [""]
    made += lines(name, found)
    if found.notes:
        made += ["", "Notes:", "", *(f"- {_line(text)}" for text in found.notes)]
    return made


def verdict(found: Findings) -> str:
    """A word for a part."""
    if found.is_good:
        return "good"
    return "FAILED" if found.failures else "NOTHING CHECKED"


def _line(text: str) -> str:
    return " ".join(text.split())
