"""The report: gpu_check.json, and gpu_check.md for people."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .findings import MOST_FAILURES, Findings, markdown_table

NAME = "gpu_check"
FORMAT = "irpar-gpu-check/1"


def write(
    folder: Path,
    facts: Mapping[str, Any],
    parts: Mapping[str, Findings],
    texts: Mapping[str, list[str]],
    seconds: float,
) -> tuple[Path, Path]:
    """Write both files.

    Args:
        folder: where; made if it is not there.
        facts: of the machine.
        parts: what each part found.
        texts: the tables of each part, in Markdown.
        seconds: that all of it took.

    Returns:
        The paths of the JSON and of the Markdown file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = {
        "format": FORMAT,
        "is_good": all(found.is_good for found in parts.values()),
        "seconds": round(seconds, 1),
        "machine": dict(facts),
        "parts": {name: found.as_json() for name, found in parts.items()},
    }
    data, text = folder / f"{NAME}.json", folder / f"{NAME}.md"
    _replace(data, json.dumps(made, indent=1) + "\n")
    _replace(text, "\n".join(markdown(facts, parts, texts, seconds)) + "\n")
    return data, text


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    os.replace(fresh, path)


def markdown(
    facts: Mapping[str, Any], parts: Mapping[str, Findings], texts: Mapping[str, list[str]], seconds: float
) -> list[str]:
    """The lines of the readable report."""
    rows = [
        (name, verdict(found), found.checks, len(found.failures), f"{found.seconds:.0f} s")
        for name, found in parts.items()
    ]
    made = [
        "# irpar on a GPU",
        "",
        f"Written by `python benchmarks/gpu/check.py` in {seconds:.0f} s; benchmarks/gpu/README.md explains it.",
        "",
        *markdown_table(("what", "version"), [(name, fact) for name, fact in facts.items() if fact is not None]),
        "",
        *markdown_table(("part", "", "checks", "failed", "took"), rows),
    ]
    for name, found in parts.items():
        made += ["", f"## {name}", ""]
        if found.failures:
            more = len(found.failures) - MOST_FAILURES
            made += ["Failed:", "", *(f"- {_line(text)}" for text in found.failures[:MOST_FAILURES])]
            made += [f"- and {more} more"] * (more > 0) + [""]
        made += texts.get(name, [])
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
