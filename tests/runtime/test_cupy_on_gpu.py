"""The engine cupy on a device: families, memory, copies, streams, device arrays at the edges."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx
import pytest

import irpar
from irpar import models
from irpar.onnx_io import to_module
from irpar.runtime.engines import cupy as engine
from irpar.runtime.engines.staging import Staging
from irpar.runtime.errors import EngineError, RunError
from irpar.runtime.executor import Executor
from irpar.runtime.groups import Call, ThreadGroup
from irpar.runtime.warm import warm
from irpar.sharding import Mesh
from irpar.verification.inputs import random_inputs
from tests.command_line import call
from tests.gpu import NEEDS_GPU, cupy
from tests.runtime.engines.test_cupy import FAMILIES

from .programs import module

pytestmark = NEEDS_GPU


@pytest.mark.parametrize(("family", "settings"), FAMILIES, ids=str)
def test_families(family: str, settings: dict) -> None:
    loaded = to_module(models.build(family, **settings))
    irpar.annotate(loaded, models.annotations(family, "dp", "tp", **settings))
    partition = irpar.partition(loaded, irpar.Mesh({"dp": 2, "tp": 2}))
    assert partition.default_engine() == "cupy"
    verified = partition.verify(engine="cupy")
    verified.check()
    assert [note for note in verified.notes if "splits CUDA graphs" not in note] == []
    # Verification draws more inputs where the first do not reach all branches: the logs are of one and the same draw.
    assert _log(partition, "cupy") == _log(partition, "numpy")


def _log(partition: irpar.Partition, engine: Literal["cupy", "numpy"]) -> list[Any]:
    """The collectives of one run on random inputs."""
    executor = partition.executor(engine)
    assert partition.module is not None
    executor.run(random_inputs(executor.inputs, partition.module.graph))
    return list(executor.log)


def test_runs_are_equal_and_leave_no_memory() -> None:
    loaded = to_module(models.build("gpt"))
    with Executor(loaded, Mesh({"x": 1}), engine="cupy") as executor:
        inputs = random_inputs(executor.inputs, loaded.graph)
        first = executor.run(inputs)
        for _ in range(2):  # The second run captures what the others replay.
            executor.run(inputs)
        pool = cupy().get_default_memory_pool()
        used = pool.used_bytes()
        for _ in range(20):
            again = executor.run(inputs)
        assert pool.used_bytes() == used
        for name, array in first.items():
            np.testing.assert_array_equal(again[name], array)


def test_memory_that_lacks_is_told_with_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result of which only the run tells how large it is has no place in the arena."""
    text = """
        graph @huge(%x: f32[1000], %shape: i64[2]) -> (%y) opset 21 {
          %wide = Expand(%x, %shape) : f32[n, 1000] from "/wide"
          %e = Exp(%wide) : f32[n, 1000] from "/exp"
          %axes = constant : i64[1] [0]
          %y = ReduceSum(%e, %axes) {keepdims=0} : f32[1000]
        }
    """
    monkeypatch.setenv("IRPAR_MEMORY_LIMIT", "none")
    with (
        Executor(module(text), Mesh({"x": 1}), engine="cupy") as executor,
        pytest.raises(RunError, match=r"Exp failed on the device: out of memory allocating [\d,]+ bytes") as raised,
    ):
        executor.run({"x": np.zeros(1000, np.float32), "shape": np.array([2_000_000_000, 1000])})
    assert raised.value.where == "node /exp"


