"""simplify-layout: pieces of a value that are joined in another order; what that sends, and its gradient."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import irpar

from .golden import check, read


def test_a_roll() -> None:
    check(
        "simplify-layout,dce",
        """
        graph @g(%x: f32[2, 8, 16]) -> (%y) opset 21 {
          %three = constant : i64[1] [3]
          %zero = constant : i64[1] [0]
          %end = constant : i64[1] [9223372036854775807]
          %one = constant : i64[1] [1]
          %a = Slice(%x, %three, %end, %one) : f32[2, 5, 16]
          %b = Slice(%x, %zero, %three, %one) : f32[2, 3, 16]
          %y = Concat(%a, %b) {axis=1} : f32[2, 8, 16] from "/roll"
        }
        """,
        """
        graph @g(%x: f32[2, 8, 16]) -> (%y) opset 21 {
          %order = constant : i64[8] [3, 4, 5, 6, 7, 0, 1, 2]
          %y = Gather(%x, %order) {axis=1} : f32[2, 8, 16] for "/roll" as "y"
        }
        """,
    )


def test_pieces_of_a_split() -> None:
    check(
        "simplify-layout,dce",
        """
        graph @g(%x: f32[8, 16]) -> (%y) opset 21 {
          %sizes = constant : i64[3] [1, 5, 2]
          %a, %b, %c = Split(%x, %sizes) {axis=0} : f32[1, 16], f32[5, 16], f32[2, 16]
          %y = Concat(%c, %a, %b) {axis=0} : f32[8, 16]
        }
        """,
        """
        graph @g(%x: f32[8, 16]) -> (%y) opset 21 {
          %order = constant : i64[8] [6, 7, 0, 1, 2, 3, 4, 5]
          %y = Gather(%x, %order) {axis=0} : f32[8, 16]
        }
        """,
    )


OTHERS = {
    "read elsewhere": ("Concat(%b, %a) {axis=1} : f32[2, 8, 16]", "Relu(%a) : f32[2, 4, 16]"),
    "in order": ("Concat(%a, %b) {axis=1} : f32[2, 8, 16]", "Relu(%y) : f32[2, 8, 16]"),
    "one twice": ("Concat(%a, %a) {axis=1} : f32[2, 8, 16]", "Relu(%b) : f32[2, 4, 16]"),
    "another dim": ("Concat(%b, %a) {axis=0} : f32[4, 4, 16]", "Relu(%y) : f32[4, 4, 16]"),
}


@pytest.mark.parametrize(("joined", "read"), OTHERS.values(), ids=OTHERS)
def test_what_is_no_roll(joined: str, read: str) -> None:
    text = f"""
        graph @g(%x: f32[2, 8, 16]) -> (%y, %z) opset 21 {{
          %a, %b = Split(%x) {{axis=1, num_outputs=2}} : f32[2, 4, 16], f32[2, 4, 16]
          %y = {joined}
          %z = {read}
        }}
        """
    check("simplify-layout", text, text)


def test_halves_of_few_elements_stay() -> None:
    """So rotations of heads are written."""
    text = """
        graph @g(%x: f32[2, 8, 16]) -> (%y) opset 21 {
          %a, %b = Split(%x) {axis=2, num_outputs=2} : f32[2, 8, 8], f32[2, 8, 8]
          %y = Concat(%b, %a) {axis=2} : f32[2, 8, 16]
        }
        """
    check("simplify-layout", text, text)


ROLLED = """<ir_version: 10, opset_import: ["" : 21]>
g (float[1, 56, 12, 16] x) => (float[1, 56, 12, 16] y)
  <int64[1] k = {3}, int64[1] z = {0}, int64[1] e = {9223372036854775807}, int64[1] one = {1}, int64[1] two = {2}> {
  r = Relu(x)
  a = Slice(r, k, e, one)
  b = Slice(r, z, k, one)
  c = Concat <axis = 1> (a, b)
  d = Slice(c, k, e, two)
  f = Slice(c, z, k, two)
  g = Concat <axis = 2> (d, f)
  y = Neg(g)
}"""


def _module(folder: Path, cut: list[Any]) -> irpar.Module:
    onnx.save(onnx.parser.parse_model(ROLLED), folder / "model.onnx")
    module = irpar.load(folder / "model.onnx")
    module.shard("x", cut)
    module.shard("y", cut)
    return module


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("dim", [1, 2])
def test_each_rank_sends_what_others_want(dim: int, ranks: int, tmp_path: Path) -> None:
    """Images whose windows are shifted by three rows, of which blocks of rows, or of columns, are on different ranks."""
    partition = irpar.partition(_module(tmp_path, ["p" if at == dim else None for at in range(4)]), {"p": ranks})
    data = np.random.default_rng(0).standard_normal((1, 56, 12, 16)).astype(np.float32)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": data})
    for engine in ("ort", "numpy"):
        np.testing.assert_array_equal(partition.run({"x": data}, engine=engine)["y"], expected)


def test_three_rows_are_sent_once(tmp_path: Path) -> None:
    partition = irpar.partition(_module(tmp_path, [None, "p", None, None]), {"p": 4})
    assert [(entry["kind"], entry["bytes"]) for entry in partition.plan.collectives] == [("permute", 3 * 12 * 16 * 4)]


def test_rows_that_are_there_in_full_are_taken_and_not_sent() -> None:
    text = """
        graph @g(%x: f32[16, 16]) -> (%z) opset 21 {
          %a, %b = Split(%x) {axis=0, num_outputs=2} : f32[8, 16], f32[8, 16]
          %y = Concat(%b, %a) {axis=0} : f32[16, 16]
          %z = Neg(%y) : f32[16, 16]
        }
        """
    module = read(text)
    module.shard("x", [None, None])
    module.shard("z", ["p", None])
    partition = irpar.partition(module, {"p": 4})
    assert partition.plan.collectives == []
    assert partition.module is not None
    (gather,) = (node for node in partition.module.graph if node.op_type == "Gather" and node.inputs[0].name == "x")
    assert gather.result.shape == (4, 16)
    data = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    np.testing.assert_array_equal(partition.run({"x": data}, engine="numpy")["z"], -np.roll(data, 8, 0))


def test_strings_stay_in_pieces() -> None:
    """ONNX Runtime's Gather takes the first string of each row alone."""
    text = """
        graph @g(%x: str[4, 16]) -> (%y) opset 21 {
          %a, %b = Split(%x) {axis=0, num_outputs=2} : str[2, 16], str[2, 16]
          %y = Concat(%b, %a) {axis=0} : str[4, 16]
        }
        """
    check("simplify-layout", text, text)


