"""Computing nodes whose operands are constants: one by one by irpar's kernels, or many in one ONNX Runtime session."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from irpar.ir import ArrayTensor, Graph, Node, Tensor, TensorType, Value, dtype_of_numpy, plain_attribute
from irpar.ir.tensor import Array
from irpar.kernels import KernelError, lookup
from irpar.onnx_io.attributes import write_attribute
from irpar.onnx_io.tensors import write_tensor
from irpar.onnx_io.types import write_type
from irpar.process import import_native

IR_VERSION = 10
"""Version of the ONNX format for the models made here; every reader in use knows it."""


def compute(node: Node) -> list[Tensor] | None:
    """The results of a node whose operands are constants, by irpar's kernel; None where there is no such kernel."""
    kernel = lookup(node.domain, node.op_type, node.version)
    if kernel is None:
        return None
    operands = [None if value is None else _numbers(value) for value in node.operands]
    try:
        attributes = {name: plain_attribute(attribute) for name, attribute in node.attributes.items()}
        arrays = kernel(np, operands, attributes, len(node.results))
        # A result may be a view of an operand, which would keep the operand's memory alive.
        found = [ArrayTensor(array.copy(), dtype_of_numpy(array.dtype)) for array in arrays]
    except (KernelError, TypeError):
        return None
    return list(found) if all(map(_agrees, node.results, found)) else None


def _agrees(value: Value, data: Tensor) -> bool:
    """True where computed numbers are of the type that was inferred; else one of both is wrong."""
    known = value.type
    if not isinstance(known, TensorType):
        return True
    if known.dtype is not data.dtype:
        return False
    return not known.is_static or known.shape == data.shape


def _numbers(value: Value) -> Array:
    assert value.data is not None
    return value.data.numpy()


def compute_together(nodes: Sequence[Node], wanted: Sequence[Value]) -> dict[Value, Tensor]:
    """Values that some nodes compute, by one run of ONNX Runtime, else one by one with ONNX's reference evaluator.

    Args:
        nodes: in an order in which each reads constants or results of nodes before it.
        wanted: the results that are needed.

    Returns:
        Those of `wanted` that could be computed.
    """
    model = _model(nodes, wanted)
    try:
        arrays = _run_onnxruntime(model)
    except Exception:  # any failure of a runtime that is not ours: ops, dtypes or versions that it does not know
        return _compute_each(nodes, wanted)
    return _tensors(wanted, arrays)


def _tensors(values: Sequence[Value], arrays: Sequence[Any]) -> dict[Value, Tensor]:
    """Arrays as tensors, less those that are not of the type that was inferred."""
    found = {value: ArrayTensor(np.asarray(array)) for value, array in zip(values, arrays, strict=True)}
    return {value: data for value, data in found.items() if _agrees(value, data)}


def _run_onnxruntime(model: onnx.ModelProto) -> list[Array]:
    onnxruntime = import_native("onnxruntime")  # Most models fold without it, and it takes a tenth of a second.

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, {}))


def _compute_each(nodes: Sequence[Node], wanted: Sequence[Value]) -> dict[Value, Tensor]:
    from onnx.reference import ReferenceEvaluator

    known: dict[Value, Tensor] = {}
    for node in nodes:
        if any(value.data is None and value not in known for value in node.inputs):
            continue
        try:
            arrays = ReferenceEvaluator(_model([node], node.results, known)).run(None, {})
        except Exception:  # what the reference cannot compute stays as it is
            continue
        known.update(_tensors(node.results, arrays))
    return {value: known[value] for value in wanted if value in known}


def _model(nodes: Sequence[Node], wanted: Sequence[Value], known: dict[Value, Tensor] | None = None) -> onnx.ModelProto:
    """A model of some nodes without inputs: what they read from outside becomes initializers."""
    model = onnx.ModelProto(ir_version=IR_VERSION)
    graph = model.graph
    graph.name = "constants"
    names: dict[Value, str] = {}
    opsets: dict[str, int] = {"": 0}
    for node in nodes:
        for value in node.inputs:
            data = value.data if value.data is not None else (known or {}).get(value)
            if data is not None and value not in names:
                names[value] = f"c{len(names)}"
                initializer = graph.initializer.add(name=names[value])
                write_tensor(data, initializer)
                initializer.name = names[value]
        for value in node.results:
            names[value] = f"v{len(names)}"
        proto = graph.node.add(op_type=node.op_type, domain=node.domain)
        proto.input.extend("" if value is None else names[value] for value in node.operands)
        proto.output.extend(names[value] for value in node.results)
        for name, attribute in node.attributes.items():
            write_attribute(name, attribute, proto.attribute.add(), _refuse_graph)
        opsets[node.domain] = max(opsets.get(node.domain, 0), node.version)
    for value in wanted:
        output = graph.output.add(name=names[value])
        write_type(value.type, output.type)
    for domain, version in opsets.items():
        model.opset_import.add(domain=domain, version=version or onnx.defs.onnx_opset_version())
    return model


def _refuse_graph(graph: Graph, proto: onnx.GraphProto) -> None:
    raise ValueError(f"graph {graph.name} in a node that is computed ahead")
