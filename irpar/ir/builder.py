"""Making nodes at a place in a graph, and rewriting by patterns that are Python functions."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .graph import DOMAIN, Graph, Node
from .module import IRPAR_OPSET
from .tensor import ArrayTensor, Tensor
from .types import UNKNOWN, Type
from .value import Value


class Builder:
    """Inserts nodes before an anchor. New nodes take source, scope and facts over from `like`.

    Args:
        graph: where to insert.
        opsets: domain to version for the new nodes.
        before: the anchor; None means at the end of the graph.
        like: the node that the new ones stand for.

    Attributes:
        made: the nodes that were inserted.
    """

    def __init__(
        self, graph: Graph, opsets: Mapping[str, int], *, before: Node | None = None, like: Node | None = None
    ) -> None:
        self.graph = graph
        self.opsets = opsets
        self.before = before
        self.like = like
        self.made: list[Node] = []

    def node(
        self,
        op_type: str,
        operands: Sequence[Value | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
        results: int | Sequence[Value] = 1,
    ) -> Node:
        """Insert a node; its results have no type yet."""
        version = IRPAR_OPSET if domain == DOMAIN else self.opsets.get(domain, 1)
        made = Node(op_type, operands, attributes, domain=domain, version=version, results=results)
        if self.like is not None:
            inherit(made, self.like)
        self.made.append(made)
        return self.graph.insert_before(self.before or self.graph.return_node, made)

    def op(
        self,
        op_type: str,
        operands: Sequence[Value | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        type: Type = UNKNOWN,
        domain: str = "",
        name: str = "",
    ) -> Value:
        """Insert a node with one result and return the result."""
        value = Value(name, type)
        return self.node(op_type, operands, attributes, domain=domain, results=[value]).result

    def constant(self, data: Any, name: str = "const") -> Value:
        """Add a constant to the graph: a tensor, an array, or numbers (ints and empty lists become int64)."""
        if isinstance(data, (list, tuple)) and not data:
            data = np.zeros(0, np.int64)
        tensor = data if isinstance(data, Tensor) else ArrayTensor(np.asarray(data))
        return self.graph.add_constant(tensor, name)


def inherit(node: Node, origin: Node) -> None:
    """Let `node` say that it comes from where `origin` comes from, with its phase, stage and place."""
    node.source = origin.source
    node.scope = origin.scope
    node.phase = origin.phase
    node.stage = origin.stage
    node.place = origin.place


Pattern = Callable[[Node, Builder], Value | Sequence[Value] | None]
"""Looks at a node; returns what replaces its results, made with the builder, or None to leave it."""


def rewrite(graph: Graph, opsets: Mapping[str, int], patterns: Mapping[str, Pattern]) -> int:
    """Apply patterns, keyed by op type, until none applies; nodes that read a replaced result are looked at again.

    A replaced node is erased; what it alone used is left to dce. New results take the names of those that they replace,
    under which the module keeps annotations and decisions. Nested graphs are not entered.

    Returns:
        The number of replacements.
    """
    waiting = deque(node for node in graph if node.op_type in patterns)
    queued = set(waiting)
    count = 0
    while waiting:
        node = waiting.popleft()
        queued.discard(node)
        if node.graph is not graph:
            continue
        builder = Builder(graph, opsets, before=node, like=node)
        made = patterns[node.op_type](node, builder)
        if made is None:
            continue
        values = [made] if isinstance(made, Value) else list(made)
        users = [user for value in node.results for user in value.users]
        names = [value.name for value in node.results]
        node.replace(values)
        for value, name in zip(values, names, strict=True):
            if value.node in builder.made:
                value.rename(name)
        count += 1
        fresh = [value.node for value in values if value.node is not None]
        for other in (*fresh, *users):
            if other.op_type in patterns and other not in queued:
                waiting.append(other)
                queued.add(other)
    return count
