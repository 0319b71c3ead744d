"""Reading and writing by index: Gather and its kin, OneHot, the scatters."""

from collections.abc import Sequence
from math import prod

import numpy as np

from irpar.ir import Builder, DType, Node, TensorType, Type, Value
from irpar.sharding import Reduction

from .coords import start_in_dim
from .facts import (
    CannotTellError,
    axis_attribute,
    data_of,
    dims_of,
    int_attribute,
    needed,
    needed_ints,
    result_shape,
    same_type,
    shape_of,
    tensor_of,
    text_attribute,
)
from .local import add_bias_once, typed_like
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
    size_of = shape_of(whole_node, 0)
    axis = axis_attribute(whole_node, len(size_of), 0)
    size, rows = size_of[axis], needed(local, 0).shape[axis]
    start = _start_of_block(needed(whole_node, 0), axis, size, builder)
    if start is None:
        return None
    result = local.result
    index = _from_start(needed(local, 1), size, builder)
    other = _nothing(index, size, result.dtype, builder)
    index, inside = _index_in_block(index, start, rows, builder)
    found = typed_like(result, local.op_type, [needed(local, 0), index], {"axis": axis}, builder)
    trailing = len(size_of) - axis - 1 if local.op_type == "Gather" else 0
    inside, other = (_with_dims(value, trailing, builder) for value in (inside, other))
    if result.dtype is DType.BOOL:  # ONNX Runtime has no Where for bools.
        return [typed_like(result, "And", [inside, found], None, builder)]
    return [typed_like(result, "Where", [inside, found, other], None, builder)]


def _start_of_block(value: Value, dim: int, size: int, builder: Builder) -> Value | None:
    """Where the device's block of a value starts in a dim of `size` elements; None where that is not cut."""
    if value.sharding is None or value.sharding.dim_parts(dim) == 1:
        return None
    return start_in_dim(builder, value.sharding.mesh, value.sharding.dims[dim].axes, size)


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
    """The axis of the data is reduced, as in Gather; that of the indices passes, others where both agree."""
    shape, indices = shape_of(node, 0), shape_of(node, 1)
    axis = axis_attribute(node, len(shape), 0)
    reduce = COMBINED.get(tensor_of(node, 0).dtype)
    kind = Kind.REPLICATE if reduce is None else Kind.REDUCE
    rule = RuleBuilder()
    data: list[DimFactors] = []
    index: list[DimFactors] = []
    for dim, (size, count) in enumerate(zip(shape, indices, strict=True)):
        if dim == axis:
            data.append(rule.dims([size], kind)[0])
            index.append(rule.dims([count])[0])
        else:
            shared = rule.dims([size])[0] if size == count else ()
            data.append(shared)
            index.append(shared)
    return rule.done([data, index], [index], reduce or "sum")


def infer_gather_nd(node: Node) -> Sequence[Type]:
    """The dims of the indices but for their last, then those of the data that are neither batch nor indexed."""
    dims, indices = dims_of(node, 0), dims_of(node, 1)
    depth = indices[-1]
    if not isinstance(depth, int):
        raise CannotTellError("how many dims are indexed")
    return [tensor_of(node, 0).with_shape((*indices[:-1], *dims[int_attribute(node, "batch_dims", 0) + depth :]))]


def rule_gather_nd(node: Node) -> FactorRule:
    """Batch dims, dims of the indices and dims of the slices pass; the indexed dims are whole."""
    shape, indices = shape_of(node, 0), shape_of(node, 1)
    batch_dims = int_attribute(node, "batch_dims", 0)
    rule = RuleBuilder()
    batch = rule.dims(shape[:batch_dims])
    indexed = rule.dims(shape[batch_dims : batch_dims + indices[-1]], Kind.REPLICATE)
    slices = rule.dims(shape[batch_dims + indices[-1] :])
    places = rule.dims(indices[batch_dims:-1])
    return rule.done([[*batch, *indexed, *slices], [*batch, *places, ()]], [[*batch, *places, *slices]])


define(OpDef("", "GatherElements", _infer_gather_elements, _rule_gather_elements, localize=_localize_gather))
define(OpDef("", "GatherND", infer_gather_nd, rule_gather_nd))


# -- OneHot ---------------------------------------------------------------------------------------------------------


