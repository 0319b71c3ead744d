"""Reading and writing by index: Gather and its kin, OneHot, the scatters."""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import numpy as np

from irpar.ir import Builder, DType, Node, TensorType, Type, Value, with_dim
from irpar.sharding import Reduction

from .block_indices import (
    counted_dims,
    from_start,
    is_within,
    nothing_or_nan,
    number,
    relative_or,
    tuples_in_block,
)
from .coords import start_of_block
from .facts import (
    CannotTellError,
    axis_attribute,
    dims_of,
    int_attribute,
    needed,
    needed_ints,
    result_shape,
    same_type,
    shape_of,
    shapes_of,
    tensor_of,
    text_attribute,
)
from .gradients import indexing as gradients
from .local import add_bias_once, typed_like
from .local_programs.program import LocalProgram
from .local_programs.shape import COMPRESS, ORDER, chosen, order_of, ordered_rule
from .neutral import COMBINED, neutral
from .op_def import OpDef
from .registry import define
from .rule import DimFactors, FactorRule, Kind, RuleBuilder, moving_rule, whole

# -- Gather ---------------------------------------------------------------------------------------------------------

_CHOSEN_AS: dict[DType, DType] = {
    DType.BF16: DType.F32,
    **dict.fromkeys((DType.I8, DType.U8, DType.I16, DType.U16), DType.I32),
    **dict.fromkeys((DType.U32, DType.U64), DType.I64),
}
"""Types of which not every engine has a Where: what is chosen between is wider, and narrow again when it is sent."""


def _infer_gather(node: Node) -> Sequence[Type]:
    dims = dims_of(node, 0)
    axis = axis_attribute(node, len(dims), 0)
    return [tensor_of(node, 0).with_shape((*dims[:axis], *dims_of(node, 1), *dims[axis + 1 :]))]


def _rule_gather(node: Node) -> FactorRule:
    """`([v,d],[i,j])->([i,j,d])`: all pass but the axis v.

    Where v is cut, each device looks up the indices that fall into its block and gives zeros for the others: partial
    sums, as in Megatron-LM's vocabulary-parallel embedding (Shoeybi et al., 2019). Where it puts what is computed in
    another order, elements move to other blocks.
    """
    ordered = ordered_rule(node)
    return _rule_of_table(node) if ordered is None else ordered


def _rule_of_table(node: Node) -> FactorRule:
    shape = shape_of(node, 0)
    axis = axis_attribute(node, len(shape), 0)
    reduce = COMBINED.get(tensor_of(node, 0).dtype)
    kind = Kind.REPLICATE if reduce is None else Kind.REDUCE
    rule = RuleBuilder()
    data = [rule.dims([size], kind if dim == axis else Kind.PASS)[0] for dim, size in enumerate(shape)]
    indices = rule.dims(shape_of(node, 1))
    others = [*data[:axis], *data[axis + 1 :]]
    results = [[*data[:axis], *indices, *data[axis + 1 :]]]
    # Of a table of vectors, whose readers want these in full, what is looked up is summed.
    moves = [(data[axis], other) for other in others] if len(others) > 1 else []
    return rule.done([data, indices], results, reduce or "sum", moves=moves)


def look_up_own_rows(whole_node: Node, local: Node, builder: Builder, *, attribute: str = "axis") -> list[Value] | None:
    """Look up only the indices in the block of rows; zeros for the others, NaN for those in no rank's block.

    `attribute` names the dim of the rows.
    """
    size_of = shape_of(whole_node, 0)
    axis = axis_attribute(whole_node, len(size_of), 0, attribute)
    start = start_of_block(needed(whole_node, 0).sharding, axis, shape_of(whole_node, 0)[axis], builder)
    if start is None:
        return None
    index = from_start(needed(local, 1), size_of[axis], builder)
    relative, inside = relative_or(index, start, needed(local, 0).shape[axis], 0, builder)
    trailing = 0 if local.op_type == "GatherElements" else len(size_of) - axis - 1
    known = partial(is_within, index, size_of[axis], builder)
    return [_looked_up(local, relative, inside, known, trailing, builder)]


