"""What runs beside a process in MPI_Init: it ends one that takes too long, and removes what MPICH shares with it."""

import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from irpar.runtime.groups.mpi import watcher as mpi_watcher
from tests.patience import patient

HOLD = """
import mmap, sys, time
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
print("held", flush=True)
time.sleep(60)
"""
"""A process that shares memory under a name as MPICH does."""


@pytest.fixture
def name() -> Iterator[Path]:
    path = Path(f"/dev/shm/mpich_shm_{secrets.token_hex(8)}_0")
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def process(name: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(name)], stdout=subprocess.PIPE) as held:
        assert held.stdout is not None
        held.stdout.readline()
        yield held
        held.kill()


def watch(process: int, seconds: float, *told: bytes) -> str:
    """Let it watch, tell it something, and end; what it writes."""
    command = [sys.executable, "-I", "-S", mpi_watcher.__file__, str(process), str(seconds), "too late"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as watcher:
        assert watcher.stdin is not None
        assert watcher.stderr is not None
        for byte in told:
            time.sleep(0.5)
            watcher.stdin.write(byte)
        if seconds > 1:
            time.sleep(0.5)
            watcher.stdin.close()
        return watcher.stderr.read().decode()


def test_a_process_that_takes_too_long_is_ended(process: "subprocess.Popen[bytes]", name: Path) -> None:
    assert watch(process.pid, 0.3) == "too late"
    assert process.wait(patient(10)) == -9
    assert not name.exists()


@pytest.mark.parametrize("told", [(), (mpi_watcher.THROUGH,)])
def test_what_a_process_leaves_is_removed(
    process: "subprocess.Popen[bytes]", name: Path, told: tuple[bytes, ...]
) -> None:
    assert watch(process.pid, 30, *told) == ""
    assert not name.exists()


def test_what_a_process_removes_itself_is_its_own(process: "subprocess.Popen[bytes]", name: Path) -> None:
    assert watch(process.pid, 30, mpi_watcher.THROUGH, mpi_watcher.REMOVED) == ""
    assert name.exists()
