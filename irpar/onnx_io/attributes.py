"""Attributes: ONNX's AttributeProto to the IR's attribute values and back. Graphs are left to the caller."""

from collections.abc import Callable
from typing import Any

import onnx
from onnx import AttributeProto

from irpar.ir import (
    Attribute,
    Floats,
    Graph,
    Graphs,
    InflightType,
    Ints,
    OptionalType,
    RefAttribute,
    SequenceType,
    Strings,
    Tensor,
    Tensors,
    TensorType,
    Types,
)
from irpar.ir.types import UnknownType

from .errors import OnnxError, text_of
from .external import ExternalFolder
from .tensors import decode_text, encode_text, read_tensor, write_tensor
from .types import TypeReader, write_type

Bodies = list[tuple[str, list[onnx.GraphProto], bool]]
"""Per attribute that holds graphs: its name, the graphs, and whether it is a list of them."""


class AttributeReader:
    """Reads the attributes of nodes."""

    def __init__(self, types: TypeReader, external: ExternalFolder) -> None:
        self._readers: dict[int, Callable[[AttributeProto], Attribute]] = {
            AttributeProto.FLOAT: lambda proto: proto.f,
            AttributeProto.INT: lambda proto: proto.i,
            AttributeProto.STRING: lambda proto: decode_text(proto.s),
            AttributeProto.TENSOR: lambda proto: read_tensor(proto.t, external),
            AttributeProto.TYPE_PROTO: lambda proto: types.read(proto.tp),
            AttributeProto.FLOATS: lambda proto: Floats(proto.floats),
            AttributeProto.INTS: lambda proto: Ints(proto.ints),
            AttributeProto.STRINGS: lambda proto: Strings(map(decode_text, proto.strings)),
            AttributeProto.TENSORS: lambda proto: Tensors(read_tensor(item, external) for item in proto.tensors),
            AttributeProto.TYPE_PROTOS: lambda proto: Types(types.read(item) for item in proto.type_protos),
        }

    def read(self, protos: Any, parameters: Any) -> tuple[dict[str, Attribute], Bodies]:
        """The attributes of a node that are not graphs, and the graphs as they are.

        Args:
            protos: the attributes.
            parameters: the attribute names of the function around the node, which references may name.

        Raises:
            OnnxError: an attribute without name or type, given twice, or of a kind that irpar does not hold.
        """
        found: dict[str, Attribute] = {}
        bodies: Bodies = []
        for proto in protos:
            name, kind = text_of(proto.name), proto.type
            if not name:
                raise OnnxError("an attribute has no name", do="export the model again")
            if name in found or any(name == other for other, _, _ in bodies):
                raise OnnxError(f'attribute "{name}" is given twice', do="give each attribute once")
            if proto.ref_attr_name:
                found[name] = _reference(proto, parameters)
            elif kind in self._readers:
                found[name] = self._read(proto)
            elif kind == AttributeProto.GRAPH:
                bodies.append((name, [proto.g], False))
            elif kind == AttributeProto.GRAPHS:
                bodies.append((name, list(proto.graphs), True))
            else:
                raise _unknown(name, kind)
        return found, bodies

    def _read(self, proto: AttributeProto) -> Attribute:
        try:
            return self._readers[proto.type](proto)
        except OnnxError as error:
            raise error.inside(f"attribute {proto.name}") from None

    def defaults(self, proto: onnx.FunctionProto) -> dict[str, Attribute | None]:
        """The attribute names of a function: None for those that a call must give, else the default."""
        required: dict[str, Attribute | None] = dict.fromkeys(proto.attribute)
        found, bodies = self.read(proto.attribute_proto, ())
        if bodies:
            raise OnnxError(
                f'attribute "{bodies[0][0]}" has a graph as default', do="give the graph where the function is called"
            )
        return required | found


def _reference(proto: AttributeProto, parameters: Any) -> RefAttribute:
    if proto.ref_attr_name not in parameters:
        raise OnnxError(
            f'attribute "{proto.name}" refers to attribute "{proto.ref_attr_name}", which no function around it has',
            do="declare the attribute in the function, or give a value",
        )
    return RefAttribute(proto.ref_attr_name, proto.type)


def _unknown(name: str, kind: int) -> OnnxError:
    if kind in (AttributeProto.SPARSE_TENSOR, AttributeProto.SPARSE_TENSORS):
        return OnnxError(f'attribute "{name}" is a sparse tensor', do="make it dense; irpar holds dense tensors")
    return OnnxError(f'attribute "{name}" has no known type ({kind})', do="write the type of every attribute")


_KINDS: tuple[tuple[type | tuple[type, ...], int], ...] = (
    (int, AttributeProto.INT),
    (float, AttributeProto.FLOAT),
    ((str, bytes), AttributeProto.STRING),
    (Ints, AttributeProto.INTS),
    (Floats, AttributeProto.FLOATS),
    (Strings, AttributeProto.STRINGS),
    (Tensor, AttributeProto.TENSOR),
    (Tensors, AttributeProto.TENSORS),
    (Graph, AttributeProto.GRAPH),
    (Graphs, AttributeProto.GRAPHS),
    (Types, AttributeProto.TYPE_PROTOS),
    ((TensorType, SequenceType, OptionalType, InflightType, UnknownType), AttributeProto.TYPE_PROTO),
)


def write_attribute(
    name: str, value: Attribute, proto: AttributeProto, write_graph: Callable[[Graph, onnx.GraphProto], None]
) -> None:
    """Put an attribute into an AttributeProto; `write_graph` writes the graphs that it holds."""
    proto.name = name
    if isinstance(value, RefAttribute):
        proto.ref_attr_name = value.name
        proto.type = value.kind
        return
    kind = next(kind for class_, kind in _KINDS if isinstance(value, class_))
    proto.type = kind
    _WRITERS[kind](proto, value, write_graph)


def _write_graphs(proto: AttributeProto, graphs: Graphs, write_graph: Callable[[Graph, onnx.GraphProto], None]) -> None:
    for graph in graphs:
        write_graph(graph, proto.graphs.add())


def _write_tensors(proto: AttributeProto, tensors: Tensors, _: object) -> None:
    for tensor in tensors:
        write_tensor(tensor, proto.tensors.add())


def _write_types(proto: AttributeProto, types: Types, _: object) -> None:
    for type_ in types:
        write_type(type_, proto.type_protos.add())


_WRITERS: dict[int, Callable[[AttributeProto, Any, Any], Any]] = {
    AttributeProto.INT: lambda proto, value, _: setattr(proto, "i", value),
    AttributeProto.FLOAT: lambda proto, value, _: setattr(proto, "f", value),
    AttributeProto.STRING: lambda proto, value, _: setattr(proto, "s", encode_text(value)),
    AttributeProto.INTS: lambda proto, value, _: proto.ints.extend(value),
    AttributeProto.FLOATS: lambda proto, value, _: proto.floats.extend(value),
    AttributeProto.STRINGS: lambda proto, value, _: proto.strings.extend(map(encode_text, value)),
    AttributeProto.TENSOR: lambda proto, value, _: write_tensor(value, proto.t),
    AttributeProto.TENSORS: _write_tensors,
    AttributeProto.GRAPH: lambda proto, value, write_graph: write_graph(value, proto.g),
    AttributeProto.GRAPHS: _write_graphs,
    AttributeProto.TYPE_PROTO: lambda proto, value, _: write_type(value, proto.tp),
    AttributeProto.TYPE_PROTOS: _write_types,
}
