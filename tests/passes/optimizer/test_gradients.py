"""What happens to gradients before the update: their norm is bounded, the scale of the loss taken out and adapted."""

from typing import Any

import numpy as np
import pytest

import irpar
from irpar.ir import clone_module
from irpar.ir.text.files import parse_module
from irpar.passes.optimizer import Optimizer
from irpar.passes.optimizer.gradients import FIRST_SCALE
from tests.training.programs import with_weights

Array = np.ndarray[Any, Any]

RATE = 0.5
TEXT = """
graph @step(%l: f64[], %ga: f64[3, 4], %gb: f64[4], %a: f64[3, 4] from "a", %b: f64[4] from "b") -> (%l as "loss", %ga as "grad.a", %gb as "grad.b") opset 21 {
}
"""
SCALED = """
graph @step(%l: f32[], %g: f32[4], %loss_scale: f32[] from "loss_scale", %w: DTYPE[4] from "w") -> (%l as "loss", %grad as "grad.w") opset 21 {
  %wide = Mul(%g, %loss_scale) : f32[4]
  %grad = Cast(%wide) {to=CODE} : DTYPE[4]
}
"""
TWO_LAYERS = """
graph @mlp(%x: f64[8, 6], %w: f64[6, 4] from "w", %b: f64[4] from "b", %u: f64[4, 6] from "u") -> (%y) opset 21 {
  %h = MatMul(%x, %w) : f64[8, 4]
  %i = Add(%h, %b) : f64[8, 4]
  %a = Tanh(%i) : f64[8, 4]
  %y = MatMul(%a, %u) : f64[8, 6]
}
"""


@pytest.mark.parametrize("most", [0.5, 100.0])
def test_the_norm_of_all_gradients_together_is_bounded(most: float) -> None:
    module = parse_module(TEXT)
    Optimizer(kind="sgd", clip_norm=most).run(module)
    random = np.random.default_rng(0)
    ga, gb = random.standard_normal((3, 4)), random.standard_normal(4)
    with irpar.partition(module, "d=1").session(engine="numpy") as session:
        found = session.run({"ga": ga, "gb": gb, "l": np.float64(1), "learning_rate": np.float64(RATE)})
        state = session.read_all()
    norm = np.sqrt(np.square(ga).sum() + np.square(gb).sum())
    factor = min(1.0, most / (norm + 1e-6))
    assert found["gradient_norm"] == pytest.approx(norm, rel=1e-14)
    np.testing.assert_allclose(state["a"], -RATE * factor * ga, rtol=1e-12)
    np.testing.assert_allclose(state["b"], -RATE * factor * gb, rtol=1e-12)


def test_gradients_of_zero_are_left() -> None:
    module = parse_module(TEXT)
    Optimizer(kind="sgd", clip_norm=1.0).run(module)
    given = {"ga": np.zeros((3, 4)), "gb": np.zeros(4), "l": np.float64(1), "learning_rate": np.float64(RATE)}
    with irpar.partition(module, "d=1").session(engine="numpy") as session:
        assert session.run(given)["gradient_norm"] == 0
        assert not session.read("a").any()


def test_norms_of_sharded_gradients_are_reduced_together() -> None:
    step = irpar.train_step(with_weights(TWO_LAYERS), loss="mse", optimizer="adam", clip_norm=1.0)
    for name, spec in {"w": [None, "tp"], "b": ["tp"], "u": ["tp", None]}.items():
        step.shard(name, spec)
    made = irpar.partition(step, "tp=2")
    sent = [each for each in made.plan.collectives if each["phase"] == "optimizer"]
    assert [(each["kind"], each["bytes"]) for each in sent] == [("all_reduce", 8)]
    assert made.verify()


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("lamb", marks=pytest.mark.slow)])
def test_norms_are_those_of_one_device_under_sharding(optimizer: str) -> None:
    step = irpar.train_step(
        with_weights(TWO_LAYERS), loss="mse", optimizer=optimizer, clip_norm=0.01, learning_rate=0.1
    )
    states = []
    for mesh, cuts in {
        "d=1": {},
        "dp=2": {"x": ["dp", None]},
        "tp=2": {"w": [None, "tp"], "u": ["tp", None]},
        "dp=2,tp=2": {"x": ["dp", None], "w": [None, "tp"], "u": ["tp", None]},
        "z=2": {"x": ["z", None], "w": ["z", None], "u": ["z", None]},
    }.items():
        module = clone_module(step)
        for name, cut in cuts.items():
            module.shard(name, cut)
        with irpar.partition(module, mesh).trainer(engine="numpy") as trainer:
            random = np.random.default_rng(1)
            norms = []
            for _ in range(3):
                trainer.step({"x": random.standard_normal((8, 6)), "target": random.standard_normal((8, 6))})
                norms.append(float(trainer.results["gradient_norm"]))
            states.append((norms, trainer.read_all()))
    assert min(states[0][0]) > 0.01
    for norms, state in states[1:]:
        np.testing.assert_allclose(norms, states[0][0], rtol=1e-10)
        for name, array in states[0][1].items():
            np.testing.assert_allclose(state[name], array, rtol=1e-10, atol=1e-14)


