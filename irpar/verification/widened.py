"""A model of bfloat16 as one of float32, where ONNX Runtime has no kernels of bfloat16."""

from collections.abc import Iterable

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from .arithmetic import DTYPE_ATTRIBUTES

_NARROW, _WIDE = TensorProto.BFLOAT16, TensorProto.FLOAT


def widen_model(model: onnx.ModelProto) -> None:
    """Let tensors of bfloat16 be of float32, in place: the same numbers, and results that are not rounded on the way.

    Args:
        model: with its weights in memory.
    """
    _widen_graph(model.graph)
    for function in model.functions:
        _widen_nodes(function.node)
        _widen_values(function.value_info)


def _widen_graph(graph: onnx.GraphProto) -> None:
    _widen_values((*graph.input, *graph.output, *graph.value_info))
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    _widen_nodes(graph.node)


def _widen_values(values: Iterable[onnx.ValueInfoProto]) -> None:
    for value in values:
        _widen_type(value.type)


def _widen_type(type_: onnx.TypeProto) -> None:
    kind = type_.WhichOneof("value")
    if kind == "tensor_type" and type_.tensor_type.elem_type == _NARROW:
        type_.tensor_type.elem_type = _WIDE
    elif kind in ("sequence_type", "optional_type"):
        _widen_type(getattr(type_, kind).elem_type)


def _widen_nodes(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.name in DTYPE_ATTRIBUTES and attribute.i == _NARROW:
                attribute.i = _WIDE
            for tensor in (attribute.t, *attribute.tensors):
                _widen_tensor(tensor)
            for graph in (attribute.g, *attribute.graphs):
                _widen_graph(graph)


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type == _NARROW:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
