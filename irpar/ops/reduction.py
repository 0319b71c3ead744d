"""Reductions over axes, ArgMax, ArgMin, TopK and CumSum."""

from collections.abc import Sequence
from math import prod

import numpy as np

from irpar.ir import Builder, Dim, DType, Node, TensorType, Type, Value, with_dim
from irpar.sharding import Reduction

from .facts import (
    CannotTellError,
    axes_of,
    axis_attribute,
    axis_of,
    computed_count,
    dims_of,
    int_attribute,
    ints_of,
    needed,
    needed_ints,
    result_shape,
    same_type,
    shape_of,
    shapes_of,
    tensor_of,
)
from .gradients.reduction import REDUCTIONS, of_cumprod, of_cumsum, of_reduction, of_top_k
from .gradients.zero import zero
from .local import typed_like
from .local_programs.integer_reductions import INTEGERS, integer_reduction
from .local_programs.normalization import reductions
from .local_programs.search import LOCAL_PROGRAMS
from .op_def import OpDef
from .registry import define
from .rule import DimFactors, FactorRule, Kind, RuleBuilder, whole

PARTIAL: dict[str, Reduction] = {
    "ReduceSum": "sum",
    "ReduceL1": "sum",
    "ReduceSumSquare": "sum",
    "ReduceMean": "sum",
    "ReduceMax": "max",
    "ReduceMin": "min",
    "ReduceProd": "prod",
}
"""Reductions whose results over blocks combine to the result over the whole."""
NONLINEAR = ("ReduceL2", "ReduceLogSum", "ReduceLogSumExp")
"""Reductions that do something to the sum, so that sums over blocks do not combine."""

_FLOPS_PER_INPUT = {"ReduceL1": 2, "ReduceL2": 2, "ReduceSumSquare": 2, "ReduceLogSumExp": 2}
_FLOPS_PER_RESULT = {"ReduceMean": 1, "ReduceL2": 1, "ReduceLogSum": 1, "ReduceLogSumExp": 1}
_BOOLEAN: dict[Reduction, Reduction] = {"max": "or", "min": "and"}


def _reduced_axes(node: Node) -> tuple[int, ...]:
    """The axes that are reduced, counted from the front."""
    rank = len(dims_of(node, 0))
    axes = ints_of(node, "axes", 1, 13 if node.op_type == "ReduceSum" else 18)
    if axes:
        return axes_of(axes, rank)
    return () if int_attribute(node, "noop_with_empty_axes", 0) else tuple(range(rank))


def _infer_reduce(node: Node) -> Sequence[Type]:
    data = tensor_of(node, 0)
    count = computed_count(node, 1)
    if count is not None and (count or not int_attribute(node, "noop_with_empty_axes", 0)):
        rank = len(dims_of(node, 0))
        keeps = int_attribute(node, "keepdims", 1)
        return [TensorType(data.dtype, (None,) * (rank if keeps else rank - (count or rank)))]
    axes = _reduced_axes(node)
    return [TensorType(data.dtype, _without(dims_of(node, 0), axes, int_attribute(node, "keepdims", 1)))]


def _without(dims: Sequence[Dim], axes: Sequence[int], keep: int) -> tuple[Dim, ...]:
    if keep:
        return tuple(1 if dim in axes else size for dim, size in enumerate(dims))
    return tuple(size for dim, size in enumerate(dims) if dim not in axes)


def _rule_reduce(node: Node) -> FactorRule:
    """Kept dims pass; reduced dims give partial results where these combine, else they are whole.

    Sums of integers do not: they end where the type ends (`local_programs/integer_reductions.py`).
    """
    dtype = tensor_of(node, 0).dtype
    reduce = PARTIAL.get(node.op_type, "sum")
    combines = node.op_type in PARTIAL and not (reduce in ("sum", "prod") and dtype in INTEGERS)
    return _axes_rule(
        node,
        _reduced_axes(node),
        Kind.REDUCE if combines else Kind.REPLICATE,
        _BOOLEAN.get(reduce, reduce) if dtype is DType.BOOL else reduce,
    )


def _axes_rule(node: Node, axes: Sequence[int], kind: Kind, reduce: Reduction) -> FactorRule:
    shape = shape_of(node, 0)
    rule = RuleBuilder()
    dims = [rule.dims([size], kind if dim in axes else Kind.PASS)[0] for dim, size in enumerate(shape)]
    keep = int_attribute(node, "keepdims", 1)
    result = [() if dim in axes else factors for dim, factors in enumerate(dims) if keep or dim not in axes]
    others = [() if other is None else whole(len(other)) for other in shapes_of(node)[1:]]
    return rule.done([dims, *others], [result], reduce)


