"""What comes of random programs of odd attributes: each is drawn, partitioned, run by every engine and compared.

python -m tests.odd_programs [--count N] [--first SEED] [--jobs N] [--verbose]

Programs run in processes of their own, since ONNX Runtime ends the process on some nodes; who was at work then, the
original or the partition, is known by what was said last.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

import irpar
from irpar.pass_manager import PassFailure
from irpar.verification.comparison import compare

from .random_attributes import draw
from .random_programs import Program, UnsteadyError, expected_of, partitioned

Kind = Literal["right", "refused", "wrong", "crashed", "unfit"]
BATCH = 25
"""Programs that one process tries."""
MOST_SECONDS = 300
"""Of a batch."""


@dataclass(frozen=True)
class Outcome:
    """What came of a program.

    Attributes:
        seed: of the program.
        kind: right in every engine; refused with a message; wrong; crashed; or unfit: ONNX Runtime gives no answer to
            compare with.
        text: the message, or what differs.
        nodes: number of nodes.
    """

    seed: int
    kind: Kind
    text: str = ""
    nodes: int = 0

    @property
    def reason(self) -> str:
        """The text without what differs from program to program."""
        return re.sub(r"\[.*?\]|[%\"][^ \"]*|\d+", "_", self.text.splitlines()[0] if self.text else "")[:160]


def outcome_of(program: Program, seed: int, folder: Path) -> Outcome:
    """Partition a program and compare it in every engine."""
    count = len(program.model.graph.node)
    try:
        with np.errstate(all="ignore"):
            return Outcome(seed, *_tried(program, folder), nodes=count)
    except Exception:  # whatever it is, it should have been an error of irpar
        return Outcome(seed, "crashed", traceback.format_exc(), count)


def _tried(program: Program, folder: Path) -> tuple[Kind, str]:
    try:
        expected = expected_of(program)
    except UnsteadyError as error:
        return "unfit", f"other numbers node by node: {error}"
    print(json.dumps({"at": "partition"}), flush=True)
    try:
        partition = partitioned(program, folder)
    except PassFailure as error:
        return "crashed", str(error)
    except irpar.IrparError as error:
        return "refused", str(error)
    refusal = ""
    for engine in program.engines:
        try:
            got = partition.executor(engine).run(program.inputs, check_replicas=True)  # type: ignore[arg-type]
        except irpar.IrparError as error:
            refusal = refusal or f"{engine}: {error}"
            continue
        for name, array in expected.items():
            if got[name].shape != array.shape or got[name].dtype != array.dtype:
                return (
                    "wrong",
                    f"{engine}: {name} is {got[name].dtype}{got[name].shape}, not {array.dtype}{array.shape}",
                )
            found = compare(name, got[name], np.asarray(array), program.tolerance)
            if not found.is_equal:
                return "wrong", f"{engine}: {found}\ngot {got[name]}\nexpected {array}"
    return ("refused", refusal) if refusal else ("right", "")


def work(seeds: Sequence[int]) -> None:
    """Try programs one by one, and print what comes of each as a line of JSON."""
    for seed in seeds:
        print(json.dumps({"at": "original", "seed": seed}), flush=True)
        try:
            program = draw(seed)
        except Exception:
            found = Outcome(seed, "crashed", "the generator failed: " + traceback.format_exc())
        else:
            with tempfile.TemporaryDirectory() as folder:
                found = Outcome(seed, "unfit") if program is None else outcome_of(program, seed, Path(folder))
        print(json.dumps({"found": vars(found)}), flush=True)


def survey(seeds: Sequence[int], jobs: int = 1) -> Iterator[Outcome]:
    """What comes of programs, in processes of their own, `jobs` at a time."""
    batches = [list(seeds[start : start + BATCH]) for start in range(0, len(seeds), BATCH)]
    with ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(_batch, batches):
            yield from found


def _batch(seeds: list[int]) -> list[Outcome]:
    found: list[Outcome] = []
    while len(found) < len(seeds):
        left = seeds[len(found) :]
        command = [sys.executable, "-m", "tests.odd_programs", "--work", *map(str, left)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, check=False)
            said, why = ended.stdout, f"the process ended with {ended.returncode}: {ended.stderr[-500:]}"
        except subprocess.TimeoutExpired as error:
            said = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
            why = f"no end after {MOST_SECONDS} s"
        lines: list[dict[str, Any]] = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        found += [Outcome(**line["found"]) for line in lines if "found" in line]
        if len(found) < len(seeds):
            is_ours = bool(lines) and lines[-1].get("at") == "partition"
            found.append(Outcome(seeds[len(found)], "crashed" if is_ours else "unfit", why))
    return found


def main() -> int:
    """Print how many programs came to what, and why; 1 where one is wrong or crashed."""
    parser = argparse.ArgumentParser(prog="python -m tests.odd_programs")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="print every program that is not right")
    parser.add_argument("--work", type=int, nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return 0
    kinds: Counter[str] = Counter()
    reasons: dict[tuple[str, str], list[int]] = {}
    for found in survey(range(options.first, options.first + options.count), options.jobs):
        kinds[found.kind] += 1
        if found.kind != "right":
            reasons.setdefault((found.kind, found.reason), []).append(found.seed)
        if found.kind in ("wrong", "crashed") or (options.verbose and found.kind == "refused"):
            print(f"{found.seed}: {found.kind} {found.text}\n", flush=True)
    print(dict(kinds))
    for (kind, reason), seeds in sorted(reasons.items(), key=lambda entry: -len(entry[1])):
        print(f"{len(seeds):4} {kind}: {reason}  {seeds[:4]}")
    return 1 if kinds["wrong"] or kinds["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main())
