"""Every family of models on ranks that are processes: the values of threads, and the collectives of the plan."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irpar.api import Engine
from irpar.output.plan_reading import read_plan
from irpar.runtime.bound_steps import UNBOUND_RUNS
from irpar.runtime.executor import Executor
from irpar.verification.inputs import random_inputs
from tests.test_families import PLANNED, Case, partitioned

from .process_ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as started:
        yield started


def run_folder(folder: Path, inputs: dict[str, Any], engine: Engine) -> tuple[dict[str, Any], list[str]] | None:
    """Run a partition, as the driver or for it; the driver gives the outputs, and how its log differs from the plan."""
    with Executor.open(folder, engine=engine, group="processes", timeout=30) as executor:
        if not executor.is_driver:
            executor.serve()
            return None
        for _ in range(UNBOUND_RUNS):
            executor.run(inputs)
        outputs = executor.run(inputs, check_replicas=True)
        return outputs, executor.log.differences(read_plan(folder).collectives)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ort", "numpy"])
@pytest.mark.parametrize("case", PLANNED, ids=str)
def test_families(ranks: Ranks, case: Case, engine: Engine, tmp_path: Path) -> None:
    partition = partitioned(case, {"dp": 2, "tp": 2}, tmp_path)
    assert partition.module is not None
    partition.save(tmp_path / "out")
    inputs = random_inputs(partition.executor(engine).inputs, partition.module.graph)
    expected = partition.run(inputs, engine=engine)
    given = {"folder": tmp_path / "out", "inputs": inputs, "engine": engine}
    found = ranks.run(run_folder, [given] * 4)
    outputs, differences = found[0]
    assert differences == []
    assert outputs.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(outputs[name], array, rtol=1e-5, atol=1e-5, err_msg=name)
