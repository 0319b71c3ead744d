"""Reading and writing by index: Gather and its kin, OneHot, the scatters."""

from collections.abc import Sequence
from math import prod

import numpy as np

from irpar.ir import Builder, DType, Node, TensorType, Type, Value
from irpar.sharding import Reduction, ceil_div

from .coords import block_start
from .facts import (
    CannotTellError,
    axis_attribute,
    dims_of,
    int_attribute,
    needed,
    needed_ints,
    same_type,
    shape_of,
    tensor_of,
    text_attribute,
)
from .local import typed_like
from .registry import OpDef, define
from .rule import DimFactors, FactorRule, Kind, RuleBuilder, whole

# -- Gather ---------------------------------------------------------------------------------------------------------

COMBINED: dict[DType, Reduction] = {
    DType.F16: "sum",
    DType.BF16: "sum",
    DType.F32: "sum",
    DType.F64: "sum",
    DType.I32: "sum",
    DType.I64: "sum",
    DType.BOOL: "or",
}
"""Element types of which blocks of rows can be gathered apart, and how zeros and rows combine.

Others have no Where in ONNX Runtime, or nothing to combine them with (strings).
"""


def _infer_gather(node: Node) -> Sequence[Type]:
    dims = dims_of(node, 0)
    axis = axis_attribute(node, len(dims), 0)
    return [tensor_of(node, 0).with_shape((*dims[:axis], *dims_of(node, 1), *dims[axis + 1 :]))]


def _rule_gather(node: Node) -> FactorRule:
    """`([v,d],[i,j])->([i,j,d])`: all pass but the axis v.

    Where v is cut, each device looks up the indices that fall into its block and gives zeros for the others: partial
    sums, as in Megatron-LM's vocabulary-parallel embedding (Shoeybi et al., 2019).
    """
    shape = shape_of(node, 0)
    axis = axis_attribute(node, len(shape), 0)
    reduce = COMBINED.get(tensor_of(node, 0).dtype)
    kind = Kind.REPLICATE if reduce is None else Kind.REDUCE
    rule = RuleBuilder()
    data = [rule.dims([size], kind if dim == axis else Kind.PASS)[0] for dim, size in enumerate(shape)]
    indices = rule.dims(shape_of(node, 1))
    return rule.done([data, indices], [[*data[:axis], *indices, *data[axis + 1 :]]], reduce or "sum")


def _localize_gather(whole_node: Node, local: Node, builder: Builder) -> list[Value] | None:
    """Look up only the indices in the block of rows; zeros for the others, NaN for those in no rank's block."""
    data = needed(whole_node, 0)
    size_of = data.shape
    axis = axis_attribute(whole_node, len(size_of), 0)
    if data.sharding is None or data.sharding.dim_parts(axis) == 1:
        return None
    mesh, axes = data.sharding.mesh, data.sharding.dims[axis].axes
    size, rows = size_of[axis], needed(local, 0).shape[axis]
    result = local.result
    if rows == 0:
        zero = builder.constant(np.zeros((), result.dtype.numpy), "zero")
        target = builder.constant(np.asarray(result.shape, np.int64), "shape")
        return [typed_like(result, "Expand", [zero, target], None, builder)]
    start = block_start(builder, mesh, axes, ceil_div(size, mesh.group_size(axes)))
    index = _from_start(needed(local, 1), size, builder)
    other = _nothing(index, size, result.dtype, builder)
    index, inside = _index_in_block(index, start, rows, builder)
    found = typed_like(result, "Gather", [needed(local, 0), index], {"axis": axis}, builder)
    trailing = len(size_of) - axis - 1
    inside, other = (_with_dims(value, trailing, builder) for value in (inside, other))
    if result.dtype is DType.BOOL:  # ONNX Runtime has no Where for bools.
        return [typed_like(result, "And", [inside, found], None, builder)]
    return [typed_like(result, "Where", [inside, found, other], None, builder)]