def _looked_up(
    local: Node, index: Value, inside: Value, known: Callable[[], Value], trailing: int, builder: Builder
) -> Value:
    """What a node finds by indices of its block, and nothing where they are of others.

    Args:
        local: the node.
        index: in the block.
        inside: whether it is the block's.
        known: makes whether any block has it.
        trailing: dims that a found slice has after those of `inside`.
        builder: inserts before the node.
    """
    result = local.result
    operands = [needed(local, 0), index, *local.operands[2:]]
    found = typed_like(result, local.op_type, operands, local.attributes, builder, domain=local.domain)
    inside_each = _with_dims(inside, trailing, builder)
    if result.dtype is DType.BOOL:  # ONNX Runtime has no Where for bools.
        return typed_like(result, "And", [inside_each, found], None, builder)
    wide = _CHOSEN_AS.get(result.dtype, result.dtype)
    if wide in (DType.F16, DType.F32, DType.F64):
        nothing = _with_dims(nothing_or_nan(known(), wide, builder), trailing, builder)
    else:
        nothing = builder.constant(neutral("sum", wide), "nothing")
    if wide is result.dtype:
        return typed_like(result, "Where", [inside_each, found, nothing], None, builder)
    of = TensorType(wide, result.shape)
    found = builder.op("Cast", [found], {"to": wide.value}, type=of)
    chosen_wide = builder.op("Where", [inside_each, found, nothing], type=of)
    return typed_like(result, "Cast", [chosen_wide], {"to": result.dtype.value}, builder)


def _with_dims(value: Value, count: int, builder: Builder) -> Value:
    """A value with `count` more dims of size 1 at its end; scalars broadcast as they are."""
    if not count or not value.shape:
        return value
    rank = len(value.shape)
    last = builder.constant(np.arange(rank, rank + count, dtype=np.int64), "axes")
    return builder.op("Unsqueeze", [value, last], type=TensorType(value.dtype, (*value.shape, *[1] * count)))


def _other_rule(node: Node) -> FactorRule | None:
    return None if order_of(node) is None else _rule_of_table(node)


_AS_TABLE = LocalProgram(lambda node, blocks, cuts: (), lambda program: None, lambda node: None, rule=_other_rule)
"""Of rows that are put in another order: where these are in full each device takes its own, and nothing is sent."""

_table = partial(OpDef, "", moves_elements=True, looks_up=True)
define(
    _table(
        "Gather",
        _infer_gather,
        _rule_gather,
        localize=look_up_own_rows,
        local_program=ORDER.local_program(),
        other_programs=(_AS_TABLE,),
        gradient=gradients.of_gather,
    )
)


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
    """Batch dims, dims of the indices and dims of the slices pass; the indexed dims are reduced, as in Gather."""
    shape, indices = shape_of(node, 0), shape_of(node, 1)
    batch_dims = int_attribute(node, "batch_dims", 0)
    reduce = COMBINED.get(tensor_of(node, 0).dtype)
    kind = Kind.REPLICATE if reduce is None else Kind.REDUCE
    rule = RuleBuilder()
    batch = rule.dims(shape[:batch_dims])
    indexed = rule.dims(shape[batch_dims : batch_dims + indices[-1]], kind)
    slices = rule.dims(shape[batch_dims + indices[-1] :])
    places = rule.dims(indices[batch_dims:-1])
    operands = [[*batch, *indexed, *slices], [*batch, *places, ()]]
    moves = [(factors, other) for factors in indexed for other in (*batch, *slices)]
    return rule.done(operands, [[*batch, *places, *slices]], reduce or "sum", moves=moves)


