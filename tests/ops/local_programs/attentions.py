"""Models of one Attention of which some operands are cut."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

import irpar

from .nodes import Operands

Cut = tuple[int, Any]
Cuts = Mapping[str, Cut | list[Cut]]


def heads(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def cut_attention(
    operands: Operands,
    cuts: Cuts,
    mesh: dict[str, int],
    folder: Path,
    results: int = 1,
    opset: int = 24,
    options: Mapping[str, Any] | None = None,
    **attributes: Any,
) -> irpar.Partition:
    """The partition of an Attention whose operands, in ONNX's order, are all inputs; some are cut.

    Args:
        operands: by name: q, k, v, mask, past_k, past_v, valid.
        cuts: of operands and of y: (dim, axes), or several of these.
        mesh: of the partition.
        folder: for the model.
        results: how many the node has.
        opset: of the model.
        options: of the partition.
        attributes: of the node.
    """
    names = ("q", "k", "v", "mask", "past_k", "past_v", "valid")
    types = {
        np.dtype(np.float32): TensorProto.FLOAT,
        np.dtype(np.float16): TensorProto.FLOAT16,
        np.dtype(bool): TensorProto.BOOL,
        np.dtype(np.int64): TensorProto.INT64,
    }
    given = [name if name in operands else "" for name in names]
    while not given[-1]:
        given.pop()
    outputs = ["y", "present_k", "present_v"][:results]
    node = helper.make_node("Attention", given, outputs, **attributes)
    inputs = [helper.make_tensor_value_info(name, types[array.dtype], array.shape) for name, array in operands.items()]
    graph = helper.make_graph([node], "g", inputs, [helper.make_empty_tensor_value_info(name) for name in outputs])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.save(onnx.shape_inference.infer_shapes(model), folder / "model.onnx")
    module = irpar.load(folder / "model.onnx")
    for name, cut in cuts.items():
        dims = dict(cut if isinstance(cut, list) else [cut])
        module.shard(name, [dims.get(dim) for dim in range(operands["q" if name == "y" else name].ndim)])
    return irpar.partition(module, irpar.Mesh(mesh), **(options or {}))


def kinds(partition: irpar.Partition) -> list[str]:
    return [entry["kind"] for entry in partition.plan.collectives]
