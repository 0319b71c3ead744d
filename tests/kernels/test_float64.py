"""Kernels in float64: the results are float64, and as exact as that.

Each sample of each operator of which ONNX, or ONNX Runtime of its own operators, has a float64.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnxruntime.capi import onnxruntime_pybind11_state as runtime

from irpar.ir import plain_attribute
from irpar.kernels import lookup
from irpar.ops.effects import schema_of
from tests.budget import every
from tests.kernels.reference import run_kernel
from tests.ops.rule_proof import Array, Sample
from tests.ops.samples import SAMPLES

DOUBLE = "tensor(double)"
CLOSE, APART = 1e-10, 1e-6
"""Relative steps of operands; in float32 the smaller moves nothing."""
FEWEST_OPERATORS = 150
ROUNDED_BY_THE_REFERENCE = {
    **dict.fromkeys(("Erf", "Gelu"), "its error function is of float32"),
    **dict.fromkeys(
        ("BatchNormalization", "HardSigmoid", "HardSwish", "LeakyRelu"), "it rounds defaults of attributes to float32"
    ),
    "Attention": "the root of its scale is float32",
    **dict.fromkeys(("AffineGrid", "GridSample"), "places are float32"),
    "GroupNormalization": "it computes statistics in float32, as stash_type says",
}


@functools.cache
def _of_onnx_runtime() -> dict[tuple[str, str], Any]:
    return {(schema.domain, schema.name): schema for schema in runtime.get_all_operator_schema()}


def _schema(sample: Sample) -> Any:
    """The operator's schema by ONNX, or by ONNX Runtime of what only that has; None where nobody has one."""
    known = schema_of(sample.domain, sample.op, sample.version)
    return known or _of_onnx_runtime().get((sample.domain, sample.op))


def _formal(parameters: Sequence[Any], place: int) -> Any:
    """What a schema says of an operand or result; the last one may be there many times."""
    return parameters[min(place, len(parameters) - 1)]


def _variable(parameter: Any) -> str:
    return str(parameter.type_str if isinstance(parameter, onnx.defs.OpSchema.FormalParameter) else parameter.typeStr)


def _widened(sample: Sample) -> tuple[bool, ...]:
    """Which operands are float32 and may be float64."""
    schema = _schema(sample)
    return tuple(
        array is not None and array.dtype == np.float32 and DOUBLE in _formal(schema.inputs, place).types
        for place, array in enumerate(sample.arrays)
    )


def _is_wide(sample: Sample) -> bool:
    has_kernel = lookup(sample.domain, sample.op, sample.version) is not None
    return has_kernel and _schema(sample) is not None and any(_widened(sample)) and sample.op != "BitCast"


CASES = [sample for sample in SAMPLES if _is_wide(sample)]


@pytest.mark.parametrize("sample", every(2, CASES), ids=str)
def test_results_are_float64(sample: Sample) -> None:
    schema = _schema(sample)
    if sample.op == "EyeLike":  # The dtype of its result is a variable of its own.
        return
    variables = {_variable(_formal(schema.inputs, place)) for place, is_wide in enumerate(_widened(sample)) if is_wide}
    single = _run(sample, sample.arrays, np.float32)
    for place, (x, y) in enumerate(zip(single, _run(sample, _operands(sample)), strict=True)):
        # Such as the statistics of a LayerNormalization, which ONNX has in float32.
        is_wide = x.dtype == np.float32 and _variable(_formal(schema.outputs, place)) in variables
        assert y.shape == x.shape
        assert y.dtype == (np.float64 if is_wide else x.dtype)
        if y.dtype.kind == "f":
            np.testing.assert_allclose(y, x, 1e-4, 1e-4 * _size(x))


@pytest.mark.parametrize("sample", every(2, CASES), ids=str)
def test_nothing_is_rounded_to_float32_on_the_way(sample: Sample) -> None:
    operands = _operands(sample)
    start, close, apart = (_run(sample, _moved(operands, step)) for step in (0, CLOSE, APART))
    for y, y_close, y_apart in zip(start, close, apart, strict=True):
        if y.dtype != np.float64:
            continue
        with np.errstate(all="ignore"):
            found, expected = np.nan_to_num((y_close - y) / CLOSE), np.nan_to_num((y_apart - y) / APART)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * (_size(y) + _size(expected)))


@pytest.mark.parametrize("sample", every(2, [case for case in CASES if not case.domain]), ids=str)
def test_results_are_those_of_the_reference(sample: Sample) -> None:
    operands = _operands(sample)
    try:
        expected = _reference(sample, operands)
    except Exception as error:
        pytest.skip(f"ONNX's reference fails: {error}")
    for x, y, other in zip(sample.whole, _run(sample, operands), expected, strict=True):
        if y.dtype != np.float64:
            continue
        if not np.allclose(x, other, 1e-3, 1e-3 * _size(x), equal_nan=True):
            pytest.skip("ONNX's reference gives other numbers than ONNX Runtime, in float32 too")
        tolerance = 1e-6 if sample.op in ROUNDED_BY_THE_REFERENCE else 1e-12
        np.testing.assert_allclose(y, other, tolerance, tolerance * _size(y))


