"""Fixtures that run and check built models."""

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

Array = NDArray[np.generic]


@pytest.fixture
def run_model() -> Callable[[onnx.ModelProto | str, dict[str, Array]], Array]:
    """Check a model (or the file at a path) with full shape inference and run it in ONNX Runtime; its first output."""

    def run(model: onnx.ModelProto | str, feeds: dict[str, Array]) -> Array:
        onnx.checker.check_model(model, full_check=True)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        source = model if isinstance(model, str) else model.SerializeToString()
        session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        result: Array = session.run(None, feeds)[0]
        return result

    return run


@pytest.fixture
def inputs() -> dict[str, dict[str, Array]]:
    """Inputs of each family at its tiny preset."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 256, (4, 32))
    return {
        "mlp": {"x": rng.standard_normal((8, 64)).astype(np.float32)},
        "gpt": {"input_ids": ids},
        "llama": {"input_ids": ids},
    }
