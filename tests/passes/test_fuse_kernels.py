"""fuse-kernels: what one kernel computes, in text and in numbers."""

import textwrap
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import irpar
from irpar import models
from irpar.analysis.kernel_fusion import Stretch, stand_ins
from irpar.ir import Module, Node, plain_attribute
from irpar.ir.text.files import parse_module
from irpar.kernels import lookup
from irpar.onnx_io import to_module, to_proto
from irpar.pass_manager import PassManager
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE
from irpar.verification.inputs import random_inputs
from tests.budget import budget

from .golden import read, run_pipeline

FAMILIES = ("gpt", "llama", "bert", "resnet", "vit", "moe", "t5", "unet", "dlrm")


def graph(*lines: str, takes: str = "%x: f32[64, 8], %b: f32[8]", gives: str = "%y") -> str:
    return "\n".join((f"graph @g({takes}) -> ({gives}) opset 21 {{", *(f"  {line}" for line in lines), "}", ""))


def fused(results: str, operands: str, *steps: str, types: str = "f32[64, 8]") -> str:
    listed = ", ".join(f'"{step}"' for step in steps)
    return f"{results} = irpar.Fused({operands}) {{expression=[{listed}]}} : {types}"


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


ROTARY = {
    "slices": (
        "%first = Slice(%x, %zero, %four, %last) : f32[64, 4]",
        "%second = Slice(%x, %four, %eight, %last) : f32[64, 4]",
    ),
    "split": ("%first, %second = Split(%x) {axis=-1, num_outputs=2} : f32[64, 4], f32[64, 4]",),
}


@pytest.mark.parametrize("cut", sorted(ROTARY))
def test_halves_that_are_turned_are_an_index(cut: str) -> None:
    takes = "%x: f32[64, 8], %cos: f32[64, 8], %sin: f32[64, 8]"
    ints = (
        f"%{name} = constant : i64[1] [{value}]"
        for name, value in {"zero": 0, "four": 4, "eight": 8, "last": 1}.items()
    )
    text = graph(
        *ints,
        *ROTARY[cut],
        "%negated = Neg(%second) : f32[64, 4]",
        "%turned = Concat(%negated, %first) {axis=-1} : f32[64, 8]",
        "%a = Mul(%x, %cos) : f32[64, 8]",
        "%b = Mul(%turned, %sin) : f32[64, 8]",
        "%y = Add(%a, %b) : f32[64, 8]",
        takes=takes,
    )
    module, plain = read(text), read(text)
    run_pipeline("fuse-kernels", module)
    (node,) = module.graph
    assert node.attributes["expression"] == (
        "t0 = RotateHalf(x0)",
        "t1 = Mul(x0, x1)",
        "t2 = Mul(t0, x2)",
        "y0 = Add(t1, t2)",
    )
    inputs = [np.random.default_rng(place).normal(size=(64, 8)).astype("f4") for place in range(3)]
    np.testing.assert_array_equal(computed(module, inputs)[0], computed(plain, inputs)[0])
    model = to_proto(module)
    onnx.checker.check_model(model, full_check=True)
    again = computed(to_module(model), inputs)
    np.testing.assert_array_equal(again[0], computed(plain, inputs)[0])


@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("values", [(0.0, 1.0), (-0.5, 2.0)])
def test_one_hot_rows_are_an_index(axis: int, values: tuple[float, float]) -> None:
    shape = [64, 3]
    shape.insert(axis % 3, 5)
    sizes = ", ".join(map(str, shape))
    text = graph(
        "%depth = constant : i64[] 5",
        f"%values = constant : f32[2] {list(values)}",
        f"%hot = OneHot(%i, %depth, %values) {{axis={axis}}} : f32[{sizes}]",
        f"%y = Sub(%x, %hot) : f32[{sizes}]",
        takes=f"%i: i64[64, 3], %x: f32[{sizes}]",
    )
    module, plain = read(text), read(text)
    run_pipeline("fuse-kernels", module)
    assert [node.op_type for node in module.graph] == ["Fused"]
    random = np.random.default_rng(0)
    inputs = [random.integers(-5, 5, (64, 3)), random.normal(size=shape).astype("f4")]
    np.testing.assert_allclose(computed(module, inputs)[0], computed(plain, inputs)[0], rtol=1e-6)
    model = to_proto(module)
    onnx.checker.check_model(model, full_check=True)
    np.testing.assert_allclose(computed(to_module(model), inputs)[0], computed(plain, inputs)[0], rtol=1e-6)


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


