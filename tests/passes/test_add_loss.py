"""add-loss: golden text, what is refused, and the numbers of each loss beside its formula in float64."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import irpar
from irpar.errors import IrparError
from irpar.ir.text.files import parse_module
from irpar.passes.add_loss import AddLoss, LossError

Array = np.ndarray[Any, Any]

SCORES = """
graph @g(%x: f32[4, 3]) -> (%y) opset 21 {
  %y = Relu(%x) : f32[4, 3]
}
"""
SEVERAL = """
graph @g(%x: f32[4, 3]) -> (%n, %a, %b, %mean) opset 21 {
  %n = Cast(%x) {to=7} : i64[4, 3]
  %a = Relu(%x) : f32[4, 3]
  %b = Neg(%x) : f32[4, 3]
  %mean = ReduceMean(%x) {keepdims=0} : f32[]
}
"""


def identity(dims: str, op: str = "Identity", attributes: str = "", dtype: str = "f64") -> str:
    """A model of one node."""
    type_ = f"{dtype}[{dims}]"
    return f"graph @g(%x: {type_}) -> (%y) opset 21 {{\n  %y = {op}(%x) {attributes} : {type_}\n}}\n"


def loss_of(text: str, inputs: Mapping[str, Any], kind: str = "cross_entropy", **options: Any) -> float:
    """The loss of a model that irpar's own engine computes."""
    module = parse_module(text)
    AddLoss(kind, **options).run(module)
    found = irpar.partition(module, "d=1").run(inputs, engine="numpy")
    return float(found["loss"])


def log_softmax(scores: Array, axis: int = -1) -> Array:
    shifted = scores - scores.max(axis=axis, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))


def cross_entropy(
    scores: Array, target: Array, axis: int = -1, ignore_index: int | None = None, smoothing: float = 0.0
) -> float:
    """The mean over the targets that count of -sum_c q_c log p_c, q being (1 - s) of the target and s of all classes."""
    logs = np.moveaxis(log_softmax(scores, axis), axis, -1)
    classes = logs.shape[-1]
    counts = np.ones(target.shape, bool) if ignore_index is None else target != ignore_index
    wanted = np.eye(classes)[np.where(counts, target, 0)] * (1 - smoothing) + smoothing / classes
    return float(-(wanted * logs).sum(axis=-1)[counts].mean())


def random() -> np.random.Generator:
    return np.random.default_rng(0)


# -- text ---------------------------------------------------------------------------------------------------------


def test_mse_is_the_mean_of_squares(check_golden):
    check_golden(
        "add-loss{kind=mse}",
        SCORES,
        """
        graph @g(%x: f32[4, 3], %target: f32[4, 3] from "target") -> (%y, %loss) opset 21 {
          %y = Relu(%x) : f32[4, 3]
          %forward = Sub(%y, %target) {| phase=forward} : f32[4, 3]
          %forward_1 = Mul(%forward, %forward) {| phase=forward} : f32[4, 3]
          %loss = ReduceMean(%forward_1) {keepdims=0 | phase=forward} : f32[]
        }
        """,
    )


def test_cross_entropy_takes_what_went_into_the_softmax(check_golden):
    check_golden(
        "add-loss",
        identity("4, 3", "Softmax", "{axis=-1}", "f32"),
        """
        graph @g(%x: f32[4, 3], %target: i64[4] from "target") -> (%y, %loss) opset 21 {
          %y = Softmax(%x) {axis=-1} : f32[4, 3]
          %loss = SoftmaxCrossEntropyLoss(%x, %target) {| phase=forward} : f32[]
        }
        """,
    )


def test_a_result_that_is_the_loss_gets_one_more_name(check_golden):
    check_golden(
        "add-loss{kind=output:mean}",
        SEVERAL,
        """
        graph @g(%x: f32[4, 3]) -> (%n, %a, %b, %mean, %mean as "loss") opset 21 {
          %n = Cast(%x) {to=7} : i64[4, 3]
          %a = Relu(%x) : f32[4, 3]
          %b = Neg(%x) : f32[4, 3]
          %mean = ReduceMean(%x) {keepdims=0} : f32[]
        }
        """,
    )


def test_what_was_taken_is_told():
    module = parse_module(identity("4", "Sigmoid"))
    assert AddLoss("bce").run(module).notes == ("the loss is taken of what goes into the Sigmoid that makes y",)
    assert AddLoss("mse").run(parse_module(identity("4", "Sigmoid"))).notes == ()


def test_a_number_of_each_sample_is_no_scores_of_one():
    (note,) = AddLoss("cross_entropy").run(parse_module(identity("8", "Tanh"))).notes
    assert note.startswith("the one dim of y is that of classes, for a single sample; ")


def test_the_first_output_of_floats_is_compared():
    module = parse_module(SEVERAL)
    AddLoss("mse").run(module)
    (difference,) = (node for node in module.graph if node.op_type == "Sub")
    assert difference.inputs[0].source_name == "a"


def test_half_precision_is_compared_in_float32():
    module = parse_module(identity("4, 3", "Relu", "", "f16"))
    AddLoss("mse").run(module)
    assert str(module.graph.outputs[-1].type) == "f32[]"
    assert str(module.graph.inputs[-1].type) == "f16[4, 3]"


