"""Attention written out as products and a Softmax, as PyTorch exports it, of which only the sequence is sharded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import irpar


@dataclass(frozen=True)
class Block:
    """A layer x -> y of (batch, places, heads * size): projections, attention by heads, and a projection back."""

    batch: int
    places: int
    heads: int
    key_heads: int
    size: int = 8
    is_causal: bool = False

    def write(self, path: Path) -> None:
        """Save the model; the heads of K and V are repeated for those of Q that share them."""
        nodes: list[onnx.NodeProto] = []
        constants: list[onnx.TensorProto] = []

        def op(op_type: str, operands: list[Any], **attributes: Any) -> str:
            names = [operand if isinstance(operand, str) else constant(operand) for operand in operands]
            result = f"{op_type.lower()}_{len(nodes)}"
            nodes.append(helper.make_node(op_type, names, [result], name=result, **attributes))
            return result

        def constant(array: np.ndarray) -> str:
            constants.append(numpy_helper.from_array(array, f"c{len(constants)}"))
            return constants[-1].name

        def projected(heads: int, order: list[int]) -> str:
            flat = op("MatMul", ["x", weight(heads * self.size)])
            return op("Transpose", [op("Reshape", [flat, np.array([0, 0, heads, self.size])])], perm=order)

        def repeated(heads: str, shape: list[int]) -> str:
            group = self.heads // self.key_heads
            if group == 1:
                return heads
            wide = op("Expand", [op("Unsqueeze", [heads, np.array([2])]), np.array([1, 1, group, 1, 1])])
            return op("Reshape", [wide, np.array([0, self.heads, *shape])])

        rng = np.random.default_rng(0)
        width = self.heads * self.size

        def weight(columns: int) -> np.ndarray:
            return (rng.standard_normal((width, columns)) / np.sqrt(width)).astype(np.float32)

        query = projected(self.heads, [0, 2, 1, 3])
        key = repeated(projected(self.key_heads, [0, 2, 3, 1]), [self.size, self.places])
        value = repeated(projected(self.key_heads, [0, 2, 1, 3]), [self.places, self.size])
        scores = op("Div", [op("MatMul", [query, key]), np.array(np.sqrt(self.size), np.float32)])
        if self.is_causal:
            scores = op("Add", [scores, np.triu(np.full((self.places, self.places), -1e9, np.float32), 1)])
        result = op("MatMul", [op("Softmax", [scores], axis=-1), value])
        merged = op("Reshape", [op("Transpose", [result], perm=[0, 2, 1, 3]), np.array([0, 0, width])])
        nodes.append(helper.make_node("MatMul", [merged, constant(weight(width))], ["y"]))
        shape = [self.batch, self.places, width]
        ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
        graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], constants)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)

    def bytes_of(self, heads: int) -> int:
        """Of all places of some heads, in f32."""
        return self.batch * self.places * heads * self.size * 4


HEADS, KEYS = ["all_to_all"] * 4, ["all_gather"] * 2
CASES = {
    "heads": (Block(1, 32, 8, 8), {"sp": 4}, HEADS),
    "heads, causal, uneven": (Block(1, 31, 8, 8, is_causal=True), {"sp": 4}, HEADS),
    "too few heads": (Block(1, 32, 2, 2, is_causal=True), {"sp": 4}, KEYS),
    "too few heads, uneven": (Block(1, 30, 2, 2), {"sp": 4}, KEYS),
    "heads of keys that are shared": (Block(1, 32, 16, 4), {"sp": 4}, KEYS),
    "heads, beside a batch": (Block(4, 32, 8, 8, is_causal=True), {"dp": 2, "sp": 4}, HEADS),
    "too few heads, beside a batch": (Block(4, 15, 2, 2), {"dp": 2, "sp": 4}, KEYS),
}
"""Layer, mesh, and what is sent: queries, keys, values and results to blocks of heads and back, or all keys and values.

With 4 devices the former are 4 * 3/16 of a tensor of all heads, the latter 2 * 3/4 of one of the key heads.
"""


@pytest.mark.parametrize("case", CASES)
def test_keys_are_gathered_once_or_places_move_to_heads(case: str, tmp_path: Path) -> None:
    block, mesh, kinds = CASES[case]
    block.write(tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    for name in "xy":
        module.shard(name, ["dp" if "dp" in mesh else None, "sp", None])
    partition = irpar.partition(module, mesh)
    assert [entry["kind"] for entry in partition.plan.collectives] == kinds
    if block.places % 4 == 0:
        share, heads = (4 * 3 / 16, block.heads) if kinds is HEADS else (2 * 3 / 4, block.key_heads)
        assert partition.plan.totals["sent_bytes"] == share * block.bytes_of(heads) / mesh.get("dp", 1)
    data = {"x": np.random.default_rng(1).standard_normal((block.batch, block.places, block.heads * 8), np.float32)}
    for engine in ("ort", "numpy"):
        partition.verify(data, engine=engine).check()
        assert partition.executor(engine).log.differences(partition.plan.collectives) == []
