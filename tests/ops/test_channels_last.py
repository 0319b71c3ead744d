"""Operators of images with channels last: types, what is told of wrong ones, and how they are written."""

import numpy as np
import onnx
import pytest

import irpar
from irpar.ir import Module
from irpar.ir.text.files import parse_module
from irpar.kernels.channels_last import ACTIVATIONS as COMPUTED
from irpar.onnx_io import to_module, to_proto
from irpar.ops import definition
from irpar.ops.channels_last import ACTIVATIONS
from irpar.pass_manager import PassManager

TAKES = "%x: f32[2, 6, 5, 4], %w: f32[8, 3, 3, 4], %b: f32[8], %r: f32[2, 3, 3, 8]"
WINDOWS = "kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]"


def conv(operands: str = "%x, %w, %b, %r", attributes: str = WINDOWS, takes: str = TAKES, type_: str = "?") -> Module:
    node = f"%y = irpar.ConvChannelsLast({operands}) {{{attributes}}} : {type_}"
    return parse_module(f"graph @g({takes}) -> (%y) opset 21 {{\n  {node}\n}}\n")


def test_the_type_and_the_operations() -> None:
    module = conv(attributes=f'{WINDOWS}, activation="Relu"')
    PassManager.parse("infer-types").run(module)
    (node,) = module.graph
    assert str(node.results[0].type) == "f32[2, 3, 3, 8]"
    known = definition(node)
    assert known is not None
    assert known.flops is not None
    assert known.flops(node) == 2 * 3 * 3 * 8 * (2 * 36 + 3)


def test_symbols_stay() -> None:
    module = conv("%x, %w", WINDOWS, "%x: f32[batch, 6, 5, 4], %w: f32[8, 3, 3, 4]")
    PassManager.parse("infer-types").run(module)
    assert str(module.graph.outputs[0].type) == "f32[batch, 3, 3, 8]"


