"""What is estimated of annotations is what the plan then says of them."""

from pathlib import Path

import pytest

import irpar
from irpar import models
from irpar.advice.suggestion.trials import Trials
from irpar.sharding import Mesh
from tests.budget import every, pairs


@pytest.mark.parametrize(
    ("name", "mesh"),
    every(2, pairs(["mlp", "gpt", "moe", "resnet", "recurrent"], [{"tp": 2}, {"dp": 2, "tp": 4}, {"x": 3}])),
    ids=str,
)
def test_what_is_estimated_is_what_is_planned(name: str, mesh: dict[str, int], tmp_path: Path) -> None:
    """Slices and local programs have tables and nodes of their own, which are in the plan alone."""
    path = tmp_path / "model.onnx"
    models.save(path, name)
    suggestion = irpar.suggest(path, mesh)
    trials = Trials(irpar.load(path), Mesh(mesh), None)
    estimated = trials.estimate(suggestion.tensors).figures
    module = irpar.load(path)
    suggestion.apply(module)
    plan = irpar.partition(module).plan
    assert estimated.sent_bytes == plan.totals["sent_bytes"]
    assert estimated.collectives == plan.totals["collectives"]
    assert estimated.flops == pytest.approx(plan.totals["flops_per_rank"], rel=0.005)
    assert estimated.weight_bytes == pytest.approx(max(part["weight_bytes"] for part in plan.parts), rel=0.005)
    assert trials.exact(suggestion.tensors).prediction.sent_bytes == plan.totals["sent_bytes"]
