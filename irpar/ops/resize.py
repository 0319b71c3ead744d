"""Resize: dims that keep their places pass."""

from collections.abc import Sequence
from math import prod

import numpy as np

from irpar.ir import Builder, Dim, Floats, Node, Type

from .facts import (
    CannotTellError,
    axes_of,
    axis_of,
    data_of,
    dims_of,
    ints_attribute,
    ints_operand,
    needed,
    operand,
    result_shape,
    shape_of,
    shapes_of,
    tensor_of,
    text_attribute,
)
from .local import set_target
from .registry import OpDef, define
from .rule import DimFactors, FactorRule, Kind, RuleBuilder, whole

TAPS = {"nearest": 0, "linear": 2, "cubic": 4}
"""Elements that count into a result along one resized dim; 0: it is copied."""


def _axes(node: Node, rank: int) -> tuple[int, ...]:
    """The dims that scales or sizes speak of, in their order."""
    axes = ints_attribute(node, "axes")
    if axes is None:
        return tuple(range(rank))
    axes_of(axes, rank)  # refuses one that is named twice
    return tuple(axis_of(axis, rank) for axis in axes)


def _sizes(node: Node) -> tuple[int, ...] | None:
    """The operand `sizes`, or None where there are scales."""
    found = ints_operand(node, 3) if operand(node, 3) is not None else None
    return found or None


def _is_crop(node: Node) -> bool:
    return text_attribute(node, "coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"


def _keeps_aspect(node: Node) -> bool:
    return text_attribute(node, "keep_aspect_ratio_policy", "stretch") != "stretch"


def _scales(node: Node) -> list[float]:
    """The constant operand `scales`."""
    if node.op_type == "Upsample" and node.version < 9:
        listed = node.attributes.get("scales")
        if not isinstance(listed, Floats):
            raise CannotTellError("scales")
        return list(listed)
    found = data_of(needed(node, 1 if node.version < 11 else 2))
    if found is None:
        raise CannotTellError("scales")
    return [float(scale) for scale in found.numpy()]


def _infer_resize(node: Node) -> Sequence[Type]:
    dims = list(dims_of(node, 0))
    axes, sizes = _axes(node, len(dims)), _sizes(node)
    if sizes is not None:
        if _keeps_aspect(node):
            raise CannotTellError("sizes that keep the aspect ratio")
        for axis, size in zip(axes, sizes, strict=True):
            dims[axis] = size
    else:
        if _is_crop(node):
            raise CannotTellError("a crop")
        for axis, scale in zip(axes, _scales(node), strict=True):
            dims[axis] = _scaled(dims[axis], scale)
    return [tensor_of(node, 0).with_shape(tuple(dims))]


def _scaled(size: Dim, scale: float) -> Dim:
    if isinstance(size, int):
        return int(np.float32(size) * np.float32(scale))
    if size is None or not scale.is_integer():
        raise CannotTellError("a symbolic dim at a scale that is no whole number")
    return size * int(scale)


def _kept(node: Node) -> set[int]:
    """The dims whose places stay what they are.

    A scale of 1 does so, an equal size alone does not: 5 places at scale 1.1 are 5 places with other numbers.
    """
    shape = shape_of(node, 0)
    axes = _axes(node, len(shape))
    others = set(range(len(shape))) - set(axes)
    if _is_crop(node):
        return others
    sizes = _sizes(node)
    if sizes is not None:
        if _keeps_aspect(node):
            return others
        return others | {axis for axis, size in zip(axes, sizes, strict=True) if shape[axis] == size}
    return others | {axis for axis, scale in zip(axes, _scales(node), strict=True) if scale == 1.0}


def _rule_resize(node: Node) -> FactorRule:
    """Dims that are not resized pass; those that are need their neighbours' places."""
    kept = _kept(node)
    rule = RuleBuilder()
    data: list[DimFactors] = [
        rule.dims([size], Kind.PASS if dim in kept else Kind.REPLICATE)[0] for dim, size in enumerate(shape_of(node, 0))
    ]
    result: list[DimFactors] = [factors if dim in kept else () for dim, factors in enumerate(data)]
    others = [() if other is None else whole(len(other)) for other in shapes_of(node)[1:]]
    return rule.done([data, *others], [result])


def _localize_resize(whole_node: Node, local: Node, builder: Builder) -> None:
    """Sizes are those of the block."""
    if _sizes(whole_node) is not None:
        shape = result_shape(local)
        set_target(local, 3, [shape[axis] for axis in _axes(whole_node, len(shape))], builder)


def _cost_resize(node: Node) -> int:
    """A multiply and an add for each element that counts into a result."""
    shape, result = shape_of(node, 0), result_shape(node)
    resized = sum(before != after for before, after in zip(shape, result, strict=True))
    taps = TAPS[text_attribute(node, "mode", "nearest")]
    return 2 * prod(result) * taps**resized if taps and resized else 0


define(OpDef("", "Upsample", _infer_resize, _rule_resize, _cost_resize))
define(OpDef("", "Resize", _infer_resize, _rule_resize, _cost_resize, _localize_resize))
