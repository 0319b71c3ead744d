"""Where weights are sharded over the axes of data, data may carry these axes first: weights are then gathered."""

from pathlib import Path
from typing import Any

import pytest

import irpar
from irpar import models
from irpar.analysis.completion.flow import Flow
from irpar.ir.text.files import parse_module
from irpar.pass_manager.default_pipeline import with_zero
from irpar.passes.complete_sharding.data_first import with_data_first
from tests.budget import SHARE

GRAPH = """
mesh @m = ["dp"=4, "tp"=2]
graph @g(%x: f32[64@dp, 16], state parameter %w: f32[SHARDED]) -> (%y) opset 21 {
  %y = MatMul(%x, %w) : f32[64, 32]
}
"""
LARGE = {"layers": 1, "hidden": 12288, "heads": 96, "vocab": 50257, "seq": 2048, "batch": 64}
"""Activations of a block are as large as its weights, so that no start is best everywhere."""


@pytest.mark.parametrize(
    ("sharded", "waiting"),
    [
        ("16@dp, 32@tp", "[@dp!1, @tp]"),
        ("16, 32@(tp,dp)", "[_, @(tp,dp)!1]"),
        ("16, 32@tp", None),
        ("16@dp!1, 32", None),
        ("16, 32", None),
    ],
)
def test_what_is_sharded_over_the_axes_of_data_waits(sharded: str, waiting: str | None) -> None:
    """Not where nothing is, and not where somebody said himself what goes first."""
    module = parse_module(GRAPH.replace("SHARDED", sharded))
    found = with_data_first(module, Flow(module.graph, module.mesh))
    assert {value.name: str(lies) for value, lies in found.items()} == ({"w": waiting} if waiting else {})


def test_axes_of_data_may_overlap_each_other() -> None:
    text = GRAPH.replace("SHARDED", "16@dp, 32@tp").replace(
        "%x: f32[64@dp, 16]", "%x: f32[64@dp, 16], %m: f32[8@dp:(1)2]"
    )
    module = parse_module(text)
    found = with_data_first(module, Flow(module.graph, module.mesh))
    assert {value.name: str(lies) for value, lies in found.items()} == {"w": "[@dp!1, @tp]"}


def test_where_no_data_are_annotated_nothing_waits() -> None:
    module = parse_module(GRAPH.replace("64@dp", "64").replace("SHARDED", "16@dp, 32"))
    assert not with_data_first(module, Flow(module.graph, module.mesh))


def planned(path: Path, **more: Any) -> tuple[int, int, int]:
    """Bytes that a rank sends and holds at most in a step with ZeRO, stage 3, and its FLOPs."""
    module = irpar.train_step(irpar.load(path))
    irpar.annotate(module, models.annotations("gpt", "dp", "tp", **LARGE) | more)
    plan = irpar.partition(module, "dp=4,tp=2", pipeline=with_zero("zero{stage=3}")).plan
    return plan.totals["sent_bytes"], max(rank["peak_bytes"] for rank in plan.ranks), plan.totals["flops_per_rank"]


def test_a_step_sends_what_zero_needs_though_its_targets_are_not_annotated(tmp_path: Path) -> None:
    """Three times the parameters of a rank, and the sums over tp; 2.4 times of that where weights went first."""
    size = models.save(tmp_path / "gpt.onnx", "gpt", weights="none", **LARGE)
    hidden, layers = LARGE["hidden"], LARGE["layers"]
    over_both = layers * 12 * hidden**2 + hidden * LARGE["vocab"]
    parameters = (over_both / 2 + (size.parameters - over_both)) * 4
    activation = LARGE["batch"] // 4 * LARGE["seq"] * hidden * 4
    sent, held, flops = planned(tmp_path / "gpt.onnx")
    assert sent <= 3 * parameters * 3 / 4 + (4 * layers + 1) * activation
    if SHARE < 1:
        return  # It takes as long again.
    with_targets = planned(tmp_path / "gpt.onnx", target=["dp", None])
    assert sent <= 1.01 * with_targets[0]
    assert held <= 1.01 * with_targets[1]
    assert flops <= 1.03 * with_targets[2]