@pytest.mark.parametrize("values", [(-np.inf, 0.0), (-1e9, 1.0)])
def test_one_hot_values_that_no_step_leads_to_stay(rewritten: Any, values: tuple[float, float]) -> None:
    lines = (
        "%depth = constant : i64[] 8",
        f"%values = constant : f32[2] [{', '.join(map(repr, values))}]",
        "%hot = OneHot(%i, %depth, %values) {axis=-1} : f32[64, 8]",
        "%y = Add(%hot, %x) : f32[64, 8]",
    )
    assert "OneHot(%i" in rewritten("fuse-kernels", graph(*lines, takes="%i: i64[64], %x: f32[64, 8]"))


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
    inputs = {"x": np.random.default_rng(0).normal(size=(64, 8)).astype("f4"), "b": np.arange(8, dtype="f4")}
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


@pytest.mark.parametrize(
    ("operands", "attributes", "message"),
    [
        ("%x, %w", '{activation="relu6"}', "with the activation relu6"),
        ("%x, %w, %r", "", r"with a bias f32\[64, 8\] and a result f32\[64, 8\]"),
        ("%x, %w, %b, %w", "", r"with a residual f32\[8, 8\] and a result f32\[64, 8\]"),
    ],
)
def test_a_wrong_product_is_told(operands: str, attributes: str, message: str) -> None:
    text = graph(f"%y = irpar.FusedMatMul({operands}) {attributes} : f32[64, 8]", takes=TAKES)
    with pytest.raises(irpar.IrparError, match=message):
        PassManager.parse("infer-types").run(parse_module(text))


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


def test_training_steps_are_written_with_their_operators(tmp_path: Any) -> None:
    module = to_module(models.build("gpt", layers=1))
    step = irpar.train_step(module, loss="cross_entropy", optimizer="sgd")
    irpar.partition(step, "dp=2", pipeline=f"{DEFAULT_PIPELINE},fuse-kernels").save(tmp_path / "out")
    assert irpar.Partition.open(tmp_path / "out").executor("numpy").states


def _check_family(family: str, settings: dict[str, Any], tolerance: float) -> None:
    loaded = to_module(models.build(family, **settings))
    inputs = None
    results = []
    for pipeline in (DEFAULT_PIPELINE, f"{DEFAULT_PIPELINE},fuse-kernels"):
        partition = irpar.partition(to_module(models.build(family, **settings)), "x=1", pipeline=pipeline)
        with partition.executor("numpy") as executor:
            inputs = random_inputs(executor.inputs, loaded.graph) if inputs is None else inputs
            results.append(executor.run(inputs))
    assert partition.module is not None
    assert any(node.op_type == "Fused" for node in partition.module.graph)
    plain, made = results
    for name, array in plain.items():
        scale = np.abs(array.astype(np.float64)).max() + 1e-6
        np.testing.assert_allclose(made[name], array, rtol=tolerance, atol=tolerance * scale, err_msg=name)