def _cost_reduce(node: Node) -> int:
    per_input = _FLOPS_PER_INPUT.get(node.op_type, 1)
    per_result = _FLOPS_PER_RESULT.get(node.op_type, 0)
    return per_input * prod(shape_of(node, 0)) + per_result * prod(result_shape(node))


def _localize_mean(whole_node: Node, local: Node, builder: Builder) -> list[Value] | None:
    """The mean of a block is scaled by the block's share of the elements, so that the sum over blocks is the mean."""
    axes = _reduced_axes(whole_node)
    total = prod(shape_of(whole_node, 0)[axis] for axis in axes)
    count = prod(needed(local, 0).shape[axis] for axis in axes)
    if count == total:
        return None
    result = local.result
    dtype = result.dtype
    mean = typed_like(result, "ReduceMean", local.operands, local.attributes, builder)
    share = builder.constant(np.asarray(count / total, dtype=dtype.numpy), "share")
    return [typed_like(result, "Mul", [mean, share], None, builder)]


_INTEGERS = integer_reduction(_reduced_axes)
for _name in PARTIAL:
    define(
        OpDef(
            "",
            _name,
            _infer_reduce,
            _rule_reduce,
            _cost_reduce,
            _localize_mean if _name == "ReduceMean" else None,
            None if PARTIAL[_name] in ("max", "min") else _INTEGERS,
            gradient=of_reduction(REDUCTIONS[_name], _reduced_axes),
        )
    )
for _name in NONLINEAR:
    define(
        OpDef(
            "",
            _name,
            _infer_reduce,
            _rule_reduce,
            _cost_reduce,
            local_program=reductions(_reduced_axes)[_name],
            gradient=of_reduction(REDUCTIONS[_name], _reduced_axes),
        )
    )


# -- ArgMax, ArgMin, TopK: the axis is whole, but for local programs ------------------------------------------------


def _infer_arg(node: Node) -> Sequence[Type]:
    dims = dims_of(node, 0)
    axis = axis_attribute(node, len(dims), 0)
    return [TensorType(DType.I64, _without(dims, [axis], int_attribute(node, "keepdims", 1)))]


def _rule_arg(node: Node) -> FactorRule:
    """Positions count from the start of the whole axis."""
    axis = axis_attribute(node, len(shape_of(node, 0)), 0)
    return _axes_rule(node, [axis], Kind.REPLICATE, "sum")


def _cost_input(node: Node) -> int:
    return prod(shape_of(node, 0))


def _infer_top_k(node: Node) -> Sequence[Type]:
    data, dims = tensor_of(node, 0), dims_of(node, 0)
    axis = axis_attribute(node, len(dims), -1)
    (count,) = needed_ints(node, 1)
    shape = with_dim(dims, axis, count)
    return [data.with_shape(shape), TensorType(DType.I64, shape)]


def _rule_top_k(node: Node) -> FactorRule:
    """The axis is whole."""
    shape = shape_of(node, 0)
    axis = axis_attribute(node, len(shape), -1)
    rule = RuleBuilder()
    dims = [rule.dims([size], Kind.REPLICATE if dim == axis else Kind.PASS)[0] for dim, size in enumerate(shape)]
    result: list[DimFactors] = [() if dim == axis else factors for dim, factors in enumerate(dims)]
    return rule.done([dims, whole(len(shape_of(node, 1)))], [result] * len(node.results))


for _name in ("ArgMax", "ArgMin"):
    define(OpDef("", _name, _infer_arg, _rule_arg, _cost_input, local_program=LOCAL_PROGRAMS[_name], gradient=zero))
define(
    OpDef(
        "",
        "TopK",
        _infer_top_k,
        _rule_top_k,
        _cost_input,
        local_program=LOCAL_PROGRAMS["TopK"],
        gradient=of_top_k,
    )
)


# -- CumSum, CumProd ------------------------------------------------------------------------------------------------


def _rule_cumulative(node: Node) -> FactorRule:
    """The axis is whole, since each element needs all before it."""
    shape = shape_of(node, 0)
    found = needed_ints(node, 1)
    if len(found) != 1:
        raise CannotTellError("several axes")
    axis = axis_of(found[0], len(shape))
    rule = RuleBuilder()
    dims = [rule.dims([size], Kind.REPLICATE if dim == axis else Kind.PASS)[0] for dim, size in enumerate(shape)]
    return rule.done([dims, whole(len(shape_of(node, 1)))], [dims])


for _name in ("CumSum", "CumProd"):
    define(
        OpDef(
            "",
            _name,
            same_type,
            _rule_cumulative,
            _cost_input,
            local_program=LOCAL_PROGRAMS[_name],
            gradient=of_cumsum if _name == "CumSum" else of_cumprod,
        )
    )
