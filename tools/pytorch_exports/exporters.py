"""PyTorch's two ONNX exporters, called alike."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import onnx
import torch

from .entry import Entry, seeded


def _torchscript(entry: Entry, dynamic: bool, path: Path) -> None:
    """Export with the TorchScript-based exporter, opset 17."""
    module = seeded(entry.scripted or entry.build, entry.dtype)
    inputs = entry.inputs()
    axes = {name: dict(enumerate(symbols)) for name, symbols in entry.symbols.items()}
    torch.onnx.export(
        torch.jit.script(module) if entry.scripted else module,
        tuple(inputs.values()),
        str(path),
        input_names=list(inputs),
        output_names=list(entry.outputs),
        opset_version=17,
        dynamic_axes=axes if dynamic else None,
        dynamo=False,
    )


def _dynamo(entry: Entry, dynamic: bool, path: Path) -> None:
    """Export with the exporter that is based on torch.export."""
    inputs = entry.inputs()
    dims = {
        symbol: torch.export.Dim(symbol, max=entry.longest.get(symbol))
        for symbols in entry.symbols.values()
        for symbol in symbols
    }
    shapes = {
        name: {i: dims[symbol] for i, symbol in enumerate(entry.symbols.get(name, ()))} or None for name in inputs
    }
    torch.onnx.export(
        seeded(entry.build, entry.dtype),
        tuple(inputs.values()),
        str(path),
        input_names=list(inputs),
        output_names=list(entry.outputs),
        opset_version=entry.opset,
        dynamic_shapes=tuple(shapes.values()) if dynamic else None,
        dynamo=True,
        external_data=False,
        verbose=False,
    )


EXPORTERS: dict[str, Callable[[Entry, bool, Path], None]] = {"torchscript": _torchscript, "dynamo": _dynamo}


DROPPED = ("trace", "fx_node", "class_hierarchy", "namespace")
"""Words of metadata keys: paths of the exporting machine, and class names, a third of a small file."""


def exported(entry: Entry, exporter: str, dynamic: bool) -> onnx.ModelProto:
    """Export a model, without what depends on the machine that exports.

    Raises:
        onnx.checker.ValidationError: the exporter wrote a model that is not valid.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "model.onnx")
        EXPORTERS[exporter](entry, dynamic, path)
        model = onnx.load(path)
    _drop_traces(model)
    onnx.checker.check_model(model, full_check=True)
    return model


def _drop_traces(model: onnx.ModelProto) -> None:
    """Remove stack traces and printed graphs: they hold paths of the exporting machine. Scopes are kept."""
    model.ClearField("doc_string")
    _drop(model)
    _drop_in_graph(model.graph)
    for function in model.functions:
        function.ClearField("doc_string")
        _drop(function)
        for holder in (*function.node, *function.value_info):
            _drop(holder)
            holder.ClearField("doc_string")


def _drop_in_graph(graph: onnx.GraphProto) -> None:
    for holder in (graph, *graph.node, *graph.value_info, *graph.input, *graph.output):
        holder.ClearField("doc_string")
        _drop(holder)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _drop_in_graph(attribute.g)


def _drop(
    holder: onnx.ModelProto | onnx.GraphProto | onnx.NodeProto | onnx.ValueInfoProto | onnx.FunctionProto,
) -> None:
    kept = [entry for entry in holder.metadata_props if not any(word in entry.key for word in DROPPED)]
    del holder.metadata_props[:]
    holder.metadata_props.extend(kept)
