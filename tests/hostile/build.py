"""Small ONNX models, as bad as one likes."""

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64, BOOL, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING
SHAPE = (4, 8)
OPSETS = [helper.make_opsetid("", 18), helper.make_opsetid("my", 1)]


def value(name: str, dtype: int = FLOAT, shape: Any = SHAPE) -> onnx.ValueInfoProto:
    """A typed name; `shape` None is unknown."""
    return helper.make_tensor_value_info(name, dtype, shape)


def node(op: str, inputs: Any, outputs: Any, **attributes: Any) -> onnx.NodeProto:
    """A node."""
    return helper.make_node(op, inputs, outputs, **attributes)


RELU = node("Relu", ["x"], ["y"])
CALL = node("f", ["x"], ["y"], domain="my")


def function(name: str, *nodes: onnx.NodeProto, **fields: Any) -> onnx.FunctionProto:
    """A function my.<name> from a to b."""
    return helper.make_function("my", name, ["a"], ["b"], nodes, OPSETS, **fields)


def model(
    *nodes: onnx.NodeProto,
    inputs: Any = None,
    outputs: Any = None,
    constants: Any = (),
    functions: Any = (),
    opset: int = 18,
) -> onnx.ModelProto:
    """A model, by default from x to y."""
    graph = helper.make_graph(nodes, "g", inputs or [value("x")], outputs or [value("y")], constants)
    opsets = [helper.make_opsetid("", opset), OPSETS[1]]
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)


def changed(made: onnx.ModelProto, statement: str) -> onnx.ModelProto:
    """A model `m`, with graph `g`, after a statement that changes it."""
    exec(statement, {"m": made, "g": made.graph, "TensorProto": TensorProto, "onnx": onnx, "helper": helper})
    return made


def relu(statement: str) -> onnx.ModelProto:
    """A good model after a statement that changes it."""
    return changed(model(node("Relu", ["x"], ["y"])), statement)


def external(
    location: str | None = "w.bin", offset: Any = 0, length: Any = 256, shape: Any = (8, 8)
) -> onnx.ModelProto:
    """A product with a weight in a file."""
    weight = TensorProto(name="w", dims=shape, data_type=FLOAT, data_location=TensorProto.EXTERNAL)
    for key, fact in (("location", location), ("offset", offset), ("length", length)):
        if fact is not None:
            weight.external_data.add(key=key, value=str(fact))
    return model(node("MatMul", ["x", "w"], ["y"]), constants=[weight])


def raw(dims: Any, content: bytes = b"abc", dtype: int = FLOAT, **fields: Any) -> onnx.ModelProto:
    """A sum with a weight of these fields."""
    fields = fields or {"raw_data": content}
    weight = TensorProto(name="w", dims=dims, data_type=dtype, **fields)
    return model(node("Add", ["x", "w"], ["y"]), constants=[weight])


def numbers(entry: Any, name: str, dtype: Any = None) -> TensorProto:
    """A constant."""
    return numpy_helper.from_array(np.array(entry, dtype), name)


def with_constant(op: str, entry: Any, dtype: Any = np.int64, **attributes: Any) -> onnx.ModelProto:
    """`y = op(x, constant)`, y of unknown shape."""
    return model(
        node(op, ["x", "k"], ["y"], **attributes),
        constants=[numbers(entry, "k", dtype)],
        outputs=[value("y", FLOAT, None)],
    )


def of_op(op: str, *inputs: onnx.ValueInfoProto, results: int = 1, **attributes: Any) -> onnx.ModelProto:
    """One node over all inputs, its results of unknown shape."""
    inputs = inputs or (value("x"),)
    outputs = [f"y{index or ''}" for index in range(results)]
    made = node(op, [one.name for one in inputs], outputs, **attributes)
    return model(made, inputs=list(inputs), outputs=[value(name, FLOAT, None) for name in outputs])


def body(*nodes: onnx.NodeProto, inputs: Any = (), outputs: Any = ()) -> onnx.GraphProto:
    """A body of If, Loop or Scan."""
    return helper.make_graph(nodes, "b", list(inputs), list(outputs))
