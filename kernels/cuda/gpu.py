"""A device, as functions that launch CUDA kernels know it."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..registry import Array, ArrayModule
from .programs import Program

STATIC_SHARED_BYTES = 48 * 1024
"""What a block may use of shared memory unasked."""

COUNTERS = 16_384
"""As many has a stream."""


class CompileError(Exception):
    """A program cannot be compiled for the device, or not be loaded there."""


class Gpu:
    """The device that was the current one when this was made.

    Args:
        module: CuPy.

    Attributes:
        module: CuPy.
        arch: the compute capability, as 90 for 9.0.
        multiprocessors: how many it has.
        shared_bytes: the most shared memory of one block.
    """

    def __init__(self, module: ArrayModule) -> None:
        device = module.cuda.Device()
        self.module = module
        self.arch = int(device.compute_capability)
        self.multiprocessors = int(device.attributes["MultiProcessorCount"])
        self.shared_bytes = int(device.attributes["MaxSharedMemoryPerBlockOptin"])
        self._modules: dict[Program, Any] = {}
        self._functions: dict[tuple[Program, str], Any] = {}
        self._counters: WeakKeyDictionary[Any, Array] = WeakKeyDictionary()

    def empty(self, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> Array:
        """An array of any content."""
        return self.module.empty(shape, dtype)

    def address(self, x: Array) -> int:
        """Of an array's first element."""
        return int(x.data.ptr)

    def counters(self) -> Array:
        """`COUNTERS` numbers of 32 bits of the current stream, by which the blocks of a launch agree.

        They are zero when a launch begins, which leaves them so. As captured graphs use them, they last as long as the
        stream, and do not come from the allocator of the moment.
        """
        stream = self.module.cuda.get_current_stream()
        found = self._counters.get(stream)
        if found is None:
            memory = self._unshared(4 * COUNTERS)
            beside = self.module.cuda.Stream(non_blocking=True)  # What is captured of the stream comes too late.
            memory.memset_async(0, 4 * COUNTERS, beside)
            beside.synchronize()
            found = self._counters[stream] = self.module.ndarray((COUNTERS,), np.uint32, memory)
        return found

    def _unshared(self, size: int) -> Any:
        """Memory of no pool: kernels that the stream has yet to run may still write what a pool gives.

        Raises:
            MemoryError: there is none left.
        """
        cuda = self.module.cuda
        try:
            memory = cuda.Memory(size)
        except cuda.runtime.CUDARuntimeError:
            self.module.get_default_memory_pool().free_all_blocks()
            try:
                memory = cuda.Memory(size)
            except cuda.runtime.CUDARuntimeError as error:
                raise MemoryError(f"no {size:,} bytes are left on the device") from error
        return cuda.MemoryPointer(memory, 0)

    def function(self, program: Program, name: str) -> Any:
        """A function of a program, compiled when it is first asked for; CuPy keeps on disk what it compiled.

        Raises:
            CompileError: that failed.
        """
        found = self._functions.get((program, name))
        if found is None:
            try:
                found = self._functions[program, name] = self._compiled(program).get_function(name)
            except Exception as error:
                lines = str(error).strip().splitlines() or [type(error).__name__]
                told = next((line for line in lines if "error" in line), lines[0])
                raise CompileError(f"its CUDA kernel {name} cannot be compiled: {told}") from error
        return found

    def _compiled(self, program: Program) -> Any:
        if program not in self._modules:
            self._modules[program] = self.module.RawModule(code=program.source, options=program.options(self.arch))
        return self._modules[program]

    def launch(
        self,
        program: Program,
        function: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        arguments: Sequence[Any],
        shared: int = 0,
    ) -> None:
        """Launch a function on the current stream; nothing for a grid without blocks.

        Args:
            program: what has the function.
            function: its name.
            grid: blocks, in up to three dims.
            block: threads of a block, in up to three dims.
            arguments: arrays, for pointers to their first elements, and numpy's numbers of the parameters' C types.
            shared: bytes of dynamic shared memory of a block.
        """
        blocks, threads = _three(grid), _three(block)
        if 0 in blocks:
            return
        for argument in arguments:
            if isinstance(argument, bool | int | float) and not isinstance(argument, np.generic):
                raise TypeError(f"{function}: an argument {argument!r} has no C type; give a number of numpy's")
        found = self.function(program, function)
        if shared > STATIC_SHARED_BYTES and found.max_dynamic_shared_size_bytes < shared:
            found.max_dynamic_shared_size_bytes = shared
        found(blocks, threads, tuple(arguments), shared_mem=shared)


def pointers_of(*arrays: Array | None) -> list[Any]:
    """Arrays as launches take them; a null pointer for what is absent."""
    return [np.uint64(0) if x is None else x for x in arrays]


def strides_of(x: Array) -> list[Any]:
    """The steps of an array from element to element of each dim, in elements, as launches take them (64 bits)."""
    return [np.int64(stride // x.dtype.itemsize) for stride in x.strides]


def _three(dims: int | Sequence[int]) -> tuple[int, ...]:
    given = (dims,) if isinstance(dims, int) else tuple(dims)
    return (*given, *(1 for _ in range(3 - len(given))))


class Gpus:
    """The devices of a process: calling it gives the current one.

    Args:
        module: CuPy.
    """

    def __init__(self, module: ArrayModule) -> None:
        self._module = module
        self._known: dict[int, Gpu] = {}

    def __call__(self) -> Gpu:
        number = int(self._module.cuda.Device().id)
        if number not in self._known:
            self._known[number] = Gpu(self._module)
        return self._known[number]
