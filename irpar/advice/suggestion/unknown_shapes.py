"""Where the shapes of a graph are lost: the first node whose result has none, though its operands have."""

from irpar.ir import Node, Value


def shape_lost_at(node: Node) -> Node | None:
    """The node behind which no shape is known, so that a later one has no rule; None where all its shapes are known.

    y = NonZero(x : [8])    z = Gather(w, y)    a = Relu(z)        of Relu it is NonZero
    """
    seen: set[Node] = set()
    while node not in seen:
        seen.add(node)
        lost = [value for value in node.inputs if not value.is_static]
        before = next((maker for value in lost if (maker := _maker(value)) is not None), None)
        if before is None:
            return node if lost or any(not value.is_static for value in node.results) else None
        node = before
    return node


def _maker(value: Value) -> Node | None:
    """The node that gives a value, or the holder of the body that it is an input of."""
    return value.node or (None if value.graph is None else value.graph.parent)
