"""ONNX to IR: a model file or ModelProto as a Module. Weights stay where they are until something reads them."""

import os
from pathlib import Path
from typing import TypeAlias

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from irpar.files.regular_file import open_file
from irpar.ir import Graph, Module
from irpar.ir.collector import collector_off

from .device_annotations import NO_CONFIGURATION, DeviceAnnotations
from .dialects import own
from .errors import OnnxError, text_of
from .external import ExternalFolder
from .facts import STATES, take_model_facts, take_states
from .functions import check_calls, read_functions
from .graphs import GraphReader, Scope, metadata_of
from .types import TypeReader, input_symbols
from .versions import MAX_PROTOBUF, OLDEST_OPSET, check_model, opsets_of, upgrade

Source: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview | onnx.ModelProto
"""What a model is read from: the path of a file, or its content."""


def load(model: Source, *, devices: DeviceAnnotations | None = None) -> Module:
    """Read an ONNX model. External data is not read, nor are its files opened; see `check_external`.

    Args:
        model: the path of the .onnx file; or its content, as bytes or parsed, without external data.
        devices: collects the model's multi-device annotations; None: they are not read.

    Raises:
        OnnxError: the file is missing or broken, or holds what irpar does not take; names file, node and value.
    """
    path = None if isinstance(model, (onnx.ModelProto, bytes, bytearray, memoryview)) else Path(model)
    with collector_off():
        try:
            module = to_module(
                _parse(path) if path is not None else _given(model),
                folder=path.parent if path is not None else None,
                devices=devices,
            )
        except OnnxError as error:
            raise (error.inside(str(path)) if path is not None else error) from None
    module.source = path
    return module


def _parse(path: Path) -> onnx.ModelProto:
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_PROTOBUF:
                raise OnnxError(
                    f"the model file has {size} bytes; a protobuf holds at most 2 GB",
                    do="export the model with external data",
                )
            data = file.read()
    except OSError as error:
        raise OnnxError(f"cannot read the model: {error.strerror}", do="give the path of an .onnx file") from None
    return _of_bytes(data)


def _given(model: object) -> onnx.ModelProto:
    """A model in memory; a parsed one is copied, since tensors are read out of it later."""
    if isinstance(model, onnx.ModelProto):
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        return copy
    assert isinstance(model, (bytes, bytearray, memoryview))
    return _of_bytes(bytes(model))


def _of_bytes(data: bytes) -> onnx.ModelProto:
    try:
        return onnx.ModelProto.FromString(data)
    except DecodeError:
        raise OnnxError(
            "not an ONNX model, or a damaged one: it is no protobuf of a model (or nested too deep for one)",
            do="give a model in ONNX's binary form (.onnx), copied completely",
        ) from None


def to_module(
    model: onnx.ModelProto, *, folder: Path | None = None, devices: DeviceAnnotations | None = None
) -> Module:
    """A Module of an ONNX model in memory, which must not be changed afterwards: tensors are read out of it later.

    Args:
        model: the model.
        folder: where its external data lies; None where it has none.
        devices: collects the model's multi-device annotations; None: they are not read.

    Raises:
        OnnxError: the model is broken, or holds what irpar does not take; names node and value.
    """
    try:
        return _to_module(model, folder, devices)
    except RecursionError:
        raise OnnxError("graphs or types are nested too deep", do="flatten the model's branches") from None


def _to_module(model: onnx.ModelProto, folder: Path | None, devices: DeviceAnnotations | None) -> Module:
    check_model(model)
    model = own(model)
    if devices is not None:
        devices.start(model)
    given, model = model, upgrade(model)
    if model is not given and devices is not None and devices.name is not None:
        raise OnnxError(
            "the model has multi-device annotations, but is of an opset that is converted first, which drops them",
            do=f"export it with opset {OLDEST_OPSET} or newer, or do not read them: configuration {NO_CONFIGURATION}",
        )
    module = Module(Graph(text_of(model.graph.name)), opsets=opsets_of(model.opset_import))
    module.ir_version = model.ir_version
    module.producer = (text_of(model.producer_name), text_of(model.producer_version))
    module.doc = text_of(model.doc_string)
    module.metadata = metadata_of(model)
    take_model_facts(module, module.metadata)
    types = TypeReader(input_symbols(model.graph))
    external = ExternalFolder(folder)
    read_functions(model, module, types, external, devices)
    GraphReader(module, module.opsets, types, external, devices=devices).read(model.graph, module.graph, Scope())
    states = module.metadata.pop(STATES, None)
    if states is not None:
        take_states(module.graph, states, [info.name for info in model.graph.input])
    if module.functions:
        check_calls(module)
    return module
