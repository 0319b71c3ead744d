"""Expressions of irpar.Fused: their text, their types, and what they compute step by step."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from irpar.kernels import KernelError, lookup
from irpar.kernels.expression import OPERATORS, ExpressionError, Number, Operand
from irpar.kernels.expression_reading import parse

Array = np.ndarray[Any, Any]


def run(lines: tuple[str, ...], *operands: Array, **keywords: Any) -> tuple[Array, ...]:
    kernel = lookup("irpar", "Fused", 1)
    assert kernel is not None
    return kernel(np, operands, {"expression": lines}, len(parse(lines).results), **keywords)


def test_text_comes_back() -> None:
    lines = (
        "t0 = Mul(x0, 0.125)",
        "t1 = Gelu(t0, approximate=tanh)",
        "t2 = ReduceMax(t1, axes=[-2, -1])",
        "y0 = Cast(t1, to=f16)",
        "y1 = Squeeze(t2, axes=[-1])",
    )
    made = parse(lines)
    assert made.lines == lines
    assert made.operand_count == 1
    assert made.results == ("y0", "y1")
    types = made.types([Operand((2, 3, 4), np.dtype(np.float32))])
    assert types["y0"] == Operand((2, 3, 4), np.dtype(np.float16))
    assert types["y1"] == Operand((2, 1), np.dtype(np.float32))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("t0=1",), "step 0, 't0=1': a step is written"),
        (("x1 = Neg(x0)",), "a step is written"),
        (("y0 = Foo(x0)",), "there is no operator Foo"),
        (("y0 = Add(x0)",), "Add has 2 operands, not 1"),
        (("y0 = Add(x0, t1)",), "t1 is not defined before"),
        (("y0 = Neg(x0)", "y0 = Neg(x0)"), "step 1, .*y0 is defined before"),
        (("y0 = Add(1, 2)",), "one operand that says the dtype is no number"),
        (("y0 = Add(x0, one)",), "'one' is neither a value"),
        (("y0 = Add(x0 x1)",), "'x0 x1' is neither a value"),
        (("y1 = Neg(x0)",), "the results are y0, y1 and so on, not y1"),
        (("t0 = Neg(x0)",), "the results are y0, y1 and so on, not none"),
        (("y0 = ReduceSum(x0, axes=[1])",), "axes is a list of different dims"),
        (("y0 = ReduceSum(x0)",), "axes is a list of different dims"),
        (("y0 = ReduceSum(x0, axes=[a])",), r"\[a\] is no list of integers"),
        (("y0 = IsIndex(x0, axis=1, size=4)",), "axis is a dim, counted from the last one"),
        (("y0 = IsIndex(x0, axis=-1)",), "size is a number of places"),
        (("y0 = Cast(x0, to=f8)",), "to is one of f16"),
        (("y0 = Neg(x0, alpha=1)",), "Neg has no attribute alpha"),
        (("y0 = Gelu(x0, approximate=no)",), "approximate is none or tanh"),
        (("y0 = Elu(x0, alpha=[-1])",), r"alpha is a number, not \(-1,\)"),
        (("y0 = Mod(x0, x1, fmod=0.5)",), "fmod is an integer, not 0.5"),
        (("y0 = Elu(x0, alpha=1.0, alpha=2.0)",), "alpha is set twice"),
    ],
)
def test_what_cannot_be_read(lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        parse(lines)


@pytest.mark.parametrize(
    ("line", "operands", "message"),
    [
        ("y0 = Add(x0, x1)", ("f4 2", "f4 3"), r"y0 = Add\(x0, x1\): \[2\] and \[3\] do not broadcast"),
        ("y0 = Add(x0, x1)", ("f4 2", "f8 2"), "operands are of one dtype, not float32, float64"),
        ("y0 = Add(x0, 0.5)", ("i4 2",), "0.5 stands beside operands of int32: write an integer"),
        ("y0 = Sqrt(x0)", ("i4 2",), "it takes floats, not int32"),
        ("y0 = Not(x0)", ("f4 2",), "it takes bools, not float32"),
        ("y0 = Where(x0, x1, 0)", ("f4 2", "f4 2"), "the condition of Where is a bool"),
        ("y0 = ReduceSum(x0, axes=[-2])", ("f4 2",), "axis -2 is outside a shape of 1 dims"),
        ("y0 = IsIndex(x0, axis=-1, size=4)", ("i4 3",), r"dim -1 of \[3\] is not of size 1"),
        ("y0 = RotateHalf(x0)", ("f4 3",), r"the last dim of \[3\] has no two halves"),
        ("y0 = Squeeze(x0, axes=[-1])", ("f4 2",), r"dims \[-1\] of \[2\] are not all of size 1"),
        ("y0 = Neg(x0)", ("c8 2",), "x0 is of complex64"),
        ("y0 = Neg(x0)", ("f4 2", "f4 2"), "2 operands given, the expression reads 1"),
    ],
)
def test_operands_that_do_not_fit(line: str, operands: tuple[str, ...], message: str) -> None:
    given = [np.ones(int(text.split()[1]), text.split()[0]) for text in operands]
    with pytest.raises(ExpressionError, match=message):
        parse((line,)).types([Operand(x.shape, x.dtype) for x in given])
    with pytest.raises(KernelError, match=message):
        run((line,), *given)


def test_all_operators_have_a_kernel() -> None:
    versions = {name: operator.version for name, operator in OPERATORS.items() if operator.version}
    assert all(lookup("", name, version) is not None for name, version in versions.items())


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_small_floats_are_rounded_once(dtype: Any) -> None:
    x = np.array([1, 3, 60000 if dtype is np.float16 else 3e38], dtype)
    tripled, back = run(("t0 = Mul(x0, 3.0)", "y0 = Add(t0, 0.001)", "y1 = Div(t0, 3.0)"), x)
    np.testing.assert_array_equal(back[:2], x[:2])
    assert back.dtype == tripled.dtype == x.dtype
    if dtype is np.float16:  # What has no place in between has one in float32.
        assert back[2] == x[2]
        assert np.isinf(tripled[2])
    (rounded,) = run(("t0 = Cast(x0, to=f16)", "t1 = Sub(t0, 1.0)", "y0 = Cast(t1, to=f32)"), np.array([1.0001], "f4"))
    assert rounded[0] == 0


def test_results_go_where_they_are_asked_for() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    outs = (np.empty((2, 3), np.float32), None)
    first, second = run(
        ("y0 = Add(x0, 1.0)", "t1 = ReduceSum(y0, axes=[-1])", "y1 = Squeeze(t1, axes=[-1])"), x, out=outs
    )
    assert first is outs[0]
    np.testing.assert_array_equal(first, x + 1)
    np.testing.assert_array_equal(second, (x + 1).sum(axis=1))


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (0.1, np.float32, "0.1"),
        (np.inf, np.float16, "inf"),
        (0.1, np.float64, "0.1"),
        (-7, np.int64, "-7"),
        (1, np.bool_, "1"),
    ],
)
def test_numbers(value: float, dtype: Any, text: str) -> None:
    number = Number.of(np.asarray(value), np.dtype(dtype))
    assert number.text == text
    assert number.of_dtype(np.dtype(dtype)) == np.asarray(value).astype(dtype)
