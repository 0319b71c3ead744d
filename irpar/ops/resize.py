"""Resize: dims that keep their places pass, others exchange the borders of their blocks."""

from collections.abc import Sequence
from math import prod

import numpy as np

from irpar.ir import Builder, Dim, Node, Type, Value

from .facts import (
    CannotTellError,
    data_of,
    dims_of,
    needed,
    operand,
    result_shape,
    shape_of,
    shapes_of,
    tensor_of,
    text_attribute,
)
from .gradients.resize import of_resize
from .gradients.writer import GradientWriter, Of
from .listed_sizes import listed_sizes, target_sizes
from .local import set_target
from .local_programs.resize import RESIZE, is_crop, named_dims, policy_of, resized_dims, scales_of, sizes_of, taps_of
from .op_def import OpDef
from .registry import define
from .rule import FactorRule, moving_rule

TAPS = {"nearest": 0, "linear": 2, "cubic": 4}
"""Elements that count into a result along one resized dim; 0: it is copied."""
_UNLIKELY = 2**20 + 7
"""A size that no Resize asks for."""


def _infer_resize(node: Node) -> Sequence[Type]:
    dims = list(dims_of(node, 0))
    axes, sizes = named_dims(node, len(dims)), _asked(node)
    if sizes is not None:
        if policy_of(node) != "stretch":
            return [tensor_of(node, 0).with_shape(_kept_aspect(node))]
        for axis, size in zip(axes, sizes, strict=True):
            dims[axis] = size
    else:
        if is_crop(node):
            raise CannotTellError("a crop")
        for axis, scale in zip(axes, scales_of(node), strict=True):
            dims[axis] = _scaled(dims[axis], scale)
    return [tensor_of(node, 0).with_shape(tuple(dims))]


def _asked(node: Node) -> Sequence[Dim] | None:
    """The sizes that are asked for, as far as they are known; None where there are scales.

    Raises:
        CannotTellError: nobody knows how many there are.
    """
    value = operand(node, 3)
    if value is None:
        return None
    found = listed_sizes(value)
    if found is None:
        raise CannotTellError("the sizes")
    return target_sizes(found) or None


def _kept_aspect(node: Node) -> tuple[int, ...]:
    """The shape of the result where all named dims have one scale."""
    shape = list(shape_of(node, 0))
    for dim, axis in resized_dims(node).items():
        shape[dim] = axis.resized
    return tuple(shape)


def _scaled(size: Dim, scale: float) -> Dim:
    if isinstance(size, int):
        return int(np.float32(size) * np.float32(scale))
    if size is None or not scale.is_integer():
        raise CannotTellError("a symbolic dim at a scale that is no whole number")
    return size * int(scale)


def _changed(node: Node) -> set[int]:
    """The dims whose places change."""
    if is_crop(node) or policy_of(node) != "stretch":
        return set(named_dims(node, len(shape_of(node, 0))))
    return set(resized_dims(node))


def _rule_resize(node: Node) -> FactorRule:
    """Dims that are not resized pass; along those that are, blocks need places of their neighbours."""
    return moving_rule(shapes_of(node), result_shape(node), _changed(node))


def _localize_resize(whole_node: Node, local: Node, builder: Builder) -> None:
    """Sizes are those of the block."""
    if sizes_of(whole_node) is None:
        return
    if policy_of(whole_node) != "stretch":
        return  # Cut are dims that it does not name.
    shape = result_shape(local)
    set_target(local, 3, [shape[axis] for axis in named_dims(whole_node, len(shape))], builder)


def _cost_resize(node: Node) -> int:
    """A multiply and an add for each element that counts into a result."""
    shape, result = shape_of(node, 0), result_shape(node)
    resized = sum(before != after for before, after in zip(shape, result, strict=True))
    taps = TAPS[text_attribute(node, "mode", "nearest")]
    return 2 * prod(result) * taps**resized if taps and resized else 0


def _gradient_resize(node: Node, of: Of, writer: GradientWriter) -> Sequence[Value | None]:
    # Dims of unknown size must be those that stay: any other size or scale changes a size as large as this.
    shape = [size if isinstance(size, int) else _UNLIKELY for size in dims_of(node, 0)]
    resized = resized_dims(node, shape, _computed_sizes(node))
    if any(not isinstance(dims_of(node, 0)[dim], int) for dim in resized):
        raise CannotTellError("the size of a dim that is resized")
    taps = {dim: (*taps_of(node, axis), axis.length) for dim, axis in resized.items()}
    return of_resize(node, of, writer, taps)


define(
    OpDef(
        "",
        "Upsample",
        _infer_resize,
        _rule_resize,
        _cost_resize,
        local_program=RESIZE.local_program(),
        gradient=_gradient_resize,
    )
)


def _computed_sizes(node: Node) -> list[int] | None:
    """The sizes that are asked for, where they are computed; that of a dim that stays and is not known is one like it.

    Raises:
        CannotTellError: one is not known.
    """
    sizes = _asked(node)
    if sizes is None or operand(node, 3) is None or data_of(needed(node, 3)) is not None:
        return None
    dims = dims_of(node, 0)
    found = []
    for axis, size in zip(named_dims(node, len(dims)), sizes, strict=True):
        if not isinstance(size, int) and (size is None or size != dims[axis]):
            raise CannotTellError("the size that a dim gets")
        found.append(size if isinstance(size, int) else _UNLIKELY)
    return found


define(
    OpDef(
        "",
        "Resize",
        _infer_resize,
        _rule_resize,
        _cost_resize,
        _localize_resize,
        RESIZE.local_program(),
        gradient=_gradient_resize,
    )
)
