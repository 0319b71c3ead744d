"""Generated kernels on the host against float64: random expressions, strides and dtypes; and what compilers say of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from irpar.kernels.cuda import Program
from irpar.kernels.cuda.expression_text import Launch
from irpar.kernels.cuda.generator import generate
from irpar.kernels.cuda.layouts import Layout, merged

from .emulated import COMPILER, compiled, emulate
from .nvcc import NEEDS_NVCC, compile_program
from .random_expressions import FLOATS, TOLERANCE, Example, draw, layout

Array = np.ndarray[Any, Any]
NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="needs g++")
GUARD = 64
"""Bytes on both sides of a result that stay as they are."""

NORMALIZED = (
    "y0 = Add(x0, x1)",
    "t1 = ReduceMean(y0, axes=[-1])",
    "t2 = Sub(y0, t1)",
    "t3 = Mul(t2, t2)",
    "t4 = ReduceMean(t3, axes=[-1])",
    "t5 = Add(t4, 1e-05)",
    "t6 = Sqrt(t5)",
    "t7 = Div(t2, t6)",
    "t8 = Mul(t7, x2)",
    "y1 = Add(t8, x3)",
    "y2 = Squeeze(t1, axes=[-1])",
)
CHANNELS = (
    "t0 = Unsqueeze(x1, axes=[-2, -1])",
    "t1 = Unsqueeze(x2, axes=[-2, -1])",
    "t2 = Mul(x0, t0)",
    "t3 = Add(t2, t1)",
    "y0 = Relu(t3)",
)
ONE_HOT = (
    "t0 = Unsqueeze(x0, axes=[-2])",
    "t1 = Add(t0, 6)",
    "t2 = IsIndex(t0, axis=-2, size=6)",
    "t3 = IsIndex(t1, axis=-2, size=6)",
    "t4 = Or(t2, t3)",
    "t5 = Where(t4, x1, 0.5)",
    "t6 = Exp(x1)",
    "y0 = Sub(t6, t5)",
)
ROTARY = ("t0 = RotateHalf(x0)", "t1 = Mul(x0, x1)", "t2 = Mul(t0, x2)", "y0 = Add(t1, t2)")
GRADIENTS = (
    "t0 = Sub(x0, x1)",
    "t1 = Mul(t0, x2)",
    "t2 = Mul(x3, t1)",
    "t3 = ReduceSum(t2, axes=[-3, -2])",
    "t4 = Squeeze(t3, axes=[-3, -2])",
    "y0 = Cast(t4, to=bf16)",
    "y1 = ReduceMean(x3, axes=[-3, -2])",
    "t7 = Mul(y1, x4)",
    "y2 = Add(t7, 1.0)",
)
"""Of a normalisation's scale and shift."""
WIDENED = (
    "t0 = Cast(x0, to=f32)",
    "t1 = Mul(t0, 0.5)",
    "t2 = ReduceSum(t1, axes=[-3, -2])",
    "t3 = Squeeze(t2, axes=[-3, -2])",
    "y0 = Cast(t3, to=bf16)",
    "t5 = ReduceSum(x1, axes=[-3, -2])",
    "y1 = Squeeze(t5, axes=[-3, -2])",
)
"""Sums of 16 bits beside some of float32."""
SOFTMAX = (
    "t0 = Mul(x0, 0.125)",
    "t1 = Add(t0, x1)",
    "t2 = ReduceMax(t1, axes=[-1])",
    "t3 = Sub(t1, t2)",
    "t4 = Exp(t3)",
    "t5 = ReduceSum(t4, axes=[-1])",
    "y0 = Div(t4, t5)",
)


class Guarded:
    """A result between two runs of bytes, filled with what is no result."""

    def __init__(self, shape: tuple[int, ...], dtype: "np.dtype[Any]", offset: int = 0) -> None:
        size = int(np.prod(shape)) * dtype.itemsize
        self.start = GUARD + offset * dtype.itemsize
        self.memory = np.full(size + 3 * GUARD, 0xFF, np.uint8)
        self.array = self.memory[self.start : self.start + size].view(dtype).reshape(shape)

    def check(self) -> None:
        """Nothing beside the result was written."""
        assert (self.memory[: self.start] == 0xFF).all()
        assert (self.memory[self.start + self.array.nbytes :] == 0xFF).all()


def launch_of(example: Example, results: Sequence[Array]) -> Launch:
    launch = generate(example.lines, tuple(map(layout, example.operands)), tuple(map(layout, results)), 2)
    assert launch is not None, example.lines
    return launch


