"""Gradients of pooling; of equal maxima the first gets all."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from irpar.ir import DType, Node, TensorType, Value

from ..facts import CannotTellError, float_attribute, int_attribute, ints_attribute, needed, text_attribute
from .convolution import Window, shifted, spread
from .writer import GradientWriter, Of

MOST_COMPARED = 9
"""Places of a window up to which each is compared with the maximum, so that places can be sharded; in larger ones the
maximum is found by its index."""


def _gradient(of: Of) -> Value:
    g = of[0]
    assert g is not None
    return g


def _window_of(node: Node, x: Value, y: Value, w: GradientWriter) -> Window:
    """The windows of a pooling; padding behind is as much as the last window reaches.

    Raises:
        CannotTellError: sizes are not known.
    """
    kernel = tuple(ints_attribute(node, "kernel_shape") or ())
    rank = len(kernel)
    ones = (1,) * rank
    strides = tuple(ints_attribute(node, "strides") or ones)
    dilations = tuple(ints_attribute(node, "dilations") or ones)
    auto_pad = text_attribute(node, "auto_pad", "NOTSET")
    pads = tuple(ints_attribute(node, "pads") or (0,) * (2 * rank)) if auto_pad == "NOTSET" else (0,) * (2 * rank)
    before, after = [], []
    for dim, (size, count) in enumerate(zip(w.dims(x)[2:], w.dims(y)[2:], strict=True)):
        if not isinstance(size, int) or not isinstance(count, int):
            raise CannotTellError("the sizes of its places")
        total = (count - 1) * strides[dim] + dilations[dim] * (kernel[dim] - 1) + 1 - size
        if auto_pad.startswith("SAME"):
            less = max(total, 0) // 2
            before.append(less if auto_pad == "SAME_UPPER" else max(total, 0) - less)
        else:
            before.append(pads[dim])
        after.append(max(total - before[-1], 0))
    return Window(kernel, strides, dilations, tuple(before), tuple(after))


# -- maxima ---------------------------------------------------------------------------------------------------------


def of_max_pool(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Each window's gradient at its first maximum."""
    x, y, g = needed(node, 0), node.results[0], _gradient(of)
    is_small = prod(ints_attribute(node, "kernel_shape") or ()) <= MOST_COMPARED and len(node.results) == 1
    if is_small or int_attribute(node, "storage_order", 0):  # An index that counts columns first says less.
        return w.each(lambda: _compared(x, y, g, _window_of(node, x, y, w), w))
    return w.each(lambda: _by_index(node, x, g, w))


def _compared(x: Value, y: Value, g: Value, window: Window, w: GradientWriter) -> Value:
    lowest = w.number(float(ml_dtypes.finfo(x.dtype.numpy).min), x)
    taken: Value | None = None
    parts = []
    for each in shifted(x, y, window, w, filler=lowest):
        is_maximum = w.compare("Equal", each, y)
        if taken is None:
            taken, first = is_maximum, is_maximum
        else:
            first = w.op("And", [is_maximum, w.op("Not", [taken])])
            taken = w.op("Or", [taken, is_maximum])
        parts.append(w.where(first, g, 0.0))
    return _put_back(parts, x, window, w)


def _put_back(parts: Sequence[Value], x: Value, window: Window, w: GradientWriter) -> Value:
    """What each place of the windows gets, added up where the windows lie."""
    rank = len(window.kernel)
    sizes = w.dims(x)[2:]
    is_tiled = all(
        window.strides[dim] == window.kernel[dim] and isinstance(size, int) and size % window.kernel[dim] == 0
        for dim, size in enumerate(sizes)
    )
    if is_tiled and not any((*window.before, *window.after)) and set(window.dilations) == {1}:
        return w.shaped_as(_tiled(list(parts), rank, window, w), x)
    channels = w.dims(x)[1]
    if not isinstance(channels, int):
        raise CannotTellError("the number of channels")
    count = len(parts)
    stacked = w.op("Concat", [w.unsqueeze(part, [2]) for part in parts], {"axis": 2})
    g = w.reshaped(stacked, [(x, 0), channels * count, *((parts[0], dim + 2) for dim in range(rank))])
    one_each = np.eye(count).reshape(count, 1, *window.kernel)
    kernel = w.constant(np.tile(one_each, (channels, *[1] * (rank + 1))).astype(x.dtype.numpy), "places")
    return spread(g, kernel, replace(window, groups=channels), x, w)


def _tiled(parts: list[Value], rank: int, window: Window, w: GradientWriter) -> Value:
    """Windows side by side: [n, c, windows, places of a window, ...], the last place dim of a window first."""
    for dim in reversed(range(rank)):
        size = window.kernel[dim]
        groups = [parts[at : at + size] for at in range(0, len(parts), size)]
        parts = [
            w.op("Concat", [w.unsqueeze(part, [3 + dim]) for part in group], {"axis": 3 + dim}) for group in groups
        ]
    (made,) = parts
    return made