def _with_dims(value: Value, count: int, builder: Builder) -> Value:
    """A value with `count` more dims of size 1 at its end; scalars broadcast as they are."""
    if not count or not value.shape:
        return value
    rank = len(value.shape)
    last = builder.constant(np.arange(rank, rank + count, dtype=np.int64), "axes")
    return builder.op("Unsqueeze", [value, last], type=TensorType(value.dtype, (*value.shape, *[1] * count)))


def _number(builder: Builder, value: int) -> Value:
    return builder.constant(np.asarray(value, np.int64), f"number_{value}")


def _from_start(index: Value, size: int, builder: Builder) -> Value:
    """Indices as int64, negative ones counted from the start."""
    of = TensorType(DType.I64, index.shape)
    if index.dtype is not DType.I64:
        index = builder.op("Cast", [index], {"to": DType.I64.value}, type=of)
    negative = builder.op("Less", [index, _number(builder, 0)], type=TensorType(DType.BOOL, index.shape))
    from_end = builder.op("Add", [index, _number(builder, size)], type=of)
    return builder.op("Where", [negative, from_end, index], type=of)


def _nothing(index: Value, size: int, dtype: DType, builder: Builder) -> Value:
    """What stands for rows of other blocks: 0; but NaN where no block has the index, which ONNX Runtime refuses too."""
    zero = np.zeros((), dtype.numpy)
    if dtype not in (DType.F16, DType.F32, DType.F64):
        return builder.constant(zero, "zero")
    inside = _is_within(index, size, builder)
    values = [builder.constant(zero, "zero"), builder.constant(np.full((), np.nan, dtype.numpy), "nan")]
    return builder.op("Where", [inside, *values], type=TensorType(dtype, index.shape))


def _is_within(index: Value, size: int, builder: Builder) -> Value:
    """Where 0 <= index < size."""
    flag = TensorType(DType.BOOL, index.shape)
    above = builder.op("GreaterOrEqual", [index, _number(builder, 0)], type=flag)
    below = builder.op("Less", [index, _number(builder, size)], type=flag)
    return builder.op("And", [above, below], type=flag)


def _index_in_block(index: Value, start: Value, rows: int, builder: Builder) -> tuple[Value, Value]:
    """Indices relative to the block, 0 where they are outside; and whether they are inside."""
    of = TensorType(DType.I64, index.shape)
    relative = builder.op("Sub", [index, start], type=of)
    inside = _is_within(relative, rows, builder)
    return builder.op("Where", [inside, relative, _number(builder, 0)], type=of), inside


define(OpDef("", "Gather", _infer_gather, _rule_gather, localize=_localize_gather))


# -- GatherElements, GatherND ---------------------------------------------------------------------------------------


def _infer_gather_elements(node: Node) -> Sequence[Type]:
    return [tensor_of(node, 0).with_shape(dims_of(node, 1))]


def _rule_gather_elements(node: Node) -> FactorRule:
    """The axis of the data is whole, that of the indices passes; other dims pass where data and indices agree."""
    shape, indices = shape_of(node, 0), shape_of(node, 1)
    axis = axis_attribute(node, len(shape), 0)
    rule = RuleBuilder()
    data: list[DimFactors] = []
    index: list[DimFactors] = []
    for dim, (size, count) in enumerate(zip(shape, indices, strict=True)):
        if dim == axis:
            data.append(rule.dims([size], Kind.REPLICATE)[0])
            index.append(rule.dims([count])[0])
        else:
            shared = rule.dims([size])[0] if size == count else ()
            data.append(shared)
            index.append(shared)
    return rule.done([data, index], [index])


def _infer_gather_nd(node: Node) -> Sequence[Type]:
    dims, indices = dims_of(node, 0), dims_of(node, 1)
    depth = indices[-1]
    if not isinstance(depth, int):
        raise CannotTellError("how many dims are indexed")
    return [tensor_of(node, 0).with_shape((*indices[:-1], *dims[int_attribute(node, "batch_dims", 0) + depth :]))]


