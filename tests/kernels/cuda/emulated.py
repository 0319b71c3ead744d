"""Generated kernels on the host: compiled as C++ behind an emulation of blocks, threads, barriers and shuffles."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from irpar.kernels.cuda.expression_text import Launch, functions
from irpar.kernels.cuda.gpu import COUNTERS

HEADER = Path(__file__).parent / "emulation.h"
COMPILER = shutil.which("g++")
_FUNCTION = re.compile(r'extern "C" __global__ void __launch_bounds__\(\d+\) fused\((.*)\) \{')


def compiled(launches: Sequence[Launch], folder: Path) -> Any:
    """A library with a function `emulate0`, `emulate1` ... for each launch."""
    assert COMPILER is not None
    parts = [f'#include "{HEADER}"\n', functions()]
    for number, launch in enumerate(launches):
        match = _FUNCTION.search(launch.source)
        assert match is not None
        parameters = match[1].split(", ")
        names = [parameter.rpartition(" ")[2] for parameter in parameters]
        kernel = launch.source.removeprefix(functions()).replace('extern "C" __global__', "static")
        types = [parameter.rpartition(" ")[0].replace("__restrict__", "") for parameter in parameters]
        held = "".join(f"static {type_} g_{name};\n" for type_, name in zip(types, names, strict=True))
        taken = ", ".join(f"{type_} {name}" for type_, name in zip(types, names, strict=True))
        given = "".join(f"g_{name} = {name}; " for name in names)
        call = ", ".join(f"g_{name}" for name in names)
        parts.append(
            f"namespace launch{number} {{\n{kernel}\n{held}static void thread() {{ fused({call}); }}\n}}\n"
            f'extern "C" void emulate{number}(unsigned grid, unsigned block, {_qualified(taken, number)}) {{\n'
            f"  using namespace launch{number};\n  {given}\n  run_grid(grid, block, thread);\n}}\n"
        )
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text("\n".join(parts))
    command = [COMPILER, "-std=c++17", "-O0", "-w", "-fno-strict-aliasing", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library))


def _qualified(parameters: str, number: int) -> str:
    return re.sub(r"\bIndex\b", f"launch{number}::Index", parameters)


def emulate(library: Any, number: int, launch: Launch, arrays: Sequence["np.ndarray[Any, Any]"]) -> None:
    """Run a launch of a library over operands and results."""
    if launch.parts:
        parts = np.full(launch.parts, np.nan, np.float64 if launch.kind == "double" else np.float32)
        arrays = [*arrays, parts, np.zeros(COUNTERS, np.uint32)]
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
    kinds = {np.int32: ctypes.c_int32, np.int64: ctypes.c_int64}
    numbers = [kinds[type(value)](int(value)) for value in launch.numbers]
    getattr(library, f"emulate{number}")(ctypes.c_uint(launch.grid), ctypes.c_uint(launch.block), *pointers, *numbers)