def _infer_one_hot(node: Node) -> Sequence[Type]:
    dims = dims_of(node, 0)
    axis = axis_attribute(node, len(dims) + 1, -1)
    (depth,) = needed_ints(node, 1)
    return [TensorType(tensor_of(node, 2).dtype, (*dims[:axis], depth, *dims[axis:]))]


def _rule_one_hot(node: Node) -> FactorRule:
    """The dims of the indices pass, and the new one: each device compares with the classes of its block."""
    rule = RuleBuilder()
    indices = rule.dims(shape_of(node, 0))
    axis = axis_attribute(node, len(indices) + 1, -1)
    (depth,) = rule.dims([result_shape(node)[axis]])
    return rule.done([indices, whole(len(shape_of(node, 1))), whole(1)], [[*indices[:axis], depth, *indices[axis:]]])


def _localize_one_hot(whole_node: Node, local: Node, builder: Builder) -> list[Value] | None:
    """Indices relative to the block; those of other blocks are as those beyond the depth, which nothing is hot for."""
    axis = axis_attribute(whole_node, len(result_shape(whole_node)), -1)
    classes = result_shape(whole_node)[axis]
    start = _start_of_block(local.result, axis, classes, builder)
    if start is None:
        return None
    depth, size = needed(local, 1), result_shape(local)[axis]
    index = _from_start(needed(local, 0), classes, builder)
    index = _relative_or(index, start, size, size, builder)
    count = builder.constant(np.full(depth.shape, size, np.int64), "depth")
    return [typed_like(local.result, "OneHot", [index, count, needed(local, 2)], local.attributes, builder)]


def _relative_or(index: Value, start: Value, rows: int, outside: int, builder: Builder) -> Value:
    """Indices relative to a block of rows, and a number for those of other blocks."""
    of = TensorType(DType.I64, index.shape)
    relative = builder.op("Sub", [index, start], type=of)
    inside = _is_within(relative, rows, builder)
    return builder.op("Where", [inside, relative, _number(builder, outside)], type=of)


define(OpDef("", "OneHot", _infer_one_hot, _rule_one_hot, localize=_localize_one_hot))


# -- ScatterElements, ScatterND, TensorScatter ----------------------------------------------------------------------


_SCATTERED: dict[str, Reduction] = {"add": "sum", "mul": "prod", "max": "max", "min": "min"}
"""What results of some of the updates alone combine by, where updates combine with what is there."""


def _updates_kind(node: Node) -> tuple[Kind, Reduction]:
    """What cutting the updates means."""
    reduce = _SCATTERED.get(text_attribute(node, "reduction", "none"))
    if reduce is None or COMBINED.get(tensor_of(node, 0).dtype) != "sum":
        return Kind.REPLICATE, "sum"
    return Kind.REDUCE, reduce


def _rows_kind(node: Node) -> Kind:
    """What cutting the rows of the data means; Scatter is older than the comparisons that this takes."""
    return Kind.PASS if tensor_of(node, 0).dtype in COMBINED and node.op_type != "Scatter" else Kind.REPLICATE


def _localize_scatter(whole_node: Node, local: Node, builder: Builder) -> list[Value] | None:
    """The data counts once, where it is added to or multiplied; a device scatters what falls into its block."""
    if text_attribute(whole_node, "reduction", "none") != "none":
        add_bias_once(local, 0, builder)
    data = needed(local, 0)
    axis = 0 if local.op_type == "ScatterND" else axis_attribute(whole_node, len(data.shape), 0)
    size, rows = shape_of(whole_node, 0)[axis], data.shape[axis]
    start = _start_of_block(needed(whole_node, 0), axis, size, builder)
    if start is None:
        return None
    index = _relative_or(_from_start(needed(local, 1), size, builder), start, rows, rows, builder)
    # What falls into other blocks goes to a row more, which is then left out.
    shape = tuple(1 if dim == axis else length for dim, length in enumerate(data.shape))
    zero = builder.constant(np.zeros((), data.dtype.numpy), "zero")
    target = builder.constant(np.asarray(shape, np.int64), "shape")
    row = builder.op("Expand", [zero, target], type=TensorType(data.dtype, shape))
    shape = tuple(rows + 1 if dim == axis else length for dim, length in enumerate(data.shape))
    longer = TensorType(data.dtype, shape)
    joined = builder.op("Concat", [data, row], {"axis": axis}, type=longer)
    made = builder.op(local.op_type, [joined, index, needed(local, 2)], local.attributes, type=longer)
    bounds = [builder.constant(np.asarray([number], np.int64), "bound") for number in (0, rows, axis)]
    return [typed_like(local.result, "Slice", [made, *bounds], None, builder)]


