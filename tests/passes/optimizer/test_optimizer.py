"""optimizer: golden text, what becomes state, what is refused."""

from typing import Any

import numpy as np
import pytest

from irpar.errors import IrparError
from irpar.ir.text.files import parse_module
from irpar.pass_manager import PassManager
from irpar.passes.optimizer import OPTIMIZERS, Optimizer
from tests.training.programs import classifier, on_mesh

GRADIENTS = """
graph @step(%x: f32[4], %g: f32[4], %l: f32[]) -> (%l as "loss", %g as "grad.w") opset 21 {
  %w = constant : f32[4] [1.0, 2.0, 3.0, 4.0] from "w"
}
"""


def test_sgd(check_golden):
    check_golden(
        "optimizer{kind=sgd}",
        GRADIENTS,
        """
        graph @step(%x: f32[4], %g: f32[4], %l: f32[], %learning_rate: f32[] from "learning_rate", state parameter %w: f32[4] = [1.0, 2.0, 3.0, 4.0] from "w") -> (%l as "loss", %optimizer_2 as "w.next" replaces %w) opset 21 {
          %optimizer = Cast(%learning_rate) {to=11 | phase=optimizer} : f64[]
          %optimizer_1 = Cast(%optimizer) {to=1 | phase=optimizer} : f32[]
          %optimizer_2 = irpar.Sgd(%w, %g, %optimizer_1) {| phase=optimizer} : f32[4]
        }
        """,
    )


def test_nesterov_momentum_with_decay_and_a_scale(check_golden):
    check_golden(
        "optimizer{kind=momentum, nesterov=true, weight-decay=0.5, w=2}",
        GRADIENTS,
        """
        graph @step(%x: f32[4], %g: f32[4], %l: f32[], %learning_rate: f32[] from "learning_rate", state parameter %w: f32[4] = [1.0, 2.0, 3.0, 4.0] from "w", state moment of "w" %w.m: f32[4] from "w.m") -> (%l as "loss", %optimizer_4 as "w.m.next" replaces %w.m, %optimizer_3 as "w.next" replaces %w) opset 21 {
          %number = constant : f64[] 2.0
          %number_1 = constant : f32[] 0.9
          %number_2 = constant : f32[] 0.5
          %optimizer = Cast(%learning_rate) {to=11 | phase=optimizer} : f64[]
          %optimizer_1 = Mul(%optimizer, %number) {| phase=optimizer} : f64[]
          %optimizer_2 = Cast(%optimizer_1) {to=1 | phase=optimizer} : f32[]
          %optimizer_3, %optimizer_4 = irpar.Momentum(%w, %g, %w.m, %optimizer_2, %number_1, %number_2) {nesterov=1 | phase=optimizer} : f32[4], f32[4]
        }
        """,
    )


NARROW = """
graph @step(%g: bf16[4], %h: bf16[4], %l: f32[]) -> (%l as "loss", %g as "grad.w", %h as "grad.u") opset 21 {
  %w = constant : bf16[4] [1.0, 2.0, 3.0, 4.0] from "w"
  %u = constant : bf16[4] [5.0, 6.0, 7.0, 8.0] from "u"
}
"""


def test_a_narrow_gradient_is_widened_beside_its_update(check_golden):
    check_golden(
        "optimizer{kind=sgd}",
        NARROW,
        """
        graph @step(%g: bf16[4], %h: bf16[4], %l: f32[], %learning_rate: f32[] from "learning_rate", state parameter %w: bf16[4] = [1.0, 2.0, 3.0, 4.0] from "w", state master of "w" %w.master: f32[4] = [1.0, 2.0, 3.0, 4.0] from "w.master", state parameter %u: bf16[4] = [5.0, 6.0, 7.0, 8.0] from "u", state master of "u" %u.master: f32[4] = [5.0, 6.0, 7.0, 8.0] from "u.master") -> (%l as "loss", %optimizer_3 as "w.master.next" replaces %w.master, %optimizer_4 as "w.next" replaces %w, %optimizer_6 as "u.master.next" replaces %u.master, %optimizer_7 as "u.next" replaces %u) opset 21 {
          %optimizer = Cast(%learning_rate) {to=11 | phase=optimizer} : f64[]
          %optimizer_1 = Cast(%optimizer) {to=1 | phase=optimizer} : f32[]
          %optimizer_2 = Cast(%g) {to=1 | phase=optimizer} : f32[4]
          %optimizer_3 = irpar.Sgd(%w.master, %optimizer_2, %optimizer_1) {| phase=optimizer} : f32[4]
          %optimizer_4 = Cast(%optimizer_3) {to=16 | phase=optimizer} : bf16[4]
          %optimizer_5 = Cast(%h) {to=1 | phase=optimizer} : f32[4]
          %optimizer_6 = irpar.Sgd(%u.master, %optimizer_5, %optimizer_1) {| phase=optimizer} : f32[4]
          %optimizer_7 = Cast(%optimizer_6) {to=16 | phase=optimizer} : bf16[4]
        }
        """,
    )


