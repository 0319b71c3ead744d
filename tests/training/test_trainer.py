"""Steps of a trainer: what they give, and what is said of what goes wrong."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irpar
from irpar.errors import IrparError
from irpar.inputs.dataset import DataError
from irpar.training.schedule import Schedule
from irpar.training.trainer import NotFiniteError
from tests.training.programs import MESHES, batch, classifier, on_mesh, same, with_weights

LOG = """
graph @log(%x: f32[8, 4], %w: f32[4] from "w") -> (%y) opset 21 {
  %h = Mul(%x, %w) : f32[8, 4]
  %root = Sqrt(%h) : f32[8, 4]
  %y = Add(%root, %h) : f32[8, 4]
}
"""


def test_losses_go_down_and_the_schedule_is_taken() -> None:
    partition = on_mesh(classifier(), "d=1")
    with partition.trainer(schedule=Schedule(0.2, "linear", steps=30), engine="numpy") as trainer:
        losses = [trainer.step(batch()) for _ in range(30)]
        assert trainer.steps == 30
        assert set(trainer.results) == {"loss"}
    assert losses[-1] < losses[0] / 3
    with partition.trainer(learning_rate=0.0, engine="numpy") as trainer:
        assert trainer.step(batch()) == trainer.step(batch()) == losses[0]
        assert trainer.step(batch(), learning_rate=0.1) == losses[0]
        assert trainer.step(batch()) < losses[0]


@pytest.mark.parametrize("mesh", list(MESHES))
def test_steps_are_those_of_one_device(mesh: str) -> None:
    step = classifier(optimizer="adamw", clip_norm=1.0)
    found = []
    for each in ("d=1", mesh):
        with on_mesh(step, each).trainer(engine="numpy") as trainer:
            found.append(([trainer.step(batch(number)) for number in range(6)], trainer.read_all()))
    (losses, state), (others, held) = found
    np.testing.assert_allclose(others, losses, rtol=1e-5)
    for name, array in state.items():
        np.testing.assert_allclose(held[name], array, rtol=1e-4, atol=1e-6)


def test_a_loss_that_is_not_finite_names_the_step_and_the_first_tensor() -> None:
    step = irpar.train_step(with_weights(LOG, w=np.ones(4)), loss="mse", optimizer="momentum")
    x = np.ones((8, 4), np.float32)
    for mesh, cut in {"d=1": None, "dp=2": ["dp", None]}.items():
        partition = on_mesh(step, "d=1") if cut is None else sharded(step, mesh, x=cut)
        with partition.trainer(engine="numpy") as trainer:
            trainer.step({"x": x, "target": x})
            before = trainer.read_all()
            wrong = x.copy()
            wrong[5, 2] = -1
            with pytest.raises(NotFiniteError) as caught, np.errstate(all="ignore"):
                trainer.step({"x": wrong, "target": x})
            assert caught.value.what == "the loss of step 2 is nan"
            assert "the first tensor that is not finite: root, which holds NaN" in caught.value.notes
            assert caught.value.do
            same(trainer.read_all(), before)
            assert trainer.steps == 1
            with pytest.raises(NotFiniteError) as caught:
                trainer.step({"x": x * np.float32(np.inf), "target": x})
            told = "the first tensor that is not finite: x, which holds infinity; the first with NaN: backward_"
            assert any(note.startswith(told) for note in caught.value.notes)
            with pytest.raises(NotFiniteError) as caught:
                trainer.step({"x": x, "target": x * np.float32(np.nan)})
            assert "the first tensor that is not finite: target, which holds NaN" in caught.value.notes
            same(trainer.read_all(), before)
            trainer.step({"x": x, "target": x})  # It goes on.


def sharded(step: irpar.Module, mesh: str, **cuts: Any) -> irpar.Partition:
    from irpar.ir import clone_module

    module = clone_module(step)
    for name, cut in cuts.items():
        module.shard(name, cut)
    return irpar.partition(module, mesh)


def test_a_parameter_that_is_not_finite_is_the_first() -> None:
    with on_mesh(classifier(), "d=1").trainer(engine="numpy") as trainer:
        wrong = trainer.read("u")
        wrong[1, 1] = np.nan
        trainer.write("u", wrong)
        with pytest.raises(NotFiniteError) as caught:
            trainer.step(batch())
    assert "the first tensor that is not finite: u, which holds NaN" in caught.value.notes


@pytest.mark.parametrize(("number", "ignored"), [(3, None), (-1, None), (7, -1)])
def test_targets_that_are_no_classes(number: int, ignored: int | None) -> None:
    given = batch()
    given["target"] = given["target"].copy()
    given["target"][3:5] = number, 0
    with on_mesh(classifier(ignore_index=ignored), "d=1").trainer(engine="numpy") as trainer:
        before = trainer.read_all()
        with pytest.raises(DataError) as caught:
            trainer.step(given)
        assert caught.value.what.startswith(f"target has {number}: it is from 0 to 2")
        assert caught.value.where == "step 1"
        same(trainer.read_all(), before)
        if ignored is not None:
            given["target"][3] = ignored
            trainer.step(given)


def test_a_batch_in_which_no_target_counts_is_told() -> None:
    given = batch()
    given["target"] = np.full_like(given["target"], -100)
    with on_mesh(classifier(ignore_index=-100), "d=1").trainer(engine="numpy") as trainer:
        with pytest.raises(NotFiniteError, match="no target of its batch counts") as caught:
            trainer.step(given)
        assert caught.value.notes[0] == "all are -100, which is ignored"
        assert np.isfinite(trainer.step(batch()))


@pytest.mark.parametrize("engine", ["numpy", "ort"])
@pytest.mark.parametrize("mesh", list(MESHES))
def test_runs_and_sessions_take_no_other_targets_either(mesh: str, engine: Any, tmp_path: Path) -> None:
    """PyTorch ignores -100 where nothing is said: here it would be a class from the end, or none on any rank."""
    given = {**batch(), "learning_rate": np.float32(0.1)}
    given["target"] = np.array([-100, *given["target"][1:]])
    partition = on_mesh(classifier(), mesh)
    runs: list[Callable[[dict[str, Any]], Any]] = [partition.session(engine=engine).run]
    partition.save(tmp_path / "out")
    runs += [partial(each.run, engine=engine) for each in (partition, irpar.Partition.open(tmp_path / "out"))]
    for run in runs:
        with pytest.raises(DataError) as caught:
            run(given)
        assert caught.value.what == "target has -100: it is from 0 to 2"
        assert caught.value.do == "correct the data, or say which targets do not count: ignore_index=-100"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"x": np.zeros((7, 6), np.float32)}, "x has shape [7, 6], expected [8, 6]"),
        ({"x": np.zeros((8, 6), np.float64)}, "x is f64[8, 6], expected f32"),
        ({"y": np.zeros((8, 6), np.float32)}, "there is no input y"),
        ({"w": np.zeros((6, 5), np.float32)}, "w is state of the session, and no input"),
        ({"target": np.zeros((8, 3), np.float32)}, "target is f32[8, 3], expected i64"),
        ({"learning_rate": np.float32(1)}, "learning_rate is given as an input"),
        ({"target": None}, "target is None, expected target i64[8]"),
        ({"target": "cat"}, "target is str[], expected i64"),
    ],
)
def test_inputs_that_do_not_fit(change: dict[str, Any], told: str) -> None:
    with on_mesh(classifier(), "d=1").trainer(engine="numpy") as trainer:
        before = trainer.read_all()
        with pytest.raises(IrparError) as caught:
            trainer.step({**batch(), **change})
        assert told in str(caught.value)
        assert caught.value.do
        with pytest.raises(IrparError, match="target"):
            trainer.step({"x": batch()["x"]})
        with pytest.raises(IrparError, match="inputs is"):
            trainer.step([batch()])  # type: ignore[arg-type]
        same(trainer.read_all(), before)


def test_a_program_that_is_no_step_has_no_trainer() -> None:
    with pytest.raises(IrparError, match="the program is no training step") as caught:
        irpar.partition(with_weights(LOG), "d=1").trainer()
    assert "irpar.train_step" in (caught.value.do or "")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"optimzer": "sgd"}, "train_step has no option optimzer"),
        ({"learning_rate": "fast"}, 'learning_rate is the text "fast"'),
        ({"no_decay": "b"}, 'no_decay is the text "b"'),
        ({"betas": [0.9]}, "betas is a list"),
        ({"freeze": ["w", "b", "u", "c"]}, "no parameter is left to train"),
        ({"freeze": ["z*"]}, '"z*" matches no weight or input of floats'),
        ({"trainable": ["z"]}, '"z" matches no weight or input of floats'),
        ({"optimizer": "adagrad"}, 'optimizer is the text "adagrad"'),
        ({"loss": "hinge"}, 'there is no loss "hinge"'),
        ({"loss_scale": "static"}, 'loss_scale is the text "static"'),
        ({"learning_rate": -1.0}, "a learning rate of -1.0"),
        ({"learning_rate": float("nan")}, "a learning rate of nan"),
    ],
)
def test_options_of_a_step_that_mean_nothing(options: dict[str, Any], told: str) -> None:
    with pytest.raises(IrparError) as caught:
        classifier(**options)
    assert told in caught.value.what
    assert caught.value.do


def test_frozen_parameters_stay() -> None:
    with on_mesh(classifier(freeze=["u", "b"]), "d=1").trainer(engine="numpy") as trainer:
        assert set(trainer.states) == {"w", "w.m", "c", "c.m"}
        trainer.step(batch())
    with on_mesh(classifier(trainable=["u*"]), "d=1").trainer(engine="numpy") as trainer:
        assert set(trainer.states) == {"u", "u.m"}


@pytest.mark.parametrize("mesh", ["d=1", "dp=2,tp=2"])
def test_a_training_partition_is_verified(mesh: str) -> None:
    partition = on_mesh(classifier(dropout={"a": 0.2}), mesh)
    assert partition.verify().is_equal


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "lamb"])
def test_verification_compares_numbers_with_every_optimizer(optimizer: str) -> None:
    verified = on_mesh(classifier(optimizer=optimizer), "dp=2,tp=2").verify()
    assert verified.is_equal
    assert verified.but == ()  # Means of squares below 0 would give parameters that are not numbers.
