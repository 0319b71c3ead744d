"""training-mode: running statistics as state, and dropout by masks that are equal on all meshes."""

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import irpar
from irpar.errors import IrparError
from irpar.ir import Module, clone_module
from irpar.ir.text.files import parse_module
from irpar.onnx_io import to_proto
from irpar.passes.training_mode import TrainingMode, running_statistics
from tests.training.programs import with_weights

Array = np.ndarray[Any, Any]

NORM = """
graph @norm(%x: f32[4, 3, 5], %g: f32[3] from "g", %b: f32[3] from "b", %mean: f32[3] from "mean", %var: f32[3] from "var") -> (%y) opset 21 {
  %y = BatchNormalization(%x, %g, %b, %mean, %var) {epsilon=1e-3, momentum=0.8} : f32[4, 3, 5]
}
"""
TWO = """
graph @norm(%x: f32[4, 3], %g: f32[3] from "g", %b: f32[3] from "b", %mean: f32[3] from "mean", %var: f32[3] from "var") -> (%y) opset 21 {
  %h = BatchNormalization(%x, %g, %b, %mean, %var) : f32[4, 3]
  %y = BatchNormalization(%h, %g, %b, %mean, %var) : f32[4, 3]
}
"""
COMPUTED = """
graph @norm(%x: f32[4, 3], %g: f32[3] from "g", %b: f32[3] from "b", %mean: f32[3] from "mean", %log: f32[3] from "log") -> (%y) opset 21 {
  %var = Exp(%log) : f32[3]
  %y = BatchNormalization(%x, %g, %b, %mean, %var) : f32[4, 3]
}
"""
IN_A_BODY = """
graph @norm(%x: f32[4, 3], %which: bool[], %g: f32[3] from "g", %b: f32[3] from "b", %mean: f32[3] from "mean", %var: f32[3] from "var") -> (%y) opset 21 {
  %y = If(%which) {then_branch=graph @t() -> (%one) {
    %one = BatchNormalization(%x, %g, %b, %mean, %var) : f32[4, 3]
  }, else_branch=graph @e() -> (%two) {
    %two = Relu(%x) : f32[4, 3]
  }} : f32[4, 3]
}
"""
NUMBERS = {"mean": [0.1, 0.2, 0.3], "var": [1.0, 2.0, 3.0], "g": [1.0, 0.5, 2.0], "b": [0.0, 1.0, -1.0]}


def normal(text: str = NORM) -> Module:
    return with_weights(text, **NUMBERS)


# -- statistics ---------------------------------------------------------------------------------------------------


PARTLY = """
graph @norm(%x: f32[4, 3], %g: f32[3] from "g", %b: f32[3] from "b", %mean: f32[3] from "mean", %var: f32[3] from "var", %m: f32[3] from "m", %v: f32[3] from "v") -> (%y) opset 21 {
  %h, %n, %w = BatchNormalization(%x, %g, %b, %mean, %var) {training_mode=1} : f32[4, 3], f32[3], f32[3]
  %y = BatchNormalization(%h, %g, %b, %m, %v) : f32[4, 3]
}
"""


def test_a_model_may_say_which_statistics_stay() -> None:
    """As an export with torch.onnx.TrainingMode.PRESERVE does of modules in eval mode."""
    module = with_weights(PARTLY, **NUMBERS, m=NUMBERS["mean"], v=NUMBERS["var"])
    found = TrainingMode().run(module)
    assert found.notes == ("1 of 2 BatchNormalization keep their statistics, as the model has them",)
    assert {value.source_name for value in module.graph.states} == {"mean", "var"}
    assert [node.attributes.get("training_mode", 0) for node in module.graph] == [1, 0]


def test_statistics_become_state() -> None:
    module = normal()
    assert {value.source_name for value in running_statistics(module)} == {"mean", "var"}
    assert TrainingMode().run(module).statistics == {"statistics": 1, "dropout": 0}
    assert {value.source_name: state.kind for value, state in module.graph.states.items()} == {
        "mean": "statistic",
        "var": "statistic",
    }
    assert module.graph.output_names == ["y", "mean.next", "var.next"]
    assert not TrainingMode(freeze_statistics=True).run(normal()).changed


