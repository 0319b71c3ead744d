"""irpar on a GPU, checked in one command in under 8 minutes.

    python benchmarks/gpu/check.py                    all parts; the report goes to benchmarks/results
    python benchmarks/gpu/check.py --only kernels     one part (kernels, families, memory, ranks, ...)
    python benchmarks/gpu/check.py --only memory --list    and what holds memory when most of it is held

It writes gpu_check.json and gpu_check.md; see benchmarks/gpu/README.md for what is checked. irpar must be importable,
installed or from a folder of links as `make view` makes it. Exit code 1 where a check failed, 2 where there is nothing
to check on.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.findings import Findings

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FAILED, NOTHING = 1, 2
"""Exit codes."""


@dataclass(frozen=True)
class Part:
    """A part of the check.

    Attributes:
        module: of this folder: `run(context)` and `lines(figures)`.
        shards: processes that share its work.
        seconds: its time limit.
    """

    module: str
    shards: int
    seconds: float


PARTS = {
    "kernels": Part("kernel_errors", shards=4, seconds=270),
    "families": Part("family_checks", shards=3, seconds=270),
    "memory": Part("memory", shards=2, seconds=240),
    "ranks": Part("rank_checks", shards=1, seconds=300),
    "tests": Part("marked_tests", shards=8, seconds=300),
}
_TO_END = 15.0
"""Seconds after its limit until a part that does not end by itself is killed."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the check, or what this process is to do of it."""
    given = list(sys.argv[1:] if words is None else words)
    if given[:1] == ["--as-rank"]:
        return _as_rank(given[1:])
    options = _options(given)
    try:
        _find_packages()
    except ImportError as error:
        print(f"error: irpar cannot be imported: {error}\n  do: pip install -e . in the clone", file=sys.stderr)
        return NOTHING
    from benchmarks.gpu import rank_worker

    if options.rank_work:
        return rank_worker.main(options.rank_work, options.scratch, options.engine, options.group)
    if options.part:
        return _run_part(options)
    return _check(options)


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PART", action="append", choices=PARTS, help="this part; may be repeated")
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=RESULTS, help="for the report (%(default)s)")
    parser.add_argument("--engine", default="cupy", help="for development: numpy needs no GPU")
    parser.add_argument("--group", help="what joins ranks that are processes (nccl, or processes without a GPU)")
    parser.add_argument("--list", action="store_true", help="memory: which functions asked for what is held at most")
    for name in ("--part", "--shard", "--rank-work"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--result", "--scratch"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help="for each part, where it has more: what it found by then counts")
    options = parser.parse_args(words)
    options.group = options.group or ("nccl" if options.engine == "cupy" else "processes")
    return options


def _find_packages() -> None:
    """Import irpar from where it is installed; then the clone, for its tests and these modules, is put on the path.

    The other way round `irpar` would be the folder of that name in the clone, which lacks irpar.passes and others.
    """
    import irpar.kernels
    import irpar.models
    import irpar.passes

    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    # Processes that are started from here find irpar as this one did, wherever they run.
    home = str(Path(irpar.__file__).resolve().parent.parent) if irpar.__file__ else ""
    known = [str(Path(entry).resolve()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*known, home]))


# -- all of it --------------------------------------------------------------------------------------------------------


def _check(options: argparse.Namespace) -> int:
    from benchmarks.gpu import machine, report

    if options.engine == "cupy":
        try:
            machine.check_device()
        except machine.MissingError as error:
            print(f"error: nothing to check on: {error}", file=sys.stderr)
            return NOTHING
    names = [name for name in PARTS if not options.only or name in options.only]
    facts = machine.facts(options.engine)
    scratch_folder, pool = tempfile.TemporaryDirectory(prefix="irpar-gpu-check-"), ThreadPoolExecutor(len(names))
    with scratch_folder as scratch, pool:
        found = list(pool.map(lambda name: _part(name, options, Path(scratch)), names))
    parts = dict(zip(names, found, strict=True))
    for path in report.merge(options.out, facts, parts, _lines):
        print(f"written: {path}")
    return 0 if all(found.is_good for found in parts.values()) else FAILED


def _part(name: str, options: argparse.Namespace, scratch: Path) -> "Findings":
    """Run a part in processes of its own, and tell how it went."""
    from benchmarks.gpu.findings import merged
    from benchmarks.gpu.report import verdict

    part, start = PARTS[name], time.monotonic()
    with ThreadPoolExecutor(part.shards) as pool:
        found = merged(list(pool.map(lambda shard: _shard(name, shard, options, scratch), range(part.shards))))
    found.seconds = time.monotonic() - start
    print(f"{name}: {verdict(found)}, {found.checks} checks, {len(found.failures)} failed, {found.seconds:.0f} s")
    for text in found.failures[:20]:
        print(f"  {text[:300]}")
    sys.stdout.flush()
    return found


def _shard(name: str, shard: int, options: argparse.Namespace, scratch: Path) -> "Findings":
    """One process of a part: what it found, or why there is nothing."""
    from benchmarks.gpu.findings import Findings

    part = PARTS[name]
    seconds = min(part.seconds, options.seconds or part.seconds)
    folder = scratch / f"{name}-{shard}"
    folder.mkdir()
    result, log = folder / "result.json", folder / "log.txt"
    words = [sys.executable, str(Path(__file__).resolve()), "--part", name, "--shard", f"{shard}/{part.shards}"]
    words += ["--result", str(result), "--scratch", str(folder), "--seconds", str(seconds)]
    words += ["--engine", options.engine, "--group", options.group, *(["--list"] if options.list else [])]
    with log.open("wb") as stream:
        process = subprocess.Popen(words, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        code = process.wait(seconds + _TO_END)
        ending = f"ended with {code}"
    except subprocess.TimeoutExpired:
        ending = f"did not end in {seconds + _TO_END:.0f} s"
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if result.is_file():
        return Findings.of_json(json.loads(result.read_text()))
    told = log.read_text(errors="replace")[-1500:]
    return Findings(failures=[f"process {shard + 1} of {part.shards} of {name} {ending}, its last words: {told}"])


def _lines(name: str, found: "Findings") -> list[str]:
    """A part's tables."""
    try:
        made: list[str] = _module(name).lines(found.figures)
    except Exception as error:
        return [f"(no tables: {type(error).__name__}: {error})"]
    return made


# -- one process of it ------------------------------------------------------------------------------------------------


def _run_part(options: argparse.Namespace) -> int:
    """Run a share of a part, and write what it found."""
    from benchmarks.gpu.findings import Context, Findings, problem_text

    shard, _, shards = options.shard.partition("/")
    deadline = time.monotonic() + options.seconds
    context = Context(options.engine, options.group, deadline, options.scratch, int(shard), int(shards), options.list)
    try:
        found = _module(options.part).run(context)
    except Exception as error:
        import traceback

        traceback.print_exc()
        found = Findings(failures=[problem_text(error)])
    fresh = options.result.with_suffix(".new")
    fresh.write_text(json.dumps(found.as_json(), default=str))
    os.replace(fresh, options.result)
    return 0


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.gpu.{PARTS[name].module}")


def _as_rank(command: list[str]) -> int:
    """Become a command, with what lets ranks share a device."""
    _find_packages()
    from benchmarks.gpu.rank_worker import share_device

    share_device(os.environ["RANK"])
    os.execvp(command[0], command)


if __name__ == "__main__":
    sys.exit(main())
