from irpar import models
from irpar.analysis.memory.arena import arena_bytes
from irpar.analysis.memory.liveness import peak
from irpar.analysis.memory.offsets.lifetimes import ALIGNMENT
from irpar.analysis.memory.scratch import needed_bytes
from irpar.ir.text.files import parse_module
from irpar.onnx_io import to_module


def test_a_chain_needs_what_it_holds_at_most():
    graph = parse_module(
        """
        graph @g(%x: f32[1024]) -> (%c) opset 21 {
          %a = Relu(%x) : f32[1024]
          %b = Neg(%a) : f32[1024]
          %c = Exp(%b) : f32[1024]
        }
        """
    ).graph
    assert arena_bytes(graph) == peak(graph).activation_bytes == 2 * 4096


def test_a_started_collective_holds_its_operand_until_the_wait():
    graph = parse_module(
        """
        mesh @m = ["x"=2]
        graph local @g(%x: f32[1024]) -> (%c) opset 21 ranks [0, 1] {
          %a = Relu(%x) : f32[1024]
          %s = irpar.AllReduceStart(%a) {axes = ["x"], id = 0, reduce = "sum"} : inflight<f32[1024]>
          %b = Neg(%x) : f32[1024]
          %r = irpar.Wait(%s) : f32[1024]
          %c = Add(%b, %r) : f32[1024]
        }
        """
    ).graph
    # At Wait: a, whose numbers may still be under way, b and r.
    assert peak(graph).activation_bytes == 3 * 4096
    assert arena_bytes(graph) == 3 * 4096


def test_arenas_of_all_families_are_about_as_large_as_what_is_held():
    for family in models.FAMILIES:
        graph = to_module(models.build(family)).graph
        assert arena_bytes(graph) <= 1.2 * peak(graph).activation_bytes + 64 * ALIGNMENT


def test_a_node_that_no_kernel_can_run_needs_nothing_beside_its_results():
    """A hostile model gives a graph where a number belongs: it is refused where it is run."""
    graph = parse_module(
        """
        graph @g(%x: f32[32, 32]) -> (%y) opset 21 {
          %y = PRelu(%x, %x) {slopes=graph @none() -> () { }} : f32[32, 32]
        }
        """
    ).graph
    assert [needed_bytes(node) for node in graph] == [0]


def test_what_was_copied_lies_as_kernels_want_it():
    """Neither the whole table nor a copy of it is scratch of a look-up."""
    graph = parse_module(
        """
        mesh @m = ["d"=1]
        graph local @g(%ids: i64[4] of [4]) -> (%a, %b) opset 21 ranks [0] {
          %t = constant : f32[1000, 64] of [1000, 64] in host data("t", 0, 256000)
          %c = irpar.Copy(%t) {to="device", id=0} : f32[1000, 64] of [1000, 64]
          %a = Gather(%c, %ids) : f32[4, 64] of [4, 64]
          %s = irpar.CopyStart(%t) {to="device", id=1} : inflight<f32[1000, 64]> of [1000, 64]
          %w = irpar.Wait(%s) {id=1} : f32[1000, 64] of [1000, 64]
          %b = Gather(%w, %ids) : f32[4, 64] of [4, 64]
        }
        """
    ).graph
    assert all(needed_bytes(node) < 4 * 64 * 4 * 4 for node in graph)
