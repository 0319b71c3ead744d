"""Fixtures that run, check and cut models."""

from collections.abc import Callable
from fnmatch import fnmatchcase

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

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
def run_model_whole() -> Callable[[onnx.ModelProto, dict[str, Array]], dict[str, Array]]:
    """Check a model and run it in ONNX Runtime; all outputs by name. Inputs that it has not are left away."""

    def run(model: onnx.ModelProto, feeds: dict[str, Array]) -> dict[str, Array]:
        onnx.checker.check_model(model, full_check=True)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        results = session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})
        return dict(zip([value.name for value in session.get_outputs()], results, strict=True))

    return run


@pytest.fixture
def keep_blocks() -> Callable[..., onnx.ModelProto]:
    """Return a model with each weight that `block_of` names (by glob) zeroed outside that block of its cut dim."""

    def block_alone(values: Array, cut: list, block: int, blocks: int) -> Array:
        axis = next(i for i, axes in enumerate(cut) if axes)
        size = values.shape[axis] // blocks
        place = (slice(None),) * axis + (slice(block * size, (block + 1) * size),)
        alone = np.zeros_like(values)
        alone[place] = values[place]
        return alone

    def keep(model: onnx.ModelProto, block_of: dict[str, int], cuts: dict, blocks: int) -> onnx.ModelProto:
        kept = onnx.ModelProto()
        kept.CopyFrom(model)
        for tensor in kept.graph.initializer:
            for pattern, block in block_of.items():
                if fnmatchcase(tensor.name, pattern):
                    alone = block_alone(numpy_helper.to_array(tensor), cuts[pattern], block, blocks)
                    tensor.CopyFrom(numpy_helper.from_array(alone, tensor.name))
        return kept

    return keep


@pytest.fixture
def inputs() -> dict[str, dict[str, Array]]:
    """Inputs of each family at its tiny preset."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 256, (4, 32))
    # The rows of a mask end in padding of different lengths.
    mask = (np.arange(32) < np.array([[32], [27], [20], [9]])).astype(np.int64)
    return {
        "mlp": {"x": rng.standard_normal((8, 64)).astype(np.float32)},
        "gpt": {"input_ids": ids},
        "llama": {"input_ids": ids},
        "bert": {"input_ids": ids, "token_type_ids": rng.integers(0, 2, (4, 32)), "attention_mask": mask},
        "vit": {"pixels": rng.standard_normal((4, 3, 16, 16)).astype(np.float32)},
        "moe": {"input_ids": ids},
        "resnet": {"pixels": rng.standard_normal((4, 3, 32, 32)).astype(np.float32)},
        "dlrm": {
            "dense": rng.standard_normal((8, 13)).astype(np.float32),
            "sparse": rng.integers(0, 100, (8, 4, 3)),
        },
        "unet": {
            "sample": rng.standard_normal((4, 3, 16, 16)).astype(np.float32),
            "time": rng.uniform(0, 100, 4).astype(np.float32),
        },
        "recurrent": {"input_ids": ids[:, :16]},
        "control": {"x": rng.standard_normal((4, 32)).astype(np.float32)},
        "t5": {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": rng.integers(0, 256, (4, 16))},
    }
