"""Sources: what is defined and included, and that every one compiles where there is a compiler."""

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from irpar.kernels import cuda
from irpar.kernels.cuda import Program, programs

from .nvcc import ARCHITECTURES, NEEDS_NVCC, compile_program
from .nvrtc import NEEDS_NVRTC, compile_at_run_time


def all_programs() -> Iterator[tuple[str, Program]]:
    """What each family says that it launches."""
    for module in pkgutil.iter_modules(cuda.__path__):
        family = import_module(f"{cuda.__name__}.{module.name}")
        for program in getattr(family, "all_programs", tuple)():
            yield module.name, program


def test_options() -> None:
    program = Program("", (("T", "float"), ("WIDTH", "4")))
    assert program.options(90) == ("-std=c++17", "-DT=float", "-DWIDTH=4")
    assert Program("", features="a").options(90) == ("-std=c++17", "-arch=sm_90a")


def test_a_file_has_what_it_includes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "FOLDER", tmp_path)
    (tmp_path / "one.cuh").write_text("int one;\n")
    (tmp_path / "two.cuh").write_text('#include "one.cuh"\nint two;\n')
    (tmp_path / "all.cu").write_text('#include <cuda_fp16.h>\n#include "one.cuh"\n#include "two.cuh"\nint three;\n')
    programs._source.cache_clear()
    program = Program.file("all.cu", T="half", N=3)
    assert [line for line in program.source.splitlines() if line] == [
        "#include <cuda_fp16.h>",
        "int one;",
        "int two;",
        "int three;",
    ]
    assert program.defines == (("T", "half"), ("N", "3"))
    assert Program.file("all.cu", T="half", N=3) == program
    programs._source.cache_clear()


def test_every_source_is_of_a_family_that_names_its_programs() -> None:
    sources = {path.read_text() for path in programs.FOLDER.glob("*.cu")}
    named = {program.source for _, program in all_programs()}
    assert len(sources) <= len(named)


@NEEDS_NVCC
def test_a_program_that_is_wrong_is_told(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="undefined"):
        compile_program(Program('extern "C" __global__ void f() { undefined; }'), tmp_path)


@NEEDS_NVCC
@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({family for family, _ in all_programs()}))
def test_every_program_compiles(family: str, tmp_path: Path) -> None:
    for name, program in all_programs():
        if name == family:
            compile_program(program, tmp_path)


@NEEDS_NVRTC
@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({family for family, _ in all_programs()}))
def test_every_program_compiles_at_run_time(family: str) -> None:
    """NVRTC has no headers of the host, and not all that nvcc has built in."""
    for name, program in all_programs():
        for arch in ARCHITECTURES if name == family else ():
            if arch == 90 or not program.features:
                compile_at_run_time(program, arch)
