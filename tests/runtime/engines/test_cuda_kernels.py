"""The engine cupy asks the CUDA kernel of an operator first."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from irpar.kernels import Kept, cuda
from irpar.kernels.cuda import registry
from irpar.kernels.faults import FAULTS
from irpar.kernels.registry import Array, HostArray
from irpar.runtime.engines import cupy as engine
from irpar.runtime.engines import device_arrays
from irpar.runtime.errors import RunError
from irpar.runtime.executor import Executor
from irpar.sharding import Mesh
from tests.runtime.devices import strict_device
from tests.runtime.programs import module
from tests.strict_device import STRICT, StrictArray

GPU: Any = object()
TEXT = """
    graph @sums(%x: f32[4, 100]) -> (%y) opset 18 {
      %axes = constant : i64[1] [1]
      %s = ReduceSum(%x, %axes) {keepdims=0} : f32[4]
      %y = Relu(%s) : f32[4] from "/relu"
    }
"""


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stand-in that compiles, and no CUDA kernels but those of a test, of the nodes as they are."""
    cuda.supported()
    monkeypatch.setattr(engine, "fused", lambda segment, constants: (segment, frozenset()))
    monkeypatch.setattr(registry._TABLE, "entries", {})
    monkeypatch.setattr(STRICT, "RawModule", object, raising=False)
    monkeypatch.setattr(device_arrays.cuda, "Gpus", lambda module: lambda: GPU)
    with strict_device(host_elements=3):
        yield


def run() -> np.ndarray:
    """The program's result for ones."""
    with Executor(module(TEXT), Mesh({"x": 1}), engine="cupy") as executor:
        return executor.run({"x": np.ones((4, 100), np.float32)})["y"]


def test_a_cuda_kernel_goes_before_the_other() -> None:
    seen: list[Any] = []

    @registry.cuda_kernel("ReduceSum", since=13)
    def reduce_sum(
        gpu: Any,
        x: Array,
        axes: HostArray | None = None,
        *,
        keepdims: int = 1,
        out: Any = None,
        kept: Kept | None = None,
    ) -> Array:
        seen.append((gpu, type(x), type(axes), keepdims, kept is not None))
        return STRICT.full((4,), 7, np.float32)

    np.testing.assert_array_equal(run(), np.full(4, 7))
    assert seen == [(GPU, StrictArray, np.ndarray, 0, True)]


def test_the_other_computes_what_is_nothing_for_it() -> None:
    seen: list[str] = []

    @registry.cuda_kernel("ReduceSum", since=13)
    def reduce_sum(gpu: Any, x: Array, axes: HostArray | None = None, *, keepdims: int = 1) -> None:
        seen.append("asked")

    np.testing.assert_array_equal(run(), np.full(4, 100))
    assert seen == ["asked"]


def test_a_kernel_that_gives_another_dtype_is_put_right() -> None:
    @registry.cuda_kernel("Relu", since=14)
    def relu(gpu: Any, x: Array) -> Array:
        return x.astype(np.float64)

    assert run().dtype == np.float32


def test_where_a_source_cannot_be_compiled_the_other_computes() -> None:
    asked: list[str] = []

    @registry.cuda_kernel("Relu", since=14)
    def relu(gpu: Any, x: Array) -> Array:
        asked.append("relu")
        raise cuda.CompileError("its CUDA kernel relu cannot be compiled: why")

    with Executor(module(TEXT), Mesh({"x": 1}), engine="cupy", strict=True) as executor:
        for _ in range(2):
            y = executor.run({"x": np.ones((4, 100), np.float32)})["y"]
            np.testing.assert_array_equal(y, np.full(4, 100))
        told = "Relu runs by CuPy's functions: its CUDA kernel relu cannot be compiled: why (node /relu)"
        assert executor.notes == (told,)
    assert asked == ["relu"]


def test_without_a_compiler_none_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(STRICT, "RawModule")

    @registry.cuda_kernel("Relu", since=14)
    def relu(gpu: Any, x: Array) -> Array:
        raise AssertionError

    np.testing.assert_array_equal(run(), np.full(4, 100))


def test_what_a_kernel_notes_is_told_at_the_end_and_forgotten() -> None:
    wrong = True

    @registry.cuda_kernel("Relu", since=14)
    def relu(gpu: Any, x: Array) -> Array:
        word = FAULTS.word("there is a 100")
        assert word is not None
        word |= STRICT.asarray(np.asarray(wrong))
        return x

    with Executor(module(TEXT), Mesh({"x": 1}), engine="cupy") as executor:
        with pytest.raises(RunError, match="Relu failed: there is a 100") as raised:
            executor.run({"x": np.ones((4, 100), np.float32)})
        assert raised.value.where == "node /relu"
        wrong = False
        executor.run({"x": np.ones((4, 100), np.float32)})
