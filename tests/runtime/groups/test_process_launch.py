"""Partitions under `irpar launch`: what happens when a rank is killed or stopped, or Ctrl-C comes; many runs in a row."""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irpar.runtime.errors import RunError
from irpar.runtime.executor import Executor
from irpar.verification.inputs import random_inputs
from tests.patience import patient
from tests.runtime.launched import IRPAR, take_signals
from tests.test_families import Case, partitioned

from .process_ranks import Ranks, world

LOOP = """
import os, sys
from irpar.process import SIGNALS
from irpar.runtime.errors import RunError
from irpar.runtime.executor import Executor
from irpar.verification.inputs import random_inputs
print("process", os.getpid(), "of rank", os.environ["RANK"], flush=True)
SIGNALS.clean_up()
try:
    with Executor.open(sys.argv[1], engine="numpy", group="processes", timeout=float(sys.argv[2])) as executor:
        if not executor.is_driver:
            executor.serve()
            sys.exit()  # The driver was interrupted before this rank.
        inputs = random_inputs(executor.inputs, executor.parts[0].graph)
        for number in range(10**9):
            executor.run(inputs)
            if number == 2:
                print("all are running", flush=True)
except RunError as error:
    SIGNALS.leave_at_once()  # The launcher ends all ranks: its signal may come while Python ends by itself.
    print(error, file=sys.stderr)
    sys.exit(1)
except KeyboardInterrupt:
    sys.exit(SIGNALS.code)
"""
"""A program that runs a partition until it is ended."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A partition over dp=2 x tp=2."""
    path = tmp_path_factory.mktemp("model")
    partitioned(Case("mlp"), {"dp": 2, "tp": 2}, path).save(path / "out")
    return path / "out"


class Run:
    """The program under `irpar launch`, once all ranks are running.

    Attributes:
        process: the launcher.
        ranks: the process of each rank.
    """

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [*IRPAR, "launch", "-n", "4", sys.executable, "-c", LOOP, str(folder), str(patient(2))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=take_signals,
        )
        self.ranks: dict[int, int] = {}
        assert self.process.stdout is not None
        for line in self.process.stdout:
            words = line.split()
            if "process" in words:
                at = words.index("process")
                self.ranks[int(words[at + 4])] = int(words[at + 1])
            if "all are running" in line:
                return
        raise AssertionError(self.process.stderr and self.process.stderr.read())

    def end(self) -> tuple[int, str]:
        """Wait for the end, which comes within 10 s; exit code and standard error."""
        _, errors = self.process.communicate(timeout=patient(10))
        for process in self.ranks.values():
            assert not os.path.exists(f"/proc/{process}"), "a rank is left"
        return self.process.returncode, errors


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run(folder: Path) -> None:
    run = Run(folder)
    os.kill(run.ranks[2], signal.SIGKILL)
    code, errors = run.end()
    assert code == 128 + signal.SIGKILL
    assert "rank 2" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_rank_that_is_stopped_ends_the_run(folder: Path) -> None:
    run = Run(folder)
    os.kill(run.ranks[1], signal.SIGSTOP)
    code, errors = run.end()
    assert code == 1
    assert "rank 1 (dp=0, tp=1) is stopped" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_ctrl_c_ends_the_run(folder: Path) -> None:
    run = Run(folder)
    run.process.send_signal(signal.SIGINT)
    code, errors = run.end()
    assert code == 130
    assert "Traceback" not in errors


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as started:
        yield started


def run_often(folder: Path, inputs: dict[str, Any], times: int) -> list[dict[str, Any]]:
    """Open a partition, run it and close it, again and again; the driver gives the results."""
    found = []
    for _ in range(times):
        with Executor.open(folder, engine="numpy", group="processes", timeout=20) as executor:
            if executor.is_driver:
                found.append(executor.run(inputs))
            else:
                executor.serve()
    return found


def open_files(process: int) -> int:
    """How many a process has open, but for those in which ONNX Runtime (1.32) keeps notes when it likes."""
    folder = Path(f"/proc/{process}/fd")
    return sum("onnxruntime.db" not in os.readlink(entry) for entry in folder.iterdir())


