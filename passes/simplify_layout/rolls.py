"""Pieces of a dim that are joined in another order: one node that takes the elements in that order.

y = Concat(Slice(x, 3:), Slice(x, :3)) : [1, 56, 56, 96]      y = Gather(x, [3, 4, .., 55, 0, 1, 2])

So exporters write a roll. Of a dim that is sharded two slices have blocks of other sizes, which Concat moves again; of
one node each device sends the rows that others want, once.
"""

from math import prod
from typing import Any

import numpy as np

from irpar.ir import Builder, DType, Module, Node, Value
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
    pieces = [_piece(value, axis) for value in node.inputs]
    known = [piece for piece in pieces if piece is not None]
    sources = {source for source, _ in known}
    if len(known) < len(pieces) or len(sources) != 1:
        return False
    (source,) = sources
    places = np.concatenate([np.asarray(taken, np.int64) for _, taken in known])
    if not _is_moved_together(source, node.result, axis) or not _is_another_order(places):
        return False
    assert node.graph is not None
    taken = [value.node for value in node.inputs]
    builder = Builder(node.graph, module.opsets, before=node, like=node)
    name = node.result.name
    order = builder.constant(places, "order")
    value = builder.op("Gather", [source, order], {"axis": axis}, type=node.result.type, name=name)
    node.replace([value])
    value.rename(name)
    for each in dict.fromkeys(taken):
        assert each is not None
        each.erase()
    return True


def _is_moved_together(source: Value, result: Value, axis: int) -> bool:
    """Whether as many elements are taken, enough of them side by side; ONNX Runtime's Gather takes one string a row."""
    is_alike = source.type == result.type and not source.is_constant and source.dtype is not DType.STR
    return is_alike and result.shape[axis] <= _MOST and prod(result.shape[axis + 1 :]) >= _FEWEST


def _is_another_order(places: "np.ndarray[Any, np.dtype[np.int64]]") -> bool:
    own = np.arange(len(places))
    return not np.array_equal(places, own) and np.array_equal(np.sort(places), own)


def _piece(value: Value, axis: int) -> tuple[Value, range] | None:
    """What a value takes of which other along a dim, if nothing but one node reads it and nobody annotated it."""
    node = value.node
    if node is None or len(value.uses) != 1 or value.sharding is not None or node.strategy is not None:
        return None
    try:
        if node.identity == ("", "Slice"):
            return _sliced(node, axis)
        if node.identity == ("", "Split"):
            return _split(node, value, axis)
    except CannotTellError:
        pass
    return None


def _sliced(node: Node, axis: int) -> tuple[Value, range] | None:
    source = node.inputs[0]
    if not source.is_static:
        return None
    found = slices(node, len(source.shape))
    return (source, range(*slice(*found[axis]).indices(source.shape[axis]))) if set(found) == {axis} else None


def _split(node: Node, value: Value, axis: int) -> tuple[Value, range] | None:
    source = node.inputs[0]
    if not source.is_static or axis_attribute(node, len(source.shape), 0) != axis:
        return None
    if any(len(result.uses) != 1 or result.users[0] is not value.users[0] for result in node.results):
        return None
    start = sum(result.shape[axis] for result in node.results[: node.results.index(value)])
    return source, range(start, start + value.shape[axis])
