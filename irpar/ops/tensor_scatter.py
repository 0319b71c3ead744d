"""TensorScatter: a cache of which some places of a sequence are written, for each batch element from its own on."""

import numpy as np

from irpar.ir import Builder, DType, Node, TensorType, Value

from .block_indices import is_within, number
from .coords import start_of_block
from .facts import axis_attribute, needed, operand, same_type, shape_of, tensor_of, text_attribute
from .gradients import indexing as gradients
from .local import typed_like
from .op_def import OpDef
from .registry import define
from .rule import DimFactors, FactorRule, Kind, RuleBuilder

_CHOSEN = (DType.F16, DType.BF16, DType.F32, DType.F64, DType.I32, DType.I64)
"""Element types of which every engine has a Where."""


def _rule(node: Node) -> FactorRule:
    """All dims of the cache pass; the places of the update are whole, and each device writes those of its block."""
    shape = shape_of(node, 0)
    axis = axis_attribute(node, len(shape), -2)
    kind = Kind.PASS if tensor_of(node, 0).dtype in _CHOSEN else Kind.REPLICATE
    rule = RuleBuilder()
    dims = [rule.dims([size], kind if dim == axis else Kind.PASS)[0] for dim, size in enumerate(shape)]
    update: list[DimFactors] = [() if dim == axis else factors for dim, factors in enumerate(dims)]
    starts = [[dims[0]]] if operand(node, 2) is not None else []
    return rule.done([dims, update, *starts], [dims])


def _localize(whole_node: Node, local: Node, builder: Builder) -> list[Value] | None:
    """Each place of the block has what is written there, or what it had.

    cache : [1, 8, 4096@sp, 64], update : [1, 8, 1, 64] at 2500, over sp=4: the third device writes place 452 of its own
    """
    size = shape_of(whole_node, 0)
    axis = axis_attribute(whole_node, len(size), -2)
    start = start_of_block(needed(whole_node, 0).sharding, axis, size[axis], builder)
    if start is None:
        return None
    past, update = needed(local, 0), needed(local, 1)
    count = update.shape[axis]
    place = _place_in_update(local, axis, start, size[axis], builder)
    is_written = is_within(place, count, builder)
    shape = [1] * len(past.shape)
    shape[0], shape[axis] = place.shape
    hits = builder.op("Reshape", [is_written, number(builder, shape)], type=TensorType(DType.BOOL, tuple(shape)))
    if count != 1:
        update = _taken(update, place, is_written, axis, builder)
    return [typed_like(local.result, "Where", [hits, update, past], None, builder)]


def _place_in_update(local: Node, axis: int, start: Value, size: int, builder: Builder) -> Value:
    """For each batch element, or for all, and each place of the block: which place of the update falls there."""
    rows = needed(local, 0).shape[axis]
    own = builder.constant(np.arange(rows, dtype=np.int64)[None], "places")
    place = builder.op("Add", [own, start], type=TensorType(DType.I64, (1, rows)))
    first = operand(local, 2)
    if first is not None:
        batch = first.shape[0]
        first = builder.op("Reshape", [first, number(builder, [batch, 1])], type=TensorType(DType.I64, (batch, 1)))
        place = builder.op("Sub", [place, first], type=TensorType(DType.I64, (batch, rows)))
    if text_attribute(local, "mode", "linear") == "circular":
        place = builder.op("Mod", [place, number(builder, size)], type=place.type)
    return place


def _taken(update: Value, place: Value, is_written: Value, axis: int, builder: Builder) -> Value:
    """What of an update falls to each place of the block; any of it where nothing does."""
    batch, rows = update.shape[0], place.shape[1]
    index = builder.op("Where", [is_written, place, number(builder, 0)], type=place.type)
    rank = len(update.shape)
    front = (0, axis, *(dim for dim in range(1, rank) if dim != axis))
    shape = tuple(update.shape[dim] for dim in front)
    turned = builder.op("Transpose", [update], {"perm": front}, type=TensorType(update.dtype, shape))
    found = TensorType(update.dtype, (batch, rows, *shape[2:]))
    if place.shape[0] == 1:
        index = builder.op("Reshape", [index, number(builder, [rows])], type=TensorType(DType.I64, (rows,)))
        turned = builder.op("Gather", [turned, index], {"axis": 1}, type=found)
    else:
        tuples = (batch, rows, 1)
        index = builder.op("Reshape", [index, number(builder, tuples)], type=TensorType(DType.I64, tuples))
        turned = builder.op("GatherND", [turned, index], {"batch_dims": 1}, type=found)
    back = tuple(front.index(dim) for dim in range(rank))
    of = TensorType(update.dtype, tuple(rows if dim == axis else length for dim, length in enumerate(update.shape)))
    return builder.op("Transpose", [turned], {"perm": back}, type=of)


define(OpDef("", "TensorScatter", same_type, _rule, localize=_localize, gradient=gradients.of_tensor_scatter))
