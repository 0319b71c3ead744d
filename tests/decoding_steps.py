"""A step of decoding with a cache, written out in several forms."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

BATCH, HEADS, SIZE = 2, 4, 16
WIDTH = HEADS * SIZE
FORMS = ("Concat", "ScatterND", "ScatterElements", "Where", "TensorScatter")
"""How new keys and values come into the cache."""
OPSET = {"TensorScatter": 24}


class Step:
    """Writes x, past_k, past_v -> y, present_k, present_v.

    Args:
        form: one of FORMS; only Concat makes the cache longer.
        length: places of the cache.
        new: tokens of the step.
    """

    def __init__(self, form: str, length: int, new: int) -> None:
        self.form, self.length, self.new = form, length, new
        self.after = length + (new if form == "Concat" else 0)
        self.at = length if form == "Concat" else length // 2 - 1  # In two blocks, where there are two.
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(0)

    def op(self, op_type: str, *operands: Any, result: str = "", **attributes: Any) -> str:
        names = [each if isinstance(each, str) else self.constant(each) for each in operands]
        result = result or f"{op_type.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, names, [result], name=result, **attributes))
        return result

    def constant(self, array: np.ndarray) -> str:
        self.constants.append(numpy_helper.from_array(array, f"c{len(self.constants)}"))
        return self.constants[-1].name

    def heads(self) -> str:
        weight = (self.rng.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32)
        apart = self.op("Reshape", self.op("MatMul", "x", weight), np.array([BATCH, self.new, HEADS, SIZE]))
        return self.op("Transpose", apart, perm=[0, 2, 1, 3])

    def updated(self, past: str, new: str, present: str) -> str:
        places = np.arange(self.at, self.at + self.new)
        match self.form:
            case "Concat":
                return self.op("Concat", past, new, axis=2, result=present)
            case "ScatterND":
                rows = [self.op("Transpose", each, perm=[2, 0, 1, 3]) for each in (past, new)]
                made = self.op("ScatterND", rows[0], places[:, None], rows[1])
                return self.op("Transpose", made, perm=[1, 2, 0, 3], result=present)
            case "ScatterElements":
                index = np.broadcast_to(places[:, None], (BATCH, HEADS, self.new, SIZE)).copy()
                return self.op("ScatterElements", past, index, new, axis=2, result=present)
            case "Where":
                spread = self.op("Pad", new, np.array([0, 0, self.at, 0, 0, 0, self.length - self.at - self.new, 0]))
                is_new = np.isin(np.arange(self.length), places)[:, None]
                return self.op("Where", is_new, spread, past, result=present)
            case _:
                starts = np.array([self.at, self.at + 1])
                return self.op("TensorScatter", past, new, starts, axis=2, result=present)

    def save(self, path: Path) -> None:
        query = self.heads()
        keys, values = (self.updated(f"past_{name}", self.heads(), f"present_{name}") for name in "kv")
        scores = self.op("MatMul", query, self.op("Transpose", keys, perm=[0, 1, 3, 2]))
        shares = self.op("Softmax", self.op("Mul", scores, np.float32(SIZE**-0.5)), axis=-1)
        merged = self.op("Transpose", self.op("MatMul", shares, values), perm=[0, 2, 1, 3])
        flat = self.op("Reshape", merged, np.array([BATCH, self.new, WIDTH]))
        weight = (self.rng.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32)
        self.op("Add", self.op("MatMul", flat, weight), "x", result="y")

        def info(name: str, places: int) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(name, TensorProto.FLOAT, [BATCH, HEADS, places, SIZE])

        steps = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [BATCH, self.new, WIDTH]) for name in "xy"]
        inputs = [steps[0], *(info(f"past_{name}", self.length) for name in "kv")]
        outputs = [steps[1], *(info(f"present_{name}", self.after) for name in "kv")]
        graph = helper.make_graph(self.nodes, "step", inputs, outputs, self.constants)
        opsets = [helper.make_opsetid("", OPSET.get(self.form, 17))]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)

    def inputs(self) -> dict[str, np.ndarray]:
        past = {f"past_{name}": (BATCH, HEADS, self.length, SIZE) for name in "kv"}
        shapes = {"x": (BATCH, self.new, WIDTH), **past}
        return {name: self.rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
