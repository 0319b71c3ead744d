"""Operators that hold graphs through whose boundaries shardings pass."""

from collections.abc import Iterator

from irpar.ir import COMMUNICATION, DOMAIN, Function, Node

from .op_def import traits

OPEN_BODIES = frozenset({("", "If"), ("", "Loop"), ("", "Scan")})
"""(domain, operator); others that hold graphs run them whole."""


def has_open_bodies(node: Node) -> bool:
    """Whether the bodies of a node are sharded with the graph around it; not those of Scan of opset 8."""
    return node.identity in OPEN_BODIES and not (node.op_type == "Scan" and 0 < node.version < 9)


def called_communication(node: Node) -> tuple[Node, ...]:
    """The nodes of communication in the function of communication that a node calls; they share the id of the call."""
    if node.callee is None or node.callee.domain != COMMUNICATION:
        return ()
    return tuple(inner for inner in node.callee.graph if traits(inner).communicates)


def is_numbered(node: Node) -> bool:
    """Whether a node has the id of communication: it is some, or calls a function of it."""
    if "id" not in node.attributes or waits_for_copy(node):
        return False
    return traits(node).communicates or bool(called_communication(node))


def waits_for_copy(node: Node) -> bool:
    """Whether a node waits for a copy between memories of its rank, and for no other rank."""
    if node.domain != DOMAIN or not traits(node).waits:
        return False
    start = node.inputs[0].node if node.inputs else None
    return start is not None and traits(start).copies


def reached(node: Node) -> Iterator[Node]:
    """A node and all in the graphs that it holds and the functions that it calls; each function once."""
    waiting = [node]
    met: set[Function] = set()
    while waiting:
        node = waiting.pop()
        yield node
        if node.callee is not None and node.callee not in met:
            met.add(node.callee)
            waiting.extend(node.callee.graph)
        if node.attributes:
            for nested in node.nested_graphs():
                waiting.extend(nested)


def holds_collectives(node: Node) -> bool:
    """True for collectives and copies, and for nodes whose bodies hold some, or that call a function that does.

    So is a node on the device that has nodes on the host in a body.
    """
    if node.callee is None and not node.holds_graphs:
        return not traits(node).is_compute
    return not all(
        traits(inner).is_compute and (inner.place in (None, node.place) or inner is node or node.place == "host")
        for inner in reached(node)
    )
