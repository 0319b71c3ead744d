"""What kernels compute again of fewer bytes rather than read what others would have to write."""

import numpy as np

from irpar.analysis.kernel_fusion import Stretch, stand_ins
from irpar.ir import Module, Node, Value, parse_module
from irpar.passes.infer_types import InferTypes
from tests.passes.fuse_kernels.texts import computed

WIDENED = """
    graph @g(%x: f16[64, 32], %w: f16[32, 48], %b: f16[48], %g: f16[48], %dy: f32[64, 48]) -> (%y, %dx, %gn) opset 21 {
        %p = MatMul(%x, %w) {| phase=forward} : ?
        %h = Add(%p, %b) {| phase=forward} : ?
        %f = Cast(%h) {to=1 | phase=forward} : ?
        %gf = Cast(%g) {to=1 | phase=forward} : ?
        %t = Tanh(%f) {| phase=forward} : ?
        %z = Mul(%t, %gf) {| phase=forward} : ?
        %y = Cast(%z) {to=10 | phase=forward} : ?
        %d = Mul(%dy, %f) {| phase=backward} : ?
        %dx = Mul(%d, %gf) {| phase=backward} : ?
        %gn = Exp(%WRITTEN) {| phase=optimizer} : ?
    }
"""


def kernels(of: str, text: str = WIDENED) -> tuple[Module, list[Node]]:
    """A program whose last node reads a value, and writes over the state %g what it makes."""
    module = parse_module(text.replace("WRITTEN", of))
    InferTypes().run(module)
    graph = module.graph
    over: dict[Value, Value] = {graph.outputs[2]: graph.inputs[3]} if of != "b" else {}
    return module, stand_ins(Stretch(list(graph), set(graph.outputs), over))


def read(node: Node) -> set[str]:
    return {value.name for value in node.inputs}


def test_kernels_read_what_is_narrower() -> None:
    module, nodes = kernels("b")
    assert [node.op_type for node in nodes] == ["MatMul", "Fused", "Fused", "Fused"]
    forward, backward = nodes[1:3]
    assert [value.name for value in forward.results] == ["y"], "and the product stays one that others read"
    assert (read(forward), read(backward)) == ({"p", "b", "g"}, {"p", "b", "g", "dy"})
    random = np.random.default_rng(0)
    inputs = [random.standard_normal(value.shape).astype(value.dtype.numpy) for value in module.graph.inputs]
    for found, right in zip(computed(module, inputs, nodes), computed(module, inputs), strict=True):
        np.testing.assert_allclose(found.astype(np.float64), right.astype(np.float64), rtol=1e-2, atol=1e-2)


def test_what_takes_longer_than_reading_is_read() -> None:
    _, nodes = kernels(
        "b", WIDENED.replace("%f = Cast(%h) {to=1", "%e = Exp(%h) {| phase=forward} : ?\n        %f = Cast(%e) {to=1")
    )
    assert read(nodes[2]) == {"f", "g", "dy"}


def test_a_state_is_read_again_only_before_it_is_written_over() -> None:
    _, nodes = kernels("g")
    backward = next(node for node in nodes if "dx" in {value.name for value in node.results})
    assert read(backward) == {"p", "b", "gf", "dy"}
    _, nodes = kernels("dx")
    assert [node.op_type for node in nodes] == ["MatMul", "Fused", "Fused", "Fused"]
    assert read(nodes[2]) == {"p", "b", "g", "dy"}, "what is written over it is made of what this kernel gives"


def test_kernels_follow_what_they_read_again() -> None:
    """The kernel of %g comes late by itself, for it gives %q too, and nothing is left of the Cast between the two."""
    module = parse_module("""
        graph @g(%x: f16[48], %dy: f32[64, 48]) -> (%dx, %q) opset 21 {
            %g = Neg(%x) {| phase=forward} : ?
            %gf = Cast(%g) {to=1 | phase=backward} : ?
            %dx = Mul(%dy, %gf) {| phase=optimizer} : ?
            %q = Exp(%g) {| phase=forward} : ?
        }
    """)
    InferTypes().run(module)
    nodes = stand_ins(Stretch(list(module.graph), set(module.graph.outputs)))
    assert [{value.name for value in node.results} for node in nodes] == [{"g", "q"}, {"dx"}]
    assert read(nodes[1]) == {"dy", "g"}