@pytest.mark.parametrize("mesh", ["d=1", "dp=2", "dp=3"])
def test_running_statistics_are_those_of_onnx(mesh: str) -> None:
    """As ONNX has it: running = running * momentum + batch's * (1 - momentum), the variance divided by the count."""
    step = irpar.train_step(normal(), loss="mse", optimizer="sgd", learning_rate=0.1)
    if mesh != "d=1":
        step.shard("x", ["dp", None, None])
    mean, var = np.float64(NUMBERS["mean"]), np.float64(NUMBERS["var"])
    gain, bias = np.float64(NUMBERS["g"]), np.float64(NUMBERS["b"])
    random = np.random.default_rng(0)
    with irpar.partition(step, mesh).trainer(engine="numpy") as trainer:
        for _ in range(3):
            x = (random.standard_normal((4, 3, 5)) * 2 + 1).astype(np.float32)
            target = random.standard_normal((4, 3, 5)).astype(np.float32)
            wide = x.astype(np.float64)
            own, spread = wide.mean(axis=(0, 2)), wide.var(axis=(0, 2))
            normed = (wide - own[:, None]) / np.sqrt(spread + 1e-3)[:, None]
            difference = normed * gain[:, None] + bias[:, None] - target
            assert trainer.step({"x": x, "target": target}) == pytest.approx(np.square(difference).mean(), rel=1e-5)
            mean, var = 0.8 * mean + 0.2 * own, 0.8 * var + 0.2 * spread
            np.testing.assert_allclose(trainer.read("mean"), mean, rtol=1e-5)
            np.testing.assert_allclose(trainer.read("var"), var, rtol=1e-5)
            gain = gain - 0.1 * (2 * difference * normed).sum(axis=(0, 2)) / x.size
            bias = bias - 0.1 * (2 * difference).sum(axis=(0, 2)) / x.size
            np.testing.assert_allclose(trainer.read("g"), gain, rtol=1e-5)
            np.testing.assert_allclose(trainer.read("b"), bias, rtol=1e-5)


def test_frozen_statistics_are_those_of_the_model() -> None:
    step = irpar.train_step(normal(), loss="mse", optimizer="sgd", freeze_statistics=True)
    assert not {"mean", "var"} & {value.source_name for value in step.graph.states}
    random = np.random.default_rng(0)
    x, target = (random.standard_normal((4, 3, 5)).astype(np.float32) for _ in range(2))
    mean, var, gain, bias = (np.float64(NUMBERS[name])[:, None] for name in ("mean", "var", "g", "b"))
    wanted = np.square((x - mean) / np.sqrt(var + 1e-3) * gain + bias - target).mean()
    with irpar.partition(step, "d=1").trainer(engine="numpy") as trainer:
        assert trainer.step({"x": x, "target": target}) == pytest.approx(wanted, rel=1e-5)


def test_frozen_statistics_are_those_of_a_model_that_was_exported_in_training_mode() -> None:
    text = NORM.replace("%y = Batch", "%y, %m, %v = Batch").replace("momentum=0.8}", "momentum=0.8, training_mode=1}")
    module = normal(text.replace(": f32[4, 3, 5]\n}", ": f32[4, 3, 5], f32[3], f32[3]\n}"))
    assert TrainingMode(freeze_statistics=True).run(module).changed
    x = np.random.default_rng(0).standard_normal((4, 3, 5)).astype(np.float32)
    wanted = irpar.partition(normal(), "d=1").run({"x": x}, engine="ort")["y"]
    np.testing.assert_allclose(irpar.partition(module, "d=1").run({"x": x}, engine="ort")["y"], wanted, rtol=1e-6)


def test_the_step_runs_in_onnx_runtime() -> None:
    """Stock ONNX Runtime has no gradient and no training mode of all versions: the step says both in other operators."""
    made = to_proto(irpar.train_step(normal(), loss="mse", optimizer="sgd"))
    onnx.checker.check_model(made, full_check=True)
    session = ort.InferenceSession(made.SerializeToString())
    random = np.random.default_rng(0)
    feeds = {"x": random.standard_normal((4, 3, 5)), "target": random.standard_normal((4, 3, 5)), "learning_rate": 0.1}
    given = {value.name: np.asarray(feeds[value.name], np.float32) for value in session.get_inputs()}
    found = dict(zip([value.name for value in session.get_outputs()], session.run(None, given), strict=True))
    batch = given["x"].astype(np.float64)
    wanted = 0.8 * np.float64(NUMBERS["mean"]) + 0.2 * batch.mean(axis=(0, 2))
    np.testing.assert_allclose(found["mean.next"], wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (TWO, "two BatchNormalization share the running statistic mean"),
        (COMPUTED, "the running statistic var is computed by the model: nothing can replace it"),
        (IN_A_BODY, "a BatchNormalization in a body of a loop or a branch cannot be set to training mode"),
    ],
)
def test_statistics_that_cannot_be_kept_are_refused_unless_frozen(text: str, told: str) -> None:
    with pytest.raises(IrparError) as caught:
        TrainingMode().run(normal(text))
    assert caught.value.what == told
    assert "freeze_statistics=True" in (caught.value.do or "")
    assert not TrainingMode(freeze_statistics=True).run(normal(text)).changed