def localize_gather_nd(whole_node: Node, local: Node, builder: Builder) -> list[Value] | None:
    """Look up only what is in the block; zeros for the rest, NaN for what is in no rank's block."""
    first = int_attribute(whole_node, "batch_dims", 0)
    at = tuples_in_block(whole_node, local, first, builder)
    if at is None:
        return None
    inside = at.inside(builder, keepdims=True)
    index = builder.op("Where", [inside, at.relative, number(builder, 0)], type=at.relative.type)
    trailing = len(shape_of(whole_node, 0)) - first - len(at.rows)
    inside = at.inside(builder, keepdims=False)
    return [_looked_up(local, index, inside, partial(at.known, builder), trailing, builder)]


define(
    _table(
        "GatherElements",
        _infer_gather_elements,
        _rule_gather_elements,
        localize=look_up_own_rows,
        gradient=gradients.of_gather_elements,
    )
)
define(
    _table("GatherND", infer_gather_nd, rule_gather_nd, localize=localize_gather_nd, gradient=gradients.of_gather_nd)
)


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
    start = start_of_block(local.result.sharding, axis, classes, builder)
    if start is None:
        return None
    depth, size = needed(local, 1), result_shape(local)[axis]
    index, _ = relative_or(from_start(needed(local, 0), classes, builder), start, size, size, builder)
    count = builder.constant(np.full(depth.shape, size, np.int64), "depth")
    return [typed_like(local.result, "OneHot", [index, count, needed(local, 2)], local.attributes, builder)]


define(OpDef("", "OneHot", _infer_one_hot, _rule_one_hot, localize=_localize_one_hot, gradient=gradients.of_one_hot))


# -- ScatterElements, ScatterND -------------------------------------------------------------------------------------


_SCATTERED: dict[str, Reduction] = {"add": "sum", "mul": "prod", "max": "max", "min": "min"}
"""What results of some of the updates alone combine by, where updates combine with what is there."""


def _updates_kind(node: Node) -> tuple[Kind, Reduction]:
    """What cutting the updates means."""
    reduce = _SCATTERED.get(text_attribute(node, "reduction", "none"))
    dtype = tensor_of(node, 0).dtype
    if reduce is None or (dtype in _CHOSEN_AS and not dtype.is_float) or COMBINED.get(dtype) != "sum":
        return Kind.REPLICATE, "sum"
    return Kind.REDUCE, reduce


def _rows_kind(node: Node) -> Kind:
    """What cutting the rows of the data means; Scatter is older than the comparisons that this takes."""
    return Kind.PASS if tensor_of(node, 0).dtype in COMBINED and node.op_type != "Scatter" else Kind.REPLICATE


def _localize_scatter(whole_node: Node, local: Node, builder: Builder) -> list[Value] | None:
    """The data counts once, where it is added to or multiplied; a device scatters what falls into its block."""
    if text_attribute(whole_node, "reduction", "none") != "none":
        add_bias_once(local, 0, builder)
    if local.op_type == "ScatterND":
        axis, index = 0, _tuple_or_beyond(whole_node, local, builder)
    else:
        axis = axis_attribute(whole_node, len(shape_of(whole_node, 0)), 0)
        index = _index_or_beyond(whole_node, local, axis, builder)
    return None if index is None else [_scattered_with_rest(local, axis, index, builder)]


def _index_or_beyond(whole_node: Node, local: Node, axis: int, builder: Builder) -> Value | None:
    """Indices in the block, the number of its rows for those of other blocks; None where the axis is not sharded."""
    start = start_of_block(needed(whole_node, 0).sharding, axis, shape_of(whole_node, 0)[axis], builder)
    if start is None:
        return None
    rows = needed(local, 0).shape[axis]
    index = from_start(needed(local, 1), shape_of(whole_node, 0)[axis], builder)
    return relative_or(index, start, rows, rows, builder)[0]


