"""What a model says of the dialect of its collectives, and of the nodes that stand for one of irpar's."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import onnx
from onnx import AttributeProto

from irpar.ir import DOMAIN, Graph, Module, Node
from irpar.onnx_io.errors import OnnxError

SPOKEN = "irpar.collectives"
"""On a model: the dialect of its collectives."""
IMPORTS = "irpar.imports"
"""On a model or function in a dialect: what it imported, in irpar's own operators."""
SAID = "irpar.collective"
"""On a node of a dialect: the collective that it is: `{"op": "AllGather", "axes": ["tp"], "dim": 1, "id": 3}`."""
AROUND = "irpar.part_of"
"""On a node beside one: the id of the collective that they are together."""
STUB = "irpar.stub"
"""On a function: it stands in for a collective where nothing can run it."""


def entry_of(proto: Any, key: str) -> str | None:
    """An entry of the metadata_props, or None."""
    return next((entry.value for entry in proto.metadata_props if entry.key == key), None)


def take_entry(proto: Any, key: str) -> str | None:
    """Remove an entry of the metadata_props; returns it, or None."""
    for place, entry in enumerate(proto.metadata_props):
        if entry.key == key:
            text: str = entry.value
            del proto.metadata_props[place]
            return text
    return None


def holders(model: onnx.ModelProto) -> Iterator[Any]:
    """The graph, all graphs nested in it, and the functions with theirs: what has a list of nodes."""
    for holder in (model.graph, *model.functions):
        yield from _nested(holder)


def _nested(holder: Any) -> Iterator[Any]:
    yield holder
    for node in holder.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _nested(attribute.g)
            for graph in attribute.graphs:
                yield from _nested(graph)


def rewrite(holder: Any, made: Callable[[onnx.NodeProto], list[onnx.NodeProto] | None]) -> bool:
    """Put other nodes in place of some; returns whether any was.

    Args:
        holder: of the list of nodes.
        made: what stands in place of a node; None: itself.
    """
    found = [(node, made(node)) for node in holder.node]
    if all(others is None for _, others in found):
        return False
    nodes = [other for node, others in found for other in ([_copy(node)] if others is None else others)]
    del holder.node[:]
    holder.node.extend(nodes)
    return True


def _copy(node: onnx.NodeProto) -> onnx.NodeProto:
    made = onnx.NodeProto()
    made.CopyFrom(node)
    return made


def numbered(module: Module, graph: Graph) -> dict[tuple[str, int], Node]:
    """The nodes of irpar's domain that a program and the functions of its module have, by operator and id.

    Raises:
        OnnxError: one has no id of its own, since calls of the function that it stands in give it theirs.
    """
    found = {}
    for inner in (graph, *(function.graph for function in module.functions.values())):
        for node in inner.walk():
            if node.domain != DOMAIN:
                continue
            number = node.attributes.get("id")
            if not isinstance(number, int):
                raise OnnxError(
                    f"{node.title} stands in a function that calls share, which only irpar's own operators allow",
                    do="leave extract-communication out of the pipeline, or write irpar's collectives without stubs",
                )
            found[node.op_type, number] = node
    return found


def imports_text(proto: Any) -> str:
    """The imports of a model or function as text."""
    return json.dumps({entry.domain: entry.version for entry in proto.opset_import})


def read_entry(key: str, text: str, parse: Callable[[Any], Any]) -> Any:
    """What an entry says.

    Raises:
        OnnxError: it has another form than irpar writes.
    """
    try:
        return parse(json.loads(text))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise OnnxError(
            f"metadata {key} cannot be read: it has another form than irpar writes",
            notes=(f"{key}: {text[:100]}",),
            do="partition the model again",
        ) from None
