"""Round trips of ONNX's own node test models: checker-clean, stable, and the same results in ONNX Runtime."""

import functools
import warnings
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import defs

from irpar.onnx_io import OnnxError, to_module, to_proto

SAMPLE_STEP = 30


@functools.cache
def cases() -> list[Any]:
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [case for case in load_model_tests(kind="node") if case.model is not None]


def parameters(step: int) -> list[Any]:
    return [
        pytest.param(index, id=case.name, marks=[] if index % step == 0 else [pytest.mark.slow])
        for index, case in enumerate(cases())
    ]


def within_range(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model as an exporter for ONNX Runtime would write it: opset 26, where its operators existed then."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for entry in made.opset_import:
        if entry.domain == "" and entry.version > 26:
            newest = [
                defs.get_schema(node.op_type, entry.version, "").since_version
                for node in model.graph.node
                if not node.domain and defs.has(node.op_type, "")
            ]
            if all(version <= 26 for version in newest) and not model.functions:
                entry.version = 26
    made.ir_version = min(made.ir_version, 13)
    return made


def run(model: onnx.ModelProto, inputs: list[Any]) -> list[Any] | None:
    """What ONNX Runtime computes, or None where it cannot."""
    try:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        feeds = {given.name: value for given, value in zip(session.get_inputs(), inputs, strict=False)}
        return list(session.run(None, feeds))
    except Exception:
        return None


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.op_type != "Constant"]


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, list):
        assert isinstance(b, list)
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            assert_same(left, right)
    elif a is None:
        assert b is None
    else:
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("index", parameters(SAMPLE_STEP))
def test_round_trip(index: int) -> None:
    case = cases()[index]
    model = within_range(case.model)
    if any(entry.domain == "" and entry.version > 26 for entry in model.opset_import):
        with pytest.raises(OnnxError, match="newer than irpar reads"):
            to_module(model)
        return
    if case.name == "test_scan_sum":
        with pytest.raises(OnnxError, match="version converter cannot convert it"):
            to_module(model)
        return
    written = to_proto(to_module(model))
    onnx.checker.check_model(written)
    again = to_proto(to_module(written))
    assert written.SerializeToString(deterministic=True) == again.SerializeToString(deterministic=True)
    if model.opset_import[0].version >= 13:
        assert operators(written) == operators(model)
    random = any(node.op_type in ("RandomNormal", "RandomUniform", "Bernoulli") for node in model.graph.node)
    for inputs, _ in case.data_sets or []:
        expected = run(model, inputs)
        if expected is not None and not random:
            assert_same(run(written, inputs), expected)
