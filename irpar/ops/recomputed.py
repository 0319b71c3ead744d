"""The mark of what is computed more than once on purpose, so that nothing merges it again."""

from irpar.ir import Node

RECOMPUTED = "irpar.recompute"
"""The entry of a node's metadata that says which of its computations it is: first, or again."""
FIRST, AGAIN = "first", "again"


def mark_recomputed(node: Node, which: str) -> None:
    """Say of a node that it is computed more than once."""
    node.metadata = {**(node.metadata or {}), RECOMPUTED: which}


def is_recomputed(node: Node) -> bool:
    """Whether a node is one of several computations of the same."""
    return node.metadata is not None and RECOMPUTED in node.metadata


def unmark_recomputed(node: Node) -> None:
    """Say nothing of the kind any more."""
    node.metadata = {key: text for key, text in (node.metadata or {}).items() if key != RECOMPUTED} or None
