"""What a call of a layer knows of the nodes that it stands for: names, sources and order, to be opened again."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from irpar.ir import Graph, Node, Value
from irpar.ir.value import Names

from .node_keys import reads

LAYER_DOMAIN = "irpar.layers"
"""The domain of functions that are layers."""
LAYER_KEY = "irpar.layer"
"""The entry of a call's metadata that says what its nodes are called."""

_NODE_FACTS = ("name", "source", "scope", "doc", "metadata")
_VALUE_FACTS = ("name", "source", "doc", "metadata")
_MISSING = {"name": "", "doc": "", "output_names": ()}
"""What stands for a fact that is not there, unless it is None."""
_GRAPH_FACTS = ("name", "output_names", "doc", "metadata")


def names_of(nodes: Iterable[Node]) -> dict[str, Any]:
    """What nodes, their values and the graphs in them are called; facts that none has are left out."""
    nodes = tuple(nodes)
    found: dict[str, Any] = {}
    kinds: tuple[tuple[str, tuple[str, ...], tuple[object, ...]], ...] = (
        ("node", _NODE_FACTS, tuple(_all_nodes(nodes))),
        ("value", _VALUE_FACTS, tuple(_all_values(nodes))),
        ("graph", _GRAPH_FACTS, tuple(_all_graphs(nodes))),
    )
    for kind, facts, things in kinds:
        for fact in facts:
            column = [getattr(thing, fact) or None for thing in things]
            if any(column):
                found[f"{kind}.{fact}"] = column
    return found


def _all_nodes(nodes: Iterable[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        for nested in node.nested_graphs():
            yield from nested.walk()


def _all_graphs(nodes: Iterable[Node]) -> Iterator[Graph]:
    for node in nodes:
        for nested in node.nested_graphs():
            yield from nested.graphs()


def _all_values(nodes: Iterable[Node]) -> Iterator[Value]:
    for node in nodes:
        yield from node.results
        for nested in node.nested_graphs():
            for graph in nested.graphs():
                yield from graph.values()


class LayerRecord:
    """Names and places of the nodes of one layer.

    Attributes:
        names: as `names_of` gives them.
        ranks: places of the nodes in the graph that they were taken from.
        between: places of nodes that stood between them, by their first results.
    """

    def __init__(self, names: Mapping[str, Any], ranks: list[int], between: Mapping[str, int]) -> None:
        self.names = names
        self.ranks = ranks
        self.between = between

    @classmethod
    def of_call(cls, call: Node) -> "LayerRecord | None":
        """The record that a call has, or None."""
        text = None if call.metadata is None else call.metadata.get(LAYER_KEY)
        if text is None:
            return None
        found = json.loads(text)
        names, ranks = found["names"], found["places"]
        if isinstance(ranks, int):
            assert call.callee is not None
            ranks = list(range(ranks, ranks + len(call.callee.graph)))
        return cls(names, ranks, found.get("between", {}))

    def text(self) -> str:
        """For the metadata of the call."""
        first = self.ranks[0]
        is_range = self.ranks == list(range(first, first + len(self.ranks)))
        found = {"places": first if is_range else self.ranks, "names": self.names}
        return json.dumps(found | ({"between": self.between} if self.between else {}), separators=(",", ":"))

    def give_names(self, nodes: tuple[Node, ...], names: Names) -> None:
        """Let the nodes of an opened call be called as they were."""
        values = tuple(_all_values(nodes))
        for value in values:
            names.release(value)
        self._put("node", _NODE_FACTS, tuple(_all_nodes(nodes)))
        self._put("value", _VALUE_FACTS, values)
        self._put("graph", _GRAPH_FACTS, tuple(_all_graphs(nodes)))
        for value in values:
            names.claim(value)

    def _put(self, kind: str, facts: tuple[str, ...], things: tuple[Any, ...]) -> None:
        for fact in facts:
            column = self.names.get(f"{kind}.{fact}", [None] * len(things))
            for thing, entry in zip(things, column, strict=True):
                setattr(thing, fact, _MISSING.get(fact) if entry is None else entry)


class LayerOrder:
    """Puts the nodes of opened layers where they stood, among each other and among those between them."""

    def __init__(self) -> None:
        self._ranks: dict[Graph, dict[Node, int]] = {}
        self._between: dict[Graph, dict[str, int]] = {}

    def add(self, record: LayerRecord, nodes: tuple[Node, ...]) -> None:
        """Note the nodes of a layer that was opened."""
        graph = nodes[0].graph
        assert graph is not None
        self._ranks.setdefault(graph, {}).update(zip(nodes, record.ranks, strict=True))
        self._between.setdefault(graph, {}).update(record.between)

    def restore(self) -> None:
        """Move them; nothing moves where a value would no longer stand before its readers."""
        for graph, known in self._ranks.items():
            ranks = dict(known)
            for name, rank in self._between[graph].items():
                value = graph.names.table.get(name)
                if value is not None and value.node is not None and value.node.graph is graph:
                    ranks.setdefault(value.node, rank)
            order = list(graph)
            slots = [index for index, node in enumerate(order) if node in ranks]
            ranked = sorted((order[index] for index in slots), key=ranks.__getitem__)
            for index, node in zip(slots, ranked, strict=True):
                order[index] = node
            if _is_topological(order):
                graph.reorder(order)


def _is_topological(order: list[Node]) -> bool:
    place = {node: index for index, node in enumerate(order)}
    return all(
        value is None or value.node is None or place.get(value.node, -1) < place[node]
        for node in order
        for value in reads(node)
    )