def _by_index(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    """The gradient added at the index of each maximum, which the pooling gives, channel by channel."""
    if len(node.results) == 1:
        node.add_result(Value("places", TensorType(DType.I64, w.dims(node.results[0]))))
    leading: list[int | tuple[Value, int]] = [(x, 0), (x, 1), -1]
    flat = w.reshaped(w.zeros(x), leading)
    sizes = [w.size_of(x, dim) for dim in range(2, len(w.dims(x)))]
    count = sizes[0]
    for size in sizes[1:]:
        known = count.data, size.data
        if known[0] is not None and known[1] is not None:
            count = w.ints([int(known[0].numpy()[0]) * int(known[1].numpy()[0])])
        else:
            count = w.op("Mul", [count, size])
    index = w.reshaped(w.op("Mod", [node.results[1], count]), leading)
    updates = w.reshaped(g, leading)
    made = w.scattered("ScatterElements", w.shape_of(flat), index, updates, {"axis": 2}, type=flat.type)
    return w.shaped_as(made, x)


def of_global_max(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """All at the first maximum."""
    x, g = needed(node, 0), _gradient(of)

    def data() -> Value:
        leading: list[int | tuple[Value, int]] = [(x, 0), (x, 1), -1]
        flat = w.reshaped(x, leading)
        place = w.op("ArgMax", [flat], {"axis": 2, "keepdims": 1})
        made = w.op("ScatterElements", [w.zeros(flat), place, w.reshaped(g, leading)], {"axis": 2})
        return w.shaped_as(made, x)

    return w.each(data)


def of_max_unpool(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """What stands where each element was put."""
    x, index, g = needed(node, 0), needed(node, 1), _gradient(of)

    def data() -> Value:
        flat, places = w.reshape(g, [-1]), w.reshape(index, [-1])
        return w.shaped_as(w.op("GatherElements", [flat, places], {"axis": 0}), x)

    return w.each(data)


# -- means ----------------------------------------------------------------------------------------------------------


def of_average_pool(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Each window's share on all its places."""
    x, g = needed(node, 0), _gradient(of)

    def data() -> Value:
        window = _window_of(node, x, node.results[0], w)
        return _on_all_places(w.share(g, _counts(node, x, window, w)), x, window, w)

    return w.each(data)


def _counts(node: Node, x: Value, window: Window, w: GradientWriter) -> "float | np.ndarray[Any, Any]":
    """How many places each window counts: those of the data, and of the padding where that is asked for."""
    pads = ints_attribute(node, "pads") if text_attribute(node, "auto_pad", "NOTSET") == "NOTSET" else None
    found = np.ones(())
    for dim, size in enumerate(w.dims(x)[2:]):
        assert isinstance(size, int)
        count = w.dims(node.results[0])[dim + 2]
        assert isinstance(count, int)
        behind = window.after[dim] if pads is None else pads[dim + len(window.kernel)]
        line = np.zeros(window.before[dim] + size + max(window.after[dim], behind))
        if int_attribute(node, "count_include_pad", 0):
            line[: window.before[dim] + size + behind] = 1
        else:
            line[window.before[dim] : window.before[dim] + size] = 1
        starts = np.arange(count) * window.strides[dim]
        offsets = np.arange(window.kernel[dim]) * window.dilations[dim]
        found = found[..., None] * line[starts[:, None] + offsets].sum(axis=1)
    if (found == found.flat[0]).all():
        return float(found.flat[0])
    return found


def _on_all_places(g: Value, x: Value, window: Window, w: GradientWriter) -> Value:
    channels = w.dims(x)[1]
    if not isinstance(channels, int):
        raise CannotTellError("the number of channels")
    kernel = w.constant(np.ones((channels, 1, *window.kernel)).astype(x.dtype.numpy), "ones")
    return spread(g, kernel, replace(window, groups=channels), x, w)


def of_global_average(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """The same share everywhere."""
    x, g = needed(node, 0), _gradient(of)

    def data() -> Value:
        sizes = w.dims(x)[2:]
        if all(isinstance(size, int) for size in sizes):
            share = w.share(g, float(prod(size for size in sizes if isinstance(size, int))))
        else:
            share = w.share(g, w.share(*(w.cast(w.op("Size", [value]), w.wide(g.dtype)) for value in (x, g))))
        return w.broadcast_to(share, x)

    return w.each(data)


# -- norms ----------------------------------------------------------------------------------------------------------


def of_lp_pool(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """(sum of |x|^p)^(1/p): |x|^(p-1) sign(x) times the windows' g / y^(p-1); nothing where y is 0."""
    x, y, g = needed(node, 0), node.results[0], _gradient(of)
    p = _power(node)

    def data() -> Value:
        return w.mul(_inner(x, p, w), _on_all_places(_outer(y, g, p, w), x, _window_of(node, x, y, w), w))

    return w.each(data)


def of_global_lp(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """The same of one window."""
    x, y, g = needed(node, 0), node.results[0], _gradient(of)
    p = _power(node)
    return w.each(lambda: w.mul(_inner(x, p, w), _outer(y, g, p, w)))


def _power(node: Node) -> float:
    value = node.attributes.get("p", 2)
    return float(value) if isinstance(value, int) else float_attribute(node, "p", 2.0)


def _inner(x: Value, p: float, w: GradientWriter) -> Value:
    if p == 2:
        return x
    sign = w.op("Sign", [x])
    return sign if p == 1 else w.mul(sign, w.op("Pow", [w.op("Abs", [x]), w.number(p - 1, x)]))


def _outer(y: Value, g: Value, p: float, w: GradientWriter) -> Value:
    is_zero = w.compare("Equal", y, 0)
    size = w.where(is_zero, 1.0, y)
    root = size if p == 2 else w.op("Pow", [size, w.number(p - 1, y)])
    return w.where(is_zero, 0.0, w.div(g, root))