# -- dropout ------------------------------------------------------------------------------------------------------

LAYER = """
graph @layer(%x: f32[64, 48], %w: f32[48, 48] from "w") -> (%y) opset 21 {
  %h = MatMul(%x, %w) : f32[64, 48]
  %y = Identity(%h) : f32[64, 48]
}
"""
DROPOUT = """
graph @layer(%x: f32[64, 48], %w: f32[48, 48] from "w") -> (%y) opset 21 {
  %ratio = constant : f32[] 0.25
  %h = MatMul(%x, %w) : f32[64, 48]
  %d = Dropout(%h, %ratio) : f32[64, 48]
  %y = Identity(%d) : f32[64, 48]
}
"""


def dropped(share: float = 0.25, seed: int = 0, text: str = LAYER, **shares: float) -> Module:
    """A layer whose output is that of ones where nothing is dropped."""
    module = with_weights(text, w=np.eye(48))
    TrainingMode(dropout=shares or ({} if text is DROPOUT else {"h": share}), seed=seed).run(module)
    return module


def outputs(module: Module, mesh: str = "d=1", steps: int = 2, **cuts: Any) -> list[Array]:
    module = clone_module(module)
    for name, cut in cuts.items():
        module.shard(name, cut)
    with irpar.partition(module, mesh).session(engine="numpy") as session:
        return [session.run({"x": np.ones((64, 48), np.float32)})["y"] for _ in range(steps)]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_about_the_share_of_elements_is_zero_and_the_mean_is_kept(share: float) -> None:
    (found,) = outputs(dropped(share), steps=1)
    deviation = np.sqrt(share * (1 - share) / found.size)
    assert abs((found == 0).mean() - share) < 4 * deviation
    np.testing.assert_allclose(found[found != 0], 1 / (1 - share), rtol=1e-6)
    assert abs(found.mean() - 1) < 4 * deviation / (1 - share)
    # Neither rows nor columns are alike.
    assert len({row.tobytes() for row in found != 0}) == 64
    assert len({column.tobytes() for column in (found != 0).T}) == 48


def test_each_step_and_seed_has_a_mask_of_its_own_and_the_same_again() -> None:
    first, second = outputs(dropped())
    (other,) = outputs(dropped(seed=1), steps=1)
    for one, two in [(first, second), (first, other), (second, other)]:
        both = ((one == 0) & (two == 0)).mean()
        assert abs(both - 0.25**2) < 0.02
    for found, again in zip(outputs(dropped()), (first, second), strict=True):
        np.testing.assert_array_equal(found, again)


def test_two_values_have_masks_of_their_own() -> None:
    text = LAYER.replace("Identity(%h)", "MatMul(%h, %u)").replace('"w")', '"w", %u: f32[48, 48] from "u")')
    module = with_weights(text, w=np.eye(48), u=np.eye(48))
    TrainingMode(dropout={"h": 0.5, "y": 0.5}).run(module)
    (found,) = outputs(module, steps=1)
    assert abs((found == 0).mean() - 0.75) < 0.04


