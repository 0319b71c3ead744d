"""What calls of functions of communication keep of the nodes that they stand for, so that opening gives these back.

%f = Concat(%a, %b) {axis=0}                            %x = call @irpar.communication.all_reduce_0(%a, %b) {id=3}
%x = irpar.AllReduce(%f) {.., id=3} doc "why"   <->       doc "why" meta {"irpar.inside": .. "f" ..}

A call has the name, source, scope, phase and reason of its collective; names of values inside, and what other nodes say
of themselves, stand in its metadata.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypedDict

from msgspec import Meta

from irpar.files.records import read_record
from irpar.ir import Graph, Node, Value
from irpar.ops import traits
from irpar.sharding import IrparError

INSIDE = "irpar.inside"
"""Metadata of a call: what `_Inside` says, as JSON."""

_Place = Annotated[int, Meta(ge=0)]


class _Inside(TypedDict):
    """What is inside a call: constants by name, with their places among those of the graph; results by name, "" for
    those that the call has; number, name, source, scope and doc of nodes, where these are not the collective's."""

    constants: list[tuple[str, _Place]]
    results: list[str]
    nodes: list[tuple[_Place, str, str | None, str | None, str]]


def origin_text(
    collective: Node, nodes: Sequence[Node], constants: Sequence[tuple[Value, int]], outputs: Sequence[Value]
) -> str | None:
    """What the call that stands for some nodes says of them; None where it says all by itself.

    Args:
        collective: whose facts the call has.
        nodes: all of them, in order.
        constants: what they alone read, with their places.
        outputs: the results that the call has.
    """
    own = collective.name, collective.source, collective.scope
    known = set(outputs)
    inside: _Inside = {
        "constants": [(value.name, place) for value, place in constants],
        "results": ["" if value in known else value.name for node in nodes for value in node.results],
        "nodes": [
            (number, node.name, node.source, node.scope, node.doc)
            for number, node in enumerate(nodes)
            if node is not collective and ((node.name, node.source, node.scope) != own or node.doc)
        ],
    }
    return json.dumps(inside, separators=(",", ":")) if constants or any(inside["results"]) or inside["nodes"] else None


@dataclass
class ConstantPlaces:
    """Where constants of opened calls stand among those of their graphs."""

    found: dict[Graph, list[tuple[int, Value]]] = field(default_factory=dict)

    def put(self) -> None:
        """Bring them there."""
        for graph, placed in self.found.items():
            moved = dict(placed)
            own = {value for value in moved.values() if value.graph is graph}
            others = [value for value in graph.constants if value not in own]
            for place in sorted(moved):
                others.insert(place, moved[place])
            graph.constants = dict.fromkeys(others)


def _rename(body: Graph, names: Mapping[Value, str]) -> None:
    """Give values of a body their names, of which others of them may have one so far; "": any."""
    for value in body.values():
        body.names.release(value)
    for value, name in sorted(names.items(), key=lambda entry: not entry[1]):
        value.name = name or value.name
        body.names.claim(value)


def restore(call: Node, body: Graph, places: ConstantPlaces) -> None:
    """Let a copy of the body of a function of communication say of itself what the nodes said that the call stands for.

    Raises:
        IrparError: the metadata of the call do not fit its function.
    """
    metadata = dict(call.metadata or {})
    text = metadata.pop(INSIDE, None)
    nodes = list(body)
    first = next((node for node in nodes if traits(node).communicates), None)
    if first is not None:
        first.doc, first.metadata = call.doc, metadata or None
    if text is None:
        return
    try:
        inside = read_record(json.loads(text), _Inside)
        results = [value for node in nodes for value in node.results]
        names = dict(zip(results, inside["results"], strict=True))
        assert call.graph is not None
        placed = places.found.setdefault(call.graph, [])
        for value, (name, place) in zip(body.constants, inside["constants"], strict=True):
            names[value] = name
            placed.append((place, value))
        _rename(body, names)
        for number, name, source, scope, doc in inside["nodes"]:
            node = nodes[number]
            node.name, node.source, node.scope, node.doc = name, source, scope, doc
    except (IrparError, ValueError, LookupError, RecursionError) as error:
        raise IrparError(
            f"metadata {INSIDE} do not fit the function that the node calls",
            where=f"node {call.label}",
            notes=(str(error.what if isinstance(error, IrparError) else error),),
            do="partition the model again",
        ) from None
