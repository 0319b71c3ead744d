"""Gradients of reductions; where several elements are the extreme, they share."""

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from irpar.ir import Node, Value

from ..facts import axis_of, int_attribute, ints_operand, needed, operand
from .writer import GradientWriter, NoGradientError, Of, safe_result

Axes = Sequence[int] | None
"""What is reduced; None where that is found when the model runs."""
Reduced = Callable[[Node, Value, Value, Value, "Axes", GradientWriter], Value]
"""(node, x, result with its dims, gradient with its dims, axes, writer) to the gradient of x, which may have fewer
elements along the reduced dims: it is repeated."""


def of_reduction(slope: Reduced, axes_of: Callable[[Node], Sequence[int]]) -> Callable[..., Sequence[Value | None]]:
    """The gradient of a reduction; `axes_of` gives its axes, or raises CannotTellError where they are computed."""

    def gradient(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
        g = of[0]
        assert g is not None
        return w.each(lambda: _of_data(node, g, slope, axes_of, w))

    return gradient


def _of_data(
    node: Node, g: Value, slope: Reduced, axes_of: Callable[[Node], Sequence[int]], w: GradientWriter
) -> Value:
    x, y = needed(node, 0), safe_result(node)
    axes: Axes = None
    if _are_known(node):
        axes = axes_of(node)
        if not int_attribute(node, "keepdims", 1):
            g, y = w.unsqueeze(g, axes), w.unsqueeze(y, axes)
    elif not int_attribute(node, "keepdims", 1):
        g, y = (_with_dims(node, value, x, w) for value in (g, y))
    return w.broadcast_to(slope(node, x, y, g, axes, w), x)


def _are_known(node: Node) -> bool:
    axes = operand(node, 1)
    return axes is None or axes.data is not None


def _with_dims(node: Node, value: Value, x: Value, w: GradientWriter) -> Value:
    """The reduced dims put back with size 1; which they are, an operand says.

    Where that is empty all dims are reduced, or none, which an attribute says.
    """
    axes = needed(node, 1)
    whole = w.op("Shape", [x])
    ones = w.op("Expand", [w.ints([1]), w.op("Shape", [axes])])
    shape = w.op("ScatterElements", [whole, w.op("Mod", [axes, w.size_of(whole, 0)]), ones])
    if not int_attribute(node, "noop_with_empty_axes", 0):
        is_empty = w.compare("Equal", w.op("Size", [axes]), 0)
        shape = w.where(is_empty, w.ints([1]), shape)
    return w.reshape(value, shape)


def _count(x: Value, axes: Axes, y: Value, w: GradientWriter) -> float | Value:
    """How many elements make one of the result; a value where that is found when the model runs."""
    if axes is not None:
        dims = w.dims(x)
        sizes = [dims[axis] for axis in axes]
        if all(isinstance(size, int) for size in sizes):
            return float(prod(size for size in sizes if isinstance(size, int)))
    return w.share(*(w.cast(w.op("Size", [value]), w.wide(x.dtype)) for value in (x, y)))


def _sum(node: Node, x: Value, y: Value, g: Value, axes: Axes, w: GradientWriter) -> Value:
    return g


def _mean(node: Node, x: Value, y: Value, g: Value, axes: Axes, w: GradientWriter) -> Value:
    return w.share(g, _count(x, axes, y, w))


def _extreme(node: Node, x: Value, y: Value, g: Value, axes: Axes, w: GradientWriter) -> Value:
    are = w.cast(w.compare("Equal", x, y), x.dtype)
    return w.mul(are, w.share(g, _again(node, w.widened(are), axes, w)))


def _again(node: Node, value: Value, axes: Axes, w: GradientWriter) -> Value:
    """The sum over the same axes; the dims stay."""
    if axes is not None:
        return w.sum(value, axes)
    noop = int_attribute(node, "noop_with_empty_axes", 0)
    return w.op("ReduceSum", [value, needed(node, 1)], {"keepdims": 1, "noop_with_empty_axes": noop})


def _prod(node: Node, x: Value, y: Value, g: Value, axes: Axes, w: GradientWriter) -> Value:
    """The product of the others: y / x; of one zero the product of what is left, and nothing where there are two."""
    is_zero = w.compare("Equal", x, 0)
    zeros = _again(node, w.cast(is_zero, x.dtype), axes, w)
    others = w.where(is_zero, 1.0, x)
    attributes = {"keepdims": 1}
    if axes is None:
        attributes["noop_with_empty_axes"] = int_attribute(node, "noop_with_empty_axes", 0)
    where = needed(node, 1) if axes is None else w.ints(axes)
    left = others if axes is not None and not axes else w.op("ReduceProd", [others, where], attributes)
    alone = w.where(w.compare("Equal", zeros, 1), left, 0.0)
    slope = w.where(is_zero, alone, w.div(w.where(w.compare("Equal", zeros, 0), left, 0.0), others))
    return w.mul(g, slope)


def _l1(node: Node, x: Value, y: Value, g: Value, axes: Axes, w: GradientWriter) -> Value:
    return w.mul(g, w.op("Sign", [x]))


def _l2(node: Node, x: Value, y: Value, g: Value, axes: Axes, w: GradientWriter) -> Value:
    """x / y; 0 where all are 0."""
    is_zero = w.compare("Equal", y, 0)
    return w.mul(x, w.where(is_zero, 0.0, w.div(g, w.where(is_zero, 1.0, y))))


def _sum_square(node: Node, x: Value, y: Value, g: Value, axes: Axes, w: GradientWriter) -> Value:
    return w.mul(x, w.mul(g, 2))


def _log_sum(node: Node, x: Value, y: Value, g: Value, axes: Axes, w: GradientWriter) -> Value:
    return w.div(g, w.op("Exp", [y]))


def _log_sum_exp(node: Node, x: Value, y: Value, g: Value, axes: Axes, w: GradientWriter) -> Value:
    return w.mul(g, w.op("Exp", [w.sub(x, y)]))


REDUCTIONS: dict[str, Reduced] = {
    "ReduceL1": _l1,
    "ReduceL2": _l2,
    "ReduceLogSum": _log_sum,
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceMax": _extreme,
    "ReduceMean": _mean,
    "ReduceMin": _extreme,
    "ReduceProd": _prod,
    "ReduceSum": _sum,
    "ReduceSumSquare": _sum_square,
}


# -- sums along an axis ---------------------------------------------------------------------------------------------


def of_cumsum(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """The sums of the gradient from the other end."""
    g = of[0]
    assert g is not None
    back = 1 - int_attribute(node, "reverse", 0)
    attributes = {"exclusive": int_attribute(node, "exclusive", 0), "reverse": back}
    return w.each(lambda: w.op("CumSum", [g, needed(node, 1)], attributes))


def of_cumprod(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Of y[i] = x[0] * ... * x[i]: p[i] * s[i], no division, which zeros would not stand.

    p[i] is the product of all before i, s[i] = g[i] + x[i + 1] * s[i + 1] what the results from i on give.

    Raises:
        NoGradientError: the axis is computed, or its size is not known.
    """
    x, g, axes = needed(node, 0), of[0], ints_operand(node, 1)
    assert g is not None
    rank = len(w.dims(x))
    axis = axis_of(axes[0], rank) if axes is not None else -1
    size = w.dims(x)[axis]
    if axes is None or not isinstance(size, int):
        raise NoGradientError("because its axis, or how many elements that has, is not known")
    reverse, exclusive = (int_attribute(node, name, 0) for name in ("reverse", "exclusive"))

    def factors() -> Value:
        given, gradient = (_flipped(value, axis, w) if reverse else value for value in (x, g))
        if exclusive:  # Results are those of one place before.
            gradient = w.pad(_from(gradient, axis, 1, w), {axis: (0, 1)}) if size else gradient
        before = w.op("CumProd", [given, w.constant(np.int64(axis), "axis")], {"exclusive": 1})
        made = w.mul(before, _sums_of_products(given, gradient, axis, size, w))
        made = w.where(w.compare("Equal", before, 0), 0.0, made)  # What comes behind a zero may be infinite.
        return _flipped(made, axis, w) if reverse else made

    return w.each(factors)


def _flipped(value: Value, axis: int, w: GradientWriter) -> Value:
    return w.op("Slice", [value, *(w.ints([number]) for number in (-1, -(2**62), axis, -1))])


def _from(value: Value, axis: int, start: int, w: GradientWriter, end: int = 2**62) -> Value:
    return w.op("Slice", [value, *(w.ints([number]) for number in (start, end, axis))])


def _sums_of_products(x: Value, g: Value, axis: int, size: int, w: GradientWriter) -> Value:
    """s[i] = g[i] + x[i + 1] * s[i + 1] in log2(size) steps, each of which doubles how far sums and products reach.

    After reach 2: s[i] = g[i] + x[i + 1] * g[i + 1], products[i] = x[i + 1] * x[i + 2]
    After reach 4: s[i] += products[i] * s[i + 2] ...

    Hillis and Steele, Data Parallel Algorithms (1986).
    """
    sums, reach = g, 1
    products = _from(x, axis, 1, w) if size > 1 else x
    while reach < size:
        more = w.mul(products, _from(sums, axis, reach, w))
        sums = w.add(sums, w.pad(more, {axis: (0, reach)}))
        if 2 * reach < size:
            products = w.mul(_from(products, axis, 0, w, size - 2 * reach), _from(products, axis, reach, w))
        reach *= 2
    return sums


def of_top_k(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Each of the values that were taken gets its gradient back."""
    x, g = needed(node, 0), of[0]
    if g is None:
        return [None, None]
    axis = int_attribute(node, "axis", -1)
    return w.each(lambda: w.op("ScatterElements", [w.zeros(x), node.results[1], g], {"axis": axis}))
