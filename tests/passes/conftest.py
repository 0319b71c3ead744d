"""What tests of passes share: IR text in and out, and numbers before and after in ONNX Runtime."""

import textwrap

import numpy as np
import onnx
import onnxruntime
import pytest

from irpar.onnx_io import to_module, to_proto

from . import golden


@pytest.fixture
def rewritten():
    """`rewritten(pipeline, text)`: the text after a pipeline."""
    return lambda pipeline, text: str(golden.run(pipeline, text))


@pytest.fixture
def check_golden():
    """`check_golden(pipeline, before, after)`: a pipeline makes one text of the other."""
    return golden.check


def run_model(model, inputs):
    """All results of a model in ONNX Runtime without optimizations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


@pytest.fixture
def check_numbers():
    """`check_numbers(model, pipeline, inputs)`: same results in ONNX Runtime before and after; gives the module."""

    def check(model, pipeline, inputs, exactly=True):
        if isinstance(model, str):
            model = onnx.parser.parse_model(textwrap.dedent(model))
        expected = run_model(model, inputs)
        module = to_module(model)
        golden.run_pipeline(pipeline, module)
        made = to_proto(module)
        onnx.checker.check_model(made, full_check=True)
        for want, got in zip(expected, run_model(made, inputs), strict=True):
            assert want.dtype == got.dtype
            assert want.shape == got.shape
            if exactly:
                np.testing.assert_array_equal(got, want)
            else:
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        return module

    return check
