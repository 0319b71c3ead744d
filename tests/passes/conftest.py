"""What tests of passes share: IR text in and out, and numbers before and after in ONNX Runtime."""

import textwrap

import numpy as np
import onnx
import onnxruntime
import pytest

from irpar.ir.compare import same_module
from irpar.ir.text import parse_module, print_module
from irpar.onnx_io import to_module, to_proto
from irpar.pass_manager import Instrumentation, PassManager


def run_pipeline(pipeline, module):
    """Run a pipeline; each pass must say truly whether it changed something, and leave what prints and parses back."""
    records = []
    for pass_ in PassManager.parse(pipeline).passes:
        before = str(module)
        records += PassManager([pass_], Instrumentation(verify_each=True, reproducer=None)).run(module).records
        printed = print_module(module)
        assert records[-1].changed == (printed.text != before), f"{pass_} says changed={records[-1].changed}"
        again = parse_module(printed.text, resources=printed.resources)
        assert same_module(module, again) is None
    return records


@pytest.fixture
def rewritten():
    """`rewritten(pipeline, text)`: the text after a pipeline."""

    def rewrite(pipeline, text):
        module = parse_module(textwrap.dedent(text))
        run_pipeline(pipeline, module)
        return str(module)

    return rewrite


@pytest.fixture
def check_golden(rewritten):
    """`check_golden(pipeline, before, after)`: a pipeline makes one text of the other."""

    def check(pipeline, before, after):
        assert rewritten(pipeline, before).strip() == textwrap.dedent(after).strip()

    return check


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
        run_pipeline(pipeline, module)
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
