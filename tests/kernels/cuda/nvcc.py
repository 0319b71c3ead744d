"""NVIDIA's compiler, where it is: programs are compiled for devices that are not here."""

import shutil
import subprocess
from pathlib import Path

import pytest

from irpar.kernels.cuda import Program

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
ARCHITECTURES = (80, 90)
NEEDS_NVCC = pytest.mark.skipif(NVCC is None, reason="needs nvcc")


def compile_program(program: Program, arch: int, folder: Path) -> None:
    """Compile a program for an architecture; warnings are errors.

    Raises:
        AssertionError: with what the compiler says.
    """
    assert NVCC is not None
    source = folder / "program.cu"
    source.write_text(program.source)
    options = [*program.options(arch)]
    if not program.features:
        options.append(f"-arch=sm_{arch}")
    command = [NVCC, "-cubin", "-Werror", "all-warnings", *options, "-o", str(folder / "program.cubin"), str(source)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, f"{program.defines}\n{found.stderr}{found.stdout}"
