"""What the engine `numpy` keeps from run to run."""

import numpy as np
import onnx
import pytest

from irpar.kernels import winograd
from irpar.onnx_io import to_module
from irpar.runtime.executor import Executor
from irpar.sharding import Mesh
from tests.kernels.reference import run_onnxruntime

SHAPES = {"x": (1, 64, 56, 56), "w": (64, 64, 3, 3)}


def model(weight: np.ndarray | None) -> onnx.ModelProto:
    """A convolution with this weight, or with one that is given to each run."""
    names = ["x"] if weight is not None else ["x", "w"]
    inputs = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, SHAPES[name]) for name in names]
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, SHAPES["x"])
    constants = [onnx.numpy_helper.from_array(weight, "w")] if weight is not None else []
    node = onnx.helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4)
    graph = onnx.helper.make_graph([node], "conv", inputs, [output], constants)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize("is_constant", [True, False])
def test_kernels_are_transformed_once_if_they_are_constant(monkeypatch, is_constant):
    transformed, calls = winograd.transformed_kernels, []
    monkeypatch.setattr(
        winograd, "transformed_kernels", lambda weight, *kept: calls.append(weight) or transformed(weight, *kept)
    )
    generator = np.random.default_rng(1)
    x, *weights = (generator.standard_normal(SHAPES[name], dtype=np.float32) for name in "xww")
    with Executor(to_module(model(weights[0] if is_constant else None)), Mesh({"x": 1}), engine="numpy") as executor:
        for weight in (weights[0], weights[0 if is_constant else 1]):
            (expected,) = run_onnxruntime("Conv", [x, weight], 18, pads=[1] * 4)
            y = executor.run({"x": x} if is_constant else {"x": x, "w": weight})["y"]
            np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-3)
    assert len(calls) == (1 if is_constant else 2)
