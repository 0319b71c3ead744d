"""Models of one Attention of which some operands are sharded."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper

import irpar
from irpar.ir import Node

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
    """The partition of an Attention whose operands, in ONNX's order, are all inputs; some are sharded.

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


def node_of(folder: Path) -> Node:
    """The Attention of the model in a folder."""
    node = irpar.load(folder / "model.onnx").graph.first
    assert node is not None
    return node


def blocks(partition: irpar.Partition, operands: Operands) -> dict[str, tuple[int, ...]]:
    """The shape of the largest block of each operand."""
    mesh = partition.plan.mesh_of_ranks.axes
    cuts = {entry["name"]: entry["sharding"] for entry in partition.plan.inputs}
    return {
        name: tuple(
            -(-size // prod(mesh[axis] for axis in cut or ()))
            for size, cut in zip(array.shape, cuts[name], strict=True)
        )
        for name, array in operands.items()
    }


# -- drawn at random ------------------------------------------------------------------------------------------------

MESHES = ({"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2})


def draw_axes(draw: st.DrawFn) -> tuple[dict[str, int], list[str], str | None]:
    """A mesh, some of its axes in any order, and one that is not among them, if there is one."""
    mesh = draw(st.sampled_from(MESHES))
    axes = draw(st.permutations(list(mesh)))[: draw(st.integers(1, len(mesh)))]
    return mesh, axes, next((axis for axis in mesh if axis not in axes), None)


@dataclass(frozen=True)
class HeadSizes:
    """How many heads an Attention has, and how large they are.

    Attributes:
        batch: of all operands.
        of_keys: how many keys and values have.
        of_queries: how many queries have, a multiple of it.
        size: features of a head of queries and keys.
        value_size: features of a head of values.
        is_packed: heads and their features are one dim.
    """

    batch: int
    of_keys: int
    of_queries: int
    size: int
    value_size: int
    is_packed: bool

    @property
    def attributes(self) -> dict[str, Any]:
        """Of the node: how many heads a dim holds."""
        return {"q_num_heads": self.of_queries, "kv_num_heads": self.of_keys} if self.is_packed else {}

    def operands(self, queries: int, keys: int) -> dict[str, np.ndarray]:
        """q, k and v of so many places."""
        return {
            "q": self._operand(queries, self.of_queries, self.size),
            "k": self._operand(keys, self.of_keys, self.size),
            "v": self._operand(keys, self.of_keys, self.value_size),
        }

    def _operand(self, places: int, count: int, size: int) -> np.ndarray:
        shape = (places, count * size) if self.is_packed else (count, places, size)
        return heads(self.batch, *shape)


def draw_heads(draw: st.DrawFn) -> HeadSizes:
    batch, of_keys, group = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 2))
    return HeadSizes(batch, of_keys, of_keys * group, 4, draw(st.sampled_from([4, 4, 6])), draw(st.booleans()))


def draw_mask(draw: st.DrawFn, shapes: list[tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The operand of that name, in one of these shapes; every other time there is none."""
    mask = heads(*draw(st.sampled_from(shapes)))
    match draw(st.sampled_from(["none", "none", "bool", "float"])):
        case "bool":
            return {"mask": mask > -1}
        case "float":
            return {"mask": mask}
    return {}
