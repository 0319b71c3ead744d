"""Runs of the launcher, for its tests."""

import os
import signal

import pytest

from irpar.runtime.launch import processes as launcher

from .launched import Launched, marked


@pytest.fixture
def launched():
    """Starts `irpar launch`; whatever is left of it is killed after the test."""
    started = []

    def start(size, program, **options):
        started.append(Launched(size, program, **options))
        return started[-1]

    yield start
    for run in started:
        for process in [run.process.pid, *marked(run.mark)]:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        run.process.communicate()


@pytest.fixture
def soon(monkeypatch):
    """The launcher's patience made short, for what runs in this process."""
    for name, seconds in {"GRACE": 0.5, "_LEFTOVER": 0.2, "_SETTLE": 0.5, "_STOPPED": 0.2, "_LOOK": 0.05}.items():
        monkeypatch.setattr(launcher, name, seconds)
