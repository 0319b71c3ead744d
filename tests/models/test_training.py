"""Training steps of every family over devices: the parameters after some steps are those of one device."""

from typing import Any

import numpy as np
import pytest

import irpar
from irpar.ir import clone_module
from irpar.models import FAMILIES, build
from tests.models.test_partitioned_gradients import MESHES, annotated

Array = np.ndarray[Any, Any]

STEPS = 5
CLASSES = ("gpt", "llama", "resnet")
"""Families whose outputs are scores of classes."""
EXCESS = 1.06


def batches(module: irpar.Module, steps: int = STEPS) -> list[dict[str, Array]]:
    """Inputs at random for each step, the target included."""
    random = np.random.default_rng(1)
    graph = module.graph
    found = []
    for _ in range(steps):
        batch: dict[str, Array] = {"learning_rate": np.float32(1e-2)}
        for value in graph.inputs:
            type_ = value.tensor_type
            if value in graph.states or value.source_name in batch:
                continue
            if type_.dtype.is_float:
                batch[value.source_name] = random.standard_normal(type_.static_shape).astype(type_.dtype.numpy)
            else:
                batch[value.source_name] = random.integers(0, 2, type_.static_shape).astype(type_.dtype.numpy)
        found.append(batch)
    return found


def trained(
    partition: irpar.Partition, data: list[dict[str, Array]], **options: Any
) -> tuple[list[float], dict[str, Array]]:
    """The loss of each step, and the state after the last one."""
    with partition.session(**options) as session:
        dtypes = {spec["name"]: spec["dtype"] for spec in partition.plan.inputs}
        losses = []
        for batch in data:
            rate = batch["learning_rate"].astype(np.float64 if dtypes["learning_rate"] == "f64" else np.float32)
            losses.append(float(session.run({**batch, "learning_rate": rate})["loss"]))
        return losses, session.read_all()


def difference(found: dict[str, Array], expected: dict[str, Array]) -> float:
    """The largest, over the largest element of each."""
    return max(
        float(np.abs(found[name] - wanted).max(initial=0) / max(1e-3, np.abs(wanted).max(initial=0)))
        for name, wanted in expected.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_parameters_after_some_steps(family: str, optimizer: str) -> None:
    loss = "cross_entropy" if family in CLASSES else "mse"
    step = irpar.train_step(build(family, preset="tiny", dtype="float64"), loss=loss, optimizer=optimizer)
    data = batches(step)
    losses, state = trained(irpar.partition(step, "d=1"), data, engine="numpy")
    for mesh in MESHES:
        made = irpar.partition(annotated(clone_module(step), family, mesh), mesh)
        others, found = trained(made, data, engine="numpy")
        np.testing.assert_allclose(others, losses, rtol=1e-10)
        # AdamW makes steps of the learning rate of what is zero but for rounding: biases of keys.
        compared = {name: array for name, array in state.items() if "key.bias" not in name and ".k.bias" not in name}
        assert difference(found, compared) <= 1e-10, mesh
