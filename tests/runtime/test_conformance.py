"""The numpy engine on ONNX's own cases of control flow, sequences, optionals and functions."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from irpar.onnx_io import to_module
from irpar.onnx_io.versions import NEWEST_OPSET
from irpar.runtime.errors import EngineError
from irpar.runtime.executor import Executor
from irpar.sharding import Mesh

OPS = frozenset(
    {
        *("If", "Loop", "Scan", "SequenceMap", "SequenceInsert", "SequenceConstruct", "SequenceEmpty", "SequenceAt"),
        *("SequenceErase", "SequenceLength", "ConcatFromSequence", "SplitToSequence"),
        *("Optional", "OptionalHasElement", "OptionalGetElement"),
    }
)


def cases() -> Iterator[Any]:
    with warnings.catch_warnings():
        # making the case data divides by zero and overflows on purpose
        warnings.simplefilter("ignore")
        from onnx.backend.test.loader import load_model_tests

        loaded = load_model_tests(kind="node")
    for case in loaded:
        if case.model is not None and case.data_sets is not None and _is_about_these(case.model):
            yield pytest.param(case, id=case.name)


def _is_about_these(model: onnx.ModelProto) -> bool:
    """Cases of these ops (and Identity of sequences); Scan of opset 8 is refused on import."""
    version = model.opset_import[0].version
    ops = {node.op_type for node in model.graph.node}
    is_sequence = any(not value.type.HasField("tensor_type") for value in model.graph.input)
    return bool(ops & OPS or is_sequence) and not (version < 9 and "Scan" in ops)


def readable(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in the newest opset that irpar reads; these ops did not change after it."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for entry in made.opset_import:
        entry.version = min(entry.version, NEWEST_OPSET) if entry.domain == "" else entry.version
    return made


def numbers(value: Any) -> Any:
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, onnx.SequenceProto):
        return numpy_helper.to_list(value)
    if isinstance(value, onnx.OptionalProto):
        return numpy_helper.to_optional(value)
    if isinstance(value, list):
        return [numbers(item) for item in value]
    return value


@pytest.mark.parametrize("case", list(cases()))
def test_case(case: Any) -> None:
    module = to_module(readable(case.model))
    names = [value.name for value in case.model.graph.input]
    try:
        executor = Executor(module, Mesh({"x": 1}), engine="numpy")
    except EngineError as error:
        pytest.skip(error.what)
    with executor:
        for inputs, outputs in case.data_sets:
            given = {name: numbers(value) for name, value in zip(names, inputs, strict=True)}
            results = executor.run(given)
            for result, expected in zip(results.values(), map(numbers, outputs), strict=True):
                assert_same(result, expected, case)


def assert_same(result: Any, expected: Any, case: Any) -> None:
    if expected is None:
        assert result is None
    elif isinstance(expected, list):
        assert len(result) == len(expected)
        for left, right in zip(result, expected, strict=True):
            assert_same(left, right, case)
    else:
        expected = np.asarray(expected)
        assert result.dtype == expected.dtype
        assert result.shape == expected.shape
        if expected.dtype.kind in "fc":
            np.testing.assert_allclose(result, expected, rtol=max(case.rtol, 1e-3), atol=max(case.atol, 1e-5))
        else:
            np.testing.assert_array_equal(result, expected)
