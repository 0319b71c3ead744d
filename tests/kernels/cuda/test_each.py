"""One expression for many lists of tensors: the same numbers as one by one, in few launches, over operands too."""

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from irpar.kernels import cuda, lookup
from irpar.kernels.cuda import Program
from irpar.kernels.cuda.expression_each import EachKernel, generate_each
from irpar.kernels.cuda.expression_text import functions
from irpar.kernels.cuda.layouts import Layout

from .emulated import COMPILER, HEADER
from .nvcc import NEEDS_NVCC, compile_program
from .nvrtc import NEEDS_NVRTC, compile_at_run_time

Array = np.ndarray[Any, Any]
NARROW, WIDE = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
UPDATE = (
    "t0 = Cast(x1, to=f32)",
    "t1 = Mul(x2, 0.9)",
    "y0 = Add(t1, t0)",
    "t3 = Mul(y0, x3)",
    "y1 = Sub(x0, t3)",
    "y2 = Cast(y1, to=bf16)",
)
"""Of a parameter, its gradient, its moment and the rate: the new moment, parameter and narrow parameter."""


class HostGpu:
    """A device whose arrays are numpy's, and which computes kernels of tables on the processor."""

    multiprocessors = 2

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._libraries: dict[Program, Any] = {}
        self.launched: list[int] = []

    def empty(self, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> Array:
        return np.empty(shape, dtype)

    def address(self, x: Array) -> int:
        return int(x.ctypes.data)

    def function(self, program: Program, name: str) -> Any:
        if program not in self._libraries:
            place = self._folder / f"each{len(self._libraries)}"
            place.with_suffix(".cpp").write_text(
                f'#include "{HEADER}"\n{functions()}\n'
                + program.source.removeprefix(functions()).replace('extern "C" __global__', "static")
                + "static const Table* held; static int count;\nstatic void thread() { fused(*held, count); }\n"
                'extern "C" void run(unsigned grid, unsigned block, const Table* table, int lists) {\n'
                "  held = table; count = lists; run_grid(grid, block, thread);\n}\n"
            )
            options = ["-std=c++17", "-O0", "-w", "-fno-strict-aliasing", "-ffp-contract=off", "-shared", "-fPIC"]
            library = str(place.with_suffix(".so"))
            subprocess.run([str(COMPILER), *options, "-o", library, str(place.with_suffix(".cpp"))], check=True)
            self._libraries[program] = ctypes.CDLL(library)
        return self._libraries[program]

    def launch(self, program: Program, name: str, grid: int, block: int, arguments: Sequence[Any]) -> None:
        table, lists = arguments
        self.launched.append(int(lists))
        self.function(program, name).run(grid, block, ctypes.c_void_p(table.ctypes.data), int(lists))


def aligned(array: Array) -> Array:
    """The same numbers at an address that 16 bytes divide."""
    memory = np.empty(array.nbytes + 16, np.uint8)
    start = -memory.ctypes.data % 16
    made = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


def update(shape: tuple[int, ...], random: np.random.Generator) -> list[Array]:
    """Operands of an update."""
    parameter, gradient, moment = (random.standard_normal(shape).astype(WIDE) for _ in range(3))
    rate = np.asarray(random.random(), WIDE)
    return [aligned(x) for x in (parameter, gradient.astype(NARROW), moment, rate)]


def computed(operands: Sequence[Array], times: int) -> Sequence[Array]:
    """What the kernel of the host makes of copies."""
    kernel = lookup("irpar", "FusedEach", 1)
    assert kernel is not None
    return kernel(np, [x.copy() for x in operands], {"expression": UPDATE, "times": times}, 3 * times)


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_lists_of_many_sizes_share_launches_and_are_written_over(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    shapes = [(4,), (3, 7), (24, 1000), (8192,), (8196,), (2, 3, 4), *((4 * size,) for size in range(1, 60))]
    lists = [update(shape, random) for shape in shapes]
    operands = [x for one in lists for x in one]
    expected = computed(operands, len(lists))
    outs = [out for one in lists for out in (one[2], one[0], aligned(np.empty(one[0].shape, NARROW)))]
    gpu: Any = HostGpu(tmp_path)
    kernel = cuda.lookup("irpar", "FusedEach", 1)
    assert kernel is not None
    results = kernel(gpu, operands, {"expression": UPDATE, "times": len(lists)}, len(outs), tuple(outs))
    assert results is not None
    for result, out, wanted in zip(results, outs, expected, strict=True):
        assert result is out
        np.testing.assert_allclose(result.astype(WIDE), wanted.astype(WIDE), rtol=1e-6, atol=1e-6)
    # That of 21 elements has no vectors; a table holds some fifty of the others.
    assert sorted(gpu.launched)[0] == 1
    assert len(gpu.launched) == 3
    assert sum(gpu.launched) == len(lists)


def made(*shape: int) -> EachKernel | None:
    operands = [Layout.contiguous(shape, dtype) for dtype in (WIDE, NARROW, WIDE)]
    results = [Layout.contiguous(shape, dtype) for dtype in (WIDE, WIDE, NARROW)]
    return generate_each(UPDATE, (*operands, Layout.contiguous((), WIDE)), tuple(results))


def test_one_text_stands_for_all_sizes_that_have_vectors_as_long() -> None:
    assert made(64, 32) == made(4) == made(2, 2, 2)
    assert made(64, 32) != made(7)


@pytest.mark.parametrize(
    ("lines", "shapes"),
    [
        (("y0 = Add(x0, x1)",), [(4, 8), (8,)]),
        (("t0 = ReduceSum(x0, axes=[-1])", "y0 = Sub(x0, t0)"), [(4, 8)]),
        (("t0 = RotateHalf(x0)", "y0 = Add(x0, t0)"), [(4, 8)]),
    ],
    ids=["rows of one operand", "sums", "halves"],
)
def test_what_walks_other_ways_has_kernels_of_its_own(lines: tuple[str, ...], shapes: list[tuple[int, ...]]) -> None:
    operands = tuple(Layout.contiguous(shape, WIDE) for shape in shapes)
    assert generate_each(lines, operands, (Layout.contiguous((4, 8), WIDE),)) is None


def test_a_table_fits_where_any_device_takes_arguments() -> None:
    kernel = made(64)
    assert kernel is not None
    table, blocks = kernel.table([[16] * 7, [32] * 7], [kernel.piece + 1, 5])
    assert table.nbytes + 4 <= 4096
    assert blocks == 3
    assert table["begins"][0, :2].tolist() == [0, 2]


@NEEDS_NVCC
def test_compilers_have_nothing_to_say(tmp_path: Path) -> None:
    kernel = made(64)
    assert kernel is not None
    compile_program(Program(kernel.source), tmp_path)


@NEEDS_NVRTC
@pytest.mark.parametrize("arch", [80, 90])
def test_it_compiles_as_a_run_compiles_it(arch: int) -> None:
    kernel = made(64)
    assert kernel is not None
    compile_at_run_time(Program(kernel.source), arch)
