"""What is held over the steps of a program, by value, use and scope."""

import pytest

from irpar.analysis.memory.holdings import Holding, at_step, bytes_by_step, holdings, step_of_peak
from irpar.analysis.memory.liveness import constant_bytes, held_bytes
from irpar.ir import Graph, parse_module
from tests.training.programs import classifier, on_mesh

STEP = """
mesh @m = ["dp"=2]
graph local @step(%x: f32[4] of [8@dp], state parameter %w: f32[4] of [4] replicated, state moment of "w" %m: f32[4] of [4] replicated) -> (%l as "loss", %w_1 replaces %w, %m_1 replaces %m) opset 21 ranks [0, 1] {
  %k = constant : f32[] 2.0
  %a = Mul(%x, %w) {| phase=forward} : f32[4] of [8@dp] scope "h.0/fc"
  %l = Mul(%a, %k) {| phase=forward} : f32[4] of [8@dp] scope "head"
  %d = Mul(%a, %l) {| phase=backward} : f32[4] of [4] partial(sum: dp) scope "head"
  %g = irpar.AllReduce(%d) {axes=["dp"], reduce="sum", id=0 | phase=backward} : f32[4] of [4] replicated
  %m_1 = Mul(%m, %g) {| phase=optimizer} : f32[4] of [4] replicated
  %c = Mul(%m_1, %k) {| phase=optimizer} : f32[4] of [4] replicated
  %w_1 = Sub(%w, %c) {| phase=optimizer} : f32[4] of [4] replicated
}
"""
LOOP = """
graph @g(%x: f32[4]) -> (%y) opset 21 {
  %n = constant : i64[] 3
  %y = Loop(%n, _, %x) {
    body = graph (%i: i64[], %c: bool[], %s: f32[4]) -> (%c_1, %s_1) {
      %c_1 = Identity(%c) : bool[]
      %e = Exp(%s) : f32[4] scope "h.0"
      %s_1 = Mul(%e, %s) : f32[4]
    }
  } : f32[4] scope "loop"
}
"""


def test_what_is_held_when_for_what_and_where() -> None:
    graph = parse_module(STEP).graph
    found = {one.name: one for one in holdings(graph)}
    # What is written over state has no bytes of its own, and the update belongs to its parameter's layer.
    assert found == {
        "k": Holding("k", "head", "parameters", 4, 0, 7),
        "x": Holding("x", "h.0/fc", "activations", 16, 0, 1),
        "w": Holding("w", "h.0/fc", "parameters", 16, 0, 7),
        "m": Holding("m", "h.0/fc", "optimizer", 16, 0, 7),
        "a": Holding("a", "h.0/fc", "activations", 16, 1, 3),
        "l": Holding("l", "head", "activations", 16, 2, 7),
        "d": Holding("d", "head", "buffers", 16, 3, 4),
        "g": Holding("g", "head", "gradients", 16, 4, 5),
        "c": Holding("c", "h.0/fc", "activations", 16, 6, 7),
    }
    held = bytes_by_step(found.values(), len(graph))
    assert held["activations"] == [16, 32, 32, 32, 16, 16, 32, 32]
    assert held["gradients"] == [0, 0, 0, 0, 16, 16, 0, 0]
    assert step_of_peak(graph) == 3
    assert {one.name for one in at_step(found.values(), 3)} == {"k", "w", "m", "a", "l", "d"}


def test_what_a_body_holds_is_told_by_what_is_in_it() -> None:
    graph = parse_module(LOOP).graph
    inside = [one for one in holdings(graph) if one.first == one.last == 1]
    assert {(one.name, one.scope) for one in inside} >= {("e", "h.0"), ("s", "h.0")}
    assert "loop" in {one.scope for one in inside}
    _check(graph)


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}])
def test_all_adds_up_to_what_liveness_counts(options: dict[str, int]) -> None:
    if options:
        graphs = [classifier(**options).graph]
    else:
        module = on_mesh(classifier(optimizer="adam"), "dp=2,tp=2").module
        assert module is not None
        graphs = module.graphs
    for graph in graphs:
        _check(graph)


def _check(graph: Graph) -> None:
    held = bytes_by_step(holdings(graph), len(graph))
    constants = constant_bytes(graph)
    assert [sum(column) for column in zip(*held.values(), strict=True)] == [
        constants + nbytes for _, nbytes in held_bytes(graph)
    ]
