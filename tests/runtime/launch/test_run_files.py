"""Files of runs in shared memory: they go with their run, or with the next one."""

import signal
import subprocess
import sys

import pytest

from irpar.runtime.launch import run_files
from irpar.runtime.launch.run_files import OwnedRun, RunFilesError, remove_leftovers, run_file, shared_folder


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder in the place of shared memory."""
    monkeypatch.setattr(run_files, "_SHARED", str(tmp_path))
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_files_go_with_their_run(folder):
    with OwnedRun() as run, OwnedRun() as other:
        run_file(run.id, "segment").write_bytes(b"1")
        kept = run_file(other.id, "segment")
        kept.write_bytes(b"2")
        run.close()
        assert names(folder) == sorted([kept.name, f"irpar-{other.id}.lock"])
        run.close()
    assert names(folder) == []


def test_files_of_runs_that_live_are_left_alone(folder):
    (folder / "irpar-mine").write_bytes(b"")
    with OwnedRun() as run:
        run_file(run.id, "segment").write_bytes(b"")
        before = names(folder)
        remove_leftovers()
        assert names(folder) == before
    assert names(folder) == ["irpar-mine"]


KILLED = """
import os, signal, sys
from irpar.runtime.launch import run_files
run_files._SHARED = sys.argv[1]
run = run_files.OwnedRun()
for name in ("a", "b"):
    run_files.run_file(run.id, name).write_bytes(b"")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_owner_left_goes_with_the_next_run(folder):
    died = subprocess.run([sys.executable, "-c", KILLED, folder])
    assert died.returncode == -signal.SIGKILL
    assert len(names(folder)) == 3
    with OwnedRun() as run:
        assert names(folder) == [f"irpar-{run.id}.lock"]


def test_ids_differ_and_are_not_the_start_of_each_other(folder):
    runs = [OwnedRun() for _ in range(20)]
    ids = [run.id for run in runs]
    assert len(set(ids)) == 20
    assert len({len(run_id) for run_id in ids}) == 1
    for run in runs:
        run.close()


def test_a_folder_that_cannot_be_written(folder, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(RunFilesError, match=r"cannot begin a run: Permission denied[^$]*do: "):
        OwnedRun()


def test_without_shared_memory_the_folder_of_temporary_files_serves(folder, monkeypatch):
    monkeypatch.setattr(run_files, "_SHARED", str(folder / "none"))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    assert shared_folder() == folder
