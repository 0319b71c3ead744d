"""Elementwise kernels that go through what a Transpose turns in the order in which it lies: golden texts, and numbers."""

import numpy as np
import pytest

from irpar.analysis.kernel_fusion import Stretch, fuse, stand_ins
from irpar.ir import Module, print_module
from irpar.runtime.executor import Executor
from irpar.sharding import Mesh
from tests.passes.fuse_kernels.texts import computed
from tests.runtime.programs import module

TEXT = """
    graph @g(%x: f16[2, 3, 5], %c: f32[1]) -> (%y) opset 18 {
      %t = Transpose(%x) {perm=PERM} : f16[SHAPE]
      %w = Cast(%t) {to=1} : f32[SHAPE]
      %e = Mul(%w, OTHER) : f32[SHAPE]
      %axes = constant : i64[1] [1]
      %y = ReduceSum(%e, %axes) {keepdims=1} : f32[2, 1, 3]
    }
"""


def written(perm: str = "[0, 2, 1]", shape: str = "2, 5, 3", other: str = "%c") -> Module:
    return module(TEXT.replace("PERM", perm).replace("SHAPE", shape).replace("OTHER", other))


def fused(made: Module) -> list[str]:
    """The nodes of a graph as they are then, without their expressions."""
    fuse(made.graph)
    lines = print_module(made).text.splitlines()
    nodes = [line.strip() for line in lines if " = " in line and " = constant" not in line]
    return [line.partition(" {expression")[0].partition(" : ")[0] for line in nodes]


def test_the_transpose_goes_behind() -> None:
    assert fused(written()) == [
        "%t = Transpose(%x) {perm=[0, 2, 1]}",
        "%e_in_order = irpar.Fused(%x, %c)",
        "%e = Transpose(%e_in_order) {perm=[0, 2, 1]}",
        "%y = ReduceSum(%e, %axes) {keepdims=1}",
    ]


@pytest.mark.parametrize("other", ["%w", "%c"])
def test_numbers_are_the_same(other: str) -> None:
    inputs = {"x": np.random.default_rng(3).normal(size=(2, 3, 5)).astype(np.float16), "c": np.float32([1.5])}
    found = []
    for is_fused in (False, True):
        made = written(other=other)
        if is_fused:
            assert "%e_in_order" in fused(made)[1]
        with Executor(made, Mesh({"x": 1}), engine="numpy") as executor:
            found.append(executor.run(inputs)["y"])
    np.testing.assert_array_equal(*found)


def test_a_last_dim_that_stays_is_read_as_it_lies() -> None:
    text = TEXT.replace("[2, 3, 5]", "[3, 2, 5]").replace("ReduceSum(%e, %axes) {keepdims=1} : f32[2, 1, 3]", "Y")
    text = text.replace("PERM", "[1, 0, 2]").replace("SHAPE", "2, 3, 5").replace("OTHER", "%c")
    made = module(text.replace("Y", "ReduceSum(%e, %axes) {keepdims=1} : f32[2, 1, 5]"))
    assert fused(made)[1] == "%e = irpar.Fused(%t, %c)"


def test_another_operand_that_is_no_scalar() -> None:
    text = TEXT.replace("%c: f32[1]", "%c: f32[5, 1]").replace("PERM", "[0, 2, 1]").replace("SHAPE", "2, 5, 3")
    assert fused(module(text.replace("OTHER", "%c")))[1] == "%e = irpar.Fused(%t, %c)"


def test_a_transpose_of_a_product_that_is_made_turned() -> None:
    made = module(
        """
        graph @g(%a: f32[64, 32], %b: f32[32, 48], %c: f32[64, 16]) -> (%y) opset 18 {
          %m = MatMul(%a, %b) : f32[64, 48]
          %t = Transpose(%m) {perm=[1, 0]} : f32[48, 64]
          %e = Tanh(%t) : f32[48, 64]
          %s = Abs(%e) : f32[48, 64]
          %y = MatMul(%s, %c) : f32[48, 16]
        }
        """
    )
    nodes = stand_ins(Stretch([*made.graph], {*made.graph.outputs}))
    assert [node.op_type for node in nodes] == ["Transpose", "Transpose", "MatMul", "Fused", "MatMul"]
    random = np.random.default_rng(4)
    inputs = [random.normal(size=value.shape).astype(np.float32) for value in made.graph.inputs]
    for found, right in zip(computed(made, inputs, nodes), computed(made, inputs), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4)
