"""Kernels that write into what they are given, on ONNX's own cases."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from irpar import kernels
from irpar.kernels.operands import is_float
from irpar.ops.op_def import traits_of_operator
from tests.strict_device import STRICT, StrictArray

from .conformance import Call, results_of_calls

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Written:
    """A call of a kernel that writes into what it is given, and what it gives without."""

    call: Call
    operands: list[Array | None]
    expected: Array

    def into(self, out: Array) -> Array:
        (result,) = self.call.kernel(np, self.operands, self.call.attributes, 1, out)
        return result


def check_same(found: Array, expected: Array, what: str) -> None:
    """NaN counts as itself, in floats that NumPy does not know too."""
    assert found.dtype == expected.dtype, what
    if is_float(expected.dtype):
        found, expected = found.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_array_equal(found, expected, err_msg=what, strict=True)


def calls() -> Iterator[Written]:
    for call, operands, results in results_of_calls():
        if call.kernel.signature.writes_out and len(call.outputs) == 1:
            yield Written(call, operands, results[0])


@pytest.fixture(scope="module")
def written() -> list[Written]:
    return list(calls())


def test_results_are_the_same_and_lie_where_they_should(written):
    used = set()
    for case in written:
        out = np.full(case.expected.shape, 77).astype(case.expected.dtype)
        result = case.into(out)
        check_same(result, case.expected, case.call.kernel.op_type)
        if np.shares_memory(result, out):
            used.add(case.call.kernel.op_type)
    assert {"Add", "Div", "Exp", "Gemm", "MatMul", "Mul", "Reciprocal", "Relu", "Sub", "Tanh"} <= used


def test_results_are_no_views_of_operands(written):
    for case in written:
        out = np.zeros(case.expected.shape, case.expected.dtype)
        for result in (case.into(out), case.expected):
            for operand in case.operands:
                assert operand is None or not np.shares_memory(result, operand), case.call.kernel.op_type


def test_elementwise_results_may_be_written_over_an_operand(written):
    over = set()
    for case in written:
        kernel = case.call.kernel
        if not traits_of_operator(kernel.domain, kernel.op_type).is_elementwise:
            continue
        for place, operand in enumerate(case.operands):
            if operand is None or (operand.shape, operand.dtype) != (case.expected.shape, case.expected.dtype):
                continue
            copies = [None if other is None else other.copy() for other in case.operands]
            out = copies[place]
            assert out is not None
            result = Written(case.call, copies, case.expected).into(out)
            check_same(result, case.expected, f"{kernel.op_type} over {place}")
            over.add(kernel.op_type) if np.shares_memory(result, out) else None
    assert {"Add", "Sub", "Mul", "Div", "Where"} <= over


def test_what_does_not_fit_is_left_alone(written):
    """A model may declare a result larger, smaller, of another rank or dtype than it is."""
    for case in written:
        shape, dtype = case.expected.shape, case.expected.dtype
        other = np.dtype(np.float64) if dtype != np.float64 else np.dtype(np.float32)
        wrong = [np.zeros((2, *shape), dtype), np.zeros(shape, other)]
        if shape:
            wrong += [np.zeros((shape[0] + 1, *shape[1:]), dtype), np.zeros(shape[1:], dtype)]
        for out in wrong:
            result = case.into(out)
            check_same(result, case.expected, case.call.kernel.op_type)
            assert not np.shares_memory(result, out)


def test_a_sum_of_integers_that_is_scaled_to_floats():
    a = np.arange(4, dtype=np.int32).reshape(2, 2)
    gemm = kernels.lookup("", "Gemm", 13)
    plain = gemm(np, [a, a, a], {"beta": 0.5}, 1)[0]
    np.testing.assert_array_equal(
        gemm(np, [a, a, a], {"beta": 0.5}, 1, np.empty((2, 2), np.int32))[0], plain, strict=True
    )


@pytest.mark.parametrize("value", [None, np.array(2, np.float32)])
def test_a_device_pads_into_what_it_is_given(value):
    pad = kernels.lookup("", "Pad", 21)
    x, pads = np.ones((2, 3), np.float32), np.array([1, -1, 0, 2])
    (expected,) = pad(np, [x, pads, value], {}, 1)
    out = StrictArray(np.full_like(expected, np.nan))
    operands = [StrictArray(x), pads, None if value is None else StrictArray(value)]
    (found,) = pad(STRICT, operands, {}, 1, out)
    np.testing.assert_array_equal(found._array, expected)
    assert np.shares_memory(found._array, out._array)


def test_a_device_repeats_neighbours_into_what_it_is_given():
    resize = kernels.lookup("", "Resize", 19)
    x, scales = np.arange(12, dtype=np.float32).reshape(1, 2, 3, 2), np.array([1, 1, 2, 3], np.float32)
    (expected,) = resize(np, [x, None, scales], {}, 1)
    out = StrictArray(np.full_like(expected, np.nan))
    (found,) = resize(STRICT, [StrictArray(x), None, scales], {}, 1, out)
    np.testing.assert_array_equal(found._array, expected)
    assert np.shares_memory(found._array, out._array)