# -- refusals -----------------------------------------------------------------------------------------------------

LOSS_TAKEN = SCORES.replace("%y", "%loss")
TARGET_TAKEN = SCORES.replace("%x", "%target")
TARGET_WEIGHT = """
graph @g(%x: f32[4, 3]) -> (%y) opset 21 {
  %w = constant : f32[3] [1.0, 2.0, 3.0] from "target"
  %y = Mul(%x, %w) : f32[4, 3]
}
"""
INTEGERS = """
graph @g(%x: f32[4, 3]) -> (%n) opset 21 {
  %n = Cast(%x) {to=7} : i64[4, 3]
}
"""


@pytest.mark.parametrize(
    ("text", "options", "told"),
    [
        (SCORES, {"kind": "hinge"}, 'there is no loss "hinge"'),
        (SCORES, {"kind": "crossentropy"}, 'there is no loss "crossentropy"'),
        (LOSS_TAKEN, {"kind": "mse"}, 'the model has an output called "loss" already, which is what training adds'),
        (TARGET_TAKEN, {}, 'the model has a tensor called "target" already, which is what training adds'),
        (TARGET_WEIGHT, {}, 'the model has a tensor called "target" already, which is what training adds'),
        (SCORES, {"output": "z"}, 'the model has no output "z"'),
        (SCORES, {"kind": "output:z"}, 'the model has no output "z"'),
        (SEVERAL, {"output": "n"}, 'the output "n" is i64[4, 3]'),
        (SEVERAL, {"kind": "output:n"}, 'the output "n" is i64[4, 3]'),
        (INTEGERS, {}, "no output of the model is of floats"),
        (SEVERAL, {"kind": "output:a"}, "the loss a is f32[4, 3], and no single number"),
        (SEVERAL, {"output": "mean"}, "the scores have 0 dims, and no axis -1 of classes"),
        (SCORES, {"class_axis": 2}, "the scores have 2 dims, and no axis 2 of classes"),
        (SCORES, {"class_axis": -3}, "the scores have 2 dims, and no axis -3 of classes"),
        (SCORES, {"label_smoothing": 1.0}, "label smoothing of 1.0"),
        (SCORES, {"label_smoothing": -0.1}, "label smoothing of -0.1"),
        (SCORES, {"label_smoothing": float("nan")}, "label smoothing of nan"),
        (SCORES, {"kind": "mse", "label_smoothing": 0.1}, "mse has no label smoothing and ignores no targets"),
        (SCORES, {"kind": "bce", "ignore_index": 0}, "bce has no label smoothing and ignores no targets"),
    ],
)
def test_refusals(text: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(IrparError) as caught:
        AddLoss(**options).run(parse_module(text))
    assert caught.value.what == told
    assert caught.value.do


def test_near_names_are_told() -> None:
    with pytest.raises(LossError) as caught:
        AddLoss("crossentropy").run(parse_module(SCORES))
    assert any("cross_entropy" in note for note in caught.value.notes)


def test_a_loss_of_that_name_is_its_own_loss() -> None:
    text = SEVERAL.replace("%mean", "%loss")
    x = random().standard_normal((4, 3)).astype(np.float32)
    assert loss_of(text, {"x": x}, "output:loss") == pytest.approx(x.mean(), rel=1e-6)


# -- numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignore_index", [None, -100, 1])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("shape", "axis"), [((6, 5), -1), ((2, 4, 5), -1), ((2, 5, 3, 4), 1), ((5, 3), 0), ((5,), -1)])
def test_cross_entropy(shape: tuple[int, ...], axis: int, smoothing: float, ignore_index: int | None) -> None:
    scores = random().standard_normal(shape) * 3
    rest = tuple(size for dim, size in enumerate(shape) if dim != axis % len(shape))
    target = random().integers(0, 5, rest)
    if ignore_index is not None and target.ndim:
        target.reshape(-1)[::3] = ignore_index
    elif ignore_index is not None:
        target = np.asarray(2)
    found = loss_of(
        identity(", ".join(map(str, shape))),
        {"x": scores, "target": target},
        class_axis=axis,
        label_smoothing=smoothing,
        ignore_index=ignore_index,
    )
    assert found == pytest.approx(cross_entropy(scores, target, axis, ignore_index, smoothing), rel=1e-12)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
def test_cross_entropy_of_probabilities_is_that_of_their_scores(op: str) -> None:
    scores = random().standard_normal((6, 5)) * 50  # So large that probabilities would be 0.
    target = random().integers(0, 5, 6)
    found = loss_of(identity("6, 5", op, "{axis=-1}"), {"x": scores, "target": target})
    assert found == pytest.approx(cross_entropy(scores, target), rel=1e-12)


@pytest.mark.parametrize("op", ["Identity", "Sigmoid"])
def test_bce(op: str) -> None:
    scores, target = random().standard_normal((6, 5)) * 3, random().random((6, 5))
    share = 1 / (1 + np.exp(-scores))
    wanted = -(target * np.log(share) + (1 - target) * np.log(1 - share)).mean()
    assert loss_of(identity("6, 5", op), {"x": scores, "target": target}, "bce") == pytest.approx(wanted, rel=1e-12)


def test_a_softmax_over_another_axis_makes_no_probabilities_of_classes() -> None:
    scores = random().standard_normal((6, 5))
    target = random().integers(0, 6, 5)
    found = loss_of(identity("6, 5", "Softmax", "{axis=1}"), {"x": scores, "target": target}, class_axis=0)
    assert found == pytest.approx(cross_entropy(np.exp(log_softmax(scores, 1)), target, axis=0), rel=1e-12)
    found = loss_of(identity("6, 5", "Softmax", "{axis=0}"), {"x": scores, "target": target}, class_axis=0)
    assert found == pytest.approx(cross_entropy(scores, target, axis=0), rel=1e-12)


def test_bce_looks_through_what_lays_out_probabilities() -> None:
    """As `torch.sigmoid(x).squeeze(-1)`; numbers so large that probabilities would be 0 and 1."""
    scores, target = random().standard_normal((6, 5, 1)) * 50, random().random((5, 6))
    text = """
    graph @g(%x: f64[6, 5, 1]) -> (%y) opset 21 {
      %last = constant : i64[1] [-1]
      %p = Sigmoid(%x) : f64[6, 5, 1]
      %s = Squeeze(%p, %last) : f64[6, 5]
      %y = Transpose(%s) {perm=[1, 0]} : f64[5, 6]
    }
    """
    laid = scores[:, :, 0].T
    wanted = (np.logaddexp(0, laid) - target * laid).mean()
    assert loss_of(text, {"x": scores, "target": target}, "bce") == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(("perm", "class_axis"), [([1, 0, 2], 2), ([0, 2, 1], 1)])
def test_cross_entropy_looks_through_transposes(perm: list[int], class_axis: int) -> None:
    scores = random().standard_normal((4, 5, 3)) * 50
    text = f"""
    graph @g(%x: f64[4, 5, 3]) -> (%y) opset 21 {{
      %p = Softmax(%x) {{axis=2}} : f64[4, 5, 3]
      %y = Transpose(%p) {{perm={perm}}} : f64[{", ".join(str(scores.shape[dim]) for dim in perm)}]
    }}
    """
    laid = scores.transpose(perm)
    target = random().integers(0, 3, np.delete(laid.shape, class_axis))
    found = loss_of(text, {"x": scores, "target": target}, class_axis=class_axis)
    assert found == pytest.approx(cross_entropy(laid, target, class_axis), rel=1e-12)


@pytest.mark.parametrize(("kind", "op"), [("bce", "Sigmoid"), ("cross_entropy", "Softmax")])
def test_probabilities_that_are_changed_are_told_of(kind: str, op: str) -> None:
    module = parse_module(
        f"""
        graph @g(%x: f32[4, 3]) -> (%y) opset 21 {{
          %half = constant : f32[] 0.5
          %p = {op}(%x) : f32[4, 3]
          %y = Mul(%p, %half) : f32[4, 3]
        }}
        """
    )
    assert AddLoss(kind).run(module).notes == (
        f"y is taken as scores, and is made by a {op}: if these are probabilities, train an output before it",
    )


def test_bce_of_large_scores_is_finite() -> None:
    scores, target = np.array([-1000.0, 1000.0, 1000.0]), np.array([0.0, 1.0, 0.0])
    assert loss_of(identity("3"), {"x": scores, "target": target}, "bce") == pytest.approx(1000 / 3)


@pytest.mark.parametrize("shape", [(6, 5), (4,), ()])
def test_mse(shape: tuple[int, ...]) -> None:
    output, target = random().standard_normal(shape), random().standard_normal(shape) + 1
    found = loss_of(identity(", ".join(map(str, shape))), {"x": output, "target": target}, "mse")
    assert found == pytest.approx(np.square(output - target).mean(), rel=1e-12)


def test_an_output_that_is_the_loss() -> None:
    x = random().standard_normal((4, 3)).astype(np.float32)
    assert loss_of(SEVERAL, {"x": x}, "output:mean") == pytest.approx(x.mean(), rel=1e-6)


def test_another_output_by_name() -> None:
    x, target = (random().standard_normal((4, 3)).astype(np.float32) for _ in range(2))
    found = loss_of(SEVERAL, {"x": x, "target": target}, "mse", output="b")
    assert found == pytest.approx(np.square(-x - target).mean(), rel=1e-6)


def test_losses_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    scores, target = random().standard_normal((2, 5, 3)), random().integers(0, 5, (2, 3))
    for smoothing in (0.0, 0.2):
        wanted = torch.nn.functional.cross_entropy(
            torch.tensor(scores), torch.tensor(target), ignore_index=1, label_smoothing=smoothing
        )
        found = loss_of(
            identity("2, 5, 3"),
            {"x": scores, "target": target},
            class_axis=1,
            ignore_index=1,
            label_smoothing=smoothing,
        )
        assert found == pytest.approx(float(wanted), rel=1e-12)
