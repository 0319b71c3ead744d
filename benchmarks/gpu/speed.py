"""irpar beside PyTorch on one GPU: models, operators alone, and what the device can do.

    python benchmarks/gpu/speed.py                        what has not been measured yet; the report goes to
                                                          benchmarks/results
    python benchmarks/gpu/speed.py --quick --seconds 240  what tells most in four minutes
    python benchmarks/gpu/speed.py --only gpt2-b1-s128-f16,rates
    python benchmarks/gpu/speed.py --kernels              each hot operator alone
    python benchmarks/gpu/speed.py --profile CASE         where the device's time goes, by kernel

Results gather in gpu_speed.json and gpu_speed.md, after each case. A case is a process of its own with a time limit.
Several of them make themselves ready together (most of the time is PyTorch's compiler), and are timed one by one. See
benchmarks/gpu/README.md. Exit code 1 where a case failed or the two sides differ, 2 where there is nothing to measure.
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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FAILED, NOTHING = 1, 2
"""Exit codes."""
RATES, KERNELS = "rates", "kernels"
"""What is measured beside the cases."""
SECONDS = {RATES: 40.0, KERNELS: 60.0}
LOCK = "lock"
TOGETHER = 5
"""Cases that make themselves ready at the same time."""
LONGEST = 3.0
"""A case is stopped after so many times what it should take."""


def main(words: Sequence[str] | None = None) -> int:
    """Measure, or do what this process is to do of it."""
    options = _options(list(sys.argv[1:] if words is None else words))
    _find_packages()
    if options.work:
        return _work(options)
    if options.profile:
        return _profile(options)
    return _measure(options)


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="CASE,...", help="these, even if they have been measured; rates, kernels too")
    parser.add_argument("--quick", action="store_true", help="the rates and the few cases that tell most")
    parser.add_argument("--kernels", action="store_true", help="the rates, and each hot operator alone")
    parser.add_argument("--again", action="store_true", help="also what has been measured of these sources")
    parser.add_argument("--list", action="store_true", help="list the cases, and measure nothing")
    parser.add_argument("--profile", metavar="CASE,...", help="print where the device's time goes, by kernel")
    parser.add_argument("--seconds", type=float, help="for all of it; nothing begins that could not end")
    parser.add_argument("--together", type=int, default=TOGETHER, help="cases made ready at once (%(default)s)")
    parser.add_argument("--max-autotune", action="store_true", help="of four cases max-autotune too; takes minutes")
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=RESULTS, help="for the report (%(default)s)")
    parser.add_argument("--engine", default="cupy", help="for development: numpy needs no GPU, and has tiny cases")
    for name in ("--work", "--lock", "--result"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def _find_packages() -> None:
    """Import irpar as it is installed; the clone, whose folder of that name lacks a part, is put behind it."""
    for name in ("kernels", "models", "passes"):
        importlib.import_module(f"irpar.{name}")
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))


# -- all of it --------------------------------------------------------------------------------------------------------


@dataclass
class _Process:
    """A process that measures one thing."""

    name: str
    process: "subprocess.Popen[bytes]"
    folder: Path
    ends: float

    @property
    def has_ended(self) -> bool:
        """Whether it is done, or out of time."""
        return self.process.poll() is not None or time.monotonic() > self.ends


def _measure(options: argparse.Namespace) -> int:
    from benchmarks.gpu import machine
    from benchmarks.gpu.speeds import report

    if options.list:
        print("\n".join(_all_names(options)))
        return 0
    if options.engine == "cupy":
        try:
            machine.check_device()
        except machine.MissingError as error:
            print(f"error: nothing to measure on: {error}", file=sys.stderr)
            return NOTHING
    facts = machine.facts(options.engine)
    known = report.read(options.out)["entries"]
    try:
        wanted = _wanted(options, known, facts)
    except KeyError as error:
        print(f"error: there is no case {error}\n  do: take one of: {', '.join(_all_names(options))}", file=sys.stderr)
        return NOTHING
    end = time.monotonic() + options.seconds if options.seconds else float("inf")
    is_good = True
    with tempfile.TemporaryDirectory(prefix="irpar-gpu-speed-") as scratch:
        while wanted:
            wave = _wave(wanted, options, end)
            if not wave:
                print(f"no time left for {', '.join(wanted)}")
                break
            wanted = [name for name in wanted if name not in wave]
            for entry in _run_wave(wave, options, Path(scratch), end):
                entry |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": facts}
                report.merge(options.out, entry)
                is_good = is_good and not entry["problems"]
                print(_told(entry), flush=True)
    print(f"written: {options.out / report.NAME}.json, .md")
    return 0 if is_good else FAILED


def _all_names(options: argparse.Namespace) -> list[str]:
    from benchmarks.gpu.speeds.cases import CASES, TINY

    return [RATES, *(CASES if options.engine == "cupy" else TINY), KERNELS]


def _wanted(options: argparse.Namespace, known: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """Names in order; without those that have been measured of the same sources on such a device, if all are asked for.

    Raises:
        KeyError: there is no such case.
    """
    from benchmarks.gpu.speeds.cases import QUICK

    names = _all_names(options)
    if options.only:
        asked = options.only.split(",")
        for name in asked:
            if name not in names:
                raise KeyError(name)
        return asked
    if options.kernels:
        names = [RATES, KERNELS]
    elif options.quick and options.engine == "cupy":
        names = [RATES, *(case.name for case in QUICK)]

    def is_known(name: str) -> bool:
        entry = known.get(name, {})
        before = entry.get("machine", {})
        same = all(before.get(fact) == facts.get(fact) for fact in ("sources", "device"))
        return bool(entry) and same and not entry["problems"]

    return names if options.again else [name for name in names if not is_known(name)]


def _seconds(name: str) -> float:
    from benchmarks.gpu.speeds.cases import case_of

    return SECONDS[name] if name in SECONDS else case_of(name).seconds


def _wave(wanted: Sequence[str], options: argparse.Namespace, end: float) -> list[str]:
    """What is made ready together next: as many as there may be, of those that can end. Operators are alone."""
    left = end - time.monotonic()
    able = [name for name in wanted if _seconds(name) <= left]
    if able[:1] == [KERNELS]:
        return [KERNELS]
    return [name for name in able if name != KERNELS][: max(1, options.together)] or able[:1]


def _run_wave(wave: Sequence[str], options: argparse.Namespace, scratch: Path, end: float) -> Iterator[dict[str, Any]]:
    """Run processes side by side; yields what each found when it ends."""
    from benchmarks.gpu.speeds.turns import BEGUN, Turns

    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        turns = Turns(folder / LOCK)
        turns.together()
        running = [_started(one, options, folder, end, len(wave)) for one in wave]
        try:
            while running:
                if all((one.folder / BEGUN).exists() for one in running):
                    turns.let_go()
                for one in [one for one in running if one.has_ended]:
                    running.remove(one)
                    _stop(one)
                    yield _found(one)
                time.sleep(0.05)
        finally:
            turns.let_go()
            for one in running:
                _stop(one)


def _started(name: str, options: argparse.Namespace, folder: Path, end: float, beside: int) -> _Process:
    own = folder / name
    own.mkdir()
    words = [sys.executable, str(Path(__file__).resolve()), "--work", name, "--engine", options.engine]
    words += ["--lock", str(folder / LOCK), "--result", str(own / "result.json")]
    words += ["--max-autotune"] * options.max_autotune
    ends = min(end, time.monotonic() + LONGEST * _seconds(name))
    words += ["--seconds", str(ends - time.monotonic())]
    cores = max(1, (os.cpu_count() or 1) // beside)
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": str(cores), "OMP_NUM_THREADS": str(cores)} | os.environ
    with (own / "log.txt").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment)
    return _Process(name, process, own, ends)


def _stop(one: _Process) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(one.process.pid, signal.SIGKILL)
    one.process.wait()


def _found(one: _Process) -> dict[str, Any]:
    """What a process wrote; why there is nothing, or not all, where it did not end well."""
    result = one.folder / "result.json"
    made: dict[str, Any] = json.loads(result.read_text()) if result.is_file() else {"name": one.name, "problems": []}
    if one.process.returncode:
        told = (one.folder / "log.txt").read_text(errors="replace")[-1500:]
        late = "did not end in time" if one.process.returncode == -signal.SIGKILL else "failed"
        made["problems"].append(f"the process {late} ({one.process.returncode}), its last words: {told}")
    return made


def _told(entry: dict[str, Any]) -> str:
    times = {name: f"{one['waited'] * 1e3:.3f} ms" for name, one in entry.get("times", {}).items()}
    host = f", host {entry['times']['irpar']['host'] * 1e6:.0f} us" if "irpar" in entry.get("times", {}) else ""
    lines = [f"{entry['name']}: " + ", ".join(f"{name} {text}" for name, text in times.items()) + host]
    return "\n".join([*lines, *(f"  {text[:1000]}" for text in entry["problems"])])


# -- one process of it ------------------------------------------------------------------------------------------------


def _work(options: argparse.Namespace) -> int:
    """Measure one thing, and write what was found."""
    from benchmarks.gpu.speeds.case_run import run_case
    from benchmarks.gpu.speeds.cases import case_of
    from benchmarks.gpu.speeds.turns import Turns

    result, name = Path(options.result), options.work

    def keep(found: Any) -> None:
        fresh = result.with_suffix(".new")
        fresh.write_text(json.dumps({"name": name, **found}, default=str))
        os.replace(fresh, result)

    turns = Turns(Path(options.lock), result.parent)
    if name == RATES:
        from benchmarks.gpu.speeds.rates import run_rates

        keep(run_rates(options.engine, turns))
    elif name == KERNELS:
        from benchmarks.gpu.speeds.kernel_speeds import run_kernels

        turns.together()
        run_kernels(options.engine, time.monotonic() + options.seconds - 5, keep)
    else:
        run_case(case_of(name), options.engine, turns, keep, options.max_autotune)
    return 0


def _profile(options: argparse.Namespace) -> int:
    """Print where the time of cases goes."""
    from benchmarks.gpu.speeds.cases import case_of
    from benchmarks.gpu.speeds.profile import profile_case

    for name in options.profile.split(","):
        print("\n".join(profile_case(case_of(name), options.engine)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
