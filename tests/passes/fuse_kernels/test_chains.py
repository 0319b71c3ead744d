"""fuse-kernels: chains and rows as one kernel, in text and in numbers."""

import textwrap
from typing import Any

import numpy as np
import onnx
import pytest

import irpar
from irpar.analysis.kernel_fusion import Stretch, stand_ins
from irpar.ir.text.files import parse_module
from irpar.onnx_io import to_module, to_proto
from irpar.pass_manager import PassManager

from .texts import computed, fused, graph


def test_chains_with_broadcasts_are_one_node(check_golden: Any) -> None:
    check_golden(
        "fuse-kernels,dce",
        graph(
            "%half = constant : f32[] 0.5",
            "%a = Add(%x, %b) : f32[64, 8]",
            "%c = Mul(%a, %half) : f32[64, 8]",
            "%y = Tanh(%c) : f32[64, 8]",
        ),
        graph(fused("%y", "%x, %b", "t0 = Add(x0, x1)", "t1 = Mul(t0, 0.5)", "y0 = Tanh(t1)")),
    )


def test_what_is_read_elsewhere_is_a_result(check_golden: Any) -> None:
    check_golden(
        "fuse-kernels",
        graph(
            "%a = Add(%x, %b) : f32[64, 8]",
            "%p = MatMul(%a, %w) : f32[64, 8]",
            "%e = Exp(%a) : f32[64, 8]",
            "%y = Mul(%p, %e) : f32[64, 8]",
            takes="%x: f32[64, 8], %b: f32[8], %w: f32[8, 8]",
        ),
        graph(
            # Mul reads what the product makes of the sum: with it the kernel would come before and after the product.
            fused("%a, %e", "%x, %b", "y0 = Add(x0, x1)", "y1 = Exp(y0)", types="f32[64, 8], f32[64, 8]"),
            "%p = MatMul(%a, %w) : f32[64, 8]",
            fused("%y", "%p, %e", "y0 = Mul(x0, x1)"),
            takes="%x: f32[64, 8], %b: f32[8], %w: f32[8, 8]",
        ),
    )


def test_a_softmax_takes_its_scale_and_its_mask(check_golden: Any) -> None:
    check_golden(
        "fuse-kernels,dce",
        graph(
            "%scale = constant : f32[] 0.125",
            "%a = Mul(%x, %scale) : f32[64, 8]",
            "%c = Add(%a, %b) : f32[64, 8]",
            "%y = Softmax(%c) {axis=-1} : f32[64, 8]",
        ),
        graph(
            fused(
                "%y",
                "%x, %b",
                "t0 = Mul(x0, 0.125)",
                "t1 = Add(t0, x1)",
                "t2 = ReduceMax(t1, axes=[-1])",
                "t3 = Sub(t1, t2)",
                "t4 = Exp(t3)",
                "t5 = ReduceSum(t4, axes=[-1])",
                "y0 = Div(t4, t5)",
            )
        ),
    )


def test_reductions_without_their_dims_are_results(check_golden: Any) -> None:
    check_golden(
        "fuse-kernels",
        graph(
            "%axes = constant : i64[1] [1]",
            "%a = Abs(%x) : f32[64, 8]",
            "%y = ReduceSum(%a, %axes) {keepdims=0} : f32[64]",
            takes="%x: f32[64, 8]",
        ),
        graph(
            "%axes = constant : i64[1] [1]",
            fused(
                "%y",
                "%x",
                "t0 = Abs(x0)",
                "t1 = ReduceSum(t0, axes=[-1])",
                "y0 = Squeeze(t1, axes=[-1])",
                types="f32[64]",
            ),
            takes="%x: f32[64, 8]",
        ),
    )


ALONE = [
    graph("%y = MatMul(%x, %b) : f32[64]"),  # no operator of expressions
    graph("%y = Add(%x, %b) : i64[64, 8]", takes="%x: i64[64, 8], %b: i64[8]"),  # integers, alone
    graph("%y = Softmax(%x) {axis=0} : f32[64, 8]"),  # not the last dim
    graph("%y = Exp(%x) : f32[n, 8]", takes="%x: f32[n, 8]"),  # a size that nobody knows
    graph("%y = Exp(%x) : f32[0, 8]", takes="%x: f32[0, 8]"),  # no elements
    graph("%s = Shape(%x) : i64[2]", "%c = Cast(%s) {to=1} : f32[2]", "%y = Sqrt(%c) : f32[2]"),  # for the host
]


