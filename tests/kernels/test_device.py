"""Every kernel on a stand-in for a device's arrays: nothing mixes with numpy's, nothing is converted unasked."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from irpar.kernels import Kernel, KernelError, lookup
from irpar.kernels.faults import FAULTS
from tests import strict_graphs
from tests.strict_device import DTYPES, STRICT, StrictArray

from .conformance import EXCLUDED, Call, Case, cases, onnx_cases

FEWEST_CASES = 1550
MOST_CAPTURED = 8
SMALL_RTOL = {np.dtype(np.float16): 2 * 2.0**-10, np.dtype(ml_dtypes.bfloat16): 2 * 2.0**-7}


def on_device(call: Call, operands: list[Any], xp: Any, to_device: Any, to_host: Any) -> tuple[Any, ...]:
    """A call with operands on the device, but those that the kernel reads on the host."""
    placed = [
        x if x is None else to_host(x) if place in call.kernel.signature.host else to_device(x)
        for place, x in enumerate(operands)
    ]
    return call.kernel(xp, placed, call.attributes, len(call.outputs))


def is_possible(case: Case) -> bool:
    return all(x.dtype in DTYPES for x in (*case.inputs.values(), *case.outputs.values()))


def rtol_of(case: Case, expected: np.ndarray) -> float:
    """Small floats stay small where they are multiplied on a device: two units apart."""
    return max(case.rtol, SMALL_RTOL.get(expected.dtype, 0.0))


def run(case: Case) -> dict[str, np.ndarray]:
    values: dict[str, Any] = dict(case.inputs)
    for call in case.calls:
        operands = [values[name] if name else None for name in call.inputs]
        results = on_device(call, operands, STRICT, _to_device, _to_host)
        assert all(isinstance(result, StrictArray) for result in results), case.name
        values.update(zip(call.outputs, results, strict=True))
    return {name: _to_host(values[name]) for name in case.outputs}


def _to_device(x: Any) -> StrictArray:
    return x if isinstance(x, StrictArray) else StrictArray(x)


def _to_host(x: Any) -> np.ndarray:
    return x._array if isinstance(x, StrictArray) else x


def test_cases_on_the_device() -> None:
    failures, count = [], 0
    for case in cases():
        if case.name in EXCLUDED or not is_possible(case):
            continue
        count += 1
        try:
            results = run(case)
            for name, expected in case.outputs.items():
                onnx_cases.assert_close(results[name], expected, rtol_of(case, expected), case.atol)
        except (AssertionError, ValueError, TypeError, AttributeError) as error:
            failures.append(f"{case.name}: {type(error).__name__}: {str(error)[:300]}")
    assert not failures, "\n".join(failures)
    assert count >= FEWEST_CASES


# Operators that look at numbers on the device, and what for.
WAITING = {
    **dict.fromkeys(
        ("Gather", "GatherElements", "GatherND", "Scatter", "ScatterElements", "ScatterND", "ArrayFeatureExtractor"),
        "an index outside is refused",
    ),
    **dict.fromkeys(("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"), "a target outside is refused"),
    "TensorScatter": "a place outside the cache is refused",
    "MaxUnpool": "a place outside the result is refused",
}


def test_kernels_wait_for_the_device_only_where_they_must() -> None:
    waiting = set()
    for case in cases():
        if case.name not in EXCLUDED and is_possible(case) and len(case.calls) == 1:
            before = StrictArray.reads
            run(case)
            if StrictArray.reads > before:
                waiting.add(case.calls[0].kernel.op_type)
    assert waiting == WAITING.keys()


# Operators that split CUDA graphs, and why.
SPLITTING = {
    **dict.fromkeys(("Compress", "NonZero", "Unique"), "numbers decide how large the results are"),
    **dict.fromkeys(("NonMaxSuppression", "RoiAlign"), "boxes are read on the host"),
    "MelWeightMatrix": "made on the host; of constants it is one",
    **dict.fromkeys(("Constant", "Shape", "Size"), "numbers of the host, where an engine computes them"),
}


def test_kernels_can_be_captured_but_where_they_cannot() -> None:
    """A few cases of each operator: where problems are noted, no kernel reads numbers that lie on the device."""
    splitting, tried = set(), Counter[str]()
    for case in cases():
        op_type = case.calls[0].kernel.op_type
        if len(case.calls) == 1 and case.name not in EXCLUDED and is_possible(case) and tried[op_type] < MOST_CAPTURED:
            tried[op_type] += 1
            word, stream = StrictArray(np.zeros(1, bool)), STRICT.cuda.Stream()
            stream.begin_capture()
            try:
                with FAULTS.noted(lambda problem, word=word: word):
                    run(case)
            except strict_graphs.RefusedError:
                splitting.add(op_type)
            finally:
                stream.end_capture()
    assert splitting == SPLITTING.keys()


def test_a_problem_is_noted_on_the_device() -> None:
    words = {"an index is outside [-3, 2] on axis 0": StrictArray(np.zeros(1, bool))}
    kernel = lookup("", "GatherElements", 13)
    assert kernel is not None
    operands = [StrictArray(np.zeros((3, 4))), StrictArray(np.array([[5, 1]]))]
    before = StrictArray.reads
    with FAULTS.noted(words.__getitem__), pytest.raises(KernelError):  # NumPy's own, which CuPy does not raise.
        kernel(STRICT, operands, {}, 1)
    assert StrictArray.reads == before
    assert all(word._array[0] for word in words.values())
    with pytest.raises(KernelError, match="an index is outside"):
        kernel(STRICT, operands, {}, 1)


def test_the_stand_in_is_strict() -> None:
    x = StrictArray(np.ones(3))
    with pytest.raises(TypeError, match="Implicit conversion"):
        np.asarray(x)
    with pytest.raises(TypeError, match="Unsupported type"):
        x + np.ones(3)
    with pytest.raises(TypeError):
        np.ones(3) + x
    with pytest.raises(ValueError, match="Unsupported dtype"):
        STRICT.asarray("text")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)], ids=str)
def test_small_floats_give_on_the_device_what_they_give_on_the_host(dtype: np.dtype) -> None:
    """The cases of float32 with smaller floats: the same dtypes, and numbers up to two units apart."""
    failures, count = [], 0
    for case in cases():
        if not any(x.dtype == np.float32 for x in case.inputs.values()) or len(case.calls) > 1:
            continue
        with np.errstate(over="ignore"):
            narrow = {k: x.astype(dtype) if x.dtype == np.float32 else x for k, x in case.inputs.items()}
        smaller = replace(case, inputs=narrow)
        try:
            expected = smaller.run()
        except ValueError:
            continue  # The operator takes no such floats, or not beside those that stay.
        if not is_possible(replace(smaller, outputs=expected)):
            continue
        count += 1
        try:
            results = run(smaller)
            for name, array in expected.items():
                assert results[name].dtype == array.dtype, f"{results[name].dtype} instead of {array.dtype}"
                onnx_cases.assert_close(results[name], array, SMALL_RTOL[dtype], 1e-5)
        except (AssertionError, ValueError, TypeError, AttributeError) as error:
            failures.append(f"{case.name}: {type(error).__name__}: {str(error)[:300]}")
    assert not failures, "\n".join(failures)
    assert count >= 400


SCATTERED = sorted((dtype for dtype in DTYPES if dtype.kind != "c"), key=str)


def scatters(dtype: np.dtype, reduction: str) -> Iterator[tuple[Kernel, list[np.ndarray]]]:
    """Kernels with operands: places that repeat where they may, negative ones, slices, and no updates at all."""
    numbers = np.random.default_rng(7)
    elements, slices = lookup("", "ScatterElements", 18), lookup("", "ScatterND", 18)
    assert elements is not None
    assert slices is not None
    once = reduction == "none"
    x = numbers.integers(-3, 4, (5, 6)).astype(dtype)
    places = np.array([[0, 1, 2, 3], [-1, -2, 3, 0]] if once else [[0, -5, 0, 4], [4, 4, -1, 0]], np.int64)
    yield elements, [x, places, numbers.integers(-3, 4, places.shape).astype(dtype)]
    rows = np.array([[[0], [1]], [[-1], [2 if once else 0]]])
    yield slices, [x, rows, numbers.integers(-3, 4, (2, 2, 6)).astype(dtype)]
    cells = np.array([[0, 1], [-1, -1], [2, 0] if once else [0, 1]])
    yield slices, [x, cells, numbers.integers(-3, 4, 3).astype(dtype)]
    yield slices, [x, np.zeros((0, 1), np.int64), np.zeros((0, 6), dtype)]


@pytest.mark.parametrize("dtype", SCATTERED, ids=str)
@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_scatter(dtype: np.dtype, reduction: str) -> None:
    for kernel, operands in scatters(dtype, reduction):
        (expected,) = kernel(np, operands, {"reduction": reduction}, 1)
        (found,) = kernel(STRICT, [_to_device(x) for x in operands], {"reduction": reduction}, 1)
        np.testing.assert_array_equal(_to_host(found), expected, strict=True)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_powers_of_integers(dtype: type) -> None:
    kernel = lookup("", "Pow", 15)
    assert kernel is not None
    base, exponent = np.array([2, 3, -2, 1, -1, 5, 2], dtype), np.array([10, 0, 3, -5, -3, -1, 40], np.int64)
    exponent = exponent[:6] if dtype is np.int32 else exponent
    operands = [base[: len(exponent)], exponent]
    (expected,) = kernel(np, operands, {}, 1)
    (found,) = kernel(STRICT, [_to_device(x) for x in operands], {}, 1)
    np.testing.assert_array_equal(_to_host(found), expected, strict=True)