def test_an_arena_without_room_is_told_with_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
        graph @huge(%x: f32[1000]) -> (%y) opset 21 {
          %shape = constant : i64[2] [2000000000, 1000]
          %wide = Expand(%x, %shape) : f32[2000000000, 1000] from "/wide"
          %e = Exp(%wide) : f32[2000000000, 1000] from "/exp"
          %axes = constant : i64[1] [0]
          %y = ReduceSum(%e, %axes) {keepdims=0} : f32[1000]
        }
    """
    monkeypatch.setenv("IRPAR_MEMORY_LIMIT", "none")
    # One kernel would do without the arena.
    monkeypatch.setattr(engine, "fused", lambda segment, constants: (segment, frozenset()))
    with (
        Executor(module(text), Mesh({"x": 1}), engine="cupy") as executor,
        pytest.raises(EngineError, match=r"an arena of [\d,]+ bytes has no room on the device: out of mem") as raised,
    ):
        executor.run({"x": np.zeros(1000, np.float32)})
    assert raised.value.where == "rank 0"


@pytest.mark.parametrize("operator", ["Gather", "GatherElements"])
def test_an_index_outside_is_told_with_the_node(operator: str) -> None:
    text = f"""
        graph @pick(%x: f32[100], %i: i64[70]) -> (%y) opset 21 {{
          %y = {operator}(%x, %i) : f32[70] from "/pick"
        }}
    """
    x, right, wrong = np.arange(100, dtype=np.float32), np.arange(-35, 35), np.full(70, 100)
    with Executor(module(text), Mesh({"x": 1}), engine="cupy") as executor:
        for _ in range(2):
            np.testing.assert_array_equal(executor.run({"x": x, "i": right})["y"], x[right])
            with pytest.raises(RunError, match=r"an index is outside \[-100, 99\] on axis 0") as raised:
                executor.run({"x": x, "i": wrong})
            assert raised.value.where == "node /pick"


def test_what_is_compiled_ahead(tmp_path: Path) -> None:
    models.save(tmp_path / "gpt.onnx", "gpt", dtype="float16")
    irpar.partition(irpar.train_step(tmp_path / "gpt.onnx"), "dp=2").save(tmp_path / "out")
    warmed = warm(tmp_path / "out")
    assert warmed.left == warmed.notes == []
    assert warmed.segments >= warmed.parts


def test_float8_is_computed_on_the_host_with_a_note() -> None:
    text = """
        graph @small(%x: f32[100]) -> (%y) opset 21 {
          %c = Cast(%x) {to=17} : f8e4m3fn[100]
          %d = Cast(%c) {to=1} : f32[100]
          %y = Add(%d, %x) : f32[100]
        }
    """
    x = np.linspace(-3, 3, 100, dtype=np.float32)
    loaded = module(text)
    with Executor(loaded, Mesh({"x": 1}), engine="cupy") as executor:
        found = executor.run({"x": x})["y"]
        assert len(executor.notes) == 1
    np.testing.assert_array_equal(found, x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) + x)


def test_copies_through_pinned_memory() -> None:
    numbers = np.random.default_rng(8)
    stream = cupy().cuda.Stream(non_blocking=True)
    arrays = [
        numbers.standard_normal((1000, 1000)),
        numbers.standard_normal((3, 5)).astype(ml_dtypes.bfloat16),
        numbers.standard_normal((2000, 3000)).astype(np.float32)[:, 100:2000],
        np.array(True),
        np.zeros((0, 4), np.int8),
        *(numbers.integers(0, 100, 700) for _ in range(50)),
    ]
    with stream:
        staging = Staging(cupy(), stream, block_bytes=2**20)
        uploaded = [staging.upload(array) for array in arrays]
        for found, array in zip(staging.download(uploaded), arrays, strict=True):
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array)


class DeviceGroup(ThreadGroup):
    """Threads that take device arrays: brought to the host and back."""

    takes_device_arrays = True

    def exchange(self, waiting: Mapping[int, Call]) -> dict[int, Any]:
        """Also sees that all operands lie on the device."""
        cupy().cuda.runtime.deviceSynchronize()
        for waiting_call in waiting.values():
            assert isinstance(waiting_call.operand, cupy().ndarray)
        on_host = {rank: replace(call, operand=cupy().asnumpy(call.operand)) for rank, call in waiting.items()}
        results = {rank: cupy().asarray(found) for rank, found in super().exchange(on_host).items()}
        cupy().cuda.runtime.deviceSynchronize()
        return results


@pytest.mark.parametrize("family", ["gpt", "moe"])
def test_segments_give_device_arrays_to_groups_that_take_them(family: str) -> None:
    loaded = to_module(models.build(family))
    irpar.annotate(loaded, models.annotations(family, "dp", "tp"))
    partition = irpar.partition(loaded, irpar.Mesh({"dp": 2, "tp": 2}))
    expected_by = partition.executor("numpy")
    inputs = random_inputs(expected_by.inputs, loaded.graph)
    assert partition.module is not None
    mesh = partition.module.mesh
    with Executor(partition.module, mesh, engine="cupy", group=DeviceGroup(mesh)) as executor:
        got = executor.run(inputs, check_replicas=True)
    for name, array in expected_by.run(inputs).items():
        assert isinstance(got[name], np.ndarray)
        np.testing.assert_allclose(got[name], array, rtol=1e-4, atol=1e-4)


def test_the_command_line_chooses_the_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(models.build("mlp"), tmp_path / "mlp.onnx")
    out = tmp_path / "out"
    assert call(capsys, "partition", tmp_path / "mlp.onnx", "-o", out, "--mesh", "dp=2")[0] == 0
    code, told, _ = call(capsys, "verify", out, "--strict", "--json")
    assert code == 0
    assert json.loads(told)["notes"] == []


def test_tf32_is_used_where_it_is_asked_for_alone() -> None:
    text = """
        graph @product(%a: f32[256, 512], %b: f32[512, 256]) -> (%y) opset 21 {
          %y = MatMul(%a, %b) : f32[256, 256]
        }
    """
    random = np.random.default_rng(0)
    inputs = {name: random.standard_normal(shape, np.float32) for name, shape in (("a", (256, 512)), ("b", (512, 256)))}
    exact = inputs["a"].astype(np.float64) @ inputs["b"].astype(np.float64)
    errors = []
    for options in ({}, {"tf32": True}):
        with Executor(module(text), Mesh({"x": 1}), engine="cupy", **options) as executor:
            # The first run is not captured, the second is, the third is a replay.
            runs = [executor.run(inputs)["y"] for _ in range(3)]
        errors.append([float(abs(run - exact).max()) for run in runs])
    assert max(errors[0]) < 2e-4
    assert min(errors[1]) > 10 * max(errors[0])
