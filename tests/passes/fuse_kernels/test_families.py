"""fuse-kernels: models of families compute the same."""

from typing import Any

import numpy as np
import pytest

import irpar
from irpar import models
from irpar.onnx_io import to_module
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE
from irpar.verification.inputs import random_inputs

FAMILIES = ("gpt", "llama", "bert", "resnet", "vit", "moe", "t5", "unet", "dlrm")


def test_training_steps_are_written_with_their_operators(tmp_path: Any) -> None:
    module = to_module(models.build("gpt", layers=1))
    step = irpar.train_step(module, loss="cross_entropy", optimizer="sgd")
    irpar.partition(step, "dp=2", pipeline=f"{DEFAULT_PIPELINE},fuse-kernels").save(tmp_path / "out")
    assert irpar.Partition.open(tmp_path / "out").executor("numpy").states


def _check_family(family: str, settings: dict[str, Any], tolerance: float) -> None:
    loaded = to_module(models.build(family, **settings))
    inputs = None
    results = []
    for pipeline in (DEFAULT_PIPELINE, f"{DEFAULT_PIPELINE},fuse-kernels"):
        partition = irpar.partition(to_module(models.build(family, **settings)), "x=1", pipeline=pipeline)
        with partition.executor("numpy") as executor:
            inputs = random_inputs(executor.inputs, loaded.graph) if inputs is None else inputs
            results.append(executor.run(inputs))
    assert partition.module is not None
    assert any(node.op_type == "Fused" for node in partition.module.graph)
    plain, made = results
    for name, array in plain.items():
        scale = np.abs(array.astype(np.float64)).max() + 1e-6
        np.testing.assert_allclose(made[name], array, rtol=tolerance, atol=tolerance * scale, err_msg=name)


def test_models_compute_the_same() -> None:
    _check_family("gpt", {}, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_families_compute_the_same(family: str) -> None:
    _check_family(family, {}, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_families_of_float16_stay_near(family: str) -> None:
    _check_family(family, {"dtype": "float16"}, 2e-2)
