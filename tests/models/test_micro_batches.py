"""Micro-batches on training steps of every family: the parameters after some steps are those of one device."""

from functools import cache
from typing import Any

import numpy as np
import pytest

import irpar
from irpar.models import FAMILIES, build
from irpar.pass_manager.default_pipeline import with_zero
from tests.models.test_partitioned_gradients import annotated
from tests.models.test_training import CLASSES, Array, batches, difference, trained

COUNT = 4
MESHES = ({"dp": 4}, {"dp": 2, "tp": 2})
STAGES = ("", "stage=1, threshold-kb=0", "stage=2, threshold-kb=0", "stage=3, threshold-kb=0")
EACH = {"reduce_gradients": "micro-batch", "gather_parameters": "micro-batch"}
DEPENDENT = ("resnet", "control")
"""Families in which samples of a batch meet: in statistics, in what a branch is chosen by."""
SHORT = 13
"""Samples of a step of four micro-batches of four."""


def step_of(
    family: str,
    mesh: dict[str, int] | None = None,
    *,
    micro_batches: int = COUNT,
    short: bool = False,
    batch: int | None = None,
    **options: Any,
) -> irpar.Module:
    """A step of a family, annotated for a mesh."""
    loss = "cross_entropy" if family in CLASSES else "mse"
    module = irpar.load(build(family, preset="tiny", dtype="float64", **({} if batch is None else {"batch": batch})))
    if mesh is not None:
        module.set_mesh(irpar.Mesh(mesh))
        annotated(module, family, mesh)
    return irpar.train_step(
        module, loss=loss, optimizer="adamw", micro_batches=micro_batches, short_batches=short, **options
    )


@cache
def reference(family: str) -> tuple[list[dict[str, Array]], list[float], dict[str, Array]]:
    """Samples of some steps, and what one device makes of them."""
    step = step_of(family)
    data = batches(step)
    losses, state = trained(irpar.partition(step, "d=1"), data, engine="numpy")
    # AdamW makes steps of the learning rate of what is zero but for rounding: biases of keys.
    return (
        data,
        losses,
        {name: array for name, array in state.items() if "key.bias" not in name and ".k.bias" not in name},
    )


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "sent"), [(zero, {}) for zero in STAGES] + [(STAGES[3], EACH)])
@pytest.mark.parametrize("mesh", MESHES, ids=["dp", "dp-tp"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_parameters_after_some_steps(family: str, mesh: dict[str, int], zero: str, sent: dict[str, str]) -> None:
    data, losses, expected = reference(family)
    pipeline = with_zero(f"zero{{{zero}}}") if zero else None
    made = irpar.partition(step_of(family, mesh, **sent), mesh, pipeline=pipeline)
    others, found = trained(made, data, engine="numpy")
    np.testing.assert_allclose(others, losses, rtol=1e-10)
    assert difference(found, expected) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in DEPENDENT])
def test_short_batches_are_the_batch_alone(family: str) -> None:
    whole = step_of(family, micro_batches=1, batch=SHORT)
    data = [{name: array for name, array in each.items() if name != "learning_rate"} for each in batches(whole, 2)]
    states = []
    for step, mesh, pipeline in (
        (whole, "d=1", None),
        (step_of(family, short=True, batch=4), "d=1", None),
        (step_of(family, {"dp": 2, "tp": 2}, short=True, batch=4), "dp=2,tp=2", with_zero(f"zero{{{STAGES[3]}}}")),
    ):
        with irpar.partition(step, mesh, pipeline=pipeline).trainer(engine="numpy") as trainer:
            losses = [trainer.step(each) for each in data]
            states.append((losses, trainer.read_all()))
    for losses, state in states[1:]:
        np.testing.assert_allclose(losses, states[0][0], rtol=1e-10)
        compared = {n: array for n, array in states[0][1].items() if "key.bias" not in n and ".k.bias" not in n}
        assert difference(state, compared) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("family", DEPENDENT)
def test_short_batches_are_refused_where_samples_meet(family: str) -> None:
    with pytest.raises(irpar.IrparError, match=r"samples of a batch meet in (BatchNormalization|ReduceSum)"):
        step_of(family, short=True)
