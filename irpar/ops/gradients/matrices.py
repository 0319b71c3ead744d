"""Gradients of determinants and inverses, and of blocks that are added up to images."""

import math
from collections.abc import Sequence

import numpy as np

from irpar.ir import Node, Value

from ..facts import ints_attribute, needed, needed_ints
from ..local_programs.shape import crop_targets
from .writer import GradientWriter, NoGradientError, Of

_MOST_ROWS = 16
"""Of a matrix whose minors are computed one by one."""


def _cofactors(x: Value, w: GradientWriter) -> Value:
    """The derivative of the determinant by each element: the determinant of the other rows and columns.

    Raises:
        NoGradientError: the size of the matrix is symbolic, or too large for that.
    """
    rank, size = len(w.dims(x)), w.dims(x)[-1]
    if not isinstance(size, int) or size > _MOST_ROWS:
        raise NoGradientError(f"because its matrices are not known to have at most {_MOST_ROWS} rows")
    if size == 1:
        return w.filled(1, x)
    others = np.asarray([[at for at in range(size) if at != left_out] for left_out in range(size)], np.int64)
    rows = w.op("Gather", [x, w.constant(others, "rows")], {"axis": rank - 2})  # [..., n, n - 1, n]
    minors = w.op("Gather", [rows, w.constant(others, "columns")], {"axis": rank})  # [..., n, n - 1, n, n - 1]
    order = [*range(rank - 1), rank, rank - 1, rank + 1]
    signs = np.asarray([[(-1) ** (row + column) for column in range(size)] for row in range(size)], x.dtype.numpy)
    return w.mul(w.op("Det", [w.transpose(minors, order)]), w.constant(signs, "signs"))


def of_det(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """The cofactors: no inverse, which a matrix of determinant 0 lacks."""
    x, g = needed(node, 0), of[0]
    assert g is not None
    rank = len(w.dims(x))
    return w.each(lambda: w.mul(_cofactors(x, w), w.unsqueeze(g, [rank - 2, rank - 1])))


def decompose_inverse(node: Node, w: GradientWriter) -> list[Value]:
    """The cofactors, transposed, by the determinant: ONNX has no inverse."""
    x = needed(node, 0)
    rank = len(w.dims(x))
    return [w.div(w.swapped(_cofactors(x, w)), w.unsqueeze(w.op("Det", [x]), [rank - 2, rank - 1]))]


# -- blocks ---------------------------------------------------------------------------------------------------------


def of_col2im(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Each element of a block gets the gradient of the place that it was added to; none where that was padding."""
    x, g = needed(node, 0), of[0]
    assert g is not None
    sizes, block = needed_ints(node, 1), needed_ints(node, 2)
    rank = len(sizes)

    def ints(name: str, default: int, count: int) -> Sequence[int]:
        return ints_attribute(node, name) or (default,) * count

    strides, dilations, pads = ints("strides", 1, rank), ints("dilations", 1, rank), ints("pads", 0, 2 * rank)

    def columns() -> Value:
        index, inside = np.zeros((1, 1), np.int64), np.ones((1, 1), np.bool_)
        for dim, size in enumerate(sizes):
            reach = dilations[dim] * (block[dim] - 1) + 1
            count = (size + pads[dim] + pads[rank + dim] - reach) // strides[dim] + 1
            along = np.arange(block[dim])[:, None] * dilations[dim] + np.arange(count) * strides[dim] - pads[dim]
            index = np.kron(index, np.ones_like(along)) * size + np.tile(along, index.shape)
            inside = np.kron(inside, np.ones_like(along, np.bool_)) & np.tile(
                (along >= 0) & (along < size), inside.shape
            )
        flat = w.reshaped(g, [(g, 0), (g, 1), math.prod(sizes)])
        places = np.where(inside, index, 0)
        picked = w.op("Gather", [flat, w.constant(places, "places")], {"axis": 2})
        if not inside.all():
            picked = w.where(w.constant(inside, "inside"), picked, 0.0)
        return w.shaped_as(picked, x)

    return w.each(columns)


def of_center_crop_pad(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """What was cut off gets zeros, what was added falls away."""
    x, g = needed(node, 0), of[0]
    assert g is not None
    pads = {}
    for axis, size in crop_targets(node, len(w.dims(x))).items():
        before = w.dims(x)[axis]
        if not isinstance(before, int):
            raise NoGradientError("because a size that it changes is symbolic")
        missing = size - before
        first = missing // 2 if missing >= 0 else -(-missing // 2)
        pads[axis] = (-first, first - missing)
    return w.each(lambda: w.pad(g, pads, type=x.type))