def check(examples: Sequence[Example], folder: Path) -> None:
    """All of them, compiled together."""
    guarded = [
        [Guarded(x.shape, x.dtype, number % 3) for x in example.computed()] for number, example in enumerate(examples)
    ]
    launches = [
        launch_of(example, [one.array for one in made]) for example, made in zip(examples, guarded, strict=True)
    ]
    library = compiled(launches, folder)
    for number, (example, made, launch) in enumerate(zip(examples, guarded, launches, strict=True)):
        emulate(library, number, launch, [*example.operands, *(one.array for one in made)])
        for one, expected in zip(made, example.expected(), strict=True):
            one.check()
            close(one.array, expected, "\n".join(example.lines))


def close(found: Array, expected: Array, message: str) -> None:
    if found.dtype not in FLOATS:
        np.testing.assert_array_equal(found, expected, message)
        return
    scale = TOLERANCE[found.dtype] * (1 + np.abs(expected).max())
    np.testing.assert_allclose(
        found.astype(np.float64), expected, rtol=TOLERANCE[found.dtype], atol=scale, err_msg=message
    )


def numbers(random: np.random.Generator, dtype: Any, *shapes: tuple[int, ...]) -> tuple[Array, ...]:
    return tuple(np.asarray(random.normal(size=shape) * 2).astype(dtype) for shape in shapes)


def rotary(random: np.random.Generator, dtype: Any, size: int) -> tuple[Array, ...]:
    """A projection seen by heads, cosines and sines."""
    x, *angles = numbers(random, dtype, (2, 5, 3, size), (5, size), (5, size))
    return (x.transpose(0, 2, 1, 3), *angles)


def gradients(random: np.random.Generator, dtype: Any, shape: tuple[int, int, int]) -> Example:
    """Of a normalisation of some shape, of numbers whose sums are about 1."""
    *outer, length = shape
    rows, share = (*outer, 1), np.sqrt(np.prod(outer))
    given = [x / share for x in numbers(random, np.float64, shape, rows)]
    given += numbers(random, np.float64, rows, shape, (length,))
    return Example(GRADIENTS, tuple(np.asarray(x / 2).astype(dtype) for x in given))


COLUMNS = ((2, 9, 16), (3, 700, 40), (1, 3000, 7), (4, 5, 600), (2, 1, 33), (1, 5000, 64))


@pytest.mark.slow
@NEEDS_COMPILER
def test_sums_of_columns(tmp_path: Path) -> None:
    """Few and many rows, which several blocks share then; columns that are no whole vectors, and of a matrix turned."""
    random = np.random.default_rng(8)
    dtypes = (np.float32, np.float16, ml_dtypes.bfloat16, np.float64)
    found = [gradients(random, dtype, shape) for dtype in dtypes for shape in COLUMNS]
    x = numbers(random, np.float32, (64, 100))[0].T
    found.append(Example(("t0 = Exp(x0)", "y0 = ReduceMean(t0, axes=[-2])"), (x,)))
    assert any(launch_of(one, [np.empty(y.shape, y.dtype) for y in one.computed()]).parts for one in found)
    check(found, tmp_path)


