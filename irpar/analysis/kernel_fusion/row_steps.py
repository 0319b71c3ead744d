"""Reductions of rows as steps of an expression, and normalisations as the reductions that they are.

y = Softmax(x) {axis=-1}      Exp(Sub(x, ReduceMax(x))), divided by its ReduceSum
"""

from collections.abc import Mapping, Sequence

import numpy as np

from irpar.ir import DType, Node, Value
from irpar.kernels.expression import OPERATORS, Number
from irpar.ops.facts import (
    CannotTellError,
    axes_of,
    axis_attribute,
    float_attribute,
    int_attribute,
    ints_attribute,
    ints_operand,
    needed,
    operand,
)

from .drafts import Given, Lower, Lowered, Ref

_SUMS = ("ReduceMean", "ReduceSum")
"""Reductions that there are kernels of along the first dims too."""


def _rows(made: Lowered, shape: Sequence[int], axes: Sequence[int]) -> None:
    """Let a node reduce axes of a shape, which must be its last ones."""
    if sorted(axes) != list(range(len(shape) - len(axes), len(shape))) or not axes:
        raise CannotTellError("reduced dims that are not the last ones")
    made.space, made.reduced = tuple(shape), len(axes)


def _softmax_axes(node: Node, rank: int) -> Sequence[int]:
    if node.version >= 13:
        return (axis_attribute(node, rank, -1),)
    return range(axis_attribute(node, rank, 1), rank)


def _softmax(node: Node, made: Lowered) -> Sequence[Given | None]:
    x = needed(node, 0)
    _rows(made, x.shape, _softmax_axes(node, len(x.shape)))
    shifted = made.step("Sub", x, made.reduce("ReduceMax", x))
    exponential = made.step("Exp", shifted)
    total = made.reduce("ReduceSum", exponential)
    if node.op_type == "LogSoftmax":
        return [made.step("Sub", shifted, made.step("Log", total))]
    return [made.step("Div", exponential, total)]


def _reduction(node: Node, made: Lowered) -> Sequence[Given | None]:
    x = needed(node, 0)
    if not x.dtype.is_float:
        raise CannotTellError("integers")
    axes = ints_attribute(node, "axes") if len(node.operands) < 2 else ints_operand(node, 1)
    if not axes and int_attribute(node, "noop_with_empty_axes", 0):
        raise CannotTellError("no axes")
    rank, chosen = len(x.shape), axes_of(axes or range(len(x.shape)), len(x.shape))
    if node.op_type in _SUMS and len(chosen) < rank and sorted(chosen) == list(range(len(chosen))):
        made.space, made.outer = x.shape, len(chosen)
    else:
        _rows(made, x.shape, chosen)
    places = tuple(range(-rank, made.outer - rank)) if made.outer else tuple(range(-made.reduced, 0))
    found = made.step(node.op_type, x, axes=places)
    return [found if int_attribute(node, "keepdims", 1) else made.step("Squeeze", found, axes=places)]


def _fitting(made: Lowered, *vectors: Value | None) -> None:
    """Check that operands of a normalisation broadcast to what is normalised."""
    for vector in vectors:
        if vector is not None and (
            len(vector.shape) > len(made.space) or np.broadcast_shapes(vector.shape, made.space) != made.space
        ):
            raise CannotTellError("an operand that the result is broadcast to")


def _layer_norm(node: Node, made: Lowered) -> Sequence[Given | None]:
    x, scale, bias = needed(node, 0), needed(node, 1), operand(node, 2)
    rank = len(x.shape)
    _rows(made, x.shape, range(axis_attribute(node, rank, -1), rank))
    _fitting(made, scale, bias)
    return _standardized(node, made, x, x.dtype, scale, bias)


def _standardized(
    node: Node, made: Lowered, x: Given, dtype: DType, scale: Value, bias: Value | None
) -> list[Given | None]:
    """The normalised value, the mean, and the inverse of the standard deviation."""
    mean = made.reduce("ReduceMean", x)
    centred = made.step("Sub", x, mean)
    variance = made.reduce("ReduceMean", made.step("Mul", centred, centred))
    inverse = _inverse_root(node, made, variance)
    y: Given = made.step("Mul", centred, inverse)
    y = made.step("Mul", y, made.cast(scale, scale.dtype, dtype))
    if bias is not None:
        y = made.step("Add", y, made.cast(bias, bias.dtype, dtype))
    statistics = [
        made.cast(given, dtype, value.dtype) if value in made.wanted else None
        for given, value in zip((mean, inverse), node.results[1:3], strict=False)
    ]
    return [y, *statistics]


def _inverse_root(node: Node, made: Lowered, mean_square: Given) -> Ref:
    usual = 1e-12 if node.domain else 1e-5
    epsilon = made.number(float_attribute(node, "epsilon", usual))
    return made.step("Reciprocal", made.step("Sqrt", made.step("Add", mean_square, epsilon)))


