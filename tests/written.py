"""Small models in ONNX's text form, with seeded weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.parser


def model_of_text(
    text: str, weights: Sequence[str] = (), integers: Mapping[str, Any] | None = None, opset: int = 18
) -> onnx.ModelProto:
    """The model of a graph in ONNX's text form.

    Args:
        text: the graph; weights stand among its inputs.
        weights: inputs that become initializers of seeded normals, scaled by the root of their first dim.
        integers: further int64 initializers by name.
        opset: of ai.onnx.
    """
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> {text}')
    kept = []
    for index, value in enumerate(model.graph.input):
        if value.name not in weights:
            kept.append(value)
            continue
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        numbers = np.random.default_rng(index).standard_normal(shape).astype(np.float32)
        numbers /= np.sqrt(shape[0] if len(shape) > 1 else 1)
        model.graph.initializer.append(onnx.numpy_helper.from_array(numbers, value.name))
    del model.graph.input[:]
    model.graph.input.extend(kept)
    for name, numbers in (integers or {}).items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(numbers, np.int64), name))
    return model