@pytest.mark.parametrize("text", ALONE)
def test_what_stays(check_golden: Any, text: str) -> None:
    check_golden("fuse-kernels", text, text)


def test_nothing_moves_over_communication(rewritten: Any) -> None:
    text = rewritten(
        "fuse-kernels",
        """
        mesh @m = ["tp"=2]
        graph local @g(%x: f32[100] of [100]) -> (%y) opset 21 ranks [0, 1] {
          %a = Neg(%x) : f32[100] of [100]
          %s = irpar.AllReduce(%a) {axes=["tp"], reduce="sum", id=0} : f32[100] of [100]
          %b = Exp(%a) : f32[100] of [100]
          %y = Add(%s, %b) : f32[100] of [100]
        }
        """,
    )
    assert text.index("Neg(x0)") < text.index("AllReduce") < text.index("Exp(x0)")
    assert text.count("irpar.Fused") == 2


def test_a_block_of_one_number_is_none(rewritten: Any) -> None:
    text = rewritten(
        "fuse-kernels",
        """
        mesh @m = ["tp"=2]
        graph local @g(%x: f32[8, 8] of [8, 8]) -> (%y) opset 21 ranks [0, 1] {
          %a = constant : f32[1] of [2@tp] whole [1.0, 2.0]
          %s = Add(%x, %a) : f32[8, 8] of [8, 8]
          %y = Exp(%s) : f32[8, 8] of [8, 8]
        }
        """,
    )
    assert "Fused(%x, %a)" in text
    assert "Add(x0, x1)" in text


def test_phases_stay_apart(rewritten: Any) -> None:
    text = rewritten(
        "fuse-kernels",
        graph(
            "%a = Exp(%x) {| phase=forward} : f32[64, 8]",
            "%y = Neg(%a) {| phase=backward} : f32[64, 8]",
        ),
    )
    assert text.count("irpar.Fused") == 2


def test_cheap_steps_are_computed_again_rather_than_saved(check_golden: Any) -> None:
    """The backward kernel reads what the forward kernel reads, and dy."""
    takes = "%x: f32[64, 8], %dy: f32[64, 8]"
    check_golden(
        "fuse-kernels",
        graph(
            "%t = Tanh(%x) {| phase=forward} : f32[64, 8]",
            "%h = Exp(%t) {| phase=forward} : f32[64, 8]",
            "%p = Add(%h, %t) {| phase=forward} : f32[64, 8]",
            "%q = Mul(%t, %dy) {| phase=backward} : f32[64, 8]",
            "%y = Mul(%q, %x) {| phase=backward} : f32[64, 8]",
            takes=takes,
            gives="%p, %y",
        ),
        graph(
            '%p = irpar.Fused(%x) {expression=["t0 = Tanh(x0)", "t1 = Exp(t0)", "y0 = Add(t1, t0)"] | phase=forward} : f32[64, 8]',
            '%y = irpar.Fused(%x, %dy) {expression=["t0 = Tanh(x0)", "t1 = Mul(t0, x1)", "y0 = Mul(t1, x0)"] | phase=backward} : f32[64, 8]',
            takes=takes,
            gives="%p, %y",
        ),
    )


def test_models_are_written_with_their_operators() -> None:
    module = parse_module(
        graph(
            "%n = LayerNormalization(%x, %b) {axis=-1, epsilon=0.001} : f32[64, 8]",
            '%g = Gelu(%n) {approximate="tanh"} : f32[64, 8]',
            "%y = Softmax(%g) {axis=-1} : f32[64, 8]",
        )
    )
    _check_written(module)


def test_sums_of_columns_are_written_with_their_operators() -> None:
    module = parse_module(
        graph(
            "%axes = constant : i64[1] [0]",
            "%e = Exp(%x) : f32[64, 40]",
            "%s = ReduceSum(%e, %axes) {keepdims=0} : f32[40]",
            "%y = Add(%s, %b) : f32[40]",
            takes="%x: f32[64, 40], %b: f32[40]",
        )
    )
    _check_written(module)