@pytest.mark.slow
@NEEDS_COMPILER
def test_rows_are_rotated(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    sizes = ((np.float32, 4), (np.float16, 6), (np.float32, 10), (np.float16, 64), (np.float64, 8))
    check([Example(ROTARY, rotary(random, dtype, size)) for dtype, size in sizes], tmp_path)
    two = launch_of(
        Example(("y0 = RotateHalf(x0)",), numbers(random, np.float32, (3, 4))), (np.empty((3, 4), np.float32),)
    )
    assert two.grid == 1


@NEEDS_COMPILER
def test_kernels_compute_what_expressions_say(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    check(
        [
            Example(NORMALIZED, numbers(random, np.float16, (3, 5, 48), (3, 5, 48), (48,), (48,))),
            Example(NORMALIZED, numbers(random, np.float32, (70, 7), (70, 1), (7,), (7,))),
            Example(SOFTMAX, numbers(random, ml_dtypes.bfloat16, (2, 3, 4, 200), (2, 1, 1, 200))),
            Example(("t0 = Add(x0, x1)", "y0 = Gelu(t0)"), numbers(random, np.float16, (6, 40), (40,))),
            Example(ROTARY, rotary(random, np.float16, 16)),
            gradients(random, np.float32, (3, 30, 40)),
            Example(WIDENED, numbers(random, ml_dtypes.bfloat16, (2, 3, 40), (2, 3, 40))),
            Example(ONE_HOT, (random.integers(-6, 6, (3, 8)), *numbers(random, np.float32, (3, 6, 8)))),
            Example(CHANNELS, numbers(random, np.float16, (2, 3, 4, 8), (3,), (3,))),
            Example(("t0 = Cast(x0, to=f16)", "y0 = Cast(t0, to=f32)"), numbers(random, np.float32, (5, 24))),
            Example(("y0 = Cast(x0, to=f16)",), numbers(random, np.float32, (5, 24))),
        ],
        tmp_path,
    )


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize("seed", range(12))
def test_random_expressions(seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    check([draw(random) for _ in range(25)], tmp_path)


@pytest.mark.slow
@NEEDS_COMPILER
def test_rows_of_all_lengths(tmp_path: Path) -> None:
    """Threads of a row, vectors of a thread, and rows that are read again in each stage."""
    random = np.random.default_rng(1)
    lengths = (1, 2, 31, 32, 33, 96, 127, 256, 768, 1000, 1024, 4096, 5000, 16384, 50257, 70000)
    check(
        [
            Example(
                lines,
                numbers(
                    random,
                    dtype,
                    *(((rows, length),) * 2 + ((length,),) * 2 if len(lines) > 8 else ((rows, length), (1, length))),
                ),
            )
            for length in lengths
            for rows, dtype in ((3, np.float32), (2, np.float16))
            for lines in (NORMALIZED, SOFTMAX)
        ],
        tmp_path,
    )


SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.5, np.inf, -np.inf, np.nan, 1e30, -1e-30, 88.0, -104.0], np.float32
)
FUNCTIONS = (
    "Abs(x0)", "Acos(x0)", "Acosh(x0)", "Asin(x0)", "Asinh(x0)", "Atan(x0)", "Atanh(x0)", "Ceil(x0)", "Celu(x0)",
    "Cos(x0)", "Cosh(x0)", "Elu(x0)", "Erf(x0)", "Exp(x0)", "Floor(x0)",
    "HardSigmoid(x0)", "HardSwish(x0)", "IsInf(x0)", "IsInf(x0, detect_negative=0)", "IsNaN(x0)", "LeakyRelu(x0)",
    "Log(x0)", "Mish(x0)", "Neg(x0)", "Reciprocal(x0)", "Relu(x0)", "Round(x0)", "Selu(x0)", "Shrink(x0)",
    "Sigmoid(x0)", "Sign(x0)", "Sin(x0)", "Sinh(x0)", "Softplus(x0)", "Softsign(x0)", "Sqrt(x0)", "Swish(x0)",
    "Tan(x0)", "Tanh(x0)", "ThresholdedRelu(x0)", "Add(x0, x1)", "Sub(x0, x1)", "Mul(x0, x1)", "Div(x0, x1)",
    "Max(x0, x1)", "Min(x0, x1)", "Mod(x0, x1)", "Mod(x0, x1, fmod=1)", "Pow(x0, x1)", "Pow(x0, 2.0)", "Pow(x0, 3.0)",
    "PRelu(x0, x1)", "Equal(x0, x1)", "Greater(x0, x1)", "GreaterOrEqual(x0, x1)", "Less(x0, x1)", "LessOrEqual(x0, x1)",
    "Cast(x0, to=bool)", "Cast(x0, to=f16)", "Cast(x0, to=bf16)", "Cast(x0, to=f64)", "Max(x0, inf)", "Min(x0, nan)",
)  # fmt: skip
WHOLE = (
    "Abs(x0)", "Neg(x0)", "Sign(x0)", "Add(x0, x1)", "Sub(x0, x1)", "Mul(x0, x1)", "Div(x0, x1)", "Max(x0, x1)", "Min(x0, x1)",
    "Mod(x0, x1)", "Mod(x0, x1, fmod=1)", "Equal(x0, 3)", "Less(x0, x1)", "Cast(x0, to=f32)", "Cast(x0, to=i64)", "Cast(x0, to=u8)", "BitwiseAnd(x0, 5)", "BitwiseOr(x0, x1)", "BitwiseXor(x0, x1)", "BitwiseNot(x0)",
)  # fmt: skip


@pytest.mark.slow
@NEEDS_COMPILER
def test_functions_of_special_numbers(tmp_path: Path) -> None:
    """NaN, infinities, signed zeros, integers that wrap around."""
    a, b = (x.reshape(-1) for x in np.meshgrid(SPECIAL, SPECIAL))
    random = np.random.default_rng(2)
    examples = [Example(tuple(f"y{place} = {call}" for place, call in enumerate(FUNCTIONS)), (a, b))]
    for dtype in (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64):
        limits = np.iinfo(dtype)
        x = random.integers(limits.min, limits.max, 200, dtype, endpoint=True)
        y = random.integers(max(limits.min, -7), 8, 200).astype(dtype)
        y[y == 0] = 1
        examples.append(Example(tuple(f"y{place} = {call}" for place, call in enumerate(WHOLE)), (x, y)))
    bools = (np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool))
    logic = (
        "And(x0, x1)",
        "Or(x0, x1)",
        "Xor(x0, x1)",
        "Not(x0)",
        "Where(x0, x1, 1)",
        "Cast(x0, to=f16)",
        "Equal(x0, x1)",
    )
    examples.append(Example(tuple(f"y{place} = {call}" for place, call in enumerate(logic)), bools))
    found = [[np.empty(x.shape, x.dtype) for x in example.computed()] for example in examples]
    launches = [launch_of(example, made) for example, made in zip(examples, found, strict=True)]
    library = compiled(launches, tmp_path)
    for number, (example, made) in enumerate(zip(examples, found, strict=True)):
        emulate(library, number, launches[number], [*example.operands, *made])
        with np.errstate(all="ignore"):
            for line, one, expected in zip(example.lines, made, example.computed(), strict=True):
                np.testing.assert_allclose(
                    one.astype(np.float64), expected.astype(np.float64), rtol=3e-6, atol=1e-30, err_msg=line
                )