@pytest.mark.parametrize(
    ("operands", "attributes", "message"),
    [
        ("%x, %w", f'{WINDOWS}, activation="Tanh"', 'with the activation "Tanh"'),
        ("%x, %w", 'auto_pad="SAME_UPPER"', "with the attribute auto_pad"),
        ("%x, %b", "", r"with an image f32\[2, 6, 5, 4\] and a kernel f32\[8\]"),
        ("%x, %w", "kernel_shape=[3, 1]", r"with kernel_shape \[3, 1\]"),
        ("%x, %w", "group=2", "with 2 groups"),
        ("%x, %w, %r", WINDOWS, r"with a bias f32\[2, 3, 3, 8\] and a result f32\[2, 3, 3, 8\]"),
        ("%x, %w, %b, %x", WINDOWS, r"with a residual f32\[2, 6, 5, 4\] and a result f32\[2, 3, 3, 8\]"),
    ],
)
def test_a_wrong_node_is_told(operands: str, attributes: str, message: str) -> None:
    with pytest.raises(irpar.IrparError, match=message):
        PassManager.parse("infer-types").run(conv(operands, attributes))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_is_written_with_onnx_operators(activation: str) -> None:
    bounds = ", max=2.0" if activation == "Clip" else ""
    module = conv(attributes=f'{WINDOWS}, activation="{activation}"{bounds}', type_="f32[2, 3, 3, 8]")
    random = np.random.default_rng(0)
    shapes = {"x": (2, 6, 5, 4), "w": (8, 3, 3, 4), "b": (8,), "r": (2, 3, 3, 8)}
    inputs = {name: random.normal(size=shape).astype("f4") for name, shape in shapes.items()}
    model = to_proto(module)
    onnx.checker.check_model(model, full_check=True)
    assert "Conv" in {node.op_type for node in model.graph.node}
    found = irpar.partition(module, "x=1").run(inputs, engine="numpy")["y"]
    expected = irpar.partition(to_module(model), "x=1").run(inputs, engine="ort")["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_what_it_names_is_computed() -> None:
    assert ACTIVATIONS.keys() == COMPUTED.keys()


POOL = "%y = irpar.PoolChannelsLast(%x) {{mode={mode}, kernel_shape=[3, 2], strides=[2, 1]{more}}} : {type}"


def pool(mode: str, more: str = "", type_: str = "?", opset: int = 21) -> Module:
    node = POOL.format(mode=f'"{mode}"', more=more, type=type_)
    return parse_module(f"graph @g(%x: f32[2, 6, 5, 4]) -> (%y) opset {opset} {{\n  {node}\n}}\n")


def test_pools_have_a_type_and_operations() -> None:
    module = pool("max", ", pads=[1, 0, 0, 1], ceil_mode=1")
    PassManager.parse("infer-types").run(module)
    (node,) = module.graph
    assert str(node.results[0].type) == "f32[2, 3, 5, 4]"
    known = definition(node)
    assert known is not None
    assert known.flops is not None
    assert known.flops(node) == 2 * 3 * 5 * 4 * 6


def test_a_wrong_pool_is_told() -> None:
    with pytest.raises(irpar.IrparError, match='with the mode "sum"'):
        PassManager.parse("infer-types").run(pool("sum"))


@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize("mode", ["max", "average"])
def test_pools_are_written_with_onnx_operators(mode: str, opset: int) -> None:
    module = pool(mode, ", pads=[1, 0, 0, 1], dilations=[1, 1]", "f32[2, 3, 5, 4]", opset)
    inputs = {"x": np.random.default_rng(0).normal(size=(2, 6, 5, 4)).astype("f4")}
    model = to_proto(module)
    onnx.checker.check_model(model, full_check=True)
    found = irpar.partition(module, "x=1").run(inputs, engine="numpy")["y"]
    expected = irpar.partition(to_module(model), "x=1").run(inputs, engine="ort")["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


NORM_TAKES = "%x: f32[2, 6, 5, 8], %s: f32[8], %b: f32[8]"


def norm(operands: str, attributes: str, type_: str = "?", opset: int = 21) -> Module:
    node = f"%y = irpar.GroupNormChannelsLast({operands}) {{{attributes}}} : {type_}"
    return parse_module(f"graph @g({NORM_TAKES}) -> (%y) opset {opset} {{\n  {node}\n}}\n")


def test_norms_have_a_type_and_operations() -> None:
    module = norm("%x, %s", 'num_groups=2, activation="Silu"')
    PassManager.parse("infer-types").run(module)
    (node,) = module.graph
    assert str(node.results[0].type) == "f32[2, 6, 5, 8]"
    known = definition(node)
    assert known is not None
    assert known.flops is not None
    assert known.flops(node) == 2 * 6 * 5 * 8 * 13


@pytest.mark.parametrize(
    ("operands", "attributes", "message"),
    [
        ("%x", "num_groups=3", r"with 3 groups of an image f32\[2, 6, 5, 8\]"),
        ("%x, %x", "num_groups=2", r"with a scale f32\[2, 6, 5, 8\]"),
        ("%x, _, %x", "num_groups=2", r"with a bias f32\[2, 6, 5, 8\]"),
        ("%x", 'num_groups=2, activation="Tanh"', 'with the activation "Tanh"'),
    ],
)
def test_a_wrong_norm_is_told(operands: str, attributes: str, message: str) -> None:
    with pytest.raises(irpar.IrparError, match=f"GroupNormChannelsLast {message}"):
        PassManager.parse("infer-types").run(norm(operands, attributes))


@pytest.mark.parametrize("opset", [18, 21])
def test_norms_are_written_with_onnx_operators(opset: int) -> None:
    module = norm("%x, %s, %b", 'num_groups=2, activation="Relu"', "f32[2, 6, 5, 8]", opset)
    random = np.random.default_rng(0)
    shapes = {"x": (2, 6, 5, 8), "s": (8,), "b": (8,)}
    inputs = {name: random.normal(size=shape).astype("f4") for name, shape in shapes.items()}
    model = to_proto(module)
    onnx.checker.check_model(model, full_check=True)
    found = irpar.partition(module, "x=1").run(inputs, engine="numpy")["y"]
    expected = irpar.partition(to_module(model), "x=1").run(inputs, engine="ort")["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