def test_what_is_made_of_nothing_is_no_piece() -> None:
    text = """
        graph @g(%x: f32[4, 16]) -> (%y) opset 21 {
          %a = RandomNormal() {shape=[4, 16]} : f32[4, 16]
          %y = Concat(%a, %x) {axis=0} : f32[8, 16]
        }
        """
    check("simplify-layout", text, text)


def test_the_gradient_is_put_back_in_order(tmp_path: Path) -> None:
    """By a Gather as well, which is sharded as this one is."""
    order = np.random.default_rng(0).permutation(24)
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    g (float[2, 24, 4] x) => (float[2, 24, 4] y) <int64[24] order = {{{", ".join(map(str, order - 24))}}}> {{
      y = Gather <axis = 1> (x, order)
    }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    module = irpar.gradients(irpar.load(tmp_path / "model.onnx"), wrt=["x"])
    assert {node.op_type for node in module.graph} == {"Gather"}
    module.shard("grad.x", [None, "p", None])
    x, seed = np.random.default_rng(1).standard_normal((2, 2, 24, 4)).astype(np.float32)
    found = irpar.partition(module, {"p": 3}).run({"x": x, "grad.y": seed}, engine="numpy")["grad.x"]
    np.testing.assert_array_equal(found[:, order], seed)
