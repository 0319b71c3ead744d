"""Running what was written to a folder."""

import json
from pathlib import Path

import numpy as np
import pytest

from irpar import Partition
from irpar.ir import Module
from irpar.output import plan_reading
from irpar.output.parts import parts_of
from irpar.output.plan import make_plan
from irpar.output.plan_reading import read_plan
from irpar.output.plan_source import original_of, source_of
from irpar.output.writer import write_partition
from irpar.runtime.errors import ProgramError
from irpar.runtime.executor import Executor

from .programs import MLP, mlp_input, mlp_reference, mlp_weights, module
from .test_executor import UNEVEN


def written(loaded: Module, folder: Path) -> Path:
    """Write a local module as `irpar partition` does."""
    parts = parts_of(loaded, loaded.mesh)
    facts = {"source": source_of(loaded), "original": original_of(loaded)}
    write_partition(folder, loaded, parts, make_plan(loaded, loaded.mesh, parts, pipeline="", **facts))
    return folder


@pytest.mark.parametrize("engine", ["ort", "numpy"])
def test_mlp(tmp_path: Path, engine: str) -> None:
    folder = written(module(MLP, **mlp_weights()), tmp_path / "out")
    inputs = mlp_input()
    with Executor.open(folder, engine=engine) as executor:
        outputs = executor.run(inputs, fetch=["hidden"], check_replicas=True)
        assert executor.log.differences(read_plan(folder).collectives) == []
    np.testing.assert_allclose(outputs["y"], mlp_reference(inputs["x"], mlp_weights()), rtol=1e-5)
    np.testing.assert_allclose(outputs["hidden"], inputs["x"] @ mlp_weights()["w1"], rtol=1e-5)


@pytest.mark.parametrize("engine", ["ort", "numpy"])
def test_uneven_blocks_and_coordinates(tmp_path: Path, engine: str) -> None:
    k = np.arange(10, dtype=np.float32).reshape(5, 2)
    loaded = module(UNEVEN, k=k)
    a = np.ones((5, 2), np.float32)
    with Executor(loaded, loaded.mesh, engine=engine) as executor:
        expected = executor.run({"a": a}, fetch=["b"])
    folder = written(loaded, tmp_path / "out")
    with Executor.open(folder, engine=engine) as executor:
        outputs = executor.run({"a": a}, fetch=["b"])
        assert executor.log.differences(read_plan(folder).collectives) == []
    assert list(outputs) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(outputs[name], array)


def test_a_plan_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(module(MLP, **mlp_weights()), tmp_path / "out")
    read = []
    plain = plan_reading.misfit
    monkeypatch.setattr(plan_reading, "misfit", lambda data: read.append(data) or plain(data))
    Executor.open(folder).close()
    assert len(read) == 1
    with Partition.open(folder) as partition:
        partition.run(mlp_input())
    assert len(read) == 2


def test_a_plan_that_does_not_fit_its_parts(tmp_path: Path) -> None:
    folder = written(module(MLP, **mlp_weights()), tmp_path / "out")
    plan = json.loads((folder / "plan.json").read_text())
    plan["outputs"][0]["dtype"] = "f64"
    (folder / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(ProgramError, match=r"plan.json and part0/model.onnx have different inputs or outputs"):
        Executor.open(folder)
