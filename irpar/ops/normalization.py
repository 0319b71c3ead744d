"""Softmax and its kin, and normalisations: the normalised dims are whole, but for local programs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from irpar.ir import Builder, Node, TensorType, Type

from .facts import (
    CannotTellError,
    axes_of,
    axis_attribute,
    dims_of,
    dtype_attribute,
    int_attribute,
    ints_attribute,
    result_shape,
    same_type,
    shape_of,
    shapes_of,
    tensor_of,
)
from .gradients import normalization as gradients
from .gradients.zero import zero
from .local_programs.normalization import GROUPS
from .local_programs.normalization import LOCAL_PROGRAMS as STATISTICS
from .local_programs.program import LocalProgram
from .local_programs.search import LOCAL_PROGRAMS as SEARCHES
from .op_def import OpDef
from .registry import define
from .rule import DimFactors, FactorRule, Kind, RuleBuilder

LOCAL_PROGRAMS: dict[str, LocalProgram] = {**STATISTICS, **SEARCHES}

FLOPS_PER_ELEMENT = {
    "Softmax": 5,  # maximum, difference, exponential, sum, quotient
    "LogSoftmax": 5,  # maximum, difference, exponential, sum, difference
    "Hardmax": 1,
    "LpNormalization": 3,
    "MeanVarianceNormalization": 6,
    "LRN": 5,
    "LayerNormalization": 8,  # mean, difference, square, sum, quotient, scale, shift and the root
    "RMSNormalization": 4,  # square, sum, quotient, scale
    "GroupNormalization": 8,
    "InstanceNormalization": 8,
    "BatchNormalization": 4,  # difference, quotient, scale, shift
}
"""What normalising one element counts, by irpar's convention."""


def cost_per_element(node: Node) -> int:
    """The entry of the table for each element of the result."""
    return FLOPS_PER_ELEMENT[node.op_type] * prod(result_shape(node))


def _along(axes_of_node: Callable[[Node, int], Sequence[int]]) -> Callable[[Node], FactorRule]:
    """A rule of one operand and results of its shape, in which the given axes are whole."""

    def rule_of(node: Node) -> FactorRule:
        shape = shape_of(node, 0)
        axes = axes_of_node(node, len(shape))
        rule = RuleBuilder()
        dims = [rule.dims([size], Kind.REPLICATE if dim in axes else Kind.PASS)[0] for dim, size in enumerate(shape)]
        return rule.done([dims], [dims])

    return rule_of


def _last_axis(node: Node, rank: int) -> Sequence[int]:
    return (axis_attribute(node, rank, -1),)


def _softmax_axes(node: Node, rank: int) -> Sequence[int]:
    if node.version >= 13:
        return _last_axis(node, rank)
    # Up to opset 12 all dims from the axis on are normalised together.
    return range(axis_attribute(node, rank, 1), rank)


def _mean_variance_axes(node: Node, rank: int) -> Sequence[int]:
    return axes_of(ints_attribute(node, "axes") or (0, 2, 3), rank)


def _channel_axis(node: Node, rank: int) -> Sequence[int]:
    return (1,)


for _name, _axes, _gradient in (
    ("Softmax", _softmax_axes, gradients.of_softmax),
    ("LogSoftmax", _softmax_axes, gradients.of_log_softmax),
    ("Hardmax", _softmax_axes, zero),
    ("LpNormalization", _last_axis, gradients.of_lp_norm),
    ("MeanVarianceNormalization", _mean_variance_axes, gradients.of_mean_variance),
    ("LRN", _channel_axis, gradients.of_lrn),
):
    define(
        OpDef(
            "",
            _name,
            same_type,
            _along(_axes),
            cost_per_element,
            local_program=LOCAL_PROGRAMS.get(_name),
            gradient=_gradient,
        )
    )


# -- LayerNormalization, RMSNormalization ---------------------------------------------------------------------------


def _infer_layer_norm(node: Node) -> Sequence[Type]:
    data, dims = tensor_of(node, 0), dims_of(node, 0)
    axis = axis_attribute(node, len(dims), -1)
    statistics = TensorType(dtype_attribute(node, "stash_type", 1), (*dims[:axis], *[1] * (len(dims) - axis)))
    return [data, statistics, statistics][: len(node.results)]


def _infer_rms_norm(node: Node) -> Sequence[Type]:
    # The scale may have another dtype, which the result takes.
    return [TensorType(tensor_of(node, 1).dtype, tensor_of(node, 0).shape)]


