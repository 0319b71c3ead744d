"""Training steps that there is nothing to train in."""

import pytest

import irpar
from irpar.ir.text.files import parse_module

MODEL = """
graph @g(%x: f32[4, 2]) -> (%copy, %y) opset 21 {
  %w = constant : f32[2, 2] [[1.0, 2.0], [3.0, 4.0]] from "w"
  %copy = Identity(%x) : f32[4, 2]
  %y = MatMul(%x, %w) : f32[4, 2]
}
"""
BARE = """
graph @g(%x: f32[4, 2]) -> (%y) opset 21 {
  %y = Tanh(%x) : f32[4, 2]
}
"""


def test_a_loss_that_depends_on_no_parameter() -> None:
    with pytest.raises(irpar.IrparError, match="the loss depends on none of the parameters: w") as caught:
        irpar.train_step(parse_module(MODEL), loss="mse")
    assert 'output="NAME"' in str(caught.value.do)
    assert irpar.train_step(parse_module(MODEL), loss="mse", output="y").graph.states


def test_a_model_with_state_of_its_own() -> None:
    model = parse_module(
        """
        graph @g(%x: f32[4, 2], %n: f32[]) -> (%n_1, %y) opset 21 {
          %one = constant : f32[] 1.0
          %w = constant : f32[2, 2] [[1.0, 2.0], [3.0, 4.0]] from "w"
          %y = MatMul(%x, %w) : f32[4, 2]
          %n_1 = Add(%n, %one) : f32[]
        }
        """
    )
    assert irpar.train_step(model, loss="mse", output="y").graph.states
    model.add_state("n", "n_1", kind="counter")
    with pytest.raises(irpar.IrparError, match="the model replaces state of its own: n"):
        irpar.train_step(model, loss="mse", output="y")


def test_a_model_without_parameters() -> None:
    with pytest.raises(irpar.IrparError, match="no initializer of floats to train"):
        irpar.train_step(parse_module(BARE), loss="mse")
    with pytest.raises(irpar.IrparError, match="no parameter is left to train"):
        irpar.train_step(parse_module(MODEL), loss="mse", output="y", freeze=["w"])


def test_options_that_there_are_not() -> None:
    with pytest.raises(irpar.IrparError, match="train_step has no option rate"):
        irpar.train_step(parse_module(MODEL), rate=1)
    with pytest.raises(irpar.IrparError, match="no_decay is the text"):
        irpar.train_step(parse_module(MODEL), no_decay="w")
    assert irpar.train_step(parse_module(MODEL), loss="mse", output="y", lr=0.5).metadata