@pytest.mark.slow
def test_two_hundred_runs_in_a_row(folder: Path, ranks: Ranks) -> None:
    with Executor.open(folder, engine="numpy") as executor:
        inputs = random_inputs(executor.inputs, executor.parts[0].graph)
        expected = executor.run(inputs)
    before = open_files(ranks.processes[0].pid)
    ranks.start(run_often, [{"folder": folder, "inputs": inputs, "times": 200}] * 4)
    found = ranks.answers(120)[0]
    assert len(found) == 200
    for outputs in found:
        for name, array in expected.items():
            np.testing.assert_array_equal(outputs[name], array)
    assert open_files(ranks.processes[0].pid) == before


def run_and_be_killed(folder: Path, inputs: dict[str, Any], after: float | None) -> RunError | None:
    """Run a partition again and again; some rank dies at some time."""
    try:
        with Executor.open(folder, engine="numpy", group="processes", timeout=20) as executor:
            if after is not None:
                threading.Timer(after, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            if not executor.is_driver:
                executor.serve()
            while True:
                executor.run(inputs)
    except RunError as error:
        return error


@pytest.mark.slow
def test_wherever_a_rank_is_killed_the_others_end(folder: Path) -> None:
    with Executor.open(folder, engine="numpy") as executor:
        inputs = random_inputs(executor.inputs, executor.parts[0].graph)
    drawn = random.Random(1)
    for _ in range(10):
        victim, after = drawn.randrange(4), drawn.uniform(0, 0.1)
        with Ranks(4) as started:
            given = [
                {"folder": folder, "inputs": inputs, "after": after if rank == victim else None} for rank in range(4)
            ]
            started.start(run_and_be_killed, given)
            found = started.answers(10)
        for rank, error in enumerate(found):
            if rank != victim:
                assert isinstance(error, RunError)
                assert f"rank {victim} (" in str(error)


MEET = """
from irpar.runtime.groups import make_group
from irpar.sharding import Mesh
group = make_group("processes", Mesh({"a": 3}), 20)
print(group.rank)
group.close()
"""
WRAPPED = ([], ["sh", "-c", '"$@"; exit $?', "sh"], ["env", "OTHER=1"])
"""Commands that start another one: two runs under them have nothing in common but who gave the ranks their numbers."""


def start_as_mpiexec(size: int) -> list["subprocess.Popen[str]"]:
    """Start ranks with the variables of MPICH, which name no run, each under another wrapper."""
    kept = {name: text for name, text in os.environ.items() if name not in world(0, size, "")}
    return [
        subprocess.Popen(
            [*WRAPPED[rank], sys.executable, "-c", MEET],
            env=kept | {"PMI_RANK": str(rank), "PMI_SIZE": str(size), "MPI_LOCALNRANKS": str(size)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def test_ranks_of_mpiexec_meet_whatever_is_between() -> None:
    started = start_as_mpiexec(3)
    for rank, process in enumerate(started):
        out, errors = process.communicate(timeout=patient(60))
        assert (out, errors) == (f"{rank}\n", "")


@pytest.mark.slow
def test_a_full_disk_ends_all_ranks_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    with Executor.open(folder, engine="numpy") as executor:
        inputs = random_inputs(executor.inputs, executor.parts[0].graph)
    np.savez(tmp_path / "in.npz", **inputs)  # type: ignore[arg-type]
    disk = tmp_path / "disk"
    disk.mkdir()
    # A disk of one page, which is taken, in a namespace of its own.
    script = f'mount -t tmpfs -o size=4k none "{disk}" || exit 77; head -c 4096 /dev/zero > "{disk}/full"; "$@"; code=$?; ls -A "{disk}"; exit $code'
    words = [*IRPAR, "launch", "-n", "4", "run", folder, "--inputs", tmp_path / "in.npz", "--engine", "numpy"]
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh", *words, "--outputs", disk / "out.npz"],
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    if "unshare:" in done.stderr or done.returncode == 77:
        pytest.skip("no namespace with a disk of its own may be made here")
    assert done.returncode == 2, done.stderr
    assert "No space left on device" in done.stderr
    assert "free some room" in done.stderr
    assert done.stdout == "full\n", "something is left on the disk"
