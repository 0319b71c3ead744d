"""NVIDIA's compiler, where it is: programs are compiled for devices that are not here."""

import shutil
import subprocess
from pathlib import Path

import pytest

from irpar.kernels.cuda import Program

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
ARCHITECTURES = (80, 90)
NEEDS_NVCC = pytest.mark.skipif(NVCC is None, reason="needs nvcc")


def compile_program(program: Program, folder: Path) -> None:
    """Compile a program for all architectures that can have it; warnings are errors.

    Raises:
        AssertionError: with what the compiler says.
    """
    assert NVCC is not None
    source = folder / "program.cu"
    source.write_text(program.source)
    names = [f"{arch}{program.features}" for arch in ARCHITECTURES if arch == 90 or not program.features]
    options = [option for option in program.options(90) if not option.startswith("-arch")]
    targets = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
    command = [NVCC, "-fatbin", "-Werror", "all-warnings", *options, *targets, "-o", "program.fatbin", str(source)]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert found.returncode == 0, f"{program.defines}\n{found.stderr}{found.stdout}"
