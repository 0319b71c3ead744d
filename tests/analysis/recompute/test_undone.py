"""A program without what recompute repeats."""

import pytest

import irpar
from irpar.analysis.memory.liveness import held_bytes
from irpar.analysis.recompute.undone import without_repetitions
from irpar.ir import parse_module
from irpar.ops.recomputed import is_recomputed
from irpar.pass_manager import PassManager
from irpar.passes.recompute import Recompute
from tests.passes.test_recompute import STEP
from tests.training.programs import with_weights

NORM = """
graph @g(%x: f32[8, 16], %w: f32[16] from "w", %b: f32[16] from "b", %v: f32[16, 16] from "v") -> (%y) opset 21 {
  %n = LayerNormalization(%x, %w, %b) {axis=-1} : f32[8, 16] scope "norm"
  %t = Tanh(%n) : f32[8, 16] scope "act"
  %y = MatMul(%t, %v) : f32[8, 16] scope "fc"
}
"""


def test_collectives_and_views_that_run_again_are_one() -> None:
    module = parse_module(STEP)
    nodes, before = len(module.graph), [nbytes for _, nbytes in held_bytes(module.graph)]
    assert Recompute(("*",)).run(module).changed
    assert [nbytes for _, nbytes in held_bytes(module.graph)] != before
    made, count = without_repetitions(module.graph)
    assert count
    assert len(made) == nodes < len(module.graph)
    assert [nbytes for _, nbytes in held_bytes(made)] == before
    assert not any(map(is_recomputed, made))
    assert any(map(is_recomputed, module.graph))


@pytest.mark.parametrize("match", ["norm", "*"])
def test_results_that_only_the_repetition_has_are_there_again(match: str) -> None:
    step = irpar.train_step(with_weights(NORM), loss="mse", optimizer="sgd")
    plain = irpar.partition(step, "d=1").module
    assert plain is not None
    again = irpar.partition(step, "d=1").module
    assert again is not None
    PassManager([Recompute((match,))]).run(again)
    made, count = without_repetitions(again.graph)
    assert count
    assert [nbytes for _, nbytes in held_bytes(made)] == [nbytes for _, nbytes in held_bytes(plain.graph)]


def test_a_program_that_computes_nothing_again_stays() -> None:
    module = parse_module(STEP)
    made, count = without_repetitions(module.graph)
    assert count == 0
    assert [node.label for node in made] == [node.label for node in module.graph]
