"""What onnx's version converter gets wrong in models of opsets before 13, mended before and after it."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]
from google.protobuf.message import Message  # type: ignore[import-untyped]
from onnx import TensorProto, helper, numpy_helper

from .errors import OnnxError, text_of
from .scan8 import rewrite_scans

_AGAIN = "export the model again with opset 13 or newer"
_OWN_DOMAIN = ("", "ai.onnx")


def check_text(message: Message) -> None:
    """Refuse strings that are not UTF-8, which the converter and onnx's helpers do not take.

    Raises:
        OnnxError: showing the string.
    """
    for field, value in message.ListFields():
        items = value if field.is_repeated else (value,)
        if field.type == FieldDescriptor.TYPE_STRING:
            for item in items:
                text_of(item)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            for item in items:
                check_text(item)


def prepare(model: onnx.ModelProto, version: int) -> None:
    """Say in other words, of the same opset, what the converter would change the meaning of.

    Raises:
        OnnxError: a node cannot be said in other words.
    """
    _flatten_hardmax(model.graph)
    if version < 9:
        rewrite_scans(model.graph)
    if version < 11:
        _drop_unread_values(model.graph)
    if version < 7:
        _unsqueeze_slopes(model)


def finish(before: onnx.ModelProto, model: onnx.ModelProto, version: int) -> None:
    """Mend what the converter made of a model of opset `version`, which `before` is."""
    if version < 11:
        _keep_names(before.graph, model.graph)
        _keep_types(before, model.graph)
        constants = _constants(model.graph)
        for graph in reversed(list(_graphs(model.graph))):
            _keep_places(graph, version, constants)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and those nested in it, which come after it: to change them, go backwards."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for nested in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                yield from _graphs(nested)


_OTHER_FLOATS: dict[int, "np.dtype[Any]"] = {
    TensorProto.FLOAT16: np.dtype(np.float16),
    TensorProto.DOUBLE: np.dtype(np.float64),
}
_NUMBERED = frozenset({"Clip", "Pad"})
"""Operators of which the converter makes numbers, attributes before, to operands: of float32, whatever the data is."""


def _keep_types(before: onnx.ModelProto, graph: onnx.GraphProto) -> None:
    """Let numbers that were attributes have the type of the data beside them."""
    numbered = [(inner, node) for inner in _graphs(graph) for node in inner.node if node.op_type in _NUMBERED]
    types = _float_types(before) if numbered else {}
    for inner, node in numbered if types else ():
        made = {maker.output[0]: maker for maker in inner.node if maker.op_type == "Constant"}
        dtype = types.get(node.input[0])
        for name in node.input[1:]:
            tensor = made[name].attribute[0].t if name in made else None
            if dtype is not None and tensor is not None and tensor.data_type == TensorProto.FLOAT:
                with np.errstate(over="ignore"):
                    narrow = numpy_helper.to_array(tensor).astype(dtype)
                tensor.CopyFrom(numpy_helper.from_array(narrow, tensor.name))


def _float_types(model: onnx.ModelProto) -> dict[str, "np.dtype[Any]"]:
    """The values of other floats than float32, as far as that is inferred."""
    with suppress(onnx.shape_inference.InferenceError):
        model = onnx.shape_inference.infer_shapes(model)
    return {
        value.name: _OTHER_FLOATS[value.type.tensor_type.elem_type]
        for graph in _graphs(model.graph)
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.type.tensor_type.elem_type in _OTHER_FLOATS
    }


_REPLACED = {"Upsample": "Resize", "Scatter": "ScatterElements"}
"""Operators for which the converter makes new nodes; the results of these have names that nobody knows."""


def _keep_names(before: onnx.GraphProto, graph: onnx.GraphProto) -> None:
    """Give results that the converter made anew the names that they had; annotations go by them."""
    old = {name for node in before.node for name in node.output}
    left = {name for node in graph.node for name in node.output}
    names: dict[str, str] = {}
    for operator, other in _REPLACED.items():
        gone = [node.output[0] for node in before.node if node.op_type == operator and node.output[0] not in left]
        made = [node.output[0] for node in graph.node if node.op_type == other and node.output[0] not in old]
        if len(gone) == len(made):
            names.update(zip(made, gone, strict=True))
    for inner in _graphs(graph) if names else ():
        for node in inner.node:
            for fields in (node.input, node.output):
                fields[:] = [names.get(name, name) for name in fields]
        for value in (*inner.output, *inner.value_info):
            value.name = names.get(value.name, value.name)


def _flatten_hardmax(graph: onnx.GraphProto) -> None:
    """Say with other nodes that Hardmax took all dims from the axis on as one; the converter leaves it as it is."""
    for inner in reversed(list(_graphs(graph))):
        nodes = []
        for node in inner.node:
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
            if node.op_type != "Hardmax" or node.domain not in _OWN_DOMAIN or axis == -1:
                nodes.append(node)
                continue
            (source,), (result,) = node.input, node.output
            shape, rows, flat = (f"{result}/{part}" for part in ("shape", "rows", "hardmax"))
            nodes.append(helper.make_node("Shape", [source], [shape]))
            nodes.append(helper.make_node("Flatten", [source], [rows], axis=axis))
            nodes.append(helper.make_node("Hardmax", [rows], [flat], name=node.name, axis=1))
            nodes.append(helper.make_node("Reshape", [flat, shape], [result]))
        _replace_nodes(inner, nodes)


def _drop_unread_values(graph: onnx.GraphProto) -> None:
    """Take from Pad what it would fill with where its mode fills with elements; the converter leaves it in the node."""
    for inner in _graphs(graph):
        for node in inner.node:
            modes = [attribute.s for attribute in node.attribute if attribute.name == "mode"]
            if node.op_type == "Pad" and node.domain in _OWN_DOMAIN and modes and modes[0] != b"constant":
                kept = [attribute for attribute in node.attribute if attribute.name != "value"]
                del node.attribute[:]
                node.attribute.extend(kept)


def _replace_nodes(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    if len(nodes) != len(graph.node):
        made = onnx.GraphProto(node=nodes)  # Copies: what is replaced may be among them.
        del graph.node[:]
        graph.node.MergeFrom(made.node)


# -- PRelu before opset 7: a slope for each channel, which from then on would be broadcast to the last dim -------------


def _unsqueeze_slopes(model: onnx.ModelProto) -> None:
    """Give the slopes of PRelu the dims that broadcasting needs: [C] to [C, 1, 1]."""
    if not any(node.op_type == "PRelu" for graph in _graphs(model.graph) for node in graph.node):
        return
    ranks: dict[str, int] = {}
    for graph in _graphs(onnx.shape_inference.infer_shapes(model).graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.tensor_type.HasField("shape"):
                ranks[value.name] = len(value.type.tensor_type.shape.dim)
        ranks.update((tensor.name, len(tensor.dims)) for tensor in graph.initializer)
    for graph in reversed(list(_graphs(model.graph))):
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            if node.op_type == "PRelu" and node.domain in _OWN_DOMAIN:
                nodes.extend(_unsqueezed(node, ranks))
            nodes.append(node)
        _replace_nodes(graph, nodes)


def _unsqueezed(node: onnx.NodeProto, ranks: dict[str, int]) -> list[onnx.NodeProto]:
    """What stands before a PRelu, whose operand is changed to it."""
    if len(node.input) != 2 or len(node.output) != 1:
        raise OnnxError("PRelu needs two operands and one result", where=f'node "{node.name}"', do=_AGAIN)
    source, slope = node.input
    if source not in ranks or slope not in ranks:
        raise OnnxError(
            "PRelu before opset 7 needs operands of known rank: its slope is one number for each channel",
            where=f'node "{node.name}" of "{node.output[0]}"',
            do=_AGAIN,
        )
    if ranks[slope] != 1 or ranks[source] <= 2:
        return []
    wide = node.input[1] = f"{node.output[0]}/slope"
    return [helper.make_node("Unsqueeze", [slope], [wide], axes=list(range(1, ranks[source] - 1)))]


# -- Upsample, and Resize before opset 11: element i lies at i / scale, not at (i + 0.5) / scale - 0.5 -----------------


def _keep_places(graph: onnx.GraphProto, version: int, constants: dict[str, np.ndarray]) -> None:
    """Write out where each Resize takes its elements from; the converter leaves it to the defaults of opset 11."""
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type != "Resize" or node.domain not in _OWN_DOMAIN or len(node.input) < 3:
            nodes.append(node)
            continue
        _set(node, "coordinate_transformation_mode", "asymmetric")
        mode = next((attribute.s for attribute in node.attribute if attribute.name == "mode"), b"nearest")
        scales = constants.get(node.input[2])
        if mode != b"nearest":
            nodes.append(node)
        elif version < 10 or (scales is not None and (scales >= 1).all()):  # Upsample only enlarges.
            _set(node, "nearest_mode", "floor")
            nodes.append(node)
        else:
            nodes.extend(_in_two_steps(node))
    _replace_nodes(graph, nodes)


def _in_two_steps(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """Enlarge some dims, then reduce others: ONNX Runtime takes the lower neighbour there, and the upper one here."""
    result = node.output[0]
    one, more, less, enlarged = (f"{result}/resize/{part}" for part in ("one", "more", "less", "enlarged"))
    source, region, scales = node.input[:3]
    yield helper.make_node("Constant", [], [one], value=helper.make_tensor(one, TensorProto.FLOAT, [], [1.0]))
    yield helper.make_node("Max", [scales, one], [more])
    yield helper.make_node("Min", [scales, one], [less])
    for data, scale, made, rounding in ((source, more, enlarged, "floor"), (enlarged, less, result, "ceil")):
        step = onnx.NodeProto()
        step.CopyFrom(node)
        del step.input[:], step.output[:]
        step.input.extend([data, region, scale])
        step.output.append(made)
        _set(step, "nearest_mode", rounding)
        yield step


def _set(node: onnx.NodeProto, name: str, value: str) -> None:
    """Set an attribute."""
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def _constants(model: onnx.GraphProto) -> dict[str, np.ndarray]:
    """The numbers of small initializers, and of the results of Constants."""
    found: dict[str, TensorProto] = {}
    for graph in _graphs(model):
        found.update((tensor.name, tensor) for tensor in graph.initializer)
        for node in graph.node:
            if node.op_type == "Constant" and len(node.output) == 1:
                found.update((node.output[0], attribute.t) for attribute in node.attribute if attribute.name == "value")
    arrays: dict[str, np.ndarray] = {}
    for name, tensor in found.items():
        with suppress(ValueError):  # Data that does not fill its shape is reported when the model is read.
            if _is_scales(tensor):
                arrays[name] = numpy_helper.to_array(tensor)
    return arrays


def _is_scales(tensor: TensorProto) -> bool:
    return tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 1 and not len(tensor.external_data)