def _rule_gather_nd(node: Node) -> FactorRule:
    """Batch dims, dims of the indices and dims of the slices pass; the indexed dims are whole."""
    shape, indices = shape_of(node, 0), shape_of(node, 1)
    batch_dims = int_attribute(node, "batch_dims", 0)
    rule = RuleBuilder()
    batch = rule.dims(shape[:batch_dims])
    indexed = rule.dims(shape[batch_dims : batch_dims + indices[-1]], Kind.REPLICATE)
    slices = rule.dims(shape[batch_dims + indices[-1] :])
    places = rule.dims(indices[batch_dims:-1])
    return rule.done([[*batch, *indexed, *slices], [*batch, *places, ()]], [[*batch, *places, *slices]])


define(OpDef("", "GatherElements", _infer_gather_elements, _rule_gather_elements))
define(OpDef("", "GatherND", _infer_gather_nd, _rule_gather_nd))


# -- OneHot ---------------------------------------------------------------------------------------------------------


def _infer_one_hot(node: Node) -> Sequence[Type]:
    dims = dims_of(node, 0)
    axis = axis_attribute(node, len(dims) + 1, -1)
    (depth,) = needed_ints(node, 1)
    return [TensorType(tensor_of(node, 2).dtype, (*dims[:axis], depth, *dims[axis:]))]


def _rule_one_hot(node: Node) -> FactorRule:
    """The dims of the indices pass, the new one is whole."""
    rule = RuleBuilder()
    indices = rule.dims(shape_of(node, 0))
    axis = axis_attribute(node, len(indices) + 1, -1)
    return rule.done([indices, whole(len(shape_of(node, 1))), whole(1)], [[*indices[:axis], (), *indices[axis:]]])


define(OpDef("", "OneHot", _infer_one_hot, _rule_one_hot))


# -- ScatterElements, ScatterND, TensorScatter ----------------------------------------------------------------------


def _rule_scatter_elements(node: Node) -> FactorRule:
    """The axis is whole; other dims pass where data and indices agree."""
    shape, indices = shape_of(node, 0), shape_of(node, 1)
    axis = axis_attribute(node, len(shape), 0)
    rule = RuleBuilder()
    data: list[DimFactors] = []
    index: list[DimFactors] = []
    for dim, (size, count) in enumerate(zip(shape, indices, strict=True)):
        shared = rule.dims([size])[0] if dim != axis and size == count else ()
        data.append(shared)
        index.append(shared)
    return rule.done([data, index, index], [data])


def _rule_scatter_nd(node: Node) -> FactorRule:
    """The dims of the slices pass; indexed dims and indices are whole."""
    shape, indices = shape_of(node, 0), shape_of(node, 1)
    rule = RuleBuilder()
    slices = rule.dims(shape[indices[-1] :])
    data = [*rule.dims(shape[: indices[-1]], Kind.REPLICATE), *slices]
    return rule.done([data, whole(len(indices)), [*whole(len(indices) - 1), *slices]], [data])


def _rule_tensor_scatter(node: Node) -> FactorRule:
    """The sequence is whole, batch and the other dims pass."""
    shape = shape_of(node, 0)
    axis = axis_attribute(node, len(shape), -2)
    rule = RuleBuilder()
    dims = [rule.dims([size], Kind.REPLICATE if dim == axis else Kind.PASS)[0] for dim, size in enumerate(shape)]
    update: list[DimFactors] = [() if dim == axis else factors for dim, factors in enumerate(dims)]
    starts = [[dims[0]]] if len(node.operands) > 2 and node.operands[2] is not None else []
    return rule.done([dims, update, *starts], [dims])


def _cost_scatter(node: Node) -> int:
    """One operation for each update that is combined with what is there."""
    return prod(shape_of(node, 2)) if text_attribute(node, "reduction", "none") != "none" else 0


define(OpDef("", "ScatterElements", same_type, _rule_scatter_elements, _cost_scatter))
define(OpDef("", "ScatterND", same_type, _rule_scatter_nd, _cost_scatter))
define(OpDef("", "TensorScatter", same_type, _rule_tensor_scatter))