def _result(op_type: str, version: int, *operands: Array | None, **attributes: Any) -> Array:
    return run_kernel(op_type, operands, version, **attributes)[0]


@pytest.mark.parametrize("op_type", ["HannWindow", "HammingWindow", "BlackmanWindow"])
def test_windows(op_type: str) -> None:
    window = _result(op_type, 17, np.array(7), output_datatype=onnx.TensorProto.DOUBLE)
    first = {
        "HannWindow": 0.5 - 0.5 * np.cos(2 * np.pi / 7),
        "HammingWindow": 25 / 46 - 21 / 46 * np.cos(2 * np.pi / 7),
    }
    assert window.dtype == np.float64
    blackman = 0.42 - 0.5 * np.cos(2 * np.pi / 7) + 0.08 * np.cos(4 * np.pi / 7)
    np.testing.assert_allclose(window[1], first.get(op_type, blackman), rtol=1e-15)


def test_operators_that_make_numbers() -> None:
    third = np.array([1 / 3])
    for made, expected in (
        (_result("Range", 11, *(np.float64(x) for x in (0, 1, 1 / 7))), np.arange(7) * (1 / 7)),
        (_result("Constant", 13, value=third), third),
        (_result("ConstantOfShape", 9, np.array([2]), value=third), np.full(2, 1 / 3)),
        (_result("Unique", 11, np.array([1 / 3, 0.5, 1 / 3])), np.array([1 / 3, 0.5])),
    ):
        assert made.dtype == np.float64
        np.testing.assert_allclose(made, expected, rtol=1e-15)


def test_mel_weights() -> None:
    operands = (np.array(x) for x in (8, 64, 16000, 0.0, 8000.0))
    exact = _result("MelWeightMatrix", 17, *operands, output_datatype=onnx.TensorProto.DOUBLE)
    assert exact.dtype == np.float64
    assert (exact != exact.astype(np.float32)).any()


def test_celu_of_opset_28_has_float64() -> None:
    x = np.linspace(-2, 2, 9)
    result = _result("Celu", 28, x, alpha=2.0)
    assert result.dtype == np.float64
    np.testing.assert_allclose(result, np.where(x > 0, x, 2 * np.expm1(x / 2)), rtol=1e-15)


def test_most_operators_are_tried() -> None:
    assert len({sample.operator for sample in CASES}) >= FEWEST_OPERATORS


def _run(sample: Sample, operands: Sequence[Array | None], dtype: type = np.float64) -> list[Array]:
    kernel = lookup(sample.domain, sample.op, sample.version)
    assert kernel is not None
    with np.errstate(all="ignore"):
        return [np.asarray(found) for found in kernel(np, operands, _attributes(sample, dtype), sample.results)]


def _reference(sample: Sample, operands: Sequence[Array | None]) -> list[Array]:
    feeds = {f"x{place}": x for place, x in enumerate(operands) if x is not None}
    names = ["" if x is None else f"x{place}" for place, x in enumerate(operands)]
    attributes = {
        name: numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value
        for name, value in _attributes(sample, np.float64).items()
    }
    node = helper.make_node(sample.op, names, [f"y{place}" for place in range(sample.results)], **attributes)
    types = [helper.make_tensor_value_info(*typed) for typed in _typed(feeds)]
    graph = helper.make_graph([node], "node", types, [onnx.ValueInfoProto(name=name) for name in node.output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", sample.version)])
    with np.errstate(all="ignore"):
        return [np.asarray(found) for found in ReferenceEvaluator(model).run(None, feeds)]


def _typed(feeds: dict[str, Array]) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    for name, x in feeds.items():
        yield name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape


def _operands(sample: Sample) -> list[Array | None]:
    """The operands, in float64 where they may be."""
    return [
        array.astype(np.float64) if is_wide and array is not None else array
        for array, is_wide in zip(sample.arrays, _widened(sample), strict=True)
    ]


def _attributes(sample: Sample, dtype: type) -> dict[str, Any]:
    """The attributes: numbers as a model has them, in float32, but for tensors."""
    plain = {name: plain_attribute(value) for name, value in sample.attributes.items()}
    plain = {name: float(np.float32(value)) if isinstance(value, float) else value for name, value in plain.items()}
    return {
        name: value.astype(dtype) if isinstance(value, np.ndarray) and value.dtype == np.float32 else value
        for name, value in plain.items()
    }


def _moved(operands: Sequence[Array | None], step: float) -> list[Array | None]:
    random = np.random.default_rng(0)
    return [
        x * (1 + step * random.uniform(-1, 1, x.shape)) if x is not None and x.dtype == np.float64 else x
        for x in operands
    ]


def _size(x: Array) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=1e-3))
