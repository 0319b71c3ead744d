"""The functions that nodes call."""

from collections import deque
from collections.abc import Iterable

from irpar.ir import Function, Node


def called_functions(nodes: Iterable[Node]) -> dict[Function, None]:
    """The functions that nodes call, nested graphs and other functions included, in order of first call."""
    found: dict[Function, None] = {}
    waiting = deque(nodes)
    while waiting:
        node = waiting.popleft()
        for nested in node.nested_graphs():
            waiting.extend(nested)
        if node.callee is not None and node.callee not in found:
            found[node.callee] = None
            waiting.extend(node.callee.graph)
    return found
