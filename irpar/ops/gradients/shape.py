"""Gradients of operators that move data without computing."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from irpar.ir import DType, Node, Value

from ..facts import axis_attribute, needed, operand, text_attribute
from .writer import GradientWriter, NoGradientError, Of

Cut = tuple[int, int, int]
"""(start, end, step) of a Slice along an axis."""


def of_view(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """The gradient in the operand's shape."""
    g = of[0]
    assert g is not None
    return w.each(lambda: w.shaped_as(g, needed(node, 0)))


def of_transpose(node: Node, of: Of, w: GradientWriter, order: Sequence[int]) -> Sequence[Value | None]:
    """The dims put back."""
    g = of[0]
    assert g is not None
    back = [order.index(dim) for dim in range(len(order))]
    return w.each(lambda: w.transpose(g, back))


def of_expand(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """The sum over what was repeated."""
    g = of[0]
    assert g is not None
    return w.each(lambda: w.sum_to(g, needed(node, 0)))


def of_concat(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """The gradient taken apart."""
    g = of[0]
    assert g is not None
    axis = axis_attribute(node, len(w.dims(node.result)))
    if len(node.inputs) == 1:
        return [g]
    sizes = [w.size_of(value, axis) for value in node.inputs]
    numbers = [size.data for size in sizes]
    if all(data is not None for data in numbers):
        split = w.ints([int(data.numpy()[0]) for data in numbers if data is not None])
    else:
        split = w.op("Concat", sizes, {"axis": 0})
    results = [Value("", value.type) for value in node.inputs]
    return w.node("Split", [g, split], {"axis": axis}, results=results).results


def of_split(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """The gradients put together; zeros for results that have none."""
    x = needed(node, 0)
    axis = axis_attribute(node, len(w.dims(x)), 0)
    parts = [w.zeros(value) if g is None else g for value, g in zip(node.results, of, strict=True)]
    return w.each(lambda: w.op("Concat", parts, {"axis": axis}, type=x.type))


# -- Slice ----------------------------------------------------------------------------------------------------------


def of_slice(node: Node, of: Of, w: GradientWriter, cuts: Mapping[int, Cut] | None) -> Sequence[Value | None]:
    """Zeros around the gradient.

    Args:
        node, of, w: as for all gradients.
        cuts: axis to bounds; None where they are computed when the model runs.

    Raises:
        NoGradientError: steps are computed.
    """
    x, g = needed(node, 0), of[0]
    assert g is not None
    if cuts is None:
        return w.each(lambda: _of_computed_slice(node, x, g, w))
    return w.each(lambda: _of_slice(x, g, dict(cuts), w))


def _of_slice(x: Value, g: Value, cuts: Mapping[int, Cut], w: GradientWriter) -> Value:
    before: dict[int, Value | int] = {}
    for axis, (start, _, step) in cuts.items():
        size, count = w.dims(x)[axis], w.dims(g)[axis]
        if size is not None and size == count and step == 1:
            continue
        if step != 1:
            g, start = _spread(x, g, axis, start, step, w)
        elif start < 0 and not isinstance(size, int):
            before[axis] = w.op("Max", [w.op("Add", [w.size_of(x, axis), w.ints([start])]), w.ints([0])])
            continue
        before[axis] = max(start + size, 0) if start < 0 and isinstance(size, int) else start
    return _padded(x, g, before, w)


def _spread(x: Value, g: Value, axis: int, start: int, step: int, w: GradientWriter) -> tuple[Value, int]:
    """The gradient of a slice with steps, with zeros between its elements; and where it begins.

    Raises:
        NoGradientError: sizes are not known.
    """
    size, count = w.dims(x)[axis], w.dims(g)[axis]
    if not isinstance(size, int) or not isinstance(count, int):
        raise NoGradientError("it has steps along a dim of unknown size")
    if step < 0:
        start = min(max(start + size, 0) if start < 0 else start, size - 1)
        g = w.op("Slice", [g, w.ints([-1]), w.ints([-(2**62)]), w.ints([axis]), w.ints([-1])])
        start, step = start + (count - 1) * step, -step
    else:
        start = max(start + size, 0) if start < 0 else start
    if step == 1 or count == 0:
        return g, start
    wide = w.unsqueeze(g, [axis + 1])
    zeros = w.pad(wide, {axis + 1: (0, step - 1)})
    sizes = [(g, dim) if dim != axis else count * step for dim in range(len(w.dims(g)))]
    joined = w.reshaped(zeros, sizes)
    reach = (count - 1) * step + 1  # The zeros behind the last element may lie outside.
    return w.op("Slice", [joined, w.ints([0]), w.ints([reach]), w.ints([axis])]), start


def _padded(x: Value, g: Value, before: Mapping[int, Value | int], w: GradientWriter) -> Value:
    """Zeros before and behind along some axes, to the size of the operand."""
    if not before:
        return w.shaped_as(g, x) if g.type != x.type else g
    pads: dict[int, tuple[int | Value, int | Value]] = {}
    for axis, start in before.items():
        size, count = w.dims(x)[axis], w.dims(g)[axis]
        if isinstance(start, int) and isinstance(size, int) and isinstance(count, int):
            pads[axis] = (start, size - start - count)
        else:
            first = w.ints([start]) if isinstance(start, int) else start
            pads[axis] = (first, w.op("Sub", [w.op("Sub", [w.size_of(x, axis), first]), w.size_of(g, axis)]))
    return w.pad(g, pads, type=x.type)


def _of_computed_slice(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    """The same for bounds that are computed; an axis that is not named is the place in the list."""
    starts, axes, steps = needed(node, 1), operand(node, 3), operand(node, 4)
    if steps is not None and (steps.data is None or any(int(step) != 1 for step in steps.data.numpy().ravel())):
        raise NoGradientError("its steps are computed")
    starts = w.op("Cast", [starts], {"to": 7}) if starts.dtype.value != 7 else starts
    if axes is None:
        shape = w.op("Shape", [starts])
        last = w.squeeze(shape, [0])
        axes = w.op("Range", [w.constant(0), last, w.constant(1)])
    sizes = w.op("Gather", [w.op("Shape", [x]), axes])
    counts = w.op("Gather", [w.op("Shape", [g]), axes])
    from_end = w.where(w.op("Less", [starts, w.ints([0])]), w.op("Add", [starts, sizes]), starts)
    before = w.op("Max", [w.op("Min", [from_end, sizes]), w.ints([0])])
    behind = w.op("Sub", [w.op("Sub", [sizes, before]), counts])
    rank = len(w.dims(x))
    none = w.ints([0] * rank)
    axes = w.op("Mod", [w.cast(axes, DType.I64), w.ints([rank])])
    pads = [w.op("ScatterElements", [none, axes, numbers], {"axis": 0}) for numbers in (before, behind)]
    return w.op("Pad", [g, w.op("Concat", pads, {"axis": 0})], type=x.type)


# -- Pad, Tile ------------------------------------------------------------------------------------------------------


def of_pad(node: Node, of: Of, w: GradientWriter, pads: Mapping[int, tuple[int, int]]) -> Sequence[Value | None]:
    """What lies inside; of the constant all that lies outside."""
    x, g = needed(node, 0), of[0]
    assert g is not None
    used = {axis: pair for axis, pair in pads.items() if pair != (0, 0)}
    mode = text_attribute(node, "mode", "constant")

    def data() -> Value:
        if mode != "constant":
            return _folded(g, x, used, _NUMPY_MODES[mode], w)
        if not used:
            return g
        if any(number < 0 for pair in used.values() for number in pair):  # what was taken away gets zeros
            return w.pad(g, {axis: (-before, -behind) for axis, (before, behind) in used.items()}, type=x.type)
        starts = [before for before, _ in used.values()]
        ends = [2**62 if behind == 0 else -behind for _, behind in used.values()]
        return w.op("Slice", [g, w.ints(starts), w.ints(ends), w.ints(list(used))], type=x.type)

    def filler() -> Value:
        total = w.op("ReduceSum", [g], {"keepdims": 0})
        inside = w.op("ReduceSum", [data()], {"keepdims": 0})
        return w.shaped_as(w.sub(total, inside), needed(node, 2))

    return w.each(data, None, filler if operand(node, 2) is not None else None)


_NUMPY_MODES: dict[str, Literal["reflect", "edge", "wrap"]] = {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}


def _folded(
    g: Value, x: Value, pads: Mapping[int, tuple[int, int]], mode: Literal["reflect", "edge", "wrap"], w: GradientWriter
) -> Value:
    """The gradient of padding with elements: what lies outside is added to where it came from, axis by axis.

    Raises:
        NoGradientError: a padded dim has no elements or no known size, or elements are taken away.
    """
    for axis, (before, behind) in pads.items():
        size = w.dims(x)[axis]
        if size == 0:
            raise NoGradientError(f"its mode is {mode}, along a dim of no elements that it could repeat")
        if not isinstance(size, int) or min(before, behind) < 0:
            raise NoGradientError(f"its mode is {mode}, along a dim that is sharded or of unknown size")
        places = np.pad(np.arange(size), (before, behind), mode=mode)
        parts = [_part(g, axis, start, places[start:end], size, w) for start, end in _runs(places)]
        total = parts[0]
        for part in parts[1:]:
            total = w.add(total, part)
        g = total
    return g


def _runs(places: "np.ndarray[Any, Any]") -> Iterator[tuple[int, int]]:
    """Where places rise by one, fall by one or stay: (start, end) of each stretch."""
    start = 0
    for end in range(1, len(places) + 1):
        steps = np.diff(places[start : end + 1])
        if end == len(places) or len(set(steps.tolist())) > 1 or abs(int(steps[0])) > 1:
            yield start, end
            start = end


def _part(g: Value, axis: int, start: int, places: "np.ndarray[Any, Any]", size: int, w: GradientWriter) -> Value:
    """A stretch of the gradient where it came from, zeros elsewhere."""
    part = w.op("Slice", [g, w.ints([start]), w.ints([start + len(places)]), w.ints([axis])])
    first, last = int(places[0]), int(places[-1])
    if len(places) > 1 and first == last:
        part = w.sum(part, [axis])
    elif first > last:
        part = w.op("Slice", [part, w.ints([-1]), w.ints([-(2**62)]), w.ints([axis]), w.ints([-1])])
    low, high = min(first, last), max(first, last)
    if (low, high) == (0, size - 1):
        return part
    return w.pad(part, {axis: (low, size - 1 - high)})


def of_tile(node: Node, of: Of, w: GradientWriter, repeats: Sequence[int]) -> Sequence[Value | None]:
    """The sum over the copies: each repeated dim is two, of which the first is summed."""
    x, g = needed(node, 0), of[0]
    assert g is not None

    def data() -> Value:
        sizes: list[int | tuple[Value, int]] = []
        summed = []
        for dim, count in enumerate(repeats):
            if count != 1:
                summed.append(len(sizes))
                sizes.append(count)
            sizes.append((x, dim))
        if not summed:
            return g
        return w.sum(w.reshaped(g, sizes), summed, keep=False)

    return w.each(data)


def of_computed_tile(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """The same for repeats that are computed: each dim is two."""
    x, repeats, g = needed(node, 0), needed(node, 1), of[0]
    assert g is not None
    rank = len(w.dims(x))

    def data() -> Value:
        pairs = [w.unsqueeze(each, [1]) for each in (repeats, w.shape_of(x))]
        sizes = w.reshape(w.op("Concat", pairs, {"axis": 1}), [2 * rank])
        split = w.reshape(g, sizes, x.tensor_type.with_shape((None,) * (2 * rank)))
        return w.op("ReduceSum", [split, w.ints(range(0, 2 * rank, 2))], {"keepdims": 0}, type=x.type)

    return w.each(data)
