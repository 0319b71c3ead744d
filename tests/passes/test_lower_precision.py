"""lower-precision: golden text, what computes in which dtype, and training in each precision."""

import numpy as np
import pytest

import irpar
from irpar import models
from irpar.ir import DType
from irpar.ir.text.files import parse_module
from irpar.onnx_io import to_module
from irpar.passes.lower_precision import NarrowedTensor
from irpar.training.step import train_step
from tests.models.test_training import batches, trained

MODEL = """
graph @g(%x: f32[2, 4]) -> (%y) opset 21 {
  %w = constant : f32[4, 4] [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]] from "w"
  %b = constant : f32[4] [1.0, 2.0, 3.0, 4.0] from "b"
  %h = MatMul(%x, %w) : f32[2, 4]
  %a = Add(%h, %b) : f32[2, 4]
  %s = Softmax(%a) {axis=-1} : f32[2, 4]
  %y = Mul(%s, %a) : f32[2, 4]
}
"""


def test_products_are_narrow_and_exponentials_wide(check_golden):
    check_golden(
        "lower-precision{dtype=fp16, parameters=[w]}",
        MODEL,
        """
        graph @g(%x: f32[2, 4]) -> (%y) opset 21 {
          %w = constant : f16[4, 4] [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]] from "w"
          %b = constant : f32[4] [1.0, 2.0, 3.0, 4.0] from "b"
          %b_1 = constant : f16[4] [1.0, 2.0, 3.0, 4.0]
          %x.f16 = Cast(%x) {to=10} : f16[2, 4]
          %h = MatMul(%x.f16, %w) : f16[2, 4]
          %a = Add(%h, %b_1) : f16[2, 4]
          %a.f32 = Cast(%a) {to=1} : f32[2, 4]
          %s = Softmax(%a.f32) {axis=-1} : f32[2, 4]
          %y = Mul(%s, %a.f32) : f32[2, 4]
        }
        """,
    )


def test_an_operand_that_cannot_be_narrow_stays_wide(check_golden):
    # ONNX has no bfloat16 for the ratio of a Dropout before opset 22.
    check_golden(
        "lower-precision",
        """
        graph @g(%x: f32[2, 2], %w: f32[2, 2]) -> (%y) opset 21 {
          %r = constant : f32[] 0.5
          %on = constant : bool[] true
          %h = MatMul(%x, %w) : f32[2, 2]
          %d = Dropout(%h, %r, %on) : f32[2, 2]
          %y = Neg(%d) : f32[2, 2]
        }
        """,
        """
        graph @g(%x: f32[2, 2], %w: f32[2, 2]) -> (%y.f32 as "y") opset 21 {
          %r = constant : f32[] 0.5
          %on = constant : bool[] true
          %x.bf16 = Cast(%x) {to=16} : bf16[2, 2]
          %w.bf16 = Cast(%w) {to=16} : bf16[2, 2]
          %h = MatMul(%x.bf16, %w.bf16) : bf16[2, 2]
          %d = Dropout(%h, %r, %on) : bf16[2, 2]
          %y = Neg(%d) : bf16[2, 2]
          %y.f32 = Cast(%y) {to=1} : f32[2, 2]
        }
        """,
    )


def test_casts_belong_to_the_scope_that_holds_the_narrower_of_both():
    """So that what they make is told as a layer's own, and is computed again with it where that holds fewer bytes."""
    step = train_step(to_module(models.build("gpt", layers=2)), precision="bf16")
    casts = [node for node in step.graph if node.op_type == "Cast" and node.phase in ("forward", "backward")]
    assert {node.phase for node in casts if (node.scope or "").startswith("h.")} == {"forward", "backward"}
    forward = [node for node in casts if node.phase == "forward" and node.inputs[0].node is not None]
    narrowing = [node for node in forward if node.result.dtype is DType.BF16]
    widening = [node for node in forward if node.result.dtype is DType.F32]
    assert narrowing
    assert widening
    assert all(node.scope == node.inputs[0].node.scope for node in narrowing)
    assert all(node.scope in [user.scope for user in node.result.users] for node in widening)


def test_a_mask_stays_a_number_in_float16():
    module = parse_module(
        """
        graph @g(%x: f32[2]) -> (%y) opset 21 {
          %m = constant : f32[2] [0.0, -3.4e38] from "m"
          %y = Add(%x, %m) : f32[2]
        }
        """
    )
    (mask,) = module.graph.constants
    assert mask.data is not None
    np.testing.assert_array_equal(NarrowedTensor(mask.data, DType.F16).numpy(), np.float16([0, -65504]))


@pytest.mark.parametrize(
    ("precision", "engine"),
    [("fp16", "ort"), *(pytest.param(precision, "numpy", marks=pytest.mark.slow) for precision in ("fp16", "bf16"))],
)
def test_training_in_each_precision_is_near_that_of_float32(precision, engine):
    model = models.build("gpt", preset="tiny")
    step = irpar.train_step(model, optimizer="adamw", precision=precision, loss_scale="none")
    data = batches(irpar.train_step(model, optimizer="adamw"))
    expected, _ = trained(irpar.partition(irpar.train_step(model, optimizer="adamw"), "d=1"), data)
    losses, state = trained(irpar.partition(step, "d=1"), data, engine=engine)
    np.testing.assert_allclose(losses, expected, rtol=2e-2)
    assert state["lm_head.weight"].dtype.itemsize == 2
    assert state["lm_head.weight.master"].dtype == np.float32
    first = irpar.load(model)
    weight = next(value for value in first.graph.constants if value.source_name == "lm_head.weight")
    assert weight.data is not None
    assert np.abs(state["lm_head.weight.master"] - weight.data.numpy()).max() <= 5 * 1.1e-2
    np.testing.assert_array_equal(
        state["lm_head.weight.master"].astype(state["lm_head.weight"].dtype), state["lm_head.weight"]
    )


@pytest.mark.parametrize(("precision", "scale", "near"), [("fp16", "dynamic", 5e-3), ("bf16", "none", 4e-2)])
def test_narrow_steps_are_equal_over_devices(precision, scale, near):
    step = irpar.train_step(models.build("mlp"), loss="mse", precision=precision, loss_scale=scale)
    data = batches(step)
    losses, _ = trained(irpar.partition(step, "d=1"), data, engine="numpy")
    step.shard("x", ["dp", None])
    step.shard("fc1.weight", [None, "tp"])
    others, _ = trained(irpar.partition(step, "dp=2,tp=2"), data, engine="numpy")
    np.testing.assert_allclose(others, losses, rtol=near)


def test_other_names_are_refused():
    with pytest.raises(irpar.IrparError, match="precision"):
        irpar.train_step(models.build("mlp"), loss="mse", precision="fp8")
