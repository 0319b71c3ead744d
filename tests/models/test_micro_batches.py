"""Micro-batches on training steps of every family: the parameters after some steps are those of one device."""

import numpy as np
import pytest

import irpar
from irpar.ir import clone_module
from irpar.models import FAMILIES, build
from irpar.pass_manager.default_pipeline import with_zero
from tests.models.test_partitioned_gradients import annotated
from tests.models.test_training import CLASSES, batches, difference, trained

COUNT = 4
MESHES = ({"dp": 4}, {"dp": 2, "tp": 2})
STAGES = ("", "stage=1, threshold-kb=0", "stage=2, threshold-kb=0", "stage=3, threshold-kb=0")
DEPENDENT = ("resnet", "moe")
"""Families in which samples of a batch meet: in statistics, in the capacity of experts."""


def step_of(
    family: str, mesh: dict[str, int] | None = None, *, micro_batches: int = COUNT, **size: int
) -> irpar.Module:
    """A step of a family, annotated for a mesh."""
    loss = "cross_entropy" if family in CLASSES else "mse"
    module = irpar.load(build(family, preset="tiny", dtype="float64", **size))
    if mesh is not None:
        module.set_mesh(irpar.Mesh(mesh))
        annotated(module, family, mesh)
    return irpar.train_step(module, loss=loss, optimizer="adamw", micro_batches=micro_batches)


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_parameters_after_some_steps(family: str) -> None:
    step = step_of(family)
    data = batches(step)
    losses, state = trained(irpar.partition(clone_module(step), "d=1"), data, engine="numpy")
    # AdamW makes steps of the learning rate of what is zero but for rounding: biases of keys.
    compared = {name: array for name, array in state.items() if "key.bias" not in name and ".k.bias" not in name}
    for mesh in MESHES:
        for options in STAGES:
            pipeline = with_zero(f"zero{{{options}}}") if options else None
            made = irpar.partition(step_of(family, mesh), mesh, pipeline=pipeline)
            others, found = trained(made, data, engine="numpy")
            np.testing.assert_allclose(others, losses, rtol=1e-10, err_msg=f"{mesh} {options}")
            assert difference(found, compared) <= 1e-10, (mesh, options)
