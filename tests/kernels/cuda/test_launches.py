"""Launches, on a stand-in for CuPy that notes them."""

from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from irpar.kernels.cuda import CompileError, Gpu, Gpus, Program
from irpar.kernels.cuda.gpu import COUNTERS

PROGRAM = Program('extern "C" __global__ void f(float *x) {}', (("N", "3"),))


class Function:
    def __init__(self, module: "Module", name: str) -> None:
        self.module, self.name, self.max_dynamic_shared_size_bytes, self.calls = module, name, 0, []

    def __call__(self, grid: Any, block: Any, arguments: Any, shared_mem: int) -> None:
        self.calls.append((grid, block, arguments, shared_mem))


class Module:
    made: ClassVar[list["Module"]] = []

    def __init__(self, code: str, options: tuple[str, ...]) -> None:
        self.code, self.options, self.functions = code, options, {}
        Module.made.append(self)

    def get_function(self, name: str) -> Function:
        return self.functions.setdefault(name, Function(self, name))


class Device:
    current = 0

    def __init__(self) -> None:
        self.id = Device.current
        self.compute_capability = "90"
        self.attributes = {"MultiProcessorCount": 132, "MaxSharedMemoryPerBlockOptin": 232448}


class Stream:
    def __init__(self, non_blocking: bool = True) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Module, "made", [])
    monkeypatch.setattr(Device, "current", 0)
    return SimpleNamespace(RawModule=Module, cuda=SimpleNamespace(Device=Device), empty=np.empty)


def test_a_program_is_compiled_once_for_a_device(cupy: Any) -> None:
    gpu = Gpu(cupy)
    assert (gpu.arch, gpu.multiprocessors, gpu.shared_bytes) == (90, 132, 232448)
    assert gpu.empty((2, 3), np.dtype(np.float16)).shape == (2, 3)
    x = np.zeros(3, np.float32)
    for _ in range(2):
        gpu.launch(PROGRAM, "f", 4, (32, 2), (x, np.int32(1)), 60_000)
    gpu.launch(PROGRAM, "g", (1, 2, 3), 64, ())
    (made,) = Module.made
    assert made.options == ("-std=c++17", "-DN=3")
    f = made.functions["f"]
    assert f.calls == [((4, 1, 1), (32, 2, 1), (x, np.int32(1)), 60_000)] * 2
    assert f.max_dynamic_shared_size_bytes == 60_000
    assert made.functions["g"].calls == [((1, 2, 3), (64, 1, 1), (), 0)]


def test_what_cannot_be_compiled_is_told(cupy: Any) -> None:
    def refuse(code: str, options: tuple[str, ...]) -> None:
        raise RuntimeError("nvrtc failed\nprogram.cu(3): error: what is this\n1 error detected")

    cupy.RawModule = refuse
    with pytest.raises(CompileError, match=r"its CUDA kernel f cannot be compiled: .*what is this$"):
        Gpu(cupy).launch(PROGRAM, "f", 1, 1, ())


def test_no_blocks_are_no_launch(cupy: Any) -> None:
    Gpu(cupy).launch(PROGRAM, "f", (0, 1), 32, ())
    assert Module.made == []


def test_numbers_of_numpy_have_a_c_type(cupy: Any) -> None:
    numbers = (np.float64(1), np.float32(1), np.int64(1), np.bool_(True))
    Gpu(cupy).launch(PROGRAM, "f", 1, 32, numbers)
    assert Module.made[0].functions["f"].calls[0][2] == numbers


@pytest.mark.parametrize("number", [1, 1.5, True])
def test_numbers_without_a_c_type_are_refused(cupy: Any, number: Any) -> None:
    with pytest.raises(TypeError, match="has no C type"):
        Gpu(cupy).launch(PROGRAM, "f", 1, 32, (number,))


def test_counters_that_there_is_no_room_for(cupy: Any) -> None:
    class FullError(Exception):
        pass

    def memory(size: int) -> None:
        raise FullError

    cupy.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: None)
    cupy.cuda.Memory, cupy.cuda.runtime = memory, SimpleNamespace(CUDARuntimeError=FullError)
    cupy.cuda.get_current_stream = Stream
    with pytest.raises(MemoryError, match="no 65,536 bytes are left on the device"):
        Gpu(cupy).counters()


def test_each_stream_has_counters(cupy: Any) -> None:
    """In memory of no pool; what the pool has in store is given back where there is no other."""

    class FullError(Exception):
        pass

    class Pointer(SimpleNamespace):
        def memset_async(self, value: int, size: int, stream: Stream) -> None:
            self.told = (value, size, stream)

    streams, made, freed = [Stream(), Stream()], [], []

    def memory(size: int) -> int:
        if not freed:
            raise FullError
        return size

    cupy.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: freed.append(1))
    cupy.ndarray = lambda shape, dtype, memory: (shape, dtype, memory)
    cupy.cuda.Stream, cupy.cuda.Memory = Stream, memory
    cupy.cuda.runtime = SimpleNamespace(CUDARuntimeError=FullError)
    cupy.cuda.MemoryPointer = lambda size, offset: made.append(Pointer(size=size)) or made[-1]
    gpu, found = Gpu(cupy), []
    for stream in (streams[0], streams[1], streams[0]):
        cupy.cuda.get_current_stream = lambda stream=stream: stream
        found.append(gpu.counters())
    assert freed == [1]
    assert found[0] is found[2]
    assert [counters[2] for counters in found[:2]] == made
    for memory in made:
        value, size, beside = memory.told
        assert (value, size) == (0, memory.size) == (0, 4 * COUNTERS)
        assert beside not in streams
        assert beside.waits == 1


def test_there_is_one_for_each_device(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(cupy)
    first = gpus()
    monkeypatch.setattr(Device, "current", 1)
    assert gpus() is not first
    monkeypatch.setattr(Device, "current", 0)
    assert gpus() is first
