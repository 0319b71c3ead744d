"""Runs that are killed at any moment, or find the disk full: what is there is whole, and they go on from it.

`irpar run --resume` is started again and again as a process of its own, and killed with SIGKILL while it computes and
writes checkpoints.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import irpar
from irpar.output.checkpoint import Checkpoint, checkpoints
from tests.patience import patient
from tests.training.programs import classifier, data_file, on_mesh, same, state_in

IRPAR = [sys.executable, "-P", "-m", "irpar.cli"]
STEPS, KILLS = 1200, 20
MORE = ("--keep", "2", "--schedule", "cosine")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """`irpar run` of a partition and its samples."""
    folder = tmp_path_factory.mktemp("program")
    step = classifier(optimizer="adamw", clip_norm=1.0, dropout={"a": 0.1})
    on_mesh(step, "dp=2,tp=2").save(folder / "out")
    options = ["--engine", "numpy", "--seed", "3", "--warmup", "20"]
    return [*IRPAR, "run", str(folder / "out"), "--data", str(data_file(folder)), *options]


def saving(words: list[str], folder: Path, steps: int, *more: str) -> list[str]:
    return [*words, "--steps", str(steps), "--checkpoint", str(folder), "--every", "1", "--resume", *more]


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of the metrics, without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def same_end(found: Path, wanted: Path) -> None:
    """Check that two runs ended alike, bit by bit, and left nothing beside."""
    one, other = Checkpoint.open(found), Checkpoint.open(wanted)
    assert one.metadata == other.metadata
    same(state_in(one), state_in(other))
    assert metrics(found) == metrics(wanted)
    assert sorted(os.listdir(found)) == sorted(os.listdir(wanted))


def kill_while_running(words: list[str], folder: Path, wait: float) -> bool:
    """Kill a run some time after its first step; False where it had ended by itself."""
    before = last_step(folder)
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    end = time.monotonic() + patient(30)
    while process.poll() is None and last_step(folder) == before and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(wait)
    process.send_signal(signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), err.decode()
    return process.returncode != 0


def last_step(folder: Path) -> int:
    found = checkpoints(folder)
    return int(found[-1].name.removeprefix("step-")) if found else 0


@pytest.mark.slow
def test_a_run_that_is_killed_anywhere_ends_as_the_one_that_was_not(words: list[str], tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    subprocess.run(saving(words, whole, STEPS, *MORE), check=True, capture_output=True)
    seconds = random.Random(0)
    kills = 0
    while kills < KILLS and last_step(parts) < STEPS:
        kills += kill_while_running(saving(words, parts, STEPS, *MORE), parts, seconds.uniform(0, 0.1))
        for checkpoint in checkpoints(parts)[-1:]:
            state_in(Checkpoint.open(checkpoint))  # It is whole.
    subprocess.run(saving(words, parts, STEPS, *MORE), check=True, capture_output=True)
    assert kills == KILLS
    same_end(parts, whole)


def failed(words: list[str], **options: Any) -> str:
    """What a run prints that ends with one clear error."""
    ended = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("error: cannot write the "), ended.stderr
    assert ended.stderr.count("error: ") == 1
    assert "\n  do: " in ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr


def goes_on(words: list[str], folder: Path, tmp_path: Path) -> None:
    """Check that the newest checkpoint is whole, and that a run that goes on from it ends as one that was not stopped."""
    steps = last_step(folder) + 3
    assert steps > 5
    subprocess.run(saving(words, folder, steps), check=True, capture_output=True)
    subprocess.run(saving(words, tmp_path / "whole", steps), check=True, capture_output=True)
    shutil.copytree(folder, tmp_path / "copy")
    whole, found = (tmp_path / name for name in ("whole", "copy"))
    one, other = Checkpoint.open(found), Checkpoint.open(whole)
    same(state_in(one), state_in(other))
    assert metrics(found) == metrics(whole)
    assert {path.name for path in checkpoints(found)} == {path.name for path in checkpoints(whole)}


@pytest.mark.slow
def test_a_file_that_may_not_grow_ends_the_run_with_one_error(words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "steps"
    subprocess.run(saving(words, folder, 3), check=True, capture_output=True)
    size = max(path.stat().st_size for path in folder.rglob("*.*"))
    told = failed(
        saving(words, folder, 100), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    )
    assert "File too large" in told
    subprocess.run(saving(words, folder, last_step(folder) + 3), check=True, capture_output=True)
    goes_on(words, folder, tmp_path)


@pytest.mark.slow
def test_where_checkpoints_may_not_grow_those_before_are_whole(words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "steps"
    subprocess.run(saving(words, folder, 5), check=True, capture_output=True)
    size = (folder / "step-00000005" / "rank0.safetensors").stat().st_size - 1
    (folder / "metrics.jsonl").unlink()
    told = failed(
        saving(words, folder, 100), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    )
    assert "cannot write the checkpoint: File too large" in told
    assert last_step(folder) == 5
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_one_error(words: list[str], small_disk: Path, tmp_path: Path) -> None:
    folder = small_disk / "steps"
    assert "No space left on device" in failed(saving(words, folder, 1000))
    with irpar.Partition.open(words[words.index("run") + 1]).trainer(engine="numpy") as trainer:
        assert trainer.load_checkpoint(folder).step == last_step(folder) > 3
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    goes_on(words, folder, tmp_path)
