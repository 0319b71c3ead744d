"""Groups that do the same to several tensors, which one node takes the place of; and what keeps them apart."""

from collections import Counter

import numpy as np
import pytest

from irpar.analysis.kernel_fusion import Stretch, stand_ins
from irpar.analysis.training_facts import facts_of
from irpar.ir import Node, parse_module
from irpar.runtime.executor import Executor
from irpar.runtime.program import build_program
from irpar.training.trainer import Trainer
from tests.runtime.devices import strict_device
from tests.runtime.engines.test_cupy import DeviceGroup
from tests.training.programs import batch, classifier, on_mesh

STEP = """
graph @step(%x: f32[2048], state parameter %w: f32[2048], state parameter %v: f32[16, 128], %rate: f32[]) -> (%loss, %w_1 replaces %w, %v_1 replaces %v) opset 21 {
  %y = Mul(%x, %w) {| phase=forward} : f32[2048]
  %loss = ReduceSum(%y) {keepdims=0 | phase=forward} : f32[]
  %g = Neg(%x) {| phase=backward} : f32[2048]
  %s = constant : i64[2] [16, 128]
  %h = Reshape(%g, %s) {| phase=backward} : f32[16, 128]
  %a = Mul(%g, %rate) {| phase=optimizer} : f32[2048]
  %w_1 = Sub(%w, %a) {| phase=optimizer} : f32[2048]
  %b = Mul(%h, %rate) {| phase=optimizer} : f32[16, 128]
  %v_1 = Sub(%v, %b) {| phase=optimizer} : f32[16, 128]
}
"""


def update(*changes: tuple[str, str]) -> list[Node]:
    """The nodes that run in the update."""
    text = STEP
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    segment = build_program(parse_module(text).graph, writes_over=True).segments[-1]
    return stand_ins(Stretch(segment.nodes, {*segment.outputs}, segment.over))


def test_updates_of_parameters_are_one_node() -> None:
    (node,) = update()
    assert node.identity == ("irpar", "FusedEach")
    assert node.attributes["times"] == 2
    assert tuple(node.attributes["expression"]) == ("t0 = Mul(x0, x1)", "y0 = Sub(x2, t0)")  # type: ignore[arg-type]
    assert [value.name for value in node.inputs] == ["g", "rate", "w", "h", "rate", "v"]
    assert [value.name for value in node.results] == ["w_1", "v_1"]


LATER = ("-> (%loss", "-> (%loss, %z")
LAST = "  %v_1 = Sub(%v, %b) {| phase=optimizer} : f32[16, 128]\n"


@pytest.mark.parametrize(
    "changes",
    [
        [("%v_1 = Sub(", "%v_1 = Add(")],
        [("Mul(%h, %rate)", "Mul(%h, %half)"), ("  %b =", "  %half = constant : f32[] 0.5\n  %b =")],
        [("Mul(%h, %rate)", "Mul(%h, %w_as_v)"), ("  %b =", "  %w_as_v = Reshape(%w_1, %s) {| phase=optimizer} : f32[16, 128]\n  %b =")],
        [LATER, (LAST, LAST + "  %z = Einsum(%v_1) {equation=\"ij->ji\" | phase=optimizer} : f32[128, 16]\n")],
        [("  %b = Mul(%h, %rate)", "  %c = Einsum(%h) {equation=\"ij->ij\" | phase=optimizer} : f32[16, 128]\n  %b = Mul(%c, %rate)")],
    ],
    ids=["another expression", "a number", "one reads the other", "a result is read", "it reads what is made there"],
)  # fmt: skip
def test_else_they_stay_apart(changes: list[tuple[str, str]]) -> None:
    assert "FusedEach" not in Counter(node.op_type for node in update(*changes))


@pytest.mark.parametrize("precision", ["f32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_steps_of_training_are_those_of_nodes(precision: str) -> None:
    partition = on_mesh(classifier(optimizer="adamw", precision=precision), "d=1")
    with partition.trainer(engine="numpy") as trainer:
        losses = [trainer.step(batch(number)) for number in range(4)]
        expected = trainer.read_all()
    assert partition.module is not None
    facts, mesh = facts_of(partition.module.metadata), partition.module.mesh
    assert facts is not None
    with (
        strict_device(),
        Executor(partition.module, mesh, engine="cupy", group=DeviceGroup(mesh)) as executor,
        Trainer(executor, facts) as trainer,
    ):
        np.testing.assert_allclose([trainer.step(batch(number)) for number in range(4)], losses, rtol=1e-2)
        for name, array in trainer.read_all().items():
            np.testing.assert_allclose(array.astype(np.float32), expected[name].astype(np.float32), atol=1e-2)
