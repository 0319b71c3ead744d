"""Runs of many steps: stopped anywhere and gone on with, they end as the run that was not stopped."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irpar
from irpar.errors import IrparError
from irpar.output.checkpoint import checkpoints
from irpar.training.loop import LoopError, LoopOptions, Step, Summary, run_loop
from irpar.training.trainer import NotFiniteError
from tests.training.programs import SAMPLES, classifier, data_file, on_mesh, same, samples

STEPS = 7


@pytest.fixture(scope="module")
def partition() -> irpar.Partition:
    return on_mesh(classifier(optimizer="adamw", clip_norm=1.0, dropout={"a": 0.1}), "dp=2")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return data_file(tmp_path)


class StoppedError(Exception):
    """The run is stopped here."""


def run(
    partition: irpar.Partition, data: Path, *, stop: int = 0, steps: int = STEPS, **options: Any
) -> tuple[Summary | None, dict[str, Any], list[Step]]:
    """What a run came to, the state after it, and what was told; `stop` is the step after which it is stopped."""
    told: list[Step] = []

    def report(step: Step) -> None:
        told.append(step)
        if step.step == stop:
            raise StoppedError

    specs = {spec["name"]: spec for spec in partition.plan.inputs}
    with partition.trainer(engine="numpy") as trainer:
        try:
            summary = run_loop(trainer, specs, LoopOptions(data, steps, **options), report)
        except StoppedError:
            summary = None
        return summary, trainer.read_all(), told


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of the metrics, without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def test_metrics_have_a_line_for_each_step(partition: irpar.Partition, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "steps"
    schedule = {"kind": "linear", "learning_rate": 0.5, "warmup": 2}
    summary, _, told = run(partition, data, checkpoint=folder, schedule=schedule)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["epoch"] for line in lines] == [0, 0, 1, 1, 2, 2, 3]
    np.testing.assert_allclose([line["learning_rate"] for line in lines], [0.25, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1])
    for line, step in zip(lines, told, strict=True):
        assert set(line) == {"step", "epoch", "loss", "learning_rate", "seconds", "read_bytes", "gradient_norm"}
        assert line["loss"] == step.loss
        assert line["read_bytes"] == 4 * (6 * 4 + 8)  # Half of a batch of eight, by each rank.
        assert line["gradient_norm"] > 0
        assert line["seconds"] > 0
    assert summary is not None
    assert (summary.first, summary.steps) == (0, STEPS)
    assert summary.losses == [lines[0]["loss"], lines[-1]["loss"]]
    assert summary.read_bytes == STEPS * lines[0]["read_bytes"]
    assert summary.checkpoint == folder / "step-00000007"


@pytest.mark.parametrize("stop", range(1, STEPS + 1))
def test_a_run_that_is_stopped_and_resumed_is_the_run_that_was_not(
    stop: int, partition: irpar.Partition, data: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"every": 2, "keep": 2, "schedule": {"kind": "cosine", "warmup": 3}, "seed": 3}
    _, state, _ = run(partition, data, checkpoint=tmp_path / "whole", **options)
    _, _, told = run(partition, data, stop=stop, checkpoint=tmp_path / "parts", **options)
    assert len(told) == stop
    summary, resumed, _ = run(partition, data, checkpoint=tmp_path / "parts", resume=True, **options)
    assert summary is not None
    assert summary.first == (stop - 1) // 2 * 2  # The checkpoint of the step itself was not written any more.
    same(resumed, state)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    names = [path.name for path in checkpoints(tmp_path / "parts")]
    assert names == [path.name for path in checkpoints(tmp_path / "whole")] == ["step-00000006", "step-00000007"]


def test_a_run_goes_on_on_another_mesh_and_longer(partition: irpar.Partition, data: Path, tmp_path: Path) -> None:
    run(partition, data, steps=3, checkpoint=tmp_path / "steps", seed=4)
    step = classifier(optimizer="adamw", clip_norm=1.0, dropout={"a": 0.1})
    summary, found, _ = run(on_mesh(step, "tp=2"), data, checkpoint=tmp_path / "steps", resume=True)
    assert summary is not None
    assert (summary.first, summary.steps) == (3, STEPS)
    _, state, _ = run(on_mesh(step, "d=1"), data, seed=4)
    for name, array in state.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5, err_msg=name)


def test_with_nothing_to_resume_a_run_begins(partition: irpar.Partition, data: Path, tmp_path: Path) -> None:
    summary, _, _ = run(partition, data, steps=2, checkpoint=tmp_path / "steps", resume=True)
    assert summary is not None
    assert summary.first == 0
    summary, _, told = run(partition, data, steps=2, checkpoint=tmp_path / "steps", resume=True)
    assert summary is not None
    assert (summary.first, summary.steps, told) == (2, 2, [])


def test_what_is_the_same_in_all_steps_is_given_once(data: Path, tmp_path: Path) -> None:
    partition = on_mesh(classifier(), "d=1")
    target = samples()["target"][:8]
    np.savez(tmp_path / "x.npz", x=samples()["x"])
    summary, _, _ = run(partition, tmp_path / "x.npz", values={"target": target})
    assert summary is not None
    with pytest.raises(IrparError, match="target has 3"):
        run(partition, tmp_path / "x.npz", values={"target": target + 1})


def test_what_is_the_same_in_all_steps_is_not_evaluated_on(data: Path) -> None:
    target = samples()["target"][:8]
    with pytest.raises(LoopError, match="target is the same in all steps, which evaluation cannot take"):
        run(on_mesh(classifier(), "d=1"), data, values={"target": target}, evaluation=data)


def test_a_schedule_that_nobody_knows(partition: irpar.Partition, data: Path, tmp_path: Path) -> None:
    run(partition, data, steps=1, checkpoint=tmp_path)
    (index,) = tmp_path.glob("*/*.index.json")
    written = json.loads(index.read_text())
    for schedule in ({"learning_rate": 1.0, "kind": "exponential"}, {"rate": 1.0}, None):
        written["metadata"]["schedule"] = schedule
        index.write_text(json.dumps(written))
        with pytest.raises(IrparError, match="the checkpoint has no schedule that this irpar knows"):
            run(partition, data, steps=2, checkpoint=tmp_path, resume=True)


def test_a_cut_line_of_metrics_is_left_out(partition: irpar.Partition, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "steps"
    run(partition, data, steps=2, checkpoint=folder)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "epoch": 1, "loss": 0.5}\n{"step": 4, "epo')
    run(partition, data, steps=4, checkpoint=folder, resume=True)
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 4]
    (folder / "metrics.jsonl").write_bytes(b'\xff\xfe{"step": 1}\n')
    run(partition, data, steps=5, checkpoint=folder, resume=True)
    assert [line["step"] for line in metrics(folder)] == [5]


def test_a_file_of_something_else_is_not_replaced(partition: irpar.Partition, data: Path, tmp_path: Path) -> None:
    folder, notes = tmp_path / "steps", tmp_path / "notes.json"
    run(partition, data, steps=2, checkpoint=folder)
    notes.write_text('{"names": [1, 2]}\n')
    with pytest.raises(IrparError, match="the file has no metrics of a run"):
        run(partition, data, steps=4, checkpoint=folder, metrics=notes, resume=True)
    assert notes.read_text() == '{"names": [1, 2]}\n'
    with pytest.raises(IrparError, match="cannot write the metrics: the target is a"):
        run(partition, data, steps=4, metrics=Path("/dev/null"))
    with pytest.raises(LoopError, match="cannot write the metrics: Not a directory") as caught:
        run(partition, data, steps=4, checkpoint=notes / "steps")
    assert caught.value.do == "give another folder: --checkpoint DIR"


def test_another_optimizer_and_what_it_does_not_keep_are_told(
    partition: irpar.Partition, data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "steps"
    run(partition, data, steps=2, checkpoint=folder)
    summary, *_ = run(partition, data, steps=3, checkpoint=folder, resume=True)
    assert summary is not None
    assert not summary.notes
    other = on_mesh(classifier(optimizer="sgd", dropout={"a": 0.1}), "d=1")
    summary, *_ = run(other, data, steps=4, checkpoint=folder, resume=True)
    assert summary is not None
    assert summary.notes == (
        "the checkpoint is of a run with adamw: this one goes on with sgd",
        "the checkpoint has w.m, w.v, b.m, b.v, u.m and 4 more, which this program does not keep",
    )


def test_a_velocity_that_begins_as_a_mean_of_gradients_is_told(
    partition: irpar.Partition, data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "steps"
    run(partition, data, steps=2, checkpoint=folder)
    other = on_mesh(classifier(optimizer="momentum"), "d=1")
    summary, *_ = run(other, data, steps=3, checkpoint=folder, resume=True)
    assert summary is not None
    assert summary.notes[1] == (
        "momentum goes on from what adamw kept as .m: the one is a mean of gradients, the other a sum of them"
    )


def test_evaluation_without_samples_is_refused(partition: irpar.Partition, data: Path) -> None:
    with pytest.raises(IrparError, match="evaluation is asked for, and there are no samples for it"):
        run(partition, data, evaluate_every=2)
    with pytest.raises(IrparError, match="an evaluation every -1 steps"):
        run(partition, data, evaluation=data, evaluate_every=-1)


def test_a_loss_that_is_not_finite_ends_the_run_and_checkpoints_stay(
    partition: irpar.Partition, tmp_path: Path
) -> None:
    arrays = samples()
    arrays["x"][12] = np.nan
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(NotFiniteError, match="the loss of step 2 is nan") as caught:
        run(partition, tmp_path / "data.npz", checkpoint=tmp_path / "steps", every=1, is_shuffled=False)
    assert any("x, which holds NaN" in note for note in caught.value.notes)
    assert [path.name for path in checkpoints(tmp_path / "steps")] == ["step-00000001"]


def test_a_target_that_is_no_class_ends_the_run(partition: irpar.Partition, tmp_path: Path) -> None:
    arrays = samples()
    arrays["target"][9] = 3
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(IrparError, match="target has 3: it is from 0 to 2") as caught:
        run(partition, tmp_path / "data.npz", is_shuffled=False)
    assert str(tmp_path / "data.npz") in str(caught.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"steps": 0}, "a run of 0 steps"),
        ({"every": 2}, "checkpoints are asked for, and there is no folder for them"),
        ({"resume": True}, "checkpoints are asked for, and there is no folder for them"),
        ({"checkpoint": "steps", "every": -1}, "a checkpoint every -1 steps, of which 0 are kept"),
        ({"schedule": {"kind": "step"}}, 'there is no schedule "step"'),
        ({"schedule": {"kind": "linear", "warmup": 9}}, "a warm-up of 9 steps in a run of 7"),
        ({"data": "none.npz"}, "cannot read the data: No such file or directory"),
    ],
)
def test_options_that_mean_nothing(
    options: dict[str, Any], told: str, partition: irpar.Partition, data: Path, tmp_path: Path
) -> None:
    given = {**options, "data": tmp_path / options["data"] if "data" in options else data}
    if "checkpoint" in options:
        given["checkpoint"] = tmp_path / "steps"
    with pytest.raises(IrparError) as caught:
        run(partition, **given)
    assert caught.value.what == told
    assert caught.value.do


def test_a_run_that_is_not_the_one_before_is_refused(partition: irpar.Partition, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "steps"
    run(partition, data, steps=2, checkpoint=folder, seed=3)
    told = {
        "the folder has checkpoints of another run": {"resume": False},
        "the run before had seed 3, and this one has seed 4": {"resume": True, "seed": 4},
        "the run before had samples shuffled, and this one has samples in order": {
            "resume": True,
            "is_shuffled": False,
        },
    }
    for text, options in told.items():
        with pytest.raises(LoopError) as caught:
            run(partition, data, checkpoint=folder, **options)
        assert caught.value.what == text
        assert caught.value.do
    data_file(tmp_path, SAMPLES - 1)
    with pytest.raises(LoopError, match="the run before had 20 samples, and this one has 19 samples"):
        run(partition, data, checkpoint=folder, resume=True)
    shutil.rmtree(folder / "step-00000002")
    with pytest.raises(LoopError, match="the file has the metrics of another run"):
        run(partition, data, checkpoint=folder)