def test_what_is_not_for_the_generator() -> None:
    def made(lines: tuple[str, ...], *shapes: tuple[int, ...], results: tuple[tuple[int, ...], ...]) -> Launch | None:
        layouts = tuple(Layout.contiguous(shape, np.dtype(np.float32)) for shape in shapes)
        return generate(lines, layouts, tuple(Layout.contiguous(shape, np.dtype(np.float32)) for shape in results), 2)

    assert made(("y0 = ReduceSum(x0, axes=[-2])",), (2, 3, 4), results=((2, 1, 4),)) is None
    two = ("t0 = ReduceSum(x0, axes=[-1])", "y0 = ReduceSum(t0, axes=[-2])")
    assert made(two, (3, 4), results=((1, 1),)) is None
    assert made(("y0 = Neg(x0)",), (0, 4), results=((0, 4),)) is None
    assert made(("y0 = Neg(x0)", "y1 = Add(x0, x1)"), (4,), (3, 4), results=((4,), (3, 4))) is None


def test_programs_depend_on_the_structure_alone() -> None:
    def source(shape: tuple[int, ...], bias: tuple[int, ...]) -> str:
        made = Layout.contiguous(shape, np.dtype(np.float32))
        launch = generate(("y0 = Add(x0, x1)",), (made, Layout.contiguous(bias, made.dtype)), (made,), 2)
        assert launch is not None
        return launch.source

    assert source((8, 64), (64,)) == source((3, 2, 128), (128,))
    assert source((8, 64), (64,)) != source((8, 64), (8, 1))
    assert source((8, 64), (8, 64)) == source((1 << 10, 4), (1 << 10, 4))
    assert source((8, 64), (8, 64)) != source((1 << 20, 1 << 12), (1 << 20, 1 << 12))


def test_dims_that_lie_together_are_one() -> None:
    found = merged((8, 128, 1, 768), [(128 * 768, 768, 5, 1), (0, 0, 0, 1)])
    assert found.sizes == (1024, 768)
    assert found.strides == ((768, 1), (0, 1))
    assert merged((1, 1), [(1, 1)]).sizes == ()


@NEEDS_NVCC
@pytest.mark.slow
def test_programs_compile_for_devices(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    examples = [
        Example(NORMALIZED, numbers(random, np.float16, (3, 5, 48), (3, 5, 48), (48,), (48,))),
        Example(SOFTMAX, numbers(random, np.float32, (2, 50257), (1, 50257))),
        Example(tuple(f"y{place} = {call}" for place, call in enumerate(FUNCTIONS)), (SPECIAL, SPECIAL)),
        Example(("t0 = Add(x0, x1)", "y0 = Gelu(t0)"), numbers(random, ml_dtypes.bfloat16, (6, 40), (40,))),
        Example(ROTARY, rotary(random, np.float16, 64)),
        Example(CHANNELS, numbers(random, np.float16, (2, 3, 4, 8), (3,), (3,))),
        Example(ONE_HOT, (random.integers(-6, 6, (3, 8)), *numbers(random, np.float32, (3, 6, 8)))),
    ]
    for example in examples:
        launch = launch_of(example, example.computed())
        compile_program(Program(launch.source), tmp_path)
