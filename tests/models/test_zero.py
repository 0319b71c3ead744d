"""ZeRO on training steps of every family: the parameters after some steps are those of one device."""

import numpy as np
import pytest

import irpar
from irpar.ir import clone_module
from irpar.models import FAMILIES, build
from irpar.pass_manager.default_pipeline import with_zero
from tests.models.test_partitioned_gradients import annotated
from tests.models.test_training import CLASSES, batches, difference, trained

MESHES = ({"dp": 4}, {"dp": 2, "tp": 2})
STAGES = ("stage=1, threshold-kb=0", "stage=2, threshold-kb=0", "stage=3, threshold-kb=0")
OTHERS = ("stage=3, threshold-kb=0, regather=false", "stage=2")


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_parameters_after_some_steps(family: str) -> None:
    loss = "cross_entropy" if family in CLASSES else "mse"
    step = irpar.train_step(build(family, preset="tiny", dtype="float64"), loss=loss, optimizer="adamw")
    data = batches(step)
    losses, state = trained(irpar.partition(step, "d=1"), data, engine="numpy")
    # AdamW makes steps of the learning rate of what is zero but for rounding: biases of keys.
    compared = {name: array for name, array in state.items() if "key.bias" not in name and ".k.bias" not in name}
    for mesh in MESHES:
        for options in (*STAGES, *(OTHERS if family == "gpt" else ())):
            module = annotated(clone_module(step), family, mesh)
            made = irpar.partition(module, mesh, pipeline=with_zero(f"zero{{{options}}}"))
            others, found = trained(made, data, engine="numpy")
            np.testing.assert_allclose(others, losses, rtol=1e-10, err_msg=f"{mesh} {options}")
            assert difference(found, compared) <= 1e-10, (mesh, options)
