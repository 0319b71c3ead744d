"""irpar run --data: what it prints, what it writes, and each mistake."""

import json
from pathlib import Path

import numpy as np
import pytest

import irpar
from irpar.output.checkpoint import checkpoints
from tests.command_line import Capture, call, refused
from tests.training.programs import same, samples


def state(partition: Path, folder: Path) -> dict[str, np.ndarray]:
    with irpar.Partition.open(partition).trainer(engine="numpy") as trainer:
        trainer.load_checkpoint(folder)
        return trainer.read_all()


def test_a_run_says_how_it_went(trained: Path, data: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "steps"
    run = ("run", trained, "--data", data, "--epochs", "10", "--checkpoint", folder, "--every", "8", "--keep", "2")
    code, printed, err = call(capsys, *run)
    assert code == 0, err
    lines = printed.splitlines()
    assert lines[0].startswith("20 steps on 2 ranks in ")
    assert lines[1].startswith("loss ")
    assert f"; each rank read at most 5.12 kB of {data}" in lines[1]
    assert lines[2] == f"checkpoint: {folder / 'step-00000020'}"
    first, last = (float(word.strip(";")) for word in lines[1].split()[1:4:2])
    assert last < first / 2
    assert [path.name for path in checkpoints(folder)] == ["step-00000016", "step-00000020"]
    code, printed, _ = call(capsys, *run, "--resume")
    assert (code, printed) == (0, "nothing to do: the checkpoint is of step 20, and --steps is 20\n")
    code, printed, _ = call(capsys, "run", trained, "--data", data, "--steps", "22", "--checkpoint", folder, "--resume")
    assert code == 0
    assert printed.startswith("2 steps after 20 on 2 ranks in ")


def test_json_says_how_it_went(trained: Path, data: Path, tmp_path: Path, capsys: Capture) -> None:
    code, printed, _ = call(
        capsys, "run", trained, "--data", data, "--steps", "3", "--json", "--metrics", tmp_path / "m"
    )
    assert code == 0
    facts = json.loads(printed)
    assert (facts["steps"], facts["first_step"], facts["checkpoint"]) == (3, 1, None)
    lines = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert [lines[0]["loss"], lines[-1]["loss"]] == facts["losses"]
    assert facts["read_bytes"] == 3 * 8 * (6 * 4 + 8)


def test_ranks_in_processes_train_bit_by_bit_alike(
    trained: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = ("run", trained, "--data", data, "--steps", "4", "--engine", "numpy", "--every", "2")
    code, _, err = call(capfd, *run, "--checkpoint", tmp_path / "threads")
    assert code == 0, err
    code, _, err = call(capfd, *run, "--checkpoint", tmp_path / "processes", "--group", "processes")
    assert code == 0, err
    same(state(trained, tmp_path / "processes"), state(trained, tmp_path / "threads"))
    code, _, err = call(
        capfd, *run[:4], "--steps", "6", "--checkpoint", tmp_path / "processes", "--group", "processes", "--resume"
    )
    assert code == 0, err


@pytest.mark.slow
def test_mistakes_of_ranks_in_processes(trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arrays = samples()
    arrays["x"][3] = np.nan
    np.savez(tmp_path / "nan.npz", **arrays)
    run = ("run", trained, "--steps", "4", "--group", "processes", "--in-order", "--data")
    err = refused(capfd, "the loss of step 1 is nan", *run, tmp_path / "nan.npz")
    assert "the first tensor that is not finite: x, which holds NaN" in err
    arrays = samples()
    arrays["target"][3] = 9
    np.savez(tmp_path / "range.npz", **arrays)
    refused(capfd, "target has 9: it is from 0 to 2", *run, tmp_path / "range.npz")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--steps", "2"), "--steps is for training, and there is no --data"),
        (("--epochs", "2"), "--epochs is for training, and there is no --data"),
        (("--checkpoint", "x"), "--checkpoint is for training, and there is no --data"),
        (("--resume",), "--resume is for training, and there is no --data"),
        (("--lr", "1"), "is for training, and there is no --data"),
        (("--data", "DATA"), "how long to train is not said, or twice"),
        (("--data", "DATA", "--steps", "2", "--epochs", "1"), "how long to train is not said, or twice"),
        (("--data", "DATA", "--steps", "0"), "a run of 0 steps"),
        (("--data", "DATA", "--steps", "-3"), "a run of -3 steps"),
        (("--data", "DATA", "--epochs", "0"), "a run of 0 epochs"),
        (("--data", "DATA", "--epochs", "nan"), "a run of nan epochs"),
        (("--data", "DATA", "--epochs", "inf"), "a run of inf epochs"),
        (("--data", "DATA", "--steps", "2", "--every", "1"), "checkpoints are asked for, and there is no folder"),
        (("--data", "DATA", "--steps", "2", "--resume"), "checkpoints are asked for, and there is no folder"),
        (("--data", "DATA", "--steps", "2", "--inputs", "in.npz"), "--data trains, and --inputs and --outputs are for"),
        (("--data", "DATA", "--steps", "2", "--schedule", "step"), 'there is no schedule "step"'),
        (("--data", "DATA", "--steps", "2", "--lr", "-1"), "a learning rate of -1.0"),
        (("--data", "DATA", "--steps", "2", "--lr", "nan"), "a learning rate of nan"),
        (("--data", "DATA", "--steps", "2", "--lr-end", "nan"), "a learning rate of nan at the end"),
        (("--data", "DATA", "--steps", "2", "--lr-end", "0.1"), "--lr-end is where a schedule ends"),
        (("--data", "DATA", "--steps", "2", "--warmup", "-1"), "a warm-up of -1 steps"),
        (("--data", "DATA", "--steps", "2", "--seed", "-1"), "a seed of -1"),
        (("--data", "DATA", "--steps", "2", "--input", "z=1"), 'there is no input "z"'),
        (("--data", "DATA", "--steps", "2", "--input", "w=1"), 'there is no input "w"'),
        (("--data", "DATA", "--steps", "2", "--input", "learning_rate=1"), "learning_rate is given as an input"),
        (("--data", "none.npz", "--steps", "2"), "cannot read the data: No such file or directory"),
        (("--data", "DATA", "--steps", "2", "--metrics", "DATA"), "the file has the metrics of another run"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_mistakes(words: tuple[str, ...], told: str, trained: Path, data: Path, capsys: Capture) -> None:
    before = data.read_bytes()
    refused(capsys, told, "run", trained, *(str(data) if word == "DATA" else word for word in words))
    assert data.read_bytes() == before


def test_runs_that_are_not_the_one_before(trained: Path, data: Path, tmp_path: Path, capsys: Capture) -> None:
    run = ("run", trained, "--data", data, "--steps", "4", "--checkpoint", tmp_path / "steps")
    assert call(capsys, *run, "--seed", "3")[0] == 0
    refused(capsys, "the folder has checkpoints of another run", *run)
    refused(capsys, "the run before had seed 3, and this one has seed 4", *run, "--resume", "--seed", "4")
    index = tmp_path / "steps" / "step-00000004" / "model.safetensors.index.json"
    index.write_text(index.read_text()[:100])
    refused(capsys, "cannot read the checkpoint", *run, "--resume")
    (tmp_path / "file").write_text("mine")
    to_file = ("--checkpoint", tmp_path / "file")
    refused(capsys, "checkpoints are asked for in a file", "run", trained, "--data", data, "--steps", "1", *to_file)


def test_samples_that_do_not_fit(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    np.savez(tmp_path / "data.npz", x=samples()["x"])
    err = refused(
        capsys, "the data do not fit the program", "run", trained, "--data", tmp_path / "data.npz", "--steps", "2"
    )
    assert "target is missing, expected i64[samples]" in err
    np.savez(tmp_path / "data.npz", x=samples()["x"], target=samples()["target"][1:])
    told = "target has 19 samples, of which a step takes 8; x has 20, and a step takes 8"
    refused(capsys, told, "run", trained, "--data", tmp_path / "data.npz", "--steps", "2")
    (tmp_path / "data.npz").write_bytes(b"PK\x03\x04")
    refused(capsys, "cannot read the data", "run", trained, "--data", tmp_path / "data.npz", "--steps", "2")
