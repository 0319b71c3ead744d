"""Operators that hold graphs through whose boundaries shardings pass."""

from irpar.ir import Node

from .op_def import traits

OPEN_BODIES = frozenset({("", "If"), ("", "Loop"), ("", "Scan")})
"""(domain, operator); others that hold graphs run them whole."""


def has_open_bodies(node: Node) -> bool:
    """Whether the bodies of a node are sharded with the graph around it; not those of Scan of opset 8."""
    return node.identity in OPEN_BODIES and not (node.op_type == "Scan" and 0 < node.version < 9)


def holds_collectives(node: Node) -> bool:
    """True for collectives, and for nodes whose bodies hold some."""
    if not traits(node).is_compute:
        return True
    return any(holds_collectives(inner) for body in node.nested_graphs() for inner in body)
