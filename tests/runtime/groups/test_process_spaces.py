"""Copies between memories on ranks that are processes: the values of threads, and the copies of the plan."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irpar
from irpar import models
from irpar.output.plan_reading import read_plan
from irpar.runtime.executor import Executor
from irpar.verification.inputs import random_inputs
from tests.scattered_places import scattering

from .process_ranks import Ranks


def run_folder(folder: Path, inputs: dict[str, Any]) -> tuple[dict[str, Any], list[str], int] | None:
    """Run a partition, as the driver or for it; the driver gives the outputs, and how copies differ from the plan."""
    with Executor.open(folder, engine="numpy", group="processes", timeout=30) as executor:
        if not executor.is_driver:
            executor.serve()
            return None
        outputs = executor.run(inputs)
        return outputs, executor.log.copies.differences(read_plan(folder).copies), executor.log.copies.copied_bytes


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_scattered_programs(seed: int, tmp_path: Path) -> None:
    partition = irpar.partition(models.build("gpt"), "tp=2", pipeline=scattering(seed))
    assert partition.module is not None
    partition.save(tmp_path / "out")
    inputs = random_inputs(partition.executor("numpy").inputs, partition.module.graph)
    expected = partition.run(inputs, engine="numpy")
    with Ranks(2) as ranks:
        outputs, differences, copied = ranks.run(run_folder, [{"folder": tmp_path / "out", "inputs": inputs}] * 2)[0]
    assert differences == []
    assert copied == partition.plan.totals["copied_bytes"] > 0
    for name, array in expected.items():
        np.testing.assert_allclose(outputs[name], array, rtol=1e-5, atol=1e-5, err_msg=name)