def test_models_compute_the_same() -> None:
    _check_family("gpt", {}, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_families_compute_the_same(family: str) -> None:
    _check_family(family, {}, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_families_of_float16_stay_near(family: str) -> None:
    _check_family(family, {"dtype": "float16"}, 2e-2)


# -- products ---------------------------------------------------------------------------------------------------------

TAKES = "%x: f32[64, 8], %w: f32[8, 8], %b: f32[8], %r: f32[64, 8]"
PRODUCT = "%p = MatMul(%x, %w) : f32[64, 8]"
BIAS = "%h = Add(%p, %b) : f32[64, 8]"


def constants(**numbers: float) -> tuple[str, ...]:
    return tuple(f"%{name} = constant : f32[] {number!r}" for name, number in numbers.items())


GELUS = [
    ('%y = Gelu(%h) {approximate="tanh"} : f32[64, 8]',),
    (
        *constants(three=3.0, cubic=0.044715, root=0.7978845608028654, one=1.0, half=0.5),
        "%a = Pow(%h, %three) : f32[64, 8]",
        "%c = Mul(%cubic, %a) : f32[64, 8]",
        "%d = Add(%c, %h) : f32[64, 8]",
        "%e = Mul(%d, %root) : f32[64, 8]",
        "%f = Tanh(%e) : f32[64, 8]",
        "%g = Add(%f, %one) : f32[64, 8]",
        "%i = Mul(%h, %g) : f32[64, 8]",
        "%y = Mul(%i, %half) : f32[64, 8]",
    ),
]


@pytest.mark.parametrize("lines", GELUS)
def test_a_product_takes_its_bias_and_gelu_by_tanh(check_golden: Any, lines: tuple[str, ...]) -> None:
    check_golden(
        "fuse-kernels,dce",
        graph(PRODUCT, BIAS, *lines, takes=TAKES),
        graph('%y = irpar.FusedMatMul(%x, %w, %b) {activation="gelu_tanh"} : f32[64, 8]', takes=TAKES),
    )


@pytest.mark.parametrize("reads_bias", [True, False])
def test_a_product_takes_its_bias_and_residual(check_golden: Any, reads_bias: bool) -> None:
    before = (
        (PRODUCT, BIAS, "%y = Add(%r, %h) : f32[64, 8]") if reads_bias else (PRODUCT, "%y = Add(%r, %p) : f32[64, 8]")
    )
    bias = "%b" if reads_bias else "_"
    check_golden(
        "fuse-kernels",
        graph(*before, takes=TAKES),
        graph(f"%y = irpar.FusedMatMul(%x, %w, {bias}, %r) : f32[64, 8]", takes=TAKES),
    )


APART = [
    (BIAS, '%y = Gelu(%h) {approximate="none"} : f32[64, 8]'),  # The library has the other one.
    (BIAS, "%y = Relu(%h) : f32[64, 8]"),  # The library's may lose a NaN.
    (
        *constants(low=-65504.0, high=65504.0),
        BIAS,
        "%y = Clip(%h, %low, %high) : f32[64, 8]",
    ),  # Only for large numbers.
    (
        *constants(c=1e4),
        "%d = Div(%p, %c) : f32[64, 8]",
        "%t = Tanh(%d) : f32[64, 8]",
        "%m = Mul(%t, %c) : f32[64, 8]",
        "%y = Add(%m, %b) : f32[64, 8]",
    ),
    ("%y = Mul(%p, %b) : f32[64, 8]",),
    ("%y = Sub(%r, %p) : f32[64, 8]",),
    (BIAS, "%a = Exp(%p) : f32[64, 8]", "%y = MatMul(%a, %h) : f32[64, 8]"),  # The product is read twice.
    (BIAS, '%a = Gelu(%h) {approximate="tanh"} : f32[64, 8]', "%y = Add(%a, %r) : f32[64, 8]"),  # Not inside of Gelu.
]


@pytest.mark.parametrize("lines", APART)
def test_what_no_product_takes(rewritten: Any, lines: tuple[str, ...]) -> None:
    assert "FusedMatMul" not in rewritten("fuse-kernels", graph(PRODUCT, *lines, takes=TAKES))


@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize("lines", [(BIAS, GELUS[0][0]), (BIAS, "%y = Add(%r, %h) : f32[64, 8]")])
def test_products_compute_the_same_and_are_written_with_their_operators(lines: tuple[str, ...], opset: int) -> None:
    text = graph(PRODUCT, *lines, takes=TAKES)
    random = np.random.default_rng(0)
    shapes = {"x": (64, 8), "w": (8, 8), "b": (8,), "r": (64, 8)}
    inputs = {name: random.normal(size=shape).astype("f4") for name, shape in shapes.items()}
    expected = irpar.partition(parse_module(text), "x=1").run(inputs, engine="numpy")["y"]
    pipeline = f"{DEFAULT_PIPELINE},fuse-kernels"
    fused_program = irpar.partition(parse_module(text), "x=1", pipeline=pipeline)
    assert fused_program.module is not None
    assert "FusedMatMul" in {node.op_type for node in fused_program.module.graph}
    np.testing.assert_allclose(fused_program.run(inputs, engine="numpy")["y"], expected, rtol=1e-5, atol=1e-6)
    module = parse_module(text)
    PassManager.parse("fuse-kernels").run(module)
    module.opsets[""] = opset
    model = to_proto(module)
    onnx.checker.check_model(model, full_check=True)
    assert "FusedMatMul" not in {node.op_type for node in model.graph.node}
    np.testing.assert_allclose(
        irpar.partition(to_module(model), "x=1").run(inputs, engine="numpy")["y"], expected, rtol=1e-5, atol=1e-6
    )


# -- random graphs ----------------------------------------------------------------------------------------------------

SIZES = ((6, 8), (6, 1), (1, 8), (8,), (), (6, 8, 4), (6, 8, 1))
ONE = ("Tanh", "Sigmoid", "Neg", "Abs", "Relu", "Softplus", "Erf")
TWO = ("Add", "Sub", "Mul", "Max", "Min")


def random_graph(draw: Any) -> str:
    """Nodes of any of the values before them: elementwise, of rows, products, views; several results."""
    values = {
        f"v{place}": shape for place, shape in enumerate(draw(st.lists(st.sampled_from(SIZES), min_size=2, max_size=4)))
    }
    takes = ", ".join(f"%{name}: {typed(shape)}" for name, shape in values.items())
    lines = ["%axes = constant : i64[1] [-1]"]
    backward = draw(st.integers(1, 14))
    for place in range(draw(st.integers(3, 14))):
        name, kind = (
            f"t{place}",
            draw(st.sampled_from(("one", "two", "two", "softmax", "mean", "norm", "product", "turn"))),
        )
        first, shape = draw(st.sampled_from(sorted(values.items())))
        if kind == "two":
            second, other = draw(st.sampled_from(sorted(values.items())))
            if not fits(shape, other):
                continue
            made, text = np.broadcast_shapes(shape, other), f"{draw(st.sampled_from(TWO))}(%{first}, %{second})"
        elif kind == "softmax" and shape:
            made, text = shape, f"Softmax(%{first}) {{axis={draw(st.integers(-len(shape), -1))}}}"
        elif kind == "mean" and shape:
            keeps = draw(st.booleans())
            made = (*shape[:-1], 1) if keeps else shape[:-1]
            text = f"ReduceMean(%{first}, %axes) {{keepdims={int(keeps)}}}"
        elif kind == "norm" and (8,) in values.values() and shape[-1:] == (8,):
            scale = next(name for name, other in values.items() if other == (8,))
            made, text = shape, f"LayerNormalization(%{first}, %{scale}) {{axis=-1}}"
        elif kind == "product" and len(shape) == 2 and shape[1] == 8:
            made, text = (shape[0], shape[0]), f"MatMul(%{first}, %{first}_t)"
            turned = f"%{first}_t = Transpose(%{first}) : {typed(shape[::-1])}"
            lines += [turned] if turned not in lines else []
        elif kind == "turn" and len(shape) == 2:
            made, text = shape[::-1], f"Transpose(%{first})"
        else:
            made, text = shape, f"{draw(st.sampled_from(ONE))}(%{first})"
        if place >= backward:
            text = f"{text[:-1]} | phase=backward}}" if text[-1] == "}" else f"{text} {{| phase=backward}}"
        lines.append(f"%{name} = {text} : {typed(made)}")
        values[name] = made
    own = [name for name in values if name[0] == "t"] or [*values]
    gives = draw(st.lists(st.sampled_from(own), min_size=1, max_size=4, unique=True))
    return graph(*lines, takes=takes, gives=", ".join(f"%{name}" for name in gives))


def typed(shape: tuple[int, ...]) -> str:
    return f"f32[{', '.join(map(str, shape))}]"


def fits(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    try:
        np.broadcast_shapes(one, other)
    except ValueError:
        return False
    return True


@settings(max_examples=budget(300), deadline=None)
@given(st.data())
def test_random_graphs_compute_the_same(data: st.DataObject) -> None:
    text = random_graph(data.draw)
    module = read(text)
    fused_module = read(text)
    run_pipeline("fuse-kernels", fused_module)
    random = np.random.default_rng(0)
    inputs = [random.normal(size=value.shape).astype("f4") for value in module.graph.inputs]
    expected = computed(module, inputs)
    graph = module.graph
    nodes = stand_ins(Stretch(list(graph), set(graph.outputs)))
    for found in (computed(fused_module, inputs), computed(module, inputs, nodes)):
        for array, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(array, wanted, rtol=2e-4, atol=2e-5, err_msg=text)


def computed(module: Module, inputs: list[np.ndarray], nodes: Iterable[Node] | None = None) -> list[np.ndarray]:
    """Node by node, with irpar's kernels."""
    values: dict[Any, Any] = dict(zip(module.graph.inputs, inputs, strict=True))
    for value in module.graph.constants:
        assert value.data is not None
        values[value] = value.data.numpy()
    for node in module.graph if nodes is None else nodes:
        kernel = lookup(node.domain, node.op_type, node.version)
        assert kernel is not None, node
        attributes = {name: plain_attribute(value) for name, value in node.attributes.items()}
        operands = [None if operand is None else values[operand] for operand in node.operands]
        values.update(zip(node.results, kernel(np, operands, attributes, len(node.results)), strict=True))
    return [values[value] for value in module.graph.outputs]