def _rule_trailing(node: Node) -> FactorRule:
    """Dims before the axis pass; those from it on are whole. Scale and shift broadcast to the data."""
    shape = shape_of(node, 0)
    axis = axis_attribute(node, len(shape), -1)
    rule = RuleBuilder()
    dims = [rule.dims([size], Kind.REPLICATE if dim >= axis else Kind.PASS)[0] for dim, size in enumerate(shape)]
    others: list[Sequence[DimFactors]] = []
    for other in shapes_of(node)[1:]:
        sizes = other or ()
        start = len(shape) - len(sizes)
        others.append([dims[start + n] if size == shape[start + n] else () for n, size in enumerate(sizes)])
    statistics: list[DimFactors] = [*dims[:axis], *[()] * (len(shape) - axis)]
    return rule.done([dims, *others], [dims, statistics, statistics][: len(node.results)])


for _name, _infer, _gradient in (
    ("LayerNormalization", _infer_layer_norm, gradients.of_layer_norm),
    ("RMSNormalization", _infer_rms_norm, gradients.of_rms_norm),
):
    define(
        OpDef(
            "",
            _name,
            _infer,
            _rule_trailing,
            cost_per_element,
            local_program=LOCAL_PROGRAMS[_name],
            gradient=_gradient,
        )
    )


# -- normalisations of images: (batch, channels, ...) ---------------------------------------------------------------


def _rule_group_norm(node: Node) -> FactorRule:
    """`([b,(gc),s],[(gc)],[(gc)])->([b,(gc),s])`: groups pass, what is in a group is whole."""
    shape = shape_of(node, 0)
    groups = int_attribute(node, "num_groups")
    if shape[1] % groups:
        raise CannotTellError("groups of different sizes")
    rule = RuleBuilder()
    (batch,) = rule.dims(shape[:1])
    (group,) = rule.dims([groups])
    (inside,) = rule.dims([shape[1] // groups], Kind.REPLICATE)
    channels = (*group, *inside)
    # Before opset 21 scale and shift have one element a group, since then one a channel.
    per_channel = channels if node.version >= 21 else group
    dims = [batch, channels, *rule.dims(shape[2:], Kind.REPLICATE)]
    return rule.done([dims, [per_channel], [per_channel]], [dims])


def _localize_group_norm(whole_node: Node, local: Node, builder: Builder) -> None:
    """Count the groups of the block."""
    inside = shape_of(whole_node, 0)[1] // int_attribute(whole_node, "num_groups")
    local.set_attribute("num_groups", shape_of(local, 0)[1] // inside)


def _rule_instance_norm(node: Node) -> FactorRule:
    """Batch and channels pass, places are whole."""
    rule = RuleBuilder()
    shape = shape_of(node, 0)
    dims = [*rule.dims(shape[:2]), *rule.dims(shape[2:], Kind.REPLICATE)]
    return rule.done([dims, [dims[1]], [dims[1]]], [dims])


def _infer_batch_norm(node: Node) -> Sequence[Type]:
    data = tensor_of(node, 0)
    return [data, tensor_of(node, 3), tensor_of(node, 4)][: len(node.results)]


def _rule_batch_norm(node: Node) -> FactorRule | None:
    """Inference: every dim passes. Training needs statistics of the whole batch: channels pass."""
    trains = bool(int_attribute(node, "training_mode", 0))
    if (trains and node.version < 14) or (not trains and len(node.results) > 1):
        return None
    rule = RuleBuilder()
    kind = Kind.REPLICATE if trains else Kind.PASS
    dims = [rule.dims([size], Kind.PASS if dim == 1 else kind)[0] for dim, size in enumerate(shape_of(node, 0))]
    channels = dims[1] if len(dims) > 1 else ()
    return rule.done([dims, *[[channels]] * 4], [dims, [channels], [channels]][: len(node.results)])


def _batch_program() -> LocalProgram:
    """In inference it has no dims of its own; nor of a vector, which is a batch of one channel."""
    found = LOCAL_PROGRAMS["BatchNormalization"]

    def dims(node: Node) -> Sequence[int] | None:
        trains = int_attribute(node, "training_mode", 0) and len(shape_of(node, 0)) > 1
        return found.dims(node) if trains else None

    return replace(found, dims=dims)


define(
    OpDef(
        "",
        "GroupNormalization",
        same_type,
        _rule_group_norm,
        cost_per_element,
        _localize_group_norm,
        GROUPS,
        gradient=gradients.of_group_norm,
    )
)
_INSTANCE = "InstanceNormalization"
define(
    OpDef(
        "",
        _INSTANCE,
        same_type,
        _rule_instance_norm,
        cost_per_element,
        local_program=LOCAL_PROGRAMS[_INSTANCE],
        gradient=gradients.of_instance_norm,
    )
)
define(
    OpDef(
        "",
        "BatchNormalization",
        _infer_batch_norm,
        _rule_batch_norm,
        cost_per_element,
        local_program=_batch_program(),
        gradient=gradients.of_batch_norm,
    )
)
