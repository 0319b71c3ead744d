"""Partitions that decide otherwise than the original beside a step, and wrong ones that may not hide behind that."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import irpar
from irpar.ir import parse_module
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE
from irpar.verification import Original, Verification, bisect, verify
from irpar.verification.steps import decides
from irpar.verification.yardstick import StepYardstick
from tests.written import model_of_text

UNIT = 2.0**-22
"""In the last place of 2.5, in float32."""
NUMBERS = np.array([1.7, 1.2, 0.7, 2.5, -3.7, -1.2, -2.7, 0.3], np.float32)

HEAD = "g (float[4,8] x, float[8] w, float[8,6] v) => (float[4,6] y) <float s = {1}, uint8 z = {8}, float half = {0.5}>"
DECIDING = {
    "QuantizeLinear": "q = QuantizeLinear(h, s, z)  d = DequantizeLinear(q, s, z)",
    "DynamicQuantizeLinear": """k = QuantizeLinear(h, s, z)  l = DequantizeLinear(k, s, z)
      q, t, u = DynamicQuantizeLinear(l)  d = DequantizeLinear(q, t, u)""",
    "Round": "d = Round(h)",
    "Cast": "a = Add(h, half)  c = Cast<to=7>(a)  d = Cast<to=1>(c)",
    "Greater": "t = Add(s, s)  b = Add(t, half)  g = Greater(h, b)  d = Where(g, s, h)",
    "If": """t = Add(s, s)  b = Add(t, half)  m = ReduceMax<keepdims=0>(h)  p = Greater(m, b)
      d = If(p) <then_branch = i () => (float[4,8] j) { j = Neg(h) }, else_branch = e () => (float[4,8] k) { k = Abs(h) }>""",
    "in a body": """t = Scan<num_scan_inputs=1, body = i (float[8] j) => (float[8] k) { k = Round(j) }>(h)  d = Identity(t)""",
}


def model(deciding: str, beside: float, wrong: float = 1.0, other: float = 1.0, head: str = HEAD) -> onnx.ModelProto:
    """A model with a tensor h beside a step of what decides of it.

    Args:
        deciding: makes d of h, the largest of which is 2.5.
        beside: how many units in the last place 2.5 is off.
        wrong: what one number of h that lies beside no step is multiplied by.
        other: what the weights behind the step are multiplied by.
    """
    made = model_of_text(f"{head} {{ h = Mul(x, w)  {deciding}  y = MatMul(d, v) }}")
    numbers = NUMBERS.copy()
    numbers[3] += np.float32(beside * UNIT)
    numbers[1] *= np.float32(wrong)
    weights = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32) * np.float32(other)
    del made.graph.input[1:]
    for name, array in (("w", numbers), ("v", weights)):
        made.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return made


def verified(folder: Path, original: onnx.ModelProto, other: onnx.ModelProto) -> tuple[Verification, Any]:
    """A partition of another model, beside the original; what a bisection finds first."""
    onnx.save(other, folder / "model.onnx")
    module = irpar.load(folder / "model.onnx")
    module.shard("v", ["tp", None])
    executor = irpar.partition(module, "tp=2").executor()
    whole = Original.of_module(irpar.onnx_io.to_module(original))
    inputs = {"x": np.ones((4, 8), np.float32)}
    return (
        verify(executor, whole, inputs, tolerance=None, seed=0),
        bisect(executor, whole, inputs, tolerance=None, seed=0).first,
    )


@pytest.mark.parametrize("name", DECIDING)
def test_a_decision_beside_a_step_is_no_fault(name: str, tmp_path: Path) -> None:
    deciding = DECIDING[name]
    found, first = verified(tmp_path, model(deciding, -4), model(deciding, 4))
    assert (found.result, first) == ("equal, but", None)
    assert found.differences[0].largest > 0.01, "the step does not show"
    (told,) = (line for line in found.but if line.startswith("y: differs by "))
    assert "that quantise, round or compare" in told
    assert "otherwise than in ONNX Runtime, beside a step (the first: " in told


def test_what_cannot_be_computed_alone_excuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(self: StepYardstick, got: Any) -> Any:
        raise irpar.IrparError("no kernel")

    monkeypatch.setattr(StepYardstick, "judge_step", refusing)
    deciding = DECIDING["Round"]
    found, first = verified(tmp_path, model(deciding, -4), model(deciding, 4))
    assert (found.result, first) == ("different", None)
    assert any("cannot be computed alone: no kernel" in doubt for doubt in found.doubts)


WRONG = {
    "before the step": (4, 1.001, 1.0, {}),
    "behind it": (4, 1.0, 1.001, {}),
    "without a decision": (-4, 1.0, 1.001, {}),
    "too far from the step": (400, 1.0, 1.0, {}),
    "the step": (4, 1.0, 1.0, {"uint8 z = {8}": "uint8 z = {9}"}),
    "its size": (4, 1.0, 1.0, {"float s = {1}": "float s = {1.1}"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_fault_is_told_beside_a_decision(name: str, tmp_path: Path) -> None:
    beside, wrong, other, constants = WRONG[name]
    # The codes are read with constants of their own: what is wrong in one place is not taken back in the other.
    deciding = "q = QuantizeLinear(h, s, z)  d = DequantizeLinear(q, one, o)"
    head = changed = HEAD.replace("half", "one = {1}, uint8 o = {8}, float half")
    for right, planted in constants.items():
        changed = changed.replace(right, planted)
    found, first = verified(
        tmp_path, model(deciding, -4, head=head), model(deciding, beside, wrong, other, head=changed)
    )
    assert found.result == "different"
    assert first is not None


def test_what_decides() -> None:
    text = """g (float[4,8] x, int64[4,8] i) => (float[4,8] y) {
      a = Relu(x)  b = Floor(x)  c = Cast<to=7>(x)  d = Cast<to=1>(i)  e = Shape(x)  f = Add(i, i)
      g = Greater(x, a)  h = Greater(i, f)  y = Identity(x) }"""
    nodes = Original.of_module(irpar.onnx_io.to_module(model_of_text(text))).nodes
    assert [node.results[0].name for node in nodes.graph if decides(node)] == ["b", "c", "g"]


JUMPING = "r = Round(h)"
MISROUNDED = {
    "down": "r = Floor(h)",
    "up": "r = Ceil(h)",
    "off by three": "k = Round(h)  r = Add(k, three)",
}


@pytest.mark.parametrize("planted", [JUMPING, *MISROUNDED.values()], ids=["right", *MISROUNDED])
def test_one_number_beside_a_step_excuses_no_others(planted: str, tmp_path: Path) -> None:
    def made(deciding: str) -> onnx.ModelProto:
        model_ = model(f"{deciding}  d = Identity(r)", 0, head=HEAD.replace("half", "three = {3}, float half"))
        (weights,) = (known for known in model_.graph.initializer if known.name == "w")
        numbers = onnx.numpy_helper.to_array(weights).copy()
        numbers[-1] = 100.3  # So that a few steps are little beside the largest number.
        weights.CopyFrom(onnx.numpy_helper.from_array(numbers, "w"))
        return model_

    found, first = verified(tmp_path, made(JUMPING), made(planted))
    assert found.result == ("equal" if planted is JUMPING else "different")
    assert (first is None) == (planted is JUMPING)


def test_a_small_fault_inside_is_told_where_rounding_moves_the_outputs_further(tmp_path: Path) -> None:
    """Of 2.5 rounding alone makes 2 or 3, so that of the output several steps are allowed; one number is wrong by one."""

    def made(wrong: float) -> onnx.ModelProto:
        model_ = model("r = Round(h)  d = Identity(r)", 0, wrong)
        (weights,) = (known for known in model_.graph.initializer if known.name == "w")
        numbers = onnx.numpy_helper.to_array(weights).copy()
        numbers[-1] = 100.3
        weights.CopyFrom(onnx.numpy_helper.from_array(numbers, "w"))
        return model_

    assert verified(tmp_path, made(1), made(1))[0].result == "equal"
    found, first = verified(tmp_path, made(1), made(1.3))
    assert (found.result, first.name) == ("different", "h")


@pytest.mark.parametrize("off", [0.0, 1e5])
def test_codes_that_rounding_changes_all_may_not_be_far_off(off: float, tmp_path: Path) -> None:
    """In the last place of 1e9 are 64: rounding changes every whole number that is made of them, but by so much."""
    head = HEAD.replace("half", f"big = {{1e9}}, float off = {{{off}}}, float half")
    made = [
        model(f"k = Mul(h, big)  {planted}  d = Cast<to=1>(c)", 0.25, head=head)
        for planted in ("c = Cast<to=7>(k)", "m = Add(k, off)  c = Cast<to=7>(m)")
    ]
    found, first = verified(tmp_path, *made)
    assert found.result == ("different" if off else "equal")
    assert (first and first.name) == ("c" if off else None)


def test_terms_that_a_function_of_communication_took_in_are_not_compared() -> None:
    module = parse_module(
        """
graph @g(%x: f32[2, 3], %w: f32[3, 4], %v: f32[3, 4]) -> (%y) opset 21 {
  %h = MatMul(%x, %w) : f32[2, 4]
  %a = Tanh(%h) : f32[2, 4]
  %b = Exp(%a) : f32[2, 4]
  %k = MatMul(%x, %v) : f32[2, 4]
  %y = Mul(%b, %k) : f32[2, 4]
}
"""
    )
    module.shard("x", [None, "tp"])
    pipeline = DEFAULT_PIPELINE.replace("group-segments", "extract-communication,group-segments")
    partition = irpar.partition(module, "tp=5", pipeline=pipeline)
    constants = [{value.name for value in graph.constants} for graph in partition.module.graphs]
    assert not any("h" in names for names in constants), "the term of ranks without elements stands in the function"
    with partition.executor() as executor:
        found = bisect(executor, Original.of_module(module), None, tolerance=None, seed=0)
    assert found.first is None
