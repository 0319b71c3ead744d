"""Hand every bad input to irpar in a process of its own: `python -m tests.hostile [--verbose] [WORD ...]`.

Each must be refused with exit code 2 and one clear error, write nothing, and take little time and memory. With WORDs
only the cases whose name has one of them.
"""

import argparse
import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.patience import slowness

from .cases import Case, all_cases, entries, make_good, objection

MOST_SECONDS = 10.0
"""On an idle machine."""
MOST_MEGABYTES = 1024
PROGRESS = re.compile(r"^pass [a-z-]+: \d+ of \d+\n", re.MULTILINE)
"""What a command tells while it works, where that takes long."""
MEASURE = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[2:])
with open(sys.argv[1], "w") as file:
    file.write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024))
sys.exit(code)
"""
"""Runs a command and writes its peak of memory in MB. A process counts what its parent had when it was forked: this
parent is small, whoever runs the cases."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; returns 1 where one was not refused as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--verbose", action="store_true", help="print the error of each")
    options = parser.parse_args(arguments)
    tried: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    slowest, largest = 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        good = Path(folder) / "good"
        good.mkdir()
        with contextlib.redirect_stdout(io.StringIO()):
            make_good(good)
        for index, case in enumerate(all_cases()):
            if options.words and not any(word in str(case) for word in options.words):
                continue
            here = Path(folder) / str(index)
            here.mkdir()
            problem, err, seconds, megabytes = tried_in_a_process(case, here, good)
            slowest, largest = max(slowest, seconds), max(largest, megabytes)
            tried[case.kind] += 1
            refused[case.kind] += problem is None
            if problem is not None:
                print(f"NOT REFUSED CLEARLY, {case}: {problem}")
            if options.verbose or problem is not None:
                print(f"--- {case} ({seconds:.1f} s, {megabytes} MB)\n{err.replace(str(here), '').rstrip()}\n")
    for kind in tried:
        print(f"{kind}: {tried[kind]} tried, {refused[kind]} refused clearly")
    print(f"together: {tried.total()} tried, {refused.total()} refused clearly")
    print(f"the slowest took {slowest:.1f} s, the largest {largest} MB")
    return 0 if tried == refused else 1


def tried_in_a_process(case: Case, here: Path, good: Path) -> tuple[str | None, str, float, int]:
    """What is wrong with the refusal of a case, its error, its seconds and its megabytes."""
    case.put(here, good)
    before = entries(here)
    outputs = here.with_name(f"{here.name}.out"), here.with_name(f"{here.name}.err")
    start, most_seconds = time.perf_counter(), MOST_SECONDS * slowness()
    with open(outputs[0], "wb") as out, open(outputs[1], "wb") as err:
        peak = here.with_name(f"{here.name}.peak")
        command = [sys.executable, "-m", "irpar.cli", *case.command(here)]
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", MEASURE, str(peak), *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    try:
        process.wait(most_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    seconds = time.perf_counter() - start
    megabytes = int(peak.read_text()) if peak.exists() else 0
    printed, told = (path.read_text(errors="replace") for path in outputs)
    told = PROGRESS.sub("", told)
    problem = objection(case, process.returncode, printed, told)
    if seconds >= most_seconds:
        problem = f"it took {seconds:.1f} s"
    elif megabytes > MOST_MEGABYTES:
        problem = f"it took {megabytes} MB"
    elif problem is None and entries(here) != before:
        problem = "something was written"
    return problem, told, seconds, megabytes


if __name__ == "__main__":
    sys.exit(main())
