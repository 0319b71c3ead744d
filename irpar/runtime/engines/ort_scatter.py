"""ScatterND with a reduction, written so that ONNX Runtime computes it right with several threads.

Its kernel (1.32, on the CPU) shares updates out to threads, which add to the same elements at the same time where
indices repeat, so that updates are lost. That of ScatterElements goes through its updates one after the other.
"""

import math
from collections.abc import Mapping

import numpy as np

from irpar.ir import Builder, DType, Node, Value
from irpar.ops.facts import text_attribute

_MOST_I32 = 2**31 - 1


def meets_itself(node: Node) -> bool:
    """Whether threads of a node may add to the same element: it is a ScatterND that reduces updates."""
    if node.identity != ("", "ScatterND") or text_attribute(node, "reduction", "none") == "none":
        return False
    return not any(value.is_static and 0 in value.shape for value in node.inputs)


def goes_in_turn(node: Node) -> bool:
    """Whether sizes are known of a node that `meets_itself`, so that it can be written otherwise."""
    return meets_itself(node) and all(value.is_static for value in node.inputs)


def in_turn(node: Node, opsets: Mapping[str, int]) -> dict[Value, Value]:
    """Let a ScatterElements of single elements take the place of a ScatterND that `goes_in_turn`.

    An index that is out of range stays so.

    Args:
        node: it.
        opsets: domain to version.

    Returns:
        For its result the value that readers read now.
    """
    assert node.graph is not None
    data, indices, updates = node.inputs
    depth = int(indices.shape[-1])  # type: ignore[call-overload]
    dims = [int(dim) for dim in data.shape]  # type: ignore[call-overload]
    rows, width = math.prod(dims[:depth]), math.prod(dims[depth:])
    builder = Builder(node.graph, opsets, before=node, like=node)

    def shaped(value: Value, *shape: int) -> Value:
        return builder.op("Reshape", [value, builder.constant(list(shape))])

    def number(value: int) -> Value:
        return builder.constant(np.asarray(value, np.int64), "number")

    listed = shaped(indices, -1, depth)
    row: Value | None = None
    outside: Value | None = None
    for place, dim in enumerate(dims[:depth]):
        index = listed if depth == 1 else builder.op("Gather", [listed, builder.constant([place])], {"axis": 1})
        behind = builder.op("Add", [index, number(dim)])
        index = builder.op("Where", [builder.op("Less", [index, number(0)]), behind, index])
        wrong = [builder.op("Less", [index, number(0)]), builder.op("GreaterOrEqual", [index, number(dim)])]
        outside = builder.op("Or", [wrong[0] if outside is None else builder.op("Or", [outside, wrong[0]]), wrong[1]])
        part = builder.op("Mul", [index, number(math.prod(dims[place + 1 : depth]))])
        row = part if row is None else builder.op("Add", [row, part])
    assert row is not None
    assert outside is not None
    row = builder.op("Where", [outside, number(rows), row])
    dtype = DType.I32 if (rows + 1) * width <= _MOST_I32 else DType.I64
    first = builder.op("Cast", [builder.op("Mul", [row, number(width)])], {"to": dtype.value})
    columns = builder.constant(np.arange(width, dtype=dtype.numpy), "columns")
    places = shaped(builder.op("Add", [first, columns]), -1)
    reduction = text_attribute(node, "reduction", "none")
    operands = [shaped(data, -1), places, shaped(updates, -1)]
    added = builder.node("ScatterElements", operands, {"axis": 0, "reduction": reduction})
    added.name = node.name  # Messages say it.
    made = shaped(added.result, *dims)
    made.type = node.result.type
    instead = {node.result: made}
    node.result.replace_uses(made)
    node.erase()
    return instead
