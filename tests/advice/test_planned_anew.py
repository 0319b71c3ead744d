"""What a model planned anew would hold: the same as a partition that is asked for it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irpar
from irpar import models
from irpar.advice.lower_peak import Change, Programs, lowering
from irpar.advice.lower_peak import changes as lower_peak_changes
from irpar.advice.planned_anew import Anew, NotAnewError
from irpar.analysis.recompute.costs import timed
from irpar.errors import IrparError
from irpar.ir import ArrayTensor, clone_module, parse_module
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


def test_what_was_tried_on_programs_that_communicate_is_what_the_pipeline_ends_with(model: Path) -> None:
    made = irpar.partition(step(model), MESH)
    assert made.module is not None
    tried = next(each for each in lowering_of(made) if each.option == "--recompute 'h.*/*'")
    wrong = replace(tried, peak_bytes=tried.peak_bytes - 1, more_seconds=0)
    other = Change("in another order", "--pipeline memory-order", 1, 0)
    assert Anew(made.plan, timed(made.plan.network)).confirmed([wrong, other])[1] == other
    found = Anew(made.plan, timed(made.plan.network)).confirmed([wrong])[0]
    asked = irpar.partition(step(model), MESH, pipeline=with_recompute("recompute{match=h.*/*}"))
    assert found.peak_bytes == worst(asked)
    assert found.more_seconds == pytest.approx(tried.more_seconds)


@pytest.mark.slow
def test_fused_communication_is_counted_too(tmp_path: Path) -> None:
    """Gathers of parameters are fused otherwise where something runs again: the programs alone do not tell the peak."""
    zero = "zero{stage=3, threshold-kb=0}"
    models.save(tmp_path / "gpt.onnx", "gpt", preset="tiny")
    whole = irpar.train_step(tmp_path / "gpt.onnx", loss="cross_entropy", optimizer="sgd")
    whole.shard("input_ids", ["dp", None])
    made = irpar.partition(clone_module(whole), "dp=2", pipeline=with_zero(zero))
    tried = next(each for each in lowering_of(made) if each.option == "--recompute 'h.*/*'")
    (found,) = Anew(made.plan, timed(made.plan.network)).confirmed([tried])
    asked = irpar.partition(whole, "dp=2", pipeline=with_recompute("recompute{match=h.*/*}", zero))
    assert found.peak_bytes == worst(asked)
    assert found.peak_bytes != tried.peak_bytes


def lowering_of(made: irpar.Partition) -> list[Change]:
    assert made.module is not None
    programs = Programs(made.module, made.plan.pipeline)
    return lowering(programs, lower_peak_changes(programs))


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
