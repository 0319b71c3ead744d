"""Gradients of operators that depend on positions."""

from collections.abc import Sequence

import numpy as np

from irpar.ir import DType, Node, TensorType, Value

from ..facts import int_attribute, needed, text_attribute
from .writer import GradientWriter, Of


def of_trilu(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """The same triangle of the gradient."""
    g = of[0]
    assert g is not None
    attributes = {"upper": int_attribute(node, "upper", 1)}
    return w.each(lambda: w.op("Trilu", [g, *node.operands[1:]], attributes))


def of_space_to_depth(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Depth back to space."""
    g = of[0]
    assert g is not None
    attributes = {"blocksize": int_attribute(node, "blocksize"), "mode": "DCR"}
    return w.each(lambda: w.op("DepthToSpace", [g], attributes))


def of_depth_to_space(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Space back to depth; of mode CRD by dims put apart, since SpaceToDepth has the other mode alone."""
    x, g = needed(node, 0), of[0]
    assert g is not None
    block = int_attribute(node, "blocksize")
    if text_attribute(node, "mode", "DCR") == "DCR":
        return w.each(lambda: w.op("SpaceToDepth", [g], {"blocksize": block}))

    def data() -> Value:
        batch, height, width = ((x, dim) for dim in (0, 2, 3))
        apart = w.reshaped(g, [batch, -1, height, block, width, block])
        return w.shaped_as(w.transpose(apart, [0, 1, 3, 5, 2, 4]), x)

    return w.each(data)


def of_range(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """The start gets all gradients, the step each as often as it was taken; the limit none."""
    g = of[0]
    assert g is not None
    count = w.squeeze(w.size_of(g, 0), [0])

    def step() -> Value:
        zero, one = (w.constant(np.int64(number), "number") for number in (0, 1))
        taken = w.op("Range", [zero, count, one], type=TensorType(DType.I64, w.dims(g)))
        return w.sum(w.mul(g, w.cast(taken, g.dtype)), [0], keep=False)

    return w.each(lambda: w.sum(g, [0], keep=False), None, step)
