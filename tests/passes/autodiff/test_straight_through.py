"""Gradients through QuantizeLinear and DequantizeLinear, as if nothing were rounded."""

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import irpar
from irpar.cli import main
from irpar.ir import Module, parse_module
from irpar.onnx_io import to_proto

MODEL = """
graph @g(%x: f32[4, 6]) -> (%y) opset 21 {{
  %w = constant : f32[6] [1.0, -2.0, 0.5, 3.0, 1.5, -1.0] from "w"
  %s = constant : f32{scale}
  %z = constant : {dtype}{zero}
  %h = Mul(%x, %w) : f32[4, 6]
  %q = QuantizeLinear(%h, %s, %z){attributes} : {dtype}[4, 6]
  %d = DequantizeLinear(%q, %s, %z){attributes} : f32[4, 6]
  %y = Mul(%d, %d) : f32[4, 6]
}}
"""
ROWS = "[0.05, 0.1, 0.02, 0.03]"
BLOCKS = "[[0.05, 0.1], [0.02, 0.1], [0.07, 0.03], [0.02, 0.09]]"
CASES = {
    "all alike": ("[] 0.05", "u8", "[] 100", "", (0, 255), 0.05, 100),
    "signed": ("[] 0.02", "i8", "[] 3", "", (-128, 127), 0.02, 3),
    "rows": (f"[4] {ROWS}", "i8", "[4] [0, 1, 2, 3]", " {axis=0}", (-128, 127), None, None),
    "blocks": (f"[4, 2] {BLOCKS}", "i4", "[4, 2] [[0, 1], [0, 0], [-2, 0], [0, 1]]", " {axis=1, block_size=3}", (-8, 7), None, None),
}  # fmt: skip


def scales(name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Scale and zero point of each element."""
    scale, zero = CASES[name][5:]
    if scale is not None:
        return np.full((4, 6), scale, np.float32), np.full((4, 6), zero)
    if name == "rows":
        return np.float32(eval(ROWS))[:, None] * np.ones((4, 6), np.float32), np.arange(4)[:, None] * np.ones((4, 6))
    return np.repeat(np.float32(eval(BLOCKS)), 3, 1), np.repeat([[0, 1], [0, 0], [-2, 0], [0, 1]], 3, 1)


def module_of(name: str) -> Module:
    scale, dtype, zero, attributes, *_ = CASES[name]
    return parse_module(MODEL.format(scale=scale, dtype=dtype, zero=zero, attributes=attributes))


@pytest.mark.parametrize("name", CASES)
def test_what_is_in_range_passes_and_what_saturates_does_not(name: str) -> None:
    module = module_of(name)
    x = 2 * np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    g = np.random.default_rng(1).standard_normal((4, 6)).astype(np.float32)
    made = irpar.gradients(module, wrt=["w", "x"], keep_outputs=True, straight_through=True)
    model = to_proto(made)
    onnx.checker.check_model(model, full_check=True)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    found = dict(zip(names, session.run(None, {"x": x, "grad.y": g}), strict=True))
    w = np.float32([1.0, -2.0, 0.5, 3.0, 1.5, -1.0])
    (low, high), (scale, zero) = CASES[name][4], scales(name)
    number = np.round(x * w / scale) + zero
    inside = (number >= low) & (number <= high)
    assert 0 < inside.sum() < inside.size
    d = ((np.clip(number, low, high) - zero) * scale).astype(np.float32)
    np.testing.assert_allclose(found["y"], d * d, rtol=1e-5, atol=1e-6)
    back = np.where(inside, 2 * d * g, 0)
    np.testing.assert_allclose(found["grad.x"], back * w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["grad.w"], (back * x).sum(axis=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_it_is_sharded_as_any(name: str) -> None:
    made = irpar.gradients(module_of(name), wrt=["w", "x"], straight_through=True)
    made.shard("x", ["dp", None])
    inputs = {value.source_name: np.ones((4, 6), np.float32) for value in made.graph.inputs}
    assert irpar.partition(made, "dp=2").verify(inputs).is_equal


def test_without_the_option_nothing_flows() -> None:
    made = irpar.gradients(module_of("signed"), wrt=["w"])
    partition = irpar.partition(made, "dp=1")
    found = partition.run({value.source_name: np.ones((4, 6), np.float32) for value in made.graph.inputs})
    assert not found["grad.w"].any()


def test_the_command_has_the_option(tmp_path: Any) -> None:
    onnx.save(to_proto(module_of("signed")), tmp_path / "m.onnx")
    words = ["grad", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "g.onnx"), "--straight-through"]
    assert main(words) == 0
    nodes = [node.op_type for node in onnx.load(tmp_path / "g.onnx").graph.node]
    assert "Round" in nodes
