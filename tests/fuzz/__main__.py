"""Fuzz irpar: `python -m tests.fuzz [--seconds N] [--seed N] [--keep DIR] [TARGET ...]`.

Each target runs in a process of its own, with little memory and a bound on time. What ends otherwise than with a result
or with one clear error is printed, once for each place it comes from, and kept with its input.
"""

import argparse
import contextlib
import io
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from .execution import MOST_SECONDS, bounded_memory, execute, keep_reproducers
from .targets import TARGETS, prepare_folder

PATIENCE = 3 * MOST_SECONDS
"""Seconds after which a process that tells nothing is killed: it hangs in code that no signal reaches."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz; returns 1 where faults were found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(target.name for target in TARGETS))
    parser.add_argument("--seconds", type=float, default=60, help="for each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-faults"), help="where faults go")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        return _work(options.worker, options.seed, options.seconds, options.keep)
    executions = faults = 0
    for name in options.targets or [target.name for target in TARGETS]:
        count, found = _watch(name, options.seed, options.seconds, options.keep)
        print(f"{name}: {count:,} executions, {found} faults", flush=True)
        executions, faults = executions + count, faults + found
    print(f"together: {executions:,} executions, {faults} faults")
    return 1 if faults else 0


def _watch(name: str, seed: int, seconds: float, keep: Path) -> tuple[int, int]:
    """Run workers until the time is over; returns executions and faults."""
    keep.mkdir(parents=True, exist_ok=True)
    count = faults = 0
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, "-m", "tests.fuzz", "--worker", name, "--seed", str(seed), "--seconds", str(left)]
            environment = {**os.environ, "TMPDIR": folder, "COLUMNS": "120"}
            process = subprocess.Popen([*words, "--keep", keep.resolve()], env=environment)
            status = Path(folder) / f"{process.pid}.status"
            _wait(process, status)
            if not status.exists():
                raise SystemExit(f"{name}: the worker died before it began")
            done = [int(number) for number in status.read_text().split()]
            count, faults, seed = count + done[0], faults + done[1], done[2] + 1
            if process.returncode != 0:
                faults += 1
                _keep(Path(folder) / "work", keep, f"{name}-{seed - 1}", f"the process ended with {process.returncode}")
    return count, faults


def _wait(process: "subprocess.Popen[bytes]", status: Path) -> None:
    """Wait for a worker; kill it where it tells nothing for long."""
    while process.poll() is None:
        time.sleep(0.2)
        with contextlib.suppress(FileNotFoundError):
            if time.time() - status.stat().st_mtime > PATIENCE:
                process.send_signal(signal.SIGKILL)


def _work(name: str, seed: int, seconds: float, keep: Path) -> int:
    """Execute one target until the time is over; writes executions, faults and the last seed to a status file."""
    target = next(target for target in TARGETS if target.name == name)
    folder = Path(tempfile.gettempdir())
    here = folder / "work"
    here.mkdir()
    with contextlib.redirect_stdout(io.StringIO()):
        prepare_folder(here)
    keep_reproducers(here)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seen: set[str] = set()
    count, end = 0, time.monotonic() + seconds
    status = folder / f"{os.getpid()}.status"
    with bounded_memory():
        while time.monotonic() < end:
            status.write_text(f"{count} {len(seen)} {seed}")
            fault = execute(target, Random(f"{name} {seed}"), here)
            if fault is not None and fault.what not in seen:
                seen.add(fault.what)
                _keep(here, keep, f"{name}-{seed}", f"{fault.what}\n{fault.text}")
            count, seed = count + 1, seed + 1
    status.write_text(f"{count} {len(seen)} {seed}")
    return 0


def _keep(here: Path, keep: Path, name: str, text: str) -> None:
    """Copy what led to a fault."""
    print(f"  {name}: {text.splitlines()[0]}", flush=True)
    place = keep / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (place / "fault.txt").write_text(text, errors="replace")
    for file in ("m.onnx", "m.irpar", "s.yaml", "words"):
        if (here / file).exists():
            shutil.copy(here / file, place)
    if name.startswith(("plan", "part")) and (here / "out").exists():
        shutil.copytree(here / "out", place / "out")


if __name__ == "__main__":
    sys.exit(main())
