"""One node computed by a kernel and by ONNX Runtime."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from irpar import kernels


def run_kernel(
    op_type: str, inputs: Sequence[np.ndarray | None], version: int, n_outputs: int = 1, **attributes: Any
) -> tuple[np.ndarray, ...]:
    """The results of irpar's kernel."""
    kernel = kernels.lookup("", op_type, version)
    assert kernel is not None
    return kernel(np, inputs, attributes, n_outputs)


def run_onnxruntime(
    op_type: str, inputs: Sequence[np.ndarray | None], version: int, n_outputs: int = 1, **attributes: Any
) -> tuple[np.ndarray, ...]:
    """The results of ONNX Runtime."""
    names = ["" if x is None else f"x{index}" for index, x in enumerate(inputs)]
    outputs = [f"y{index}" for index in range(n_outputs)]
    graph = helper.make_graph(
        [helper.make_node(op_type, names, outputs, **attributes)],
        "node",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for name, x in zip(names, inputs, strict=True)
            if x is not None
        ],
        [onnx.ValueInfoProto(name=name) for name in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=10)
    feeds = {name: x for name, x in zip(names, inputs, strict=True) if x is not None}
    return tuple(_session(model.SerializeToString()).run(None, feeds))


@functools.lru_cache(maxsize=1)
def _options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return options


def _session(model: bytes) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model, _options(), providers=["CPUExecutionProvider"])


def assert_same(
    op_type: str, inputs: Sequence[np.ndarray | None], version: int, n_outputs: int = 1, **attributes: Any
) -> None:
    """Assert that kernel and ONNX Runtime agree in dtype, shape and values."""
    for x in inputs:
        if x is not None:
            x.flags.writeable = False
    expected = run_onnxruntime(op_type, inputs, version, n_outputs, **attributes)
    results = run_kernel(op_type, inputs, version, n_outputs, **attributes)
    for result, other in zip(results, expected, strict=True):
        assert result.dtype == other.dtype
        assert result.shape == other.shape
        np.testing.assert_allclose(result, other, rtol=1e-4, atol=1e-5)
