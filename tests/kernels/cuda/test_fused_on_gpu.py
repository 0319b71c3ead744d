"""irpar.Fused on a device against float64: random expressions, odd sizes, strides, unaligned views, guard words."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from irpar.kernels import cuda, lookup
from tests.gpu import NEEDS_GPU, cupy

from .random_expressions import Array, Example, draw
from .test_each import NARROW, UPDATE, computed, update
from .test_generator import (
    CHANNELS,
    COLUMNS,
    NORMALIZED,
    ONE_HOT,
    ROTARY,
    SOFTMAX,
    WIDENED,
    close,
    gradients,
    numbers,
    rotary,
)

pytestmark = NEEDS_GPU
GUARD = 256
"""Bytes on both sides of a result."""


class Guarded:
    """A result on the device between two runs of bytes, filled with what is no result."""

    def __init__(self, like: Array, offset: int) -> None:
        xp = cupy()
        self.start = GUARD + offset * like.dtype.itemsize
        self.memory = xp.full(like.nbytes + 3 * GUARD, 0xFF, np.uint8)
        self.array = self.memory[self.start : self.start + like.nbytes].view(like.dtype).reshape(like.shape)

    def taken(self) -> Array:
        """The result; nothing beside it was written."""
        memory = self.memory.get()
        assert (memory[: self.start] == 0xFF).all()
        assert (memory[self.start + self.array.nbytes :] == 0xFF).all()
        return self.array.get()


def uploaded(array: Array) -> Any:
    """An array on the device that lies as it does here: strides, and the bytes to the next address of 16."""
    xp = cupy()
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    memory = xp.asarray(np.ascontiguousarray(base).reshape(-1).view(np.uint8))
    offset = array.ctypes.data - base.ctypes.data
    pointer = memory.data + offset
    return xp.ndarray(array.shape, array.dtype, memptr=pointer, strides=array.strides)


def check(example: Example, offset: int = 0) -> None:
    kernel = cuda.lookup("irpar", "Fused", 1)
    assert kernel is not None
    made = [Guarded(result, offset) for result in example.computed()]
    outs = tuple(one.array for one in made)
    operands = [uploaded(x) for x in example.operands]
    results = kernel(cuda.Gpu(cupy()), operands, {"expression": example.lines}, len(outs), outs)
    assert results is not None
    for one, expected in zip(made, example.expected(), strict=True):
        close(one.taken(), expected, "\n".join(example.lines))


@pytest.mark.parametrize("seed", range(8))
def test_random_expressions(seed: int) -> None:
    random = np.random.default_rng(100 + seed)
    for number in range(10):
        check(draw(random), number % 3)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("length", [1, 33, 768, 1024, 4096, 5000, 50257])
def test_rows(length: int, dtype: Any) -> None:
    random = np.random.default_rng(length)
    check(Example(NORMALIZED, numbers(random, dtype, (37, length), (37, length), (length,), (length,))))
    check(Example(SOFTMAX, numbers(random, dtype, (37, length), (1, length))))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_rotated_rows_and_channels(dtype: Any) -> None:
    random = np.random.default_rng(7)
    for size in (4, 6, 64, 128):
        check(Example(ROTARY, rotary(random, dtype, size)))
    check(Example(CHANNELS, numbers(random, dtype, (3, 7, 5, 8), (7,), (7,))))
    check(Example(ONE_HOT, (random.integers(-6, 6, (50, 33)), *numbers(random, dtype, (50, 6, 33)))))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_sums_of_columns(dtype: Any) -> None:
    random = np.random.default_rng(9)
    for shape in (*COLUMNS, (4, 256, 768), (4, 256, 3072), (8, 4000, 768), (1, 100_000, 33)):
        example = gradients(random, dtype, shape)
        check(example, shape[0])
        if np.dtype(dtype).itemsize == 2 and shape[1] < 700:
            check(Example(WIDENED, numbers(random, dtype, shape, shape)))
        kernel = cuda.lookup("irpar", "Fused", 1)
        assert kernel is not None
        operands = [uploaded(x) for x in example.operands]
        runs = [kernel(cuda.Gpu(cupy()), operands, {"expression": example.lines}, 3) or () for _ in range(2)]
        assert [x.get().tobytes() for x in runs[0]] == [x.get().tobytes() for x in runs[1]]


def test_elements_beyond_32_bits_of_strides() -> None:
    xp = cupy()
    kernel = cuda.lookup("irpar", "Fused", 1)
    assert kernel is not None
    wide = xp.zeros(1 << 27, np.float16)
    x = xp.lib.stride_tricks.as_strided(wide, (2, 1 << 10), ((1 << 27), 2))
    x[1, 5] = 3
    (y,) = kernel(cuda.Gpu(xp), [x], {"expression": ("y0 = Add(x0, 1.0)",)}, 1) or ()
    assert float(y[1, 5]) == 4
    assert float(y.astype(np.float64).sum()) == x.size + 3


def test_results_over_operands() -> None:
    """In place where each element is made of its own; beside, and then copied, where it is made of others of its row."""
    xp = cupy()
    kernel = cuda.lookup("irpar", "Fused", 1)
    assert kernel is not None
    gpu = cuda.Gpu(xp)
    for lines in (
        ("y0 = Mul(x0, 2.0)",),
        ("t0 = ReduceSum(x0, axes=[-1])", "y0 = Sub(x0, t0)"),
        ("t0 = RotateHalf(x0)", "y0 = Add(x0, t0)"),
    ):
        x = np.random.default_rng(3).normal(size=(5, 300)).astype(np.float32)
        held = xp.asarray(x)
        (y,) = kernel(gpu, [held], {"expression": lines}, 1, held) or ()
        assert y is held
        close(y.get(), Example(lines, (x,)).expected()[0], lines[0])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_products_with_what_follows(dtype: Any) -> None:
    """A bias and Gelu by tanh, a bias and a residual; of columns that are no multiple of anything too."""
    xp = cupy()
    kernel = lookup("irpar", "FusedMatMul", 1)
    assert kernel is not None
    random = np.random.default_rng(9)
    for columns in (64, 37):
        a, b, bias, residual = numbers(random, dtype, (3, 50, 40), (40, columns), (columns,), (3, 50, columns))
        for operands, attributes in (((a, b, bias), {"activation": "gelu_tanh"}), ((a, b, bias, residual), {})):
            (found,) = kernel(xp, [xp.asarray(x) for x in operands], attributes, 1)
            (expected,) = kernel(np, [x.astype(np.float64) for x in operands], attributes, 1)
            close(found.get(), expected, f"{columns} {attributes}")


def test_updates_of_many_tensors_over_what_they_read() -> None:
    random = np.random.default_rng(3)
    shapes = [(4,), (3, 7), (50257, 64), (768, 768), *((4 * size + 4,) for size in range(60))]
    lists = [update(shape, random) for shape in shapes]
    operands = [x for one in lists for x in one]
    expected = computed(operands, len(lists))
    given = [[cupy().asarray(x) for x in one] for one in lists]
    outs = tuple(out for one in given for out in (one[2], one[0], cupy().empty(one[0].shape, NARROW)))
    kernel = cuda.lookup("irpar", "FusedEach", 1)
    assert kernel is not None
    attributes = {"expression": UPDATE, "times": len(lists)}
    results = kernel(cuda.Gpu(cupy()), [x for one in given for x in one], attributes, len(outs), outs)
    assert results is not None
    for result, out, wanted in zip(results, outs, expected, strict=True):
        assert result is out
        rtol = 1e-2 if wanted.dtype == NARROW else 1e-6  # Products and sums are rounded together.
        np.testing.assert_allclose(result.get().astype(np.float32), wanted.astype(np.float32), rtol=rtol, atol=1e-6)
