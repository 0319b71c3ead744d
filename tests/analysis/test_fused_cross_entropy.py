"""Cross-entropy with its gradient, and products that are read transposed: what takes their place, and the same numbers."""

import numpy as np
import pytest

from irpar.analysis.kernel_fusion import Stretch, stand_ins
from irpar.ir import Module, Node, parse_module
from irpar.passes.fold_constants import FoldConstants
from irpar.passes.infer_types import InferTypes

from .test_fused_attention import numbers

TRAINED = """
    graph @g(%x: f16[2, 3, 16], %w: f16[16, 259], %t: i64[2, 3], %each: f32[2, 1, 3]) -> (%loss, %dx, %dw) opset 18 {
        %depth = constant : i64[] 259
        %ends = constant : f32[2] [0.0, 1.0]
        %rows = constant : i64[2] [6, 16]
        %long = constant : i64[2] [6, 259]
        %s = MatMul(%x, %w) : ?
        %st = Transpose(%s) {perm=[0, 2, 1]} : ?
        %wide = Cast(%st) {to=1} : ?
        %loss, %logs = SoftmaxCrossEntropyLoss(%wide, %t) {ignore_index=5} : ?, ?
        %e = Exp(%logs) : ?
        %hot = OneHot(%t, %depth, %ends) {axis=1} : ?
        %d = Sub(%e, %hot) : ?
        %m = Mul(%d, %each) : ?
        %small = Cast(%m) {to=10} : ?
        %ds = Transpose(%small) {perm=[0, 2, 1]} : ?
        %wt = Transpose(%w) {perm=[1, 0]} : ?
        %dx = MatMul(%ds, %wt) : ?
        %xr = Reshape(%x, %rows) : ?
        %xt = Transpose(%xr) {perm=[1, 0]} : ?
        %dr = Reshape(%ds, %long) : ?
        %dwt = MatMul(%xt, %dr) : ?
        %dw = Transpose(%dwt) {perm=[1, 0]} : ?
    }
"""
PLAIN = """
    graph @g(%s: f32[6, 9], %t: i32[6], %each: f32[6, 1], %weight: f32[9]) -> (%loss, %m) opset 18 {
        %depth = constant : i64[] 9
        %ends = constant : f32[2] [0.0, 1.0]
        %loss, %logs = SoftmaxCrossEntropyLoss(%s, %t, %weight) {reduction="none"} : ?, ?
        %e = Exp(%logs) : ?
        %hot = OneHot(%t, %depth, %ends) {axis=1} : ?
        %d = Sub(%e, %hot) : ?
        %m = Mul(%each, %d) : ?
    }
"""


def trained(text: str) -> tuple[Module, list[Node]]:
    module = parse_module(text)
    for pass_ in (InferTypes(), FoldConstants(), InferTypes()):
        pass_.run(module)
    return module, stand_ins(Stretch(list(module.graph), set(module.graph.outputs)))


def check_numbers(module: Module, nodes: list[Node]) -> None:
    """The same as of the nodes one by one."""
    rng = np.random.default_rng(3)
    inputs = {}
    for value in module.graph.inputs:
        is_label = value.dtype.is_integer
        drawn = rng.integers(0, 9, value.shape) if is_label else rng.standard_normal(value.shape)
        inputs[value] = drawn.astype(value.dtype.numpy)
    plain = numbers(module, list(module.graph), inputs)
    for found, right in zip(numbers(module, nodes, inputs), plain, strict=True):
        assert (found.dtype, found.shape) == (right.dtype, right.shape)
        bound = 1e-5 if right.dtype == np.float32 else 4e-3
        np.testing.assert_allclose(found.astype(np.float64), right.astype(np.float64), rtol=bound, atol=bound)


def test_scores_are_read_once_in_each_direction_in_rows_at_even_places() -> None:
    module, nodes = trained(TRAINED)
    assert [node.op_type for node in nodes if node.op_type not in ("Reshape", "Transpose")] == [
        *("FusedMatMul", "Slice", "CrossEntropyForward", "CrossEntropyGradient", "Slice", "MatMul", "MatMul"),
    ]
    gradient = next(node for node in nodes if node.op_type == "CrossEntropyGradient")
    assert gradient.result.shape == (2, 3, 264)
    assert nodes[-1].op_type == "MatMul"
    assert nodes[-1].result is module.graph.outputs[-1]
    check_numbers(module, nodes)


def test_scores_that_are_wide_and_read_elsewhere_stay_as_they_are() -> None:
    module, nodes = trained(PLAIN)
    assert [node.op_type for node in nodes] == ["CrossEntropyForward", "CrossEntropyGradient"]
    check_numbers(module, nodes)
    kept, nodes = trained(TRAINED.replace("-> (%loss, %dx, %dw)", "-> (%loss, %dx, %dw, %s)"))
    assert [node.op_type for node in nodes].count("Slice") == 1
    check_numbers(kept, nodes)


def test_scores_of_a_node_with_several_results() -> None:
    text = PLAIN.replace("%s: f32[6, 9],", "%x: f32[6, 9], %scale: f32[9],").replace(
        "%loss, %logs", "%s, %mean, %inverse = LayerNormalization(%x, %scale) : ?, ?, ?\n        %loss, %logs"
    )
    module, nodes = trained(text)
    assert [node.op_type for node in nodes if "Cross" in node.op_type] == [
        "CrossEntropyForward",
        "CrossEntropyGradient",
    ]
    check_numbers(module, nodes)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Sub(%e, %hot)", "Sub(%hot, %e)"),
        ("[0.0, 1.0]", "[1.0, 0.0]"),
        ("{axis=1}", "{axis=2}"),
        ("perm=[0, 2, 1]} : ?\n        %wide", "perm=[0, 2, 1]} : ?\n        %logits = Neg(%st) : ?\n        %wide"),
        ("-> (%loss, %dx, %dw)", "-> (%loss, %dx, %dw, %logs)"),
        ("-> (%loss, %dx, %dw)", "-> (%loss, %dx, %dw, %d)"),
    ],
    ids=["another difference", "other ends", "another axis", "other scores", "logarithms are read", "slopes are read"],
)
def test_what_is_no_gradient(old: str, new: str) -> None:
    assert old in TRAINED
    text = TRAINED.replace(old, new)
    if "%logits" in text:
        text = text.replace("Cast(%st)", "Cast(%logits)")
    if "axis=2" in text:
        text = text.replace("259", "3")  # As many classes as places.
    _, nodes = trained(text)
    assert "CrossEntropyGradient" not in {node.op_type for node in nodes}


def test_a_product_that_is_read_elsewhere_is_not_turned() -> None:
    _, nodes = trained(TRAINED.replace("-> (%loss, %dx, %dw)", "-> (%loss, %dx, %dw, %dwt)"))
    assert nodes[-1].op_type == "Transpose"
