"""fuse-kernels: what a matrix product takes, and what it does not."""

from typing import Any

import numpy as np
import onnx
import pytest

import irpar
from irpar.ir.text.files import parse_module
from irpar.onnx_io import to_module, to_proto
from irpar.pass_manager import PassManager
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE

from .texts import graph

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


@pytest.mark.parametrize(("dtype", "root", "cubic"), [("bf16", 0.796875, 0.044677734), ("f16", 0.7978516, 0.044708252)])
def test_a_gelu_whose_constants_have_the_digits_of_the_dtype(
    check_golden: Any, dtype: str, root: float, cubic: float
) -> None:
    lines = [line.replace("0.7978845608028654", f"{root}").replace("0.044715", f"{cubic}") for line in GELUS[1]]
    before = graph(PRODUCT, BIAS, *lines, takes=TAKES)
    after = graph('%y = irpar.FusedMatMul(%x, %w, %b) {activation="gelu_tanh"} : f32[64, 8]', takes=TAKES)
    check_golden("fuse-kernels,dce", *(text.replace("f32", dtype) for text in (before, after)))


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
    (*constants(c=2e-5), "%d = Add(%p, %c) : f32[64, 8]", "%y = Add(%d, %b) : f32[64, 8]"),  # Small sums show it.
    (*constants(c=2e-5), BIAS, '%a = Gelu(%h) {approximate="tanh"} : f32[64, 8]', "%y = Add(%a, %c) : f32[64, 8]"),
]


@pytest.mark.parametrize("lines", APART)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_what_no_product_takes(rewritten: Any, lines: tuple[str, ...], dtype: str) -> None:
    text = graph(PRODUCT, *lines, takes=TAKES).replace("f32", dtype)
    assert "FusedMatMul" not in rewritten("fuse-kernels", text)


def test_a_gelu_with_fewer_digits_than_its_dtype_is_another_function(rewritten: Any) -> None:
    lines = [line.replace("0.7978845608028654", "0.796875").replace("0.044715", "0.044677734") for line in GELUS[1]]
    text = graph(PRODUCT, BIAS, *lines, takes=TAKES)
    for dtype in ("f32", "f16"):
        assert "activation" not in rewritten("fuse-kernels", text.replace("f32", dtype))


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