def _check_written(module: irpar.Module) -> None:
    """One kernel computes a graph, and is written as what it was made of."""
    random = np.random.default_rng(0)
    inputs = {value.name: random.normal(size=value.shape).astype("f4") for value in module.graph.inputs}
    expected = irpar.partition(parse_module(str(module)), "x=1").run(inputs, engine="numpy")["y"]
    PassManager.parse("fuse-kernels").run(module)
    assert [node.op_type for node in module.graph] == ["Fused"]
    model = to_proto(module)
    onnx.checker.check_model(model, full_check=True)
    assert "Fused" not in {node.op_type for node in model.graph.node}
    found = irpar.partition(to_module(model), "x=1").run(inputs, engine="numpy")["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_wrong_expression_is_told_with_its_step() -> None:
    text = graph('%y = irpar.Fused(%x) {expression=["y0 = Foo(x0)"]} : f32[64, 8]', takes="%x: f32[64, 8]")
    with pytest.raises(irpar.IrparError) as raised:
        PassManager.parse("infer-types").run(parse_module(textwrap.dedent(text)))
    assert "there is no operator Foo" in str(raised.value)


def test_what_lost_its_reduced_dims_is_read_by_another_kernel(rewritten: Any) -> None:
    """A kernel writes such a result, and has no place in its rows to read it at."""
    text = rewritten(
        "fuse-kernels",
        graph(
            "%m = ReduceMean(%x) {keepdims=0} : f32[]",
            "%c = Sub(%x, %m) : f32[64, 8]",
            "%y = Tanh(%c) : f32[64, 8]",
            takes="%x: f32[64, 8]",
        ),
    )
    assert text.count("irpar.Fused") == 2
    assert '"y0 = Squeeze(t0, axes=[-2, -1])"' in text
    assert '["t0 = Sub(x0, x1)", "y0 = Tanh(t0)"]' in text


def test_bodies_are_written_with_their_operators() -> None:
    lines = (
        "%y = If(%flag) {then_branch=graph @then() -> (%a) {",
        "  %e = Exp(%x) : f32[64, 8]",
        "  %a = Add(%e, %b) : f32[64, 8]",
        "}, else_branch=graph @else() -> (%n) {",
        "  %n = Neg(%x) : f32[64, 8]",
        "}} : f32[64, 8]",
    )
    module = parse_module(graph(*lines, takes="%x: f32[64, 8], %b: f32[8], %flag: bool[]"))
    PassManager.parse("fuse-kernels").run(module)
    assert str(module).count("irpar.Fused") == 2
    onnx.checker.check_model(to_proto(module), full_check=True)
    assert "Fused" not in str(to_proto(module))


def test_no_kernel_waits_for_one_that_waits_for_it() -> None:
    text = graph(  # %e joins %a, which is before %n and %t: what reads both of these cannot be one with %n, which %e reads.
        "%d = constant : i64[] 64",
        "%ends = constant : f32[2] [0.0, 1.0]",
        "%h = OneHot(%ids, %d, %ends) {axis=1} : f32[64, 64]",
        "%a = Sub(%x, %h) : f32[64, 64]",
        "%t = MatMul(%a, %x) : f32[64, 64]",
        "%n = Softmax(%x) : f32[64, 64]",
        "%e = Add(%n, %a) : f32[64, 64]",
        "%m = Mul(%n, %t) : f32[64, 64]",
        takes="%x: f32[64, 64], %ids: i64[64]",
        gives="%e, %m",
    )
    module = parse_module(text)
    nodes = stand_ins(Stretch([*module.graph], {*module.graph.outputs}))
    assert [node.op_type for node in nodes] == ["Fused", "Fused", "MatMul", "Fused"]
    random = np.random.default_rng(0)
    inputs = [random.normal(size=(64, 64)).astype(np.float32), random.integers(0, 64, 64)]
    for found, right in zip(computed(module, inputs, nodes), computed(module, inputs), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)