def _rule_scatter_elements(node: Node) -> FactorRule:
    """The axis of the data passes: each device scatters into its block; other dims pass where data and indices agree.

    The axis of indices and updates is whole, but where updates are added, multiplied, or the greatest or smallest
    is kept: some of the updates then give a partial result.
    """
    shape, indices = shape_of(node, 0), shape_of(node, 1)
    axis = axis_attribute(node, len(shape), 0)
    kind, reduce = _updates_kind(node)
    rule = RuleBuilder()
    data: list[DimFactors] = []
    index: list[DimFactors] = []
    for dim, (size, count) in enumerate(zip(shape, indices, strict=True)):
        if dim == axis:
            data.extend(rule.dims([size], _rows_kind(node)))
            index.extend(rule.dims([count], kind))
        else:
            shared = rule.dims([size])[0] if size == count else ()
            data.append(shared)
            index.append(shared)
    return rule.done([data, index, index], [data], reduce)


def _rule_scatter_nd(node: Node) -> FactorRule:
    """The dims of the slices pass, and of one indexed dim its rows, of more none; updates are as in ScatterElements."""
    shape, indices = shape_of(node, 0), shape_of(node, 1)
    kind, reduce = _updates_kind(node)
    rule = RuleBuilder()
    slices = rule.dims(shape[indices[-1] :])
    updates = rule.dims(indices[:-1], kind)
    data = [*rule.dims(shape[: indices[-1]], _rows_kind(node) if indices[-1] == 1 else Kind.REPLICATE), *slices]
    return rule.done([data, [*updates, ()], [*updates, *slices]], [data], reduce)


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


for _name in ("Scatter", "ScatterElements"):
    define(OpDef("", _name, same_type, _rule_scatter_elements, _cost_scatter, _localize_scatter))
define(OpDef("", "ScatterND", same_type, _rule_scatter_nd, _cost_scatter, _localize_scatter))
define(OpDef("", "TensorScatter", same_type, _rule_tensor_scatter))


# -- ReverseSequence, Compress --------------------------------------------------------------------------------------


def _rule_reverse_sequence(node: Node) -> FactorRule:
    """`([t,b,d],[b])->([t,b,d])`: t is whole, since a step may come from any other; the rest passes."""
    shape = shape_of(node, 0)
    batch, time = axis_attribute(node, len(shape), 1, "batch_axis"), axis_attribute(node, len(shape), 0, "time_axis")
    rule = RuleBuilder()
    dims = [rule.dims([size], Kind.REPLICATE if dim == time else Kind.PASS)[0] for dim, size in enumerate(shape)]
    return rule.done([dims, [dims[batch]]], [dims])


def _infer_compress(node: Node) -> Sequence[Type]:
    """Where the condition is constant; else the size depends on data."""
    condition = data_of(needed(node, 1))
    if condition is None:
        raise CannotTellError("the condition")
    chosen = np.flatnonzero(condition.numpy())
    dims = dims_of(node, 0)
    if "axis" not in node.attributes:
        return [tensor_of(node, 0).with_shape((len(chosen),))]
    axis = axis_attribute(node, len(dims))
    return [tensor_of(node, 0).with_shape((*dims[:axis], len(chosen), *dims[axis + 1 :]))]


def _rule_compress(node: Node) -> FactorRule:
    """The axis is whole, the other dims pass; without an axis everything is whole."""
    shape = shape_of(node, 0)
    axis = axis_attribute(node, len(shape)) if "axis" in node.attributes else None
    rule = RuleBuilder()
    inside = [axis is None or dim == axis for dim in range(len(shape))]
    dims = [
        rule.dims([size], Kind.REPLICATE if whole_dim else Kind.PASS)[0]
        for size, whole_dim in zip(shape, inside, strict=True)
    ]
    result = [()] if axis is None else [() if dim == axis else factors for dim, factors in enumerate(dims)]
    return rule.done([dims, whole(1)], [result])


define(OpDef("", "ReverseSequence", same_type, _rule_reverse_sequence))
define(OpDef("", "Compress", _infer_compress, _rule_compress))
