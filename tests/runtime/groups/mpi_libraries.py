"""The MPI libraries at hand, and how ranks are started with them."""

import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.patience import patient

from .launched_ranks import ROOT, Ended

NAMES = ("MPICH", "Open MPI")
PROGRAMS = "tests.runtime.groups.mpi_rank_programs"
"""The module that ranks run, for what there is of MPI alone."""


@dataclass(frozen=True)
class Library:
    """An MPI library.

    Attributes:
        name: one of `NAMES`.
        launch: its mpiexec, with what lets it start more ranks than there are cores, as root too.
        environment: what makes mpi4py take this library.
    """

    name: str
    launch: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self, count: int, *command: str, launch: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
        """Start `count` ranks of a Python module with arguments."""
        return subprocess.Popen(
            [*self.launch, *launch, "-n", str(count), sys.executable, "-m", *command],
            cwd=ROOT,
            env={**os.environ, **self.environment, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, count: int, *command: str, seconds: float = 120, launch: tuple[str, ...] = ()) -> Ended:
        """Run `count` ranks to their end; if that does not come, the test fails."""
        return end(self.start(count, *command, launch=launch), seconds)


def end(job: "subprocess.Popen[str]", seconds: float) -> Ended:
    """Wait for a job, and see that it leaves no process behind."""
    with job:
        try:
            out, err = job.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            out, err = job.communicate()
            pytest.fail(f"the job did not end in {seconds} s\n{out}\n{err}")
    return Ended(job.returncode, out, err, time.time())


@functools.cache
def find(name: str) -> Library | str:
    """A library, or why it cannot be used."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    for mpiexec in _launchers():
        version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=patient(60)).stdout
        if name == "MPICH" and "HYDRA" in version:
            found = Library(name, (mpiexec,))
        elif name == "Open MPI" and "Open MPI" in version:
            found = Library(name, (mpiexec, "--allow-run-as-root", "--oversubscribe"), {"MPI4PY_MPIABI": "openmpi"})
        else:
            continue
        tried = found.run(2, "mpi4py", "--mpi-library", seconds=60)
        return found if tried.code == 0 else f"{mpiexec} cannot start ranks here: {tried.err.strip()[-200:]}"
    return f"there is no mpiexec of {name} beside this Python, in PATH or in IRPAR_TEST_MPIEXEC"


def _launchers() -> Iterator[str]:
    beside = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    for name in ("mpiexec", "mpiexec.mpich", "mpiexec.hydra", "mpiexec.openmpi"):
        for path in beside:
            if found := shutil.which(name, path=path):
                yield found
    yield from filter(None, os.environ.get("IRPAR_TEST_MPIEXEC", "").split(os.pathsep))
