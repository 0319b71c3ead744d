"""CUDA kernels on a processor: programs are compiled with a header that gives them threads, barriers and warps."""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irpar.kernels.cuda import Program
from irpar.kernels.cuda.gpu import COUNTERS

HEADER = Path(__file__).with_name("emulated.h")
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class EmulatedGpu:
    """A `Gpu` whose arrays are numpy's.

    Args:
        folder: where what is compiled goes.
        multiprocessors: how many it says that it has.
        poison: what new arrays hold.
        is_backwards: whether the last block runs first.
        arch: the compute capability that it says that it has.
    """

    module = np
    shared_bytes = 227 * 1024

    def __init__(
        self, folder: Path, multiprocessors: int = 4, poison: int = 0xFF, is_backwards: bool = False, arch: int = 90
    ) -> None:
        self.multiprocessors, self.arch = multiprocessors, arch
        self._folder = folder
        self._poison = poison
        self._is_backwards = is_backwards
        self._counters = np.zeros(COUNTERS, np.uint32)
        self.launched: list[str] = []

    def empty(self, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> "np.ndarray[Any, Any]":
        """An array of NaNs, at an address that 16 bytes divide."""
        dtype = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory = np.full(count + 16, self._poison, np.uint8)
        start = -memory.ctypes.data % 16
        return memory[start : start + count].view(dtype).reshape(shape)

    def address(self, x: "np.ndarray[Any, Any]") -> int:
        """Of its first element."""
        return int(x.ctypes.data)

    def counters(self) -> "np.ndarray[Any, Any]":
        """Zeros, which a launch leaves so."""
        return self._counters

    def launch(
        self,
        program: Program,
        function: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        arguments: Sequence[Any],
        shared: int = 0,
    ) -> None:
        """Run a function to its end."""
        assert shared <= self.shared_bytes
        self.launched.append(function)
        held, addresses = [], (ctypes.c_void_p * len(arguments))()
        for place, argument in enumerate(arguments):
            if isinstance(argument, np.ndarray):
                cell = np.array([argument.ctypes.data], np.uint64)
            else:
                assert isinstance(argument, np.generic), argument
                cell = np.array([argument])
            held.append(cell)
            addresses[place] = cell.ctypes.data
        dims = [(ctypes.c_int * 3)(*_three(given)) for given in (grid, block)]
        self._library(program, function).run(*dims, shared, addresses, int(self._is_backwards))
        assert not self._counters.any()

    def _library(self, program: Program, function: str) -> ctypes.CDLL:
        text = f'#include "{HEADER}"\n{program.source}\n' + (
            'extern "C" void run(const int* grid, const int* block, int bytes, void** arguments, int backwards) {\n'
            f"  launch({function}, grid, block, bytes, arguments, backwards);\n}}\n"
        )
        defines = [f"-D{name}={value}" for name, value in program.defines]
        name = sha256(repr((text, defines, HEADER.read_text())).encode()).hexdigest()[:16]
        library = self._folder / f"{name}.so"
        if not library.exists():
            source = self._folder / f"{name}.cpp"
            source.write_text(text)
            options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", *defines]
            subprocess.run(["g++", *options, "-o", str(library), str(source)], check=True)
        return ctypes.CDLL(str(library))


def _three(dims: int | Sequence[int]) -> tuple[int, ...]:
    given = (dims,) if isinstance(dims, int) else tuple(dims)
    return (*given, *(1 for _ in range(3 - len(given))))