def _scaled_to_root_mean(node: Node, made: Lowered, x: Given, dtype: DType, scale: Value) -> tuple[Given, Given]:
    """x divided by its root mean square, times the scale, in the scale's dtype; and the inverse of that root."""
    inverse = _inverse_root(node, made, made.reduce("ReduceMean", made.step("Mul", x, x)))
    normalised = made.cast(made.step("Mul", x, inverse), dtype, scale.dtype)
    return made.step("Mul", normalised, scale), inverse


def _rms_norm(node: Node, made: Lowered) -> Sequence[Given | None]:
    x, scale = needed(node, 0), needed(node, 1)
    rank = len(x.shape)
    _rows(made, x.shape, range(axis_attribute(node, rank, -1), rank))
    _fitting(made, scale)
    y, inverse = _scaled_to_root_mean(node, made, x, x.dtype, scale)
    found: list[Given | None] = [y]
    if len(node.results) > 1 and node.results[1] in made.wanted:
        found.append(made.cast(inverse, x.dtype, node.results[1].dtype))
    return [*found, *(None for _ in node.results[len(found) :])]


def _along_channels(made: Lowered, value: Value, rank: int, to: DType) -> Given:
    """A number for each channel, which is dim 1 of a rank, in a dtype."""
    cast = made.cast(
        made.step("Unsqueeze", value, axes=tuple(range(2 - rank, 0))) if rank > 2 else value, value.dtype, to
    )
    if value.shape != (made.space[1],):
        raise CannotTellError("channels")
    return cast


def _batch_norm(node: Node, made: Lowered) -> Sequence[Given | None]:
    """In inference: the statistics are operands."""
    x, rank = needed(node, 0), len(made.space)
    vectors = [needed(node, index) for index in range(1, 5)]
    if rank < 2 or int_attribute(node, "training_mode", 0) or not made.wanted.isdisjoint(node.results[1:]):
        raise CannotTellError("training")
    wide = DType.F32 if any(vector.dtype is not x.dtype for vector in vectors) else x.dtype
    if wide is not x.dtype and DType.F64 in (x.dtype, *(vector.dtype for vector in vectors)):
        raise CannotTellError("float64 beside others")
    scale, bias, mean, variance = (_along_channels(made, vector, rank, wide) for vector in vectors)
    epsilon = Number.of(float_attribute(node, "epsilon", 1e-5), wide.numpy)
    factor = made.step("Div", scale, made.step("Sqrt", made.step("Add", variance, epsilon)))
    centred = made.step("Sub", made.cast(x, x.dtype, wide), mean)
    y = made.step("Add", made.step("Mul", centred, factor), bias)
    return [made.cast(y, wide, x.dtype)]


def _instance_norm(node: Node, made: Lowered) -> Sequence[Given | None]:
    x, rank = needed(node, 0), len(made.space)
    vectors = [needed(node, index) for index in (1, 2)]
    if rank < 3 or any(vector.dtype is not x.dtype for vector in vectors):
        raise CannotTellError("rank or dtypes")
    _rows(made, x.shape, range(2, rank))
    scale, bias = (_along_channels(made, vector, rank, x.dtype) for vector in vectors)
    centred = made.step("Sub", x, made.reduce("ReduceMean", x))
    inverse = _inverse_root(node, made, made.reduce("ReduceMean", made.step("Mul", centred, centred)))
    y = made.step("Mul", made.step("Mul", centred, inverse), scale)
    return [made.step("Add", y, bias)]


def _skip_norm(node: Node, made: Lowered) -> Sequence[Given | None]:
    """com.microsoft's normalisations of a sum, which is their fourth result."""
    x, skip, scale = needed(node, 0), needed(node, 1), needed(node, 2)
    is_plain = node.op_type == "SkipLayerNormalization"
    shift, bias = (operand(node, 3), operand(node, 4)) if is_plain else (None, operand(node, 3))
    _rows(made, x.shape, [len(x.shape) - 1])
    _fitting(made, skip, scale, shift, bias)
    total = made.step("Add", x, skip)
    if bias is not None:
        total = made.step("Add", total, bias)
    if not made.wanted.isdisjoint(node.results[1:3]):
        raise CannotTellError("statistics")
    if is_plain:
        (y, *_) = _standardized(node, made, total, x.dtype, scale, shift)
    else:
        y, _ = _scaled_to_root_mean(node, made, total, x.dtype, scale)
    return [y, None, None, total][: len(node.results)]


ROWS: Mapping[tuple[str, str], Lower] = {
    **{("", name): _reduction for name in OPERATORS if name.startswith("Reduce")},
    ("", "BatchNormalization"): _batch_norm,
    ("", "InstanceNormalization"): _instance_norm,
    ("", "LayerNormalization"): _layer_norm,
    ("", "LogSoftmax"): _softmax,
    ("", "RMSNormalization"): _rms_norm,
    ("", "SimplifiedLayerNormalization"): _rms_norm,
    ("", "Softmax"): _softmax,
    ("com.microsoft", "SkipLayerNormalization"): _skip_norm,
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): _skip_norm,
}
"""What writes the steps of an operator, by its domain and name."""