def test_what_the_norm_takes_is_widened_beside_it(check_golden):
    check_golden(
        "optimizer{kind=sgd, clip-norm=1}",
        NARROW,
        """
        graph @step(%g: bf16[4], %h: bf16[4], %l: f32[], %learning_rate: f32[] from "learning_rate", state parameter %w: bf16[4] = [1.0, 2.0, 3.0, 4.0] from "w", state master of "w" %w.master: f32[4] = [1.0, 2.0, 3.0, 4.0] from "w.master", state parameter %u: bf16[4] = [5.0, 6.0, 7.0, 8.0] from "u", state master of "u" %u.master: f32[4] = [5.0, 6.0, 7.0, 8.0] from "u.master") -> (%l as "loss", %optimizer_5 as "gradient_norm", %optimizer_12 as "w.master.next" replaces %w.master, %optimizer_13 as "w.next" replaces %w, %optimizer_15 as "u.master.next" replaces %u.master, %optimizer_16 as "u.next" replaces %u) opset 21 {
          %number = constant : f32[] 1e-06
          %number_1 = constant : f32[] 1.0
          %number_2 = constant : f32[] 1.0
          %optimizer = Cast(%g) {to=1 | phase=optimizer} : f32[4]
          %optimizer_1 = ReduceSumSquare(%optimizer) {keepdims=0 | phase=optimizer} : f32[]
          %optimizer_2 = Cast(%h) {to=1 | phase=optimizer} : f32[4]
          %optimizer_3 = ReduceSumSquare(%optimizer_2) {keepdims=0 | phase=optimizer} : f32[]
          %optimizer_4 = Sum(%optimizer_1, %optimizer_3) {| phase=optimizer} : f32[]
          %optimizer_5 = Sqrt(%optimizer_4) {| phase=optimizer} : f32[]
          %optimizer_6 = Add(%optimizer_5, %number) {| phase=optimizer} : f32[]
          %optimizer_7 = Div(%number_1, %optimizer_6) {| phase=optimizer} : f32[]
          %optimizer_8 = Min(%optimizer_7, %number_2) {| phase=optimizer} : f32[]
          %optimizer_9 = Cast(%learning_rate) {to=11 | phase=optimizer} : f64[]
          %optimizer_10 = Cast(%optimizer_9) {to=1 | phase=optimizer} : f32[]
          %optimizer_11 = Mul(%optimizer, %optimizer_8) {| phase=optimizer} : f32[4]
          %optimizer_12 = irpar.Sgd(%w.master, %optimizer_11, %optimizer_10) {| phase=optimizer} : f32[4]
          %optimizer_13 = Cast(%optimizer_12) {to=16 | phase=optimizer} : bf16[4]
          %optimizer_14 = Mul(%optimizer_2, %optimizer_8) {| phase=optimizer} : f32[4]
          %optimizer_15 = irpar.Sgd(%u.master, %optimizer_14, %optimizer_10) {| phase=optimizer} : f32[4]
          %optimizer_16 = Cast(%optimizer_15) {to=16 | phase=optimizer} : bf16[4]
        }
        """,
    )


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_is_state(kind: str) -> None:
    module = parse_module(GRADIENTS)
    Optimizer(kind=kind).run(module)  # type: ignore[arg-type]
    moments = {"sgd": [], "momentum": ["w.m"]}.get(kind, ["w.m", "w.v"])
    counters = [] if kind in ("sgd", "momentum") else ["step"]
    states = module.graph.states
    assert {value.source_name: state.kind for value, state in states.items()} == (
        {"w": "parameter"} | dict.fromkeys(moments, "moment") | dict.fromkeys(counters, "counter")
    )
    assert all(state.output is not None for state in states.values())
    assert {state.parameter for value, state in states.items() if state.kind == "moment"} <= {"w"}
    assert {node.phase for node in module.graph} == {"optimizer"}
    assert module.graph.output_names[0] == "loss"
    assert not any(name.startswith("grad.") for name in module.graph.output_names)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_a_narrow_parameter_has_a_master(dtype: str) -> None:
    module = parse_module(GRADIENTS.replace("f32[4]", f"{dtype}[4]"))
    Optimizer(kind="momentum").run(module)
    found = {
        value.source_name: (str(value.type), state.kind, state.parameter)
        for value, state in module.graph.states.items()
    }
    assert found == {
        "w": (f"{dtype}[4]", "parameter", None),
        "w.master": ("f32[4]", "master", "w"),
        "w.m": ("f32[4]", "moment", "w"),
    }
    (master,) = (state for value, state in module.graph.states.items() if value.source_name == "w.master")
    assert master.data is not None
    np.testing.assert_array_equal(master.data.numpy(), np.arange(1, 5, dtype=np.float32))


