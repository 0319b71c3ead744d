"""Kernels on CuPy: ONNX's own cases, and what only a device computes, against numpy in float64."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from irpar.kernels import KernelError, convolution, lookup
from irpar.kernels.gemm import product
from tests.gpu import NEEDS_GPU, cupy

from .conformance import EXCLUDED, cases, onnx_cases
from .test_device import FEWEST_CASES, SCATTERED, is_possible, on_device, rtol_of, scatters

pytestmark = NEEDS_GPU

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
UNIT = {
    np.dtype(np.float16): 2.0**-10,
    BFLOAT16: 2.0**-7,
    np.dtype(np.float32): 2.0**-22,
    np.dtype(np.float64): 2.0**-50,
}
FLOATS = list(UNIT)


def to_device(x: Any) -> Any:
    return cupy().asarray(x)


def to_host(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else cupy().asnumpy(x)


def test_onnx_cases() -> None:
    failures, count = [], 0
    for case in cases():
        if case.name in EXCLUDED or not is_possible(case):
            continue
        count += 1
        values: dict[str, Any] = dict(case.inputs)
        try:
            for call in case.calls:
                operands = [values[name] if name else None for name in call.inputs]
                results = on_device(call, operands, cupy(), to_device, to_host)
                values.update(zip(call.outputs, results, strict=True))
            for name, expected in case.outputs.items():
                found = to_host(values[name])
                assert found.dtype == expected.dtype, f"{found.dtype} instead of {expected.dtype}"
                onnx_cases.assert_close(found, expected, rtol_of(case, expected), case.atol)
        except Exception as error:
            failures.append(f"{case.name}: {type(error).__name__}: {str(error)[:300]}")
    assert not failures, f"{len(failures)} of {count}\n" + "\n".join(failures)
    assert count >= FEWEST_CASES


# -- matrix products ------------------------------------------------------------------------------------------------

SHAPES = [
    ((5, 7), (7, 3)),
    ((7,), (7, 3)),
    ((5, 7), (7,)),
    ((2, 3, 5, 7), (2, 3, 7, 4)),
    ((2, 3, 5, 7), (7, 4)),
    ((5, 7), (2, 3, 7, 4)),
    ((2, 1, 5, 7), (1, 3, 7, 4)),
    ((3, 1, 64), (64, 32)),
    ((40, 2, 9, 16), (40, 2, 16, 9)),
    ((2, 0, 7), (7, 4)),
    ((2, 5, 0), (0, 4)),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("turned", ["", "a", "b", "ab", "heads"])
def test_products(dtype: np.dtype, shapes: tuple[tuple[int, ...], tuple[int, ...]], turned: str) -> None:
    numbers = np.random.default_rng(5)
    a, b = (numbers.standard_normal(shape).astype(dtype) for shape in shapes)
    left, right = to_device(a), to_device(b)
    if "a" in turned and a.ndim > 1:
        left = cupy().ascontiguousarray(left.swapaxes(-1, -2)).swapaxes(-1, -2)
    if "b" in turned and b.ndim > 1:
        right = cupy().ascontiguousarray(right.swapaxes(-1, -2)).swapaxes(-1, -2)
    if turned == "heads" and a.ndim == 4 and b.ndim == 4:
        left = cupy().ascontiguousarray(left.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
        right = cupy().ascontiguousarray(right.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    wide = np.float32 if dtype.itemsize == 2 else dtype
    for result_dtype in (dtype, np.dtype(wide)):
        found = product(cupy(), left, right, result_dtype)
        assert found.dtype == result_dtype
        exact = np.matmul(a.astype(np.float64), b.astype(np.float64))
        room = np.matmul(abs(a.astype(np.float64)), abs(b.astype(np.float64)))
        error = abs(to_host(found).astype(np.float64) - exact)
        assert found.shape == exact.shape
        assert (error <= UNIT[result_dtype] * (room + 1e-30)).all()


def test_products_of_long_rows_accumulate_in_float32() -> None:
    """Sums that float16 cannot hold in between: 70,000 ones less 69,000."""
    a = np.ones((2, 1, 139_000), np.float16)
    a[..., 70_000:] = -1
    b = np.ones((2, 139_000, 1), np.float16)
    found = product(cupy(), to_device(a), to_device(b))
    np.testing.assert_array_equal(to_host(found).astype(np.float64), np.full((2, 1, 1), 1000.0))


@pytest.mark.parametrize("other", FLOATS, ids=str)
def test_products_of_two_dtypes(other: np.dtype) -> None:
    a, b = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(3, 4)
    found = product(cupy(), to_device(a), to_device(b.astype(other)))
    np.testing.assert_array_equal(to_host(found), a @ b)


def test_integer_products() -> None:
    a = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    b = np.arange(40, dtype=np.int32).reshape(2, 4, 5)
    np.testing.assert_array_equal(to_host(product(cupy(), to_device(a), to_device(b))), a @ b)


# -- convolutions ---------------------------------------------------------------------------------------------------

CONVOLUTIONS = [
    ((2, 6, 9, 8), (12, 1, 3, 3), {"group": 6, "pads": (1, 1, 1, 1)}),
    ((2, 6, 9, 8), (6, 1, 3, 2), {"group": 6, "strides": (2, 1), "dilations": (1, 2)}),
    ((2, 3, 17), (3, 1, 4), {"group": 3, "pads": (3, 0)}),
    ((1, 2, 5, 6, 7), (2, 1, 2, 2, 2), {"group": 2}),
    ((3, 6, 9, 8), (8, 3, 3, 3), {"group": 2, "pads": (1, 1, 1, 1)}),
    ((3, 4, 9, 8), (8, 4, 3, 3), {"auto_pad": "SAME_UPPER", "strides": (2, 2)}),
    ((0, 4, 9, 8), (8, 4, 3, 3), {}),
    ((0, 4, 9, 8), (4, 1, 3, 3), {"group": 4}),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("column_bytes", [2**28, 1])
def test_convolutions(dtype: np.dtype, case: tuple, column_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "COLUMN_BYTES", column_bytes)
    numbers = np.random.default_rng(6)
    x, weight = (numbers.standard_normal(shape).astype(dtype) for shape in case[:2])
    bias = numbers.standard_normal(len(weight)).astype(dtype)
    conv = lookup("", "Conv", 22)
    assert conv is not None
    (found,) = conv(cupy(), [to_device(x), to_device(weight), to_device(bias)], case[2], 1)
    (exact,) = conv(np, [x.astype(np.float64), weight.astype(np.float64), bias.astype(np.float64)], case[2], 1)
    assert found.dtype == dtype
    assert found.shape == exact.shape
    np.testing.assert_allclose(to_host(found).astype(np.float64), exact, rtol=0, atol=40 * UNIT[dtype])


# -- scatter --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", SCATTERED, ids=str)
@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_scatter(dtype: np.dtype, reduction: str) -> None:
    for kernel, operands in scatters(dtype, reduction):
        (expected,) = kernel(np, operands, {"reduction": reduction}, 1)
        (found,) = kernel(cupy(), [to_device(x) for x in operands], {"reduction": reduction}, 1)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(to_host(found), expected)


def test_maxima_with_nan() -> None:
    kernel = lookup("", "ScatterElements", 18)
    assert kernel is not None
    operands = [np.zeros(3, np.float32), np.array([0, 0, 1]), np.array([1, np.nan, 2], np.float32)]
    (found,) = kernel(cupy(), [to_device(x) for x in operands], {"reduction": "max"}, 1)
    np.testing.assert_array_equal(to_host(found), np.array([np.nan, 2, 0], np.float32))


def test_an_index_outside_is_refused() -> None:
    kernel = lookup("", "Gather", 13)
    assert kernel is not None
    with pytest.raises(KernelError, match="an index is outside"):
        kernel(cupy(), [to_device(np.zeros(3)), to_device(np.array([3]))], {}, 1)
