"""Sizes that models compute from other sizes, as the exporters write them: types know them, gradients too."""

import numpy as np
import pytest

from irpar.ir import Module
from irpar.ir.text.files import parse_module
from irpar.ops.listed_sizes import listed_sizes
from irpar.passes.fold_constants import FoldConstants
from irpar.passes.infer_types import InferTypes
from tests.ops.gradients.proof import check_module

CONSTANTS = """
  %zero = constant : i64[] 0
  %two = constant : i64[] 2
  %front = constant : i64[1] [0]
  %one = constant : i64[1] [1]
  %last = constant : i64[1] [2]
  %eight = constant : i64[1] [8]
  %fours = constant : i64[2] [4, 4]
  %open = constant : i64[1] [-1]
"""
SIZES = """
  %s = Shape(%x) : i64[3]
  %b = Gather(%s, %zero) : i64[]
  %h = Gather(%s, %two) : i64[]
  %batch = Unsqueeze(%b, %front) : i64[1]
  %width = Unsqueeze(%h, %front) : i64[1]
"""


def module_of(lines: str, x: str = "f64[batch, seq, 16]") -> Module:
    """A module that computes `%y` from `%x`."""
    typed = "".join(f"{line}\n" if " : " in line else f"{line} : ?\n" for line in lines.splitlines())
    module = parse_module(f"graph @g(%x: {x}) -> (%y) opset 21 {{{CONSTANTS}{SIZES}{typed}}}")
    InferTypes().run(module)
    return module


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("%t = Concat(%batch, %open, %fours) {axis=0}\n %y = Reshape(%x, %t)", "f64[batch, seq, 4, 4]"),
        (
            "%r = Slice(%s, %front, %last)\n %t = Concat(%r, %fours) {axis=0}\n %y = Reshape(%x, %t)",
            "f64[batch, seq, 4, 4]",
        ),
        ("%q = Div(%width, %eight)\n %t = Concat(%open, %q) {axis=0}\n %y = Reshape(%x, %t)", "f64[8*batch*seq, 2]"),
        ("%t = Concat(%batch, %eight) {axis=0}\n %y = ConstantOfShape(%t)", "f32[batch, 8]"),
        ("%y = Range(%zero, %b, %two)", "i64[_]"),
        ("%first = Squeeze(%one, %front)\n %y = Range(%zero, %b, %first)", "i64[batch]"),
        ("%t = Concat(%batch, %one, %one) {axis=0}\n %y = Tile(%x, %t)", "f64[batch*batch, seq, 16]"),
        ("%t = Concat(%batch, %one, %width) {axis=0}\n %y = Expand(%x, %t)", "f64[batch, seq, 16]"),
        # What Tensor.expand becomes: -1 is a dim that stays, written as 1.
        (
            "%n = ConstantOfShape(%one) {value=tensor(i64[1] [-1])}\n %k = Equal(%batch, %n)\n"
            " %w = Where(%k, %one, %batch)\n %t = Concat(%w, %fours) {axis=0}\n %y = ConstantOfShape(%t)",
            "f32[batch, 4, 4]",
        ),
        ("%d = Sub(%batch, %one)\n %t = Concat(%d, %open) {axis=0}\n %y = Reshape(%x, %t)", "f64[_, _]"),
    ],
)
def test_types_know_what_sizes_are_computed(lines: str, expected: str) -> None:
    assert str(module_of(lines).graph.value("y").type) == expected


def test_a_list_of_which_all_is_known_is_a_constant() -> None:
    module = module_of("%t = Concat(%width, %eight) {axis=0}\n %y = Identity(%t)")
    FoldConstants().run(module)
    (output,) = module.graph.outputs
    assert output.data is not None
    assert output.data.numpy().tolist() == [16, 8]


def test_sizes_that_depend_on_numbers_are_not_known() -> None:
    module = module_of("%k = NonZero(%x)\n %t = Shape(%k)\n %u = Gather(%t, %one)\n %y = Concat(%batch, %u) {axis=0}")
    found = listed_sizes(module.graph.value("y"))
    assert found is not None
    assert str(found[0]) == "batch"
    assert found[1] is None


@pytest.mark.parametrize(
    "lines",
    [
        "%t = Concat(%batch, %one, %one) {axis=0}\n %y = Tile(%x, %t)",
        "%p = Unsqueeze(%x, %front)\n %t = Concat(%one, %batch, %fours) {axis=0}\n"
        ' %y = Resize(%p, _, _, %t) {mode="linear"}',
    ],
    ids=["Tile", "Resize"],
)
def test_gradients_of_computed_sizes(lines: str) -> None:
    module = module_of(lines, "f64[batch, 3, 5]")
    check_module(module, {"x": np.random.default_rng(0).standard_normal((2, 3, 5))}, ["x"])
