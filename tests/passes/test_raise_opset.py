"""raise-opset: nodes of opsets 13 to 17 said in opset 18; refusals; the same numbers."""

import numpy as np
import pytest

from irpar.ir.text.files import parse_module
from irpar.passes.raise_opset import RaiseOpset
from irpar.sharding import IrparError


def test_axes_become_operands_and_splits_say_how_many(check_golden):
    check_golden(
        "raise-opset",
        """
        graph @g(%x: f32[4, 6]) -> (%y, %a) opset 13 {
          %m = ReduceMax(%x) {axes=[1], keepdims=0} : f32[4]
          %s = ReduceSum(%x) {keepdims=0} : f32[]
          %p = ReduceProd(%x) : f32[1, 1]
          %a, %b = Split(%x) {axis=1} : f32[4, 3], f32[4, 3]
          %y = Add(%m, %s) : f32[4]
        }
        """,
        """
        graph @g(%x: f32[4, 6]) -> (%y, %a) opset 18 {
          %m_axes = constant : i64[1] [1]
          %m = ReduceMax(%x, %m_axes) {keepdims=0} : f32[4]
          %s = ReduceSum(%x) {keepdims=0} : f32[]
          %p = ReduceProd(%x) : f32[1, 1]
          %a, %b = Split(%x) {axis=1, num_outputs=2} : f32[4, 3], f32[4, 3]
          %y = Add(%m, %s) : f32[4]
        }
        """,
    )


def test_a_newer_graph_stays():
    module = parse_module("graph @g(%x: f32[4]) -> (%y) opset 20 {\n  %y = Relu(%x) : f32[4]\n}\n")
    assert not RaiseOpset().run(module).changed
    assert module.opsets[""] == 20


def test_bodies_are_raised_too(check_numbers):
    module = check_numbers(
        """
        <ir_version: 8, opset_import: ["" : 13]>
        g (float[3, 4] x, bool c) => (float[3] y) {
          y = If (c) <
            then_branch = t () => (float[3] t1) { t1 = ReduceMean <axes = [1], keepdims = 0> (x) },
            else_branch = e () => (float[3] e1) { e1 = ReduceMax <axes = [1], keepdims = 0> (x) }>
        }
        """,
        "raise-opset",
        {"x": np.arange(12, dtype=np.float32).reshape(3, 4), "c": np.array(True)},
    )
    assert {node.version for node in module.graph.walk()} == {18}


def test_saved_statistics_that_are_read_are_refused():
    module = parse_module(
        """
        graph @g(%x: f32[2, 3], %s: f32[3]) -> (%y, %m) opset 13 {
          %y, %m = BatchNormalization(%x, %s, %s, %s, %s) : f32[2, 3], f32[3]
        }
        """
    )
    with pytest.raises(IrparError, match="mean and variance are read"):
        RaiseOpset().run(module)
