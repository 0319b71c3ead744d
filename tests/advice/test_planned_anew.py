"""What a model planned anew would hold: the same as a partition that is asked for it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irpar
from irpar.advice.lower_peak import Change
from irpar.advice.planned_anew import Anew, NotAnewError
from irpar.analysis.recompute.costs import timed
from irpar.errors import IrparError
from irpar.ir import ArrayTensor, parse_module
from irpar.onnx_io import save
from irpar.pass_manager.default_pipeline import with_recompute, with_zero

from .test_lower_peak import MODEL

MESH = "dp=2,tp=2"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planned_anew") / "model.onnx"
    module = parse_module(MODEL.replace("f32[64,", "f32[batch,"))
    for value in list(module.graph.inputs):
        if value.source is not None:
            module.graph.inputs_to_constants({value: ArrayTensor(np.ones(value.shape, np.float32))})
    save(module, path)
    return path


def step(model: Path, batch: int = 64, **options: Any) -> irpar.Module:
    made = irpar.train_step(model, loss="mse", optimizer="adam", bind={"batch": batch}, **options)
    rows = [None] if options.get("micro_batches") else []
    made.shard("x0", [*rows, "dp", None])
    return made


def changes(made: irpar.Partition) -> dict[str, Change]:
    return {each.option: each for each in Anew(made.plan, timed(made.plan.network)).changes()}


def worst(made: irpar.Partition) -> int:
    return max(int(entry["peak_bytes"]) for entry in made.plan.ranks)


@pytest.mark.slow
def test_zero_and_micro_batches_are_what_is_promised(model: Path) -> None:
    first = "zero{stage=1, threshold-kb=0}"
    found = changes(irpar.partition(step(model), MESH, pipeline=with_zero(first)))
    second = irpar.partition(step(model), MESH, pipeline=with_zero(first.replace("stage=1", "stage=2")))
    assert found["--zero 2 --zero-threshold-kb 0"].peak_bytes == worst(second)
    halves = irpar.partition(step(model, 32, micro_batches=2), MESH, pipeline=with_zero(first))
    assert found["--bind batch=32 --micro-batches 2"].peak_bytes == worst(halves)
    assert found["--bind batch=32 --micro-batches 2"].more_seconds > 0


def test_a_parameter_is_sharded_where_all_hold_it_whole(model: Path) -> None:
    found = changes(irpar.partition(step(model), MESH))
    (option,) = (each for each in found if '[["dp"], null]' in each)
    assert option == '--shardings FILE with "h.*.w": [["dp"], null] in its tensors'
    asked = step(model)
    asked.shard("h.*.w", ["dp", None])
    assert found[option].peak_bytes == worst(irpar.partition(asked, MESH))
    assert "--zero 1" in found


def test_of_inference_too(model: Path) -> None:
    module = irpar.load(model, bind={"batch": 64})
    module.shard("x0", ["dp", None])
    # Of the weights no one is of a size that plans name.
    assert changes(irpar.partition(module, MESH)) == {}


def test_what_a_plan_does_not_tell_is_not_guessed(model: Path, tmp_path: Path) -> None:
    budget = irpar.partition(step(model), MESH, pipeline=with_recompute("recompute{budget=1}"))
    with pytest.raises(NotAnewError, match="a memory budget is searched for"):
        changes(budget)
    made = irpar.partition(step(model), MESH)
    made.plan.ranks[0]["peak_bytes"] += 1
    with pytest.raises(NotAnewError, match="does not tell all"):
        changes(made)
    made.plan.source["model"] = str(tmp_path / "gone.onnx")
    with pytest.raises(IrparError, match="not there any more"):
        changes(made)