# -- the scale of the loss ------------------------------------------------------------------------------------------


def scaled(dtype: str = "f32", **options: Any) -> irpar.Partition:
    code = {"f32": "1", "f16": "10"}[dtype]
    module = parse_module(SCALED.replace("DTYPE", dtype).replace("CODE", code))
    Optimizer(kind="momentum", loss_scale="dynamic", **options).run(module)
    return irpar.partition(module, "d=1")


def feeds(gradient: Any) -> dict[str, Any]:
    return {
        "g": np.broadcast_to(np.float32(gradient), 4).copy(),
        "l": np.float32(1),
        "learning_rate": np.float32(RATE),
    }


def test_the_scale_is_taken_out_of_gradients() -> None:
    with scaled().session(engine="numpy") as session:
        assert session.read("loss_scale") == FIRST_SCALE
        assert not session.run(feeds(0.25))["skipped"]
        np.testing.assert_array_equal(session.read("w"), np.full(4, -RATE * 0.25, np.float32))
        assert session.read("good_steps") == 1


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan, 1e38])
def test_what_is_not_finite_halves_the_scale_and_is_left_out(wrong: float) -> None:
    with scaled().session(engine="numpy") as session:
        session.run(feeds(0.25))
        before = session.read_all()
        given = feeds(0.25)
        given["g"][2] = wrong
        with np.errstate(all="ignore"):
            assert session.run(given)["skipped"]
        after = session.read_all()
        assert after["loss_scale"] == FIRST_SCALE / 2
        assert after["good_steps"] == 0
        for name in ("w", "w.m"):
            np.testing.assert_array_equal(after[name], before[name])
        assert not session.run(feeds(0.25))["skipped"]
        assert session.read("w")[0] < after["w"][0]


def test_the_scale_grows_after_as_many_good_steps() -> None:
    with scaled(growth_interval=3).session(engine="numpy") as session:
        scales = []
        for _ in range(7):
            session.run(feeds(0.25))
            scales.append(float(session.read("loss_scale")) / FIRST_SCALE)
    assert scales == [1, 1, 2, 2, 2, 4, 4]


def test_the_norm_is_bounded_after_the_scale_is_taken_out() -> None:
    with scaled(clip_norm=0.5).session(engine="numpy") as session:
        assert session.run(feeds(1.0))["gradient_norm"] == pytest.approx(2)
        np.testing.assert_allclose(session.read("w"), np.full(4, -RATE * 0.25), rtol=1e-5)


def test_small_updates_of_float16_parameters_are_kept_in_their_masters() -> None:
    with scaled("f16").session(engine="numpy") as session:
        session.write_all({"w": np.ones(4, np.float16), "w.master": np.ones(4, np.float32)})
        for _ in range(4):
            assert not session.run(feeds(2.0**-14))["skipped"]
        state = session.read_all()
    # Half of 2**-11, the distance of float16 numbers below 1, is more than each update, and less than all of them.
    moment, total = 0.0, 0.0
    for _ in range(4):
        moment = 0.9 * moment + 2.0**-14
        total += RATE * moment
    np.testing.assert_allclose(state["w.master"], np.full(4, 1 - total), rtol=1e-6)
    np.testing.assert_array_equal(state["w"], state["w.master"].astype(np.float16))
    assert state["w"][0] < 1
    assert state["w.master"].dtype == state["w.m"].dtype == np.float32


def test_an_overflow_of_float16_is_seen() -> None:
    with scaled("f16").session(engine="numpy") as session, np.errstate(all="ignore"):
        assert session.run(feeds(2.0))["skipped"]  # 2 times 65536 is above 65504.
        assert session.read("loss_scale") == FIRST_SCALE / 2
        assert session.run(feeds(2.0))["skipped"]
        assert not session.run(feeds(2.0))["skipped"]
        assert session.read("w")[0] == np.float16(-RATE * 2)
