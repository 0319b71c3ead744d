"""The tests that need a device, by pytest."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import share_of_tests
from .findings import Context, Findings, markdown_table
from .machine import ROOT

FAULTS = "tests/runtime/groups/test_nccl_on_gpu.py"
"""Tests that the part `ranks` runs."""
_TO_END = 10.0
"""Seconds before the deadline from which on no test begins."""
_OUTCOMES = ("passed", "failed", "skipped")
# irpar before pytest puts the clone first on the path, and -P, which leaves the working folder out of it: where irpar
# is not installed but found in a folder of links, `irpar` of the clone itself would lack irpar.passes and others.
_PYTEST = "import irpar.passes, sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"


def run(context: Context) -> Findings:
    """All tests marked `gpu`, but those of the part `ranks`."""
    found = Findings()
    run_pytest(context, found, ["tests", f"--ignore={FAULTS}"])
    return found


def run_pytest(context: Context, found: Findings, words: Sequence[str]) -> None:
    """Run tests marked `gpu` in a process of their own, and enter what they gave.

    Args:
        context: of the part.
        found: where to enter it.
        words: folders and options.
    """
    report = context.scratch / "junit.xml"
    command = [
        sys.executable,
        "-P",
        "-c",
        _PYTEST,
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "-p",
        share_of_tests.__name__,
        f"--share={context.shard}/{context.shards}",
        f"--until={context.deadline - _TO_END}",
        f"--junitxml={report}",
        *words,
    ]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=context.seconds_left,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        text = error.output.decode(errors="replace") if isinstance(error.output, bytes) else error.output or ""
        found.check(f"pytest {' '.join(words)} was not done in time; its last lines: {_tail(text)}")
        return
    if not report.is_file():
        found.check(f"pytest {' '.join(words)} ended with {done.returncode}: {_tail(done.stdout)}")
        return
    enter(found, report)
    if late := re.search(rf"\d+ {share_of_tests.LATE}", done.stdout):
        found.check(late[0])
        return
    if done.returncode not in (0, 1) and not (done.returncode == 5 and not found.failures):
        found.check(f"pytest {' '.join(words)} ended with {done.returncode}: {_tail(done.stdout)}")


def _environment() -> dict[str, str]:
    """Tests start `python -m tests...` in the clone, where -P is not given: irpar comes before the clone here too."""
    paths = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(ROOT)]
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def enter(found: Findings, report: Path) -> None:
    """Count the tests of a JUnit file by their files; failures with the first lines of what they tell."""
    files = found.figures.setdefault("files", {})
    for case in ElementTree.parse(report).iter("testcase"):
        name = re.sub(r"^tests\.", "", case.get("classname", ""))
        wrong = next((case.find(tag) for tag in ("failure", "error") if case.find(tag) is not None), None)
        skipped = case.find("skipped")
        row = files.setdefault(name, dict.fromkeys(_OUTCOMES, 0))
        if wrong is not None:
            row["failed"] += 1
            told = [line.strip() for line in (wrong.get("message") or wrong.text or "").splitlines() if line.strip()]
            found.check(f"{name}::{case.get('name')}: {' | '.join(told[:4])}")
        elif skipped is not None:
            row["skipped"] += 1
            reasons = found.figures.setdefault("skipped", {})
            reason = str(skipped.get("message"))
            reasons[reason] = reasons.get(reason, 0) + 1
        else:
            row["passed"] += 1
            found.check(None)


def lines(figures: Mapping[str, Any]) -> list[str]:
    """The figures for the report."""
    files = figures.get("files", {})
    rows = [(name, *(row[outcome] for outcome in _OUTCOMES)) for name, row in sorted(files.items())]
    total = ("all", *(sum(row[outcome] for row in files.values()) for outcome in _OUTCOMES))
    made = markdown_table(("tests marked gpu", *_OUTCOMES), [*rows, total])
    return [*made, "", *(f"- skipped {count}: {reason}" for reason, count in figures.get("skipped", {}).items())]


def _tail(text: str) -> str:
    return " | ".join(line for line in text.splitlines() if line.strip())[-1500:]