def _tuple_or_beyond(whole_node: Node, local: Node, builder: Builder) -> Value | None:
    """The same of tuples of indices: those of other blocks name the row behind the first dim, and there the first."""
    at = tuples_in_block(whole_node, local, 0, builder)
    if at is None:
        return None
    beyond = number(builder, [at.rows[0], *[0] * (len(at.rows) - 1)])
    return builder.op("Where", [at.inside(builder, keepdims=True), at.relative, beyond], type=at.relative.type)


def _scattered_with_rest(local: Node, axis: int, index: Value, builder: Builder) -> Value:
    """Scatter into a block with a row more, for what falls into other blocks, which is then left out."""
    data = needed(local, 0)
    rows = data.shape[axis]
    shape = tuple(1 if dim == axis else length for dim, length in enumerate(data.shape))
    zero = builder.constant(np.zeros((), data.dtype.numpy), "zero")
    row = builder.op("Expand", [zero, number(builder, shape)], type=TensorType(data.dtype, shape))
    shape = tuple(rows + 1 if dim == axis else length for dim, length in enumerate(data.shape))
    longer = TensorType(data.dtype, shape)
    joined = builder.op("Concat", [data, row], {"axis": axis}, type=longer)
    made = builder.op(local.op_type, [joined, index, needed(local, 2)], local.attributes, type=longer)
    bounds = [number(builder, [bound]) for bound in (0, rows, axis)]
    return typed_like(local.result, "Slice", [made, *bounds], None, builder)


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
    """All dims of the data pass: each device scatters into its block; updates are as in ScatterElements.

    Where the first indices count the rows of the updates, these have them in common with the data, as batch dims.
    """
    shape, indices = shape_of(node, 0), shape_of(node, 1)
    kind, reduce = _updates_kind(node)
    rule = RuleBuilder()
    slices = rule.dims(shape[indices[-1] :])
    batch_dims = counted_dims(needed(node, 1), shape) if _rows_kind(node) is Kind.PASS else 0
    batch = rule.dims(shape[:batch_dims])
    updates = [*batch, *rule.dims(indices[batch_dims:-1], kind)]
    data = [*batch, *rule.dims(shape[batch_dims : indices[-1]], _rows_kind(node)), *slices]
    return rule.done([data, [*updates, ()], [*updates, *slices]], [data], reduce)


def _cost_scatter(node: Node) -> int:
    """One operation for each update that is combined with what is there."""
    return prod(shape_of(node, 2)) if text_attribute(node, "reduction", "none") != "none" else 0


for _name in ("Scatter", "ScatterElements"):
    define(
        OpDef(
            "",
            _name,
            same_type,
            _rule_scatter_elements,
            _cost_scatter,
            _localize_scatter,
            gradient=gradients.of_scatter,
        )
    )
define(
    OpDef(
        "",
        "ScatterND",
        same_type,
        _rule_scatter_nd,
        _cost_scatter,
        _localize_scatter,
        gradient=gradients.of_scatter,
    )
)


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
    count = len(chosen(node))
    dims = dims_of(node, 0)
    if "axis" not in node.attributes:
        return [tensor_of(node, 0).with_shape((count,))]
    axis = axis_attribute(node, len(dims))
    return [tensor_of(node, 0).with_shape(with_dim(dims, axis, count))]


def _rule_compress(node: Node) -> FactorRule:
    """The axis is taken from, the other dims pass; without an axis everything is whole."""
    shape = shape_of(node, 0)
    if "axis" in node.attributes:
        return moving_rule(shapes_of(node), result_shape(node), {axis_attribute(node, len(shape))})
    rule = RuleBuilder()
    return rule.done([rule.dims(shape, Kind.REPLICATE), whole(1)], [[()]])


define(
    OpDef(
        "",
        "ReverseSequence",
        same_type,
        _rule_reverse_sequence,
        moves_elements=True,
        gradient=gradients.of_reverse_sequence,
    )
)
define(
    OpDef(
        "",
        "Compress",
        _infer_compress,
        _rule_compress,
        local_program=COMPRESS.local_program(),
        moves_elements=True,
        gradient=gradients.of_compress,
    )
)
