"""ZeRO on all builders: parameters after five steps are those of the unsharded run, and go from one stage to another."""

from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irpar
from irpar import models
from irpar.analysis.training_facts import facts_of
from irpar.ir import Module, clone_module
from irpar.onnx_io import to_module
from irpar.output.checkpoint import Checkpoint
from irpar.pass_manager.default_pipeline import with_zero
from irpar.runtime.specs import input_specs
from irpar.verification.inputs import random_inputs
from tests.partition_runs import GROUPS
from tests.training.group_runs import run_in_group
from tests.training.programs import state_in

Array = np.ndarray[Any, Any]

STEPS = 5
TOLERANCE = 1e-10
"""Largest difference of a parameter, over its largest element."""
CLASSES = frozenset({"gpt", "llama", "moe", "t5", "vit", "resnet", "recurrent"})
"""Families whose outputs are scores of classes."""
STAGES = (1, 2, 3)
MESHES = ("dp=4", "dp=2,tp=2")
PLACED = list(zip(sorted(models.FAMILIES), cycle(product(STAGES, MESHES)), strict=False))
"""Each family with a stage and a mesh, so that all of these come."""


def step_of(family: str) -> Module:
    """In float64; Adam's divisors are kept from what is zero but for rounding."""
    module = to_module(models.build(family, dtype="float64"))
    loss = "cross_entropy" if family in CLASSES else "mse"
    return irpar.train_step(
        module, loss=loss, output=module.graph.output_names[0], optimizer="adamw", eps=1e-3, learning_rate=0.01
    )


def samples_of(step: Module) -> list[dict[str, Array]]:
    """Inputs of each step."""
    facts = facts_of(step.metadata)
    assert facts is not None
    specs = [spec for spec in input_specs(step.graph) if spec.name in facts["inputs"]]
    found = []
    for number in range(STEPS):
        batch = random_inputs(specs, step.graph, number)
        if facts["classes"]:
            shape = batch["target"].shape
            batch["target"] = np.random.default_rng(number).integers(0, facts["classes"], shape)
        found.append(batch)
    return found


def on(step: Module, family: str, mesh: str, stage: int) -> irpar.Partition:
    """On a mesh, sharded as the builder says, along axes that there are."""
    module = clone_module(step)
    known = {value.source_name for value in module.graph.inputs}
    for pattern, spec in models.annotations(family).items():
        cut = [dim if dim and dim[0] in mesh else None for dim in spec]
        if any(cut) and (pattern in known or "*" in pattern or "." in pattern):
            module.shard(pattern, cut)
    zero = f"zero{{stage={stage}, threshold-kb=0}}"
    return irpar.partition(module, mesh, pipeline=with_zero(zero) if stage else None)


def trained(partition: irpar.Partition, batches: list[dict[str, Array]]) -> dict[str, Array]:
    with partition.trainer(engine="numpy") as trainer:
        for batch in batches:
            trainer.step(batch)
        return trainer.read_all()


def compare(found: dict[str, Array], expected: dict[str, Array], what: str) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        difference = np.abs(found[name] - array).max(initial=0)
        assert difference <= TOLERANCE * max(1.0, np.abs(array).max(initial=0)), f"{name}, {what}: {difference}"


@cache
def reference(family: str) -> tuple[Module, list[dict[str, Array]], dict[str, Array]]:
    """A step, its samples, and the state that one device has after them."""
    step = step_of(family)
    batches = samples_of(step)
    return step, batches, trained(irpar.partition(clone_module(step), "d=1"), batches)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "mesh"), list(product(STAGES, MESHES)))
@pytest.mark.parametrize("family", sorted(models.FAMILIES))
def test_every_stage_learns_what_one_device_does(family: str, stage: int, mesh: str) -> None:
    step, batches, expected = reference(family)
    compare(trained(on(step, family, mesh, stage), batches), expected, f"stage {stage} on {mesh}")


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS[1:])
@pytest.mark.parametrize(("family", "placed"), PLACED, ids=str)
def test_processes_learn_it_too(
    family: str, placed: tuple[int, str], group: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stage, mesh = placed
    step, batches, expected = reference(family)
    on(step, family, mesh, stage).save(tmp_path / "out")
    np.savez(tmp_path / "data.npz", **{name: np.concatenate([each[name] for each in batches]) for name in batches[0]})
    words = ["--data", tmp_path / "data.npz", "--steps", STEPS, "--in-order", "--checkpoint", tmp_path / "steps"]
    run_in_group(capfd, group, tmp_path / "out", *words)
    compare(state_in(Checkpoint.open(tmp_path / "steps")), expected, f"stage {stage} on {mesh} in {group}")