@pytest.mark.parametrize(
    ("mesh", "cuts"),
    [
        ("dp=2", {"x": ["dp", None]}),
        ("tp=2", {"w": [None, "tp"]}),
        ("dp=2,tp=2", {"x": ["dp", None], "w": [None, "tp"]}),
        ("a=5", {"x": ["a", None]}),
    ],
)
def test_masks_are_equal_on_all_meshes(mesh: str, cuts: dict[str, Any]) -> None:
    for found, wanted in zip(outputs(dropped(), mesh, **cuts), outputs(dropped()), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_dropout_nodes_drop_what_they_say() -> None:
    (found,) = outputs(dropped(text=DROPOUT), steps=1)
    assert abs((found == 0).mean() - 0.25) < 0.03
    (other,) = outputs(dropped(text=DROPOUT, d=0.75), steps=1)
    assert abs((other == 0).mean() - 0.75) < 0.03
    assert np.isclose(other[other != 0], 4).all()
    (none,) = outputs_without_state(dropped(text=DROPOUT, d=0.0))
    np.testing.assert_array_equal(none, np.ones((64, 48)))


SEVERAL = """
graph @layer(%x: f32[64, 48], %w: f32[48, 48] from "w") -> (%y) opset 21 {
  %ratio = constant : f32[] 0.5
  %h = MatMul(%x, %w) : f32[64, 48]
  %d = Dropout(%h, %ratio) : f32[64, 48]
  %e = Dropout(%h, %ratio) : f32[64, 48]
  %y = RESULT : f32[64, 48]
}
"""


def test_other_readers_of_what_a_dropout_drops_have_all_of_it() -> None:
    (found,) = outputs(dropped(text=SEVERAL.replace("RESULT", "Sub(%h, %d)"), d=0.5), steps=1)
    assert set(np.unique(found)) == {-1.0, 1.0}


def test_two_dropouts_of_one_value_have_masks_of_their_own() -> None:
    (found,) = outputs(dropped(text=SEVERAL.replace("RESULT", "Mul(%d, %e)"), d=0.5), steps=1)
    assert abs((found == 0).mean() - 0.75) < 0.03
    assert np.isclose(found[found != 0], 4).all()


def outputs_without_state(module: Module) -> list[Array]:
    assert not module.graph.states
    return [irpar.partition(module, "d=1").run({"x": np.ones((64, 48), np.float32)}, engine="numpy")["y"]]


def test_dropout_is_in_the_gradient() -> None:
    """The rows of a weight are changed by what was kept of them."""
    step = irpar.train_step(with_weights(LAYER), loss="mse", optimizer="sgd", learning_rate=1.0, dropout={"x": 0.5})
    with irpar.partition(step, "d=1").trainer(engine="numpy") as trainer:
        before = trainer.read("w")
        x = np.zeros((64, 48), np.float32)
        x[0] = 1
        trainer.step({"x": x, "target": np.zeros((64, 48), np.float32)})
        rows = (trainer.read("w") != before).any(axis=1)
    assert 10 < rows.sum() < 38


def test_a_seed_and_a_count_are_state() -> None:
    module = dropped(seed=5)
    kinds = {value.source_name: (state.kind, state.output is None) for value, state in module.graph.states.items()}
    assert kinds == {"seed": ("seed", True), "dropout_step": ("counter", False)}
    assert all("Random" not in node.op_type for node in module.graph)


SYMBOLIC = """
graph @g(%x: f32[n, 4]) -> (%y) opset 21 {
  %y = Relu(%x) : f32[n, 4]
}
"""
MASK = DROPOUT.replace(
    "%d = Dropout(%h, %ratio) : f32[64, 48]", "%d, %m = Dropout(%h, %ratio) : f32[64, 48], bool[64, 48]"
)
RATIO = DROPOUT.replace("  %ratio = constant : f32[] 0.25\n", "  %ratio = ReduceMean(%x) {keepdims=0} : f32[]\n")


IN_A_BRANCH = """
graph @layer(%x: f32[64, 48], %which: bool[]) -> (%y) opset 21 {
  %ratio = constant : f32[] 0.25
  %y = If(%which) {then_branch=graph @t() -> (%one) {
    %one = Dropout(%x, %ratio) : f32[64, 48]
  }, else_branch=graph @e() -> (%two) {
    %two = Relu(%x) : f32[64, 48]
  }} : f32[64, 48]
}
"""


def test_dropout_of_nothing_may_be_in_a_branch() -> None:
    assert not TrainingMode().run(parse_module(IN_A_BRANCH.replace("0.25", "0.0"))).changed


@pytest.mark.parametrize(
    ("text", "shares", "told"),
    [
        (IN_A_BRANCH, {}, "a Dropout in a body of a loop or a branch cannot drop"),
        (LAYER, {"h": 1.0}, 'dropout of 1.0 for "h"'),
        (LAYER, {"h": -0.1}, 'dropout of -0.1 for "h"'),
        (LAYER, {"h": float("nan")}, 'dropout of nan for "h"'),
        (LAYER, {"k*": 0.5}, 'dropout "k*" matches no value of floats in the main graph'),
        (SYMBOLIC, {"x": 0.5}, "x is f32[n, 4]: its elements cannot be counted"),
        (MASK.replace("(%y)", "(%y, %m)"), {}, "the mask of a Dropout is read, which training makes otherwise"),
        (RATIO, {}, "the ratio of a Dropout is computed"),
        (DROPOUT.replace("0.25", "1.0"), {}, "a Dropout drops a share of 1"),
        (
            LAYER.replace("%x:", '%x: f32[64, 48] from "seed", %z:'),
            {"h": 0.5},
            'the model has a tensor called "seed" already, which is what training adds',
        ),
    ],
)
def test_dropout_that_cannot_be_is_refused(text: str, shares: dict[str, float], told: str) -> None:
    with pytest.raises(IrparError) as caught:
        TrainingMode(dropout=shares).run(
            with_weights(text) if '"w"' in text and "seed" not in text else parse_module(text)
        )
    assert caught.value.what == told
    assert caught.value.do
