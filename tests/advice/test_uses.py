"""What constants are for."""

import pytest

from irpar.advice.uses import uses_of
from irpar.ir.text.files import parse_module


def uses(text: str, name: str) -> list[str]:
    value = parse_module(text).graph.value(name)
    return [use.text(value.tensor_type.shape) for use in uses_of(value)]


GRAPH = """
graph @g(%x: f32[4, 8], %ids: i64[4]) -> (%y, %z, %e, %c) opset 18 {{
  %w = constant : f32[{shape}] data("w.bin", 0, 256)
  %image = constant : f32[1, 3, 5, 5] data("w.bin", 0, 300)
  %kernel = constant : f32[2, 3, 3, 3] data("w.bin", 0, 216)
  %t = Transpose(%w) {{perm=[1, 0]}} : f32[{turned}]
  %y = MatMul(%x, %t) : f32[4, {out}] from "/h.3/attn/q/MatMul"
  %z = Gemm(%x, %w) {{transB=1}} : f32[4, {out}] from "node_7" scope "h.3/fc"
  %e = Gather(%w, %ids) : f32[4, {width}] from "/embed/Gather"
  %c = Conv(%image, %kernel) : f32[1, 2, 3, 3] from "/conv/Conv"
}}
"""


def test_a_tied_weight_shows_all_its_uses() -> None:
    text = GRAPH.format(shape="5, 8", turned="8, 5", out=5, width=8)
    assert uses(text, "w") == [
        "B of Gemm in h.*/fc: [out 5, in 8]",
        "data of Gather /embed/Gather: [rows 5, 8]",
        "B of MatMul /h.*/attn/q/MatMul: [out 5, in 8], transposed",
    ]
    assert uses(text, "kernel") == ["W of Conv /conv/Conv: [out 2, in 3, 3, 3]"]


def test_the_exact_text_keeps_the_numbers() -> None:
    value = parse_module(GRAPH.format(shape="5, 8", turned="8, 5", out=5, width=8)).graph.value("w")
    assert uses_of(value)[-1].exact_text((5, 8)) == "B of MatMul /h.3/attn/q/MatMul: [out 5, in 8], transposed"


@pytest.mark.parametrize("name", ["x", "y"])
def test_other_values_have_uses_too(name: str) -> None:
    text = GRAPH.format(shape="5, 8", turned="8, 5", out=5, width=8)
    assert len(uses(text, name)) == {"x": 2, "y": 0}[name]
