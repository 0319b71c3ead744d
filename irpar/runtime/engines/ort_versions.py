"""What the installed ONNX Runtime reads, which is asked of it: each release knows newer operator sets."""

from functools import cache

import onnxruntime
from onnx import TensorProto, helper

from irpar.onnx_io.versions import NEWEST_OPSET

ALWAYS_LOADED = 26
"""ONNX's newest operator set that the oldest ONNX Runtime that irpar allows loads: up to this one nothing is asked."""


@cache
def newest_opset() -> int:
    """Of ONNX's operator sets that irpar reads the newest that ONNX Runtime loads."""
    return next((version for version in range(NEWEST_OPSET, ALWAYS_LOADED, -1) if _loads(version)), ALWAYS_LOADED)


def _loads(opset: int) -> bool:
    """Whether ONNX Runtime makes a session of a model of an operator set."""
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    model = helper.make_model(
        helper.make_graph([], "asked", [value], [value]),
        ir_version=10,
        opset_imports=[helper.make_opsetid("", opset)],
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except onnxruntime.capi.onnxruntime_pybind11_state.Fail:
        return False
    return True