def test_the_learning_rate_of_float64_is_float64() -> None:
    module = parse_module(GRADIENTS.replace("f32[4]", "f64[4]"))
    Optimizer(kind="sgd").run(module)
    (rate,) = (value for value in module.graph.inputs if value.source_name == "learning_rate")
    assert str(rate.type) == "f64[]"


def test_options_are_read_back() -> None:
    made = Optimizer(kind="lamb", betas=(0.8, 0.9), no_decay=("*.bias",), lr_scale={"h.*": 0.5}, clip_norm=1.0)
    assert PassManager.parse(str(made)).passes == (made,)


OTHERS = {"momentum": 0.5, "nesterov": True, "betas": (0.5, 0.5), "eps": 0.5}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("option", OTHERS)
def test_options_that_an_optimizer_does_not_read_are_refused(kind: str, option: str) -> None:
    reads = {"sgd": (), "momentum": ("momentum", "nesterov")}.get(kind, ("betas", "eps"))
    made = Optimizer(**{"kind": kind, option: OTHERS[option]})
    module = parse_module(GRADIENTS)
    if option in reads:
        assert made.run(module).changed
        return
    with pytest.raises(IrparError, match=f"{kind} has no {option}") as raised:
        made.run(module)
    assert f"leave {option} out" in raised.value.do
    assert f"{kind} has {', '.join((*reads, 'weight-decay'))}" in raised.value.do


SCALED = GRADIENTS.replace("%l: f32[])", '%l: f32[], %s: f32[] from "loss_scale")')


@pytest.mark.parametrize(
    ("options", "text", "told"),
    [
        ({"betas": (0.9,)}, GRADIENTS, "betas of (0.9,)"),
        ({"betas": (0.9, 1.0)}, GRADIENTS, "betas of (0.9, 1.0)"),
        ({"betas": (-0.1, 0.9)}, GRADIENTS, "betas of (-0.1, 0.9)"),
        ({"betas": (0.9, float("nan"))}, GRADIENTS, "betas of (0.9, nan)"),
        ({"momentum": 1.0}, GRADIENTS, "momentum of 1.0"),
        ({"eps": -1e-8}, GRADIENTS, "eps of -1e-08"),
        ({"weight_decay": -1.0}, GRADIENTS, "weight decay of -1.0"),
        ({"weight_decay": float("inf")}, GRADIENTS, "weight decay of inf"),
        ({"clip_norm": 0.0}, GRADIENTS, "clip norm of 0.0"),
        ({"clip_norm": float("nan")}, GRADIENTS, "clip norm of nan"),
        ({"growth_interval": 0}, GRADIENTS, "growth interval of 0"),
        ({"kind": "adam", "nesterov": True}, GRADIENTS, "adam has no nesterov"),
        ({"kind": "adagrad"}, GRADIENTS, 'there is no optimizer "adagrad"'),
        ({"loss_scale": "static"}, SCALED, 'there is no loss scale "static"'),
        ({"loss_scale": "dynamic"}, GRADIENTS, 'the graph has no input "loss_scale"'),
        ({"no_decay": ("b*",)}, GRADIENTS, 'no-decay "b*" matches no parameter that is trained'),
        ({"lr_scale": {"b": 0.5}}, GRADIENTS, 'lr-scale "b" matches no parameter that is trained'),
        ({"lr_scale": {"w": float("nan")}}, GRADIENTS, "lr-scale w of nan"),
        ({"lr_scale": {"w": -1.0}}, GRADIENTS, "lr-scale w of -1.0"),
        (
            {},
            GRADIENTS.replace('%g as "grad.w"', '%g as "g"'),
            "the graph has no gradients of a loss among its results",
        ),
        ({}, GRADIENTS.replace('%l as "loss"', '%l as "l"'), "the graph has no gradients of a loss among its results"),
        (
            {},
            GRADIENTS.replace("%x: f32[4]", '%x: f32[4] from "w.m"'),
            'the model has a tensor called "w.m" already, which is what training adds',
        ),
        (
            {},
            GRADIENTS.replace("%x: f32[4]", '%x: f32[4] from "learning_rate"'),
            'the model has a tensor called "learning_rate" already, which is what training adds',
        ),
    ],
)
def test_refusals(options: dict[str, Any], text: str, told: str) -> None:
    with pytest.raises(IrparError) as caught:
        Optimizer(**options).run(parse_module(text))
    assert caught.value.what == told
    assert caught.value.do


@pytest.mark.parametrize("precision", ["f32", "fp16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_tensors_of_updates_are_no_tensors_of_the_original(optimizer: str, precision: str) -> None:
    """What an update is written out as has names that the original may give to other tensors."""
    made = on_mesh(classifier(optimizer=optimizer, precision=precision), "tp=2")
    found = made.bisect()
    assert found.first is None, found
    assert found.compared > 20
