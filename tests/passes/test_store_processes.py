"""Programs that keep things on disk, in processes of their own: what ends them, and what is then left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irpar import models
from irpar.cli import main
from irpar.output.checkpoint import Checkpoint, checkpoints
from tests.runtime.groups.mpi_libraries import find
from tests.training.programs import same

pytestmark = pytest.mark.slow
ALL = "weights=disk, state=disk, activations=disk, prefetch=1, threshold-kb=0"
PATIENCE_SECONDS = 120


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of two ranks that keeps everything in a folder, and samples."""
    folder = tmp_path_factory.mktemp("step")
    (folder / "ssd").mkdir()
    models.save(folder / "mlp.onnx", "mlp")
    store = f"{ALL}, path={folder / 'ssd'}"
    words = ["train", str(folder / "mlp.onnx"), "-o", str(folder / "out"), "--optimizer", "adam", "--mesh", "dp=2"]
    assert main([*words, "--store", store]) == 0
    random = np.random.default_rng(0)
    x = random.standard_normal((24, 64), np.float32)
    np.savez(folder / "data.npz", x=x, target=random.integers(0, 64, 24))
    return folder


def begin(folder: Path, words: Sequence[str]) -> subprocess.Popen[str]:
    """A process of irpar."""
    command = [sys.executable, "-m", "irpar", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def training(folder: Path, steps: int, *words: str) -> list[str]:
    data = str(folder / "data.npz")
    return [
        "run",
        str(folder / "out"),
        "--data",
        data,
        "--steps",
        str(steps),
        "--lr",
        "0.01",
        "--engine",
        "numpy",
        *words,
    ]


def until(holds: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


def files_in(folder: Path, process: int) -> list[str]:
    """The files without a name that a process, or one that it started, has open in a folder."""
    found: list[str] = []
    for one in (str(process), *children(process)):
        try:
            handles = list(Path("/proc", one, "fd").iterdir())
            found += [target for handle in handles if (target := os.readlink(handle)).startswith(str(folder))]
        except OSError:
            continue  # It has ended, or closed it.
    return found


def children(process: int) -> list[str]:
    listed = Path(f"/proc/{process}/task/{process}/children")
    return listed.read_text().split()


@pytest.mark.parametrize("group", ["threads", "processes"])
def test_a_run_that_is_killed_leaves_nothing(group: str, step: Path) -> None:
    run = begin(step, training(step, 100_000, "--group", group))
    until(lambda: len(files_in(step / "ssd", run.pid)) >= 2, run)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    assert run.returncode == -signal.SIGKILL
    assert not list((step / "ssd").iterdir())


def state_in(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """What the newest checkpoint of a folder has, whole."""
    checkpoint = Checkpoint.open(checkpoints(folder)[-1])
    return {name: checkpoint.full(name).numpy() for name in checkpoint.tensors}


def ends_well(run: "subprocess.Popen[str]") -> None:
    out, err = run.communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode == 0, (out, err)


def test_runs_with_one_folder_do_not_disturb_each_other(step: Path) -> None:
    ends_well(begin(step, training(step, 4, "--checkpoint", "alone")))
    for run in [begin(step, training(step, 4, "--checkpoint", f"beside{number}")) for number in range(2)]:
        ends_well(run)
    for number in range(2):
        same(state_in(step / f"beside{number}"), state_in(step / "alone"))
    assert not list((step / "ssd").iterdir())


def test_steps_go_on_where_things_lie_elsewhere(step: Path) -> None:
    """Saved by what keeps all on disk, loaded by what keeps it on the host, and by what keeps nothing."""
    ends_well(begin(step, training(step, 4, "--checkpoint", "whole")))
    for number, options in enumerate((["--store", "weights=host, state=host"], [])):
        out, kept = step / f"out{number}", f"kept{number}"
        words = ["train", str(step / "mlp.onnx"), "-o", str(out), "--optimizer", "adam", "--mesh", "dp=2", *options]
        assert main(words) == 0
        ends_well(begin(step, training(step, 2, "--checkpoint", kept)))
        more = training(step, 4, "--checkpoint", kept, "--resume")
        ends_well(begin(step, [str(out) if word == str(step / "out") else word for word in more]))
        same(state_in(step / kept), state_in(step / "whole"))


STREAM = """
import sys
import numpy as np
import irpar
with irpar.Partition.open(sys.argv[1]) as made, made.executor(engine="numpy") as executor:
    for number in range(100_000):
        executor.run({"x": np.zeros((8, 64), np.float32)})
        print(number, flush=True)
"""


def test_weights_that_are_cut_during_a_run_end_it(step: Path) -> None:
    words = ["partition", str(step / "mlp.onnx"), "-o", str(step / "stream"), "--mesh", "d=1"]
    assert main([*words, "--store", "weights=disk, threshold-kb=0"]) == 0
    weights = step / "stream" / "part0" / "weights.bin"
    command = [sys.executable, "-c", STREAM, str(step / "stream")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "0\n"
        os.truncate(weights, weights.stat().st_size // 2)
        _, err = run.communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode == 1
    assert str(weights) in err
    assert "the file was written to while the program ran" in err or "could be read" in err


@pytest.mark.parametrize("group", ["threads", "processes", "mpi"])
def test_what_the_host_has_no_memory_for_is_refused_in_all_groups(
    group: str, step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit holds for the device and for the host, each by itself."""
    out = step / "host"
    if not out.exists():
        models.save(step / "deep.onnx", "mlp", layers=12)
        words = ["partition", str(step / "deep.onnx"), "-o", str(out), "--mesh", "dp=2"]
        assert main([*words, "--store", "weights=host, prefetch=0, threshold-kb=0"]) == 0
        np.savez(step / "x.npz", x=np.zeros((8, 64), np.float32))
    (rank, *_) = json.loads((out / "plan.json").read_text())["ranks"]
    assert rank["host_bytes"] > rank["peak_bytes"]
    monkeypatch.setenv("IRPAR_MEMORY_LIMIT", str(rank["host_bytes"] - 1))
    words = ["run", str(out), "--inputs", str(step / "x.npz"), "--outputs", str(step / "y.npz"), "--engine", "numpy"]
    if group == "mpi":
        library = find("MPICH")
        if isinstance(library, str):
            pytest.skip(library)
        ended = library.run(2, "irpar", *words, "--group", "mpi")
        code, err = ended.code, ended.err
    else:
        run = begin(step, [*words, "--group", group])
        _, err = run.communicate(timeout=PATIENCE_SECONDS)
        code = run.returncode
    assert code != 0
    assert "on the host, needs about" in err
