"""cse: equal nodes and small constants merge; what differs in anything that counts does not."""

import numpy as np
import pytest

from irpar.ir.text.files import parse_module
from irpar.passes.cse import Cse


def test_equal_nodes_and_constants_merge(check_golden):
    check_golden(
        "cse",
        """
        graph @g(%x: f32[4]) -> (%y, %z) opset 21 {
          %a = constant : f32[] 2.0
          %b = constant : f32[] 2.0
          %p = Mul(%x, %a) : f32[4] from "first"
          %q = Mul(%x, %b) : f32[4] from "second"
          %y = Exp(%p) : f32[4]
          %z = Exp(%q) : f32[4]
        }
        """,
        """
        graph @g(%x: f32[4]) -> (%y, %y as "z") opset 21 {
          %a = constant : f32[] 2.0
          %p = Mul(%x, %a) : f32[4] from "first"
          %y = Exp(%p) : f32[4]
        }
        """,
    )


def test_nested_nodes_merge_with_those_before_their_holder(check_golden):
    check_golden(
        "cse",
        """
        graph @g(%x: f32[4], %c: bool[]) -> (%y) opset 21 {
          %a = Neg(%x) : f32[4]
          %y = If(%c) {then_branch=graph @t() -> (%t) {
            %b = Neg(%x) : f32[4]
            %d = Exp(%x) : f32[4]
            %t = Add(%b, %d) : f32[4]
          }, else_branch=graph @e() -> (%e) {
            %e = Exp(%x) : f32[4]
          }} : f32[4]
        }
        """,
        """
        graph @g(%x: f32[4], %c: bool[]) -> (%y) opset 21 {
          %a = Neg(%x) : f32[4]
          %y = If(%c) {then_branch=graph @t() -> (%t) {
            %d = Exp(%x) : f32[4]
            %t = Add(%a, %d) : f32[4]
          }, else_branch=graph @e() -> (%e) {
            %e = Exp(%x) : f32[4]
          }} : f32[4]
        }
        """,
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Softmax(%x) {axis=0} : f32[2, 2]", "Softmax(%x) {axis=1} : f32[2, 2]"),
        ("Elu(%x) {alpha=0.0} : f32[2, 2]", "Elu(%x) {alpha=-0.0} : f32[2, 2]"),
        ("Sub(%x, %w) : f32[2, 2]", "Sub(%w, %x) : f32[2, 2]"),
        ("Exp(%x) {| phase=forward} : f32[2, 2]", "Exp(%x) {| phase=backward} : f32[2, 2]"),
        ("RandomNormalLike(%x) : f32[2, 2]", "RandomNormalLike(%x) : f32[2, 2]"),
        ("other.Thing(%x) : f32[2, 2]", "other.Thing(%x) : f32[2, 2]"),
    ],
)
def test_nodes_that_differ_stay(check_golden, first, second):
    text = f"""
        graph @g(%x: f32[2, 2], %w: f32[2, 2]) -> (%a, %b) opset 21, "other" 1 {{
          %a = {first}
          %b = {second}
        }}
        """
    check_golden("cse", text, text)


def test_results_that_lie_in_different_ways_stay_apart(check_golden):
    text = """
        mesh @m = ["dp"=2]
        graph @g(%x: f32[2, 2]) -> (%a, %b) opset 21 {
          %a = Exp(%x) : f32[2@dp, 2]
          %b = Exp(%x) : f32[2, 2] replicated
        }
        """
    check_golden("cse", text, text)


def test_equal_weights_stay_two_equal_indices_become_one(check_golden):
    check_golden(
        "cse",
        """
        graph @g(%x: f32[2, 2]) -> (%d) opset 21 {
          %b1 = constant : f32[2] [0.0, 0.0] from "layer.0.bias"
          %b2 = constant : f32[2] [0.0, 0.0] from "layer.1.bias"
          %s1 = constant : i64[1] [4]
          %s2 = constant : i64[1] [4]
          %a = Add(%x, %b1) : f32[2, 2]
          %b = Add(%a, %b2) : f32[2, 2]
          %c = Reshape(%b, %s1) : f32[4]
          %d = Reshape(%c, %s2) : f32[4]
        }
        """,
        """
        graph @g(%x: f32[2, 2]) -> (%d) opset 21 {
          %b1 = constant : f32[2] [0.0, 0.0] from "layer.0.bias"
          %b2 = constant : f32[2] [0.0, 0.0] from "layer.1.bias"
          %s1 = constant : i64[1] [4]
          %a = Add(%x, %b1) : f32[2, 2]
          %b = Add(%a, %b2) : f32[2, 2]
          %c = Reshape(%b, %s1) : f32[4]
          %d = Reshape(%c, %s1) : f32[4]
        }
        """,
    )


def test_no_file_is_read():
    text = """
        graph @g(%x: f32[1]) -> (%y) opset 21 {
          %a = constant : f32[1] data("is not there", 0, 4)
          %b = constant : f32[1] data("is not there", 0, 4)
          %c = Add(%a, %b) : f32[1]
          %y = Add(%x, %c) : f32[1]
        }
        """
    assert not Cse().run(parse_module(text)).changed


def test_numbers_stay_the_same(check_numbers):
    check_numbers(
        """
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[3] x) => (float[3] y, float[3] z) <float a = {2.0}, float b = {2.0}> {
          p = Mul(x, a)
          q = Mul(x, b)
          y = Exp(p)
          r = Exp(q)
          z = Add(y, r)
        }
        """,
        "cse,dce",
        {"x": np.array([1, 2, 3], np.float32)},
    )
