"""What fused programs move: heads are split, turned and joined where they lie, by views, and attention reads these."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irpar import Mesh, load, models, partition
from irpar.analysis.kernel_fusion import Stretch, stand_ins
from irpar.ir import Node, Value, plain_attribute
from irpar.kernels import lookup
from irpar.runtime.program import build_program

FIXTURES = Path(__file__).parents[1] / "fixtures"
VIEWS = ("Expand", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze")
"""Operators whose results can be read where their operands lie."""
SIZES: dict[str, Any] = {"layers": 1, "hidden": 64, "heads": 4, "vocab": 32, "seq": 16, "batch": 2}
Array = np.ndarray[Any, Any]


def copied(model: Any) -> list[str]:
    """The nodes of a model's program that copy what they could read where it lies, and attentions that have to."""
    (part,) = partition(load(model), Mesh({"x": 1})).parts
    (segment,) = build_program(part.graph).segments
    held: dict[Value, Array] = {}
    found = []
    for node in stand_ins(Stretch(segment.nodes, {*segment.outputs}, segment.over)):
        operands = [_array(value, held) for value in node.operands if value is not None]
        if node.op_type in VIEWS:
            results = _viewed(node, operands)
            if operands[0].size > 1 and not all(np.shares_memory(result, operands[0]) for result in results):
                found.append(f"{node.op_type} of {node.label}")
            held.update(zip(node.results, results, strict=True))
        elif node.op_type == "Attention":
            if any(operand.strides[-1] != operand.itemsize for operand in operands[:3]):
                found.append(f"{node.op_type} of {node.label}")
            batch, heads, places, size = node.result.shape if len(node.result.shape) == 4 else (0, 0, 0, 0)
            if batch:  # As the kernel lays it where nobody says otherwise.
                held[node.result] = np.empty((batch, places, heads, size), np.float16).transpose(0, 2, 1, 3)
    return found


def _array(value: Value, held: dict[Value, Array]) -> Array:
    if value not in held:
        data = value.data
        held[value] = np.zeros(value.shape, value.dtype.numpy) if data is None else data.numpy()
    return held[value]


def _viewed(node: Node, operands: Sequence[Array]) -> tuple[Array, ...]:
    kernel = lookup(node.domain, node.op_type, node.version)
    assert kernel is not None
    attributes = {name: plain_attribute(value) for name, value in node.attributes.items()}
    return kernel(np, list(operands), attributes, len(node.results))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gpt", {"fused_qkv": True, "opset": 20, "dtype": "float16"}),
        ("llama", {"kv_heads": 2, "opset": 20}),
        ("llama", {"kv_heads": 2, "opset": 23, "fused": True}),
    ],
)
def test_models(family: str, settings: dict[str, Any]) -> None:
    assert copied(models.build(family, **SIZES, **settings)) == []


@pytest.mark.parametrize(
    "name",
    [
        "hf-llama_dynamo_fixed",
        "hf-gpt2_dynamo_fixed",
        *(
            pytest.param(f"{name}_fixed", marks=pytest.mark.slow)
            for name in ("bart_dynamo", "gpt_torchscript", "hf-bert_torchscript", "hf-t5_dynamo", "hf-vit_dynamo")
        ),
    ],
)
def test_exports(name: str) -> None:
    assert copied(str(FIXTURES / f"{name}.onnx")) == []
