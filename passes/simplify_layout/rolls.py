"""Pieces of a dim that are joined in another order: one node that takes the elements in that order.

y = Concat(Slice(x, 3:), Slice(x, :3)) : [1, 56, 56, 96]      y = Gather(x, [3, 4, .., 55, 0, 1, 2])

So exporters write a roll. Of a dim that is sharded two slices have blocks of other sizes, which Concat moves again; of
one node each device sends the rows that others want, once.
"""

from math import prod

import numpy as np

from irpar.ir import Builder, Module, Node, Value
from irpar.ops.facts import CannotTellError, axis_attribute
from irpar.ops.local_programs.shape import slices

from .merged_dims import has_elements

_FEWEST = 16
"""Elements side by side that are moved together: of fewer, such as halves of a head, slices take less time."""
_MOST = 1 << 16
"""Places that are listed."""


def roll(node: Node, module: Module) -> bool:
    """Let a Concat of all pieces of one value take its elements in their order, where nothing else reads these."""
    if node.identity != ("", "Concat") or node.strategy is not None or not has_elements(node.result):
        return False
    axis = axis_attribute(node, len(node.result.shape))
    pieces = [_piece(value, axis) for value in node.operands]
    if any(piece is None for piece in pieces) or len({source for source, _ in filter(None, pieces)}) != 1:
        return False
    source = pieces[0][0] if pieces[0] else node.inputs[0]
    places = np.concatenate([np.asarray(piece[1]) for piece in pieces if piece])
    is_listed = len(places) <= _MOST and prod(node.result.shape[axis + 1 :]) >= _FEWEST
    if not is_listed or source.is_constant or source.type != node.result.type:
        return False
    if not np.array_equal(np.sort(places), np.arange(len(places))) or np.array_equal(places, np.arange(len(places))):
        return False
    assert node.graph is not None
    taken = [value.node for value in node.inputs if value.node is not None]
    builder = Builder(node.graph, module.opsets, before=node, like=node)
    name = node.result.name
    order = builder.constant(places.astype(np.int64), "order")
    value = builder.op("Gather", [source, order], {"axis": axis}, type=node.result.type, name=name)
    node.replace([value])
    value.rename(name)
    for each in dict.fromkeys(taken):
        each.erase()
    return True


def _piece(value: Value | None, axis: int) -> tuple[Value, range] | None:
    """What a value takes of which other along a dim, if nothing but one node reads it and nobody annotated it."""
    node = None if value is None else value.node
    if value is None or node is None or len(value.uses) != 1 or value.sharding is not None or node.strategy is not None:
        return None
    source = node.inputs[0]
    if not source.is_static:
        return None
    try:
        if node.identity == ("", "Slice"):
            found = slices(node, len(source.shape))
            return (source, range(*slice(*found[axis]).indices(source.shape[axis]))) if set(found) == {axis} else None
        if node.identity == ("", "Split") and axis_attribute(node, len(source.shape), 0) == axis:
            if any(len(result.uses) != 1 or result.users[0] is not value.users[0] for result in node.results):
                return None
            start = sum(result.shape[axis] for result in node.results[: node.results.index(value)])
            return source, range(start, start + value.shape[axis])
    except CannotTellError:
        return None
    return None
