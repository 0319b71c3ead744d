"""Sums of columns take what is summed up, and what is made of the sums; those of what one kernel makes are one kernel."""

import numpy as np

from irpar.analysis.kernel_fusion import Stretch, stand_ins
from irpar.ir import Module, Node, parse_module
from irpar.passes.infer_types import InferTypes
from tests.passes.fuse_kernels.texts import computed

GRADIENTS = """
    graph @g(%d: f16[2, 8, 48], %x: f16[2, 8, 48], %m: f32[2, 8, 1], %e: f16[2, 8, 48]) -> (%g, %b, %dx, %other) opset 21 {
        %axes = constant : i64[2] [0, 1]
        %w = Cast(%d) {to=1} : ?
        %f = Cast(%x) {to=1} : ?
        %c = Sub(%f, %m) : ?
        %p = Mul(%w, %c) : ?
        %last = constant : i64[1] [-1]
        %r = ReduceMean(%p, %last) {keepdims=1} : ?
        %q = Sub(%w, %r) : ?
        %dx = Cast(%q) {to=10} : ?
        %gs = ReduceSum(%p, %axes) {keepdims=0} : ?
        %g = Cast(%gs) {to=10} : ?
        %bs = ReduceSum(%w, %axes) {keepdims=0} : ?
        %b = Cast(%bs) {to=10} : ?
        %other = ReduceSum(%e, %axes) {keepdims=1} : ?
    }
"""


def summed(text: str) -> tuple[Module, list[Node]]:
    module = parse_module(text)
    InferTypes().run(module)
    return module, stand_ins(Stretch(list(module.graph), set(module.graph.outputs)))


def test_gradients_of_a_normalisation_are_two_kernels() -> None:
    module, nodes = summed(GRADIENTS)
    kernels = {tuple(value.name for value in node.results): node for node in nodes}
    assert set(kernels) == {("dx",), ("g", "b"), ("other",)}
    assert {value.name for value in kernels["g", "b"].inputs} == {"d", "x", "m"}
    random = np.random.default_rng(0)
    inputs = [random.standard_normal(value.shape).astype(value.dtype.numpy) for value in module.graph.inputs]
    for found, right in zip(computed(module, inputs, nodes), computed(module, inputs), strict=True):
        assert (found.dtype, found.shape) == (right.dtype, right.shape)
        np.testing.assert_allclose(found.astype(np.float64), right.astype(np.float64), rtol=4e-3, atol=4e-3)


def test_numbers_of_rows_are_given_to_sums() -> None:
    """The root mean square of a row, rather than what it divides."""
    text = GRADIENTS.replace("%c = Sub(%f, %m)", "%c = Div(%f, %root)").replace(
        "%f = Cast",
        "%s = Mul(%x32, %x32) : ?\n        %ms = ReduceMean(%s, %last) {keepdims=1} : ?\n        "
        "%root = Sqrt(%ms) : ?\n        %f = Cast",
    )
    text = text.replace("%last = constant : i64[1] [-1]\n        ", "").replace(
        "%w = Cast", "%last = constant : i64[1] [-1]\n        %x32 = Cast(%x) {to=1} : ?\n        %w = Cast"
    )
    module, nodes = summed(text)
    sums = next(node for node in nodes if "g" in {value.name for value in node.results})
    assert {value.name for value in sums.inputs} == {"d", "x", "root"}
    random = np.random.default_rng(0)
    inputs = [random.standard_normal(value.shape).astype(value.dtype.numpy) for value in module.graph.inputs]
    for found, right in zip(computed(module, inputs, nodes), computed(module, inputs), strict=True):
        np.testing.assert_allclose(found.astype(np.float64), right.astype(np.float64), rtol=4e-3, atol=4e-3)


def test_few_columns_and_sums_of_middle_dims_stay() -> None:
    for old, new in (("48]", "8]"), ("[0, 1]\n", "[1, 0]\n"), ("i64[2] [0, 1]", "i64[1] [1]")):
        _, nodes = summed(GRADIENTS.replace(old, new))
        is_plain = "ReduceSum" in {node.op_type for node in nodes}
        assert is_plain == (old != "[0, 1]\n"), new
