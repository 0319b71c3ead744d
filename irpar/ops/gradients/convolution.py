"""Gradients of convolutions.

y = Conv(x : [n, c, s], w : [m, c, k])    x gets ConvTranspose(dy, w), w the sum over batch and places of dy times what
                                          each weight met: x shifted by the weight's place, in steps of the stride
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from irpar.ir import Node, Value, with_dim

from ..facts import CannotTellError, int_attribute, ints_attribute, needed, operand, text_attribute
from .writer import GradientWriter, NoGradientError, Of

MOST_SHIFTS = 64
"""Weights of a window up to which each meets a copy of the data; more are found by a convolution with large windows."""
LEAST_CHANNELS = 7
"""Channels of the gradient in a group for each place of a window, from which on a Conv copies the windows."""
_LETTERS = "xyzuvwpqrst"


@dataclass(frozen=True)
class Window:
    """How windows slide over places.

    Attributes:
        kernel, strides, dilations: by place dim.
        before, after: padding, by place dim.
        groups: of channels.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    groups: int = 1

    def reach(self, dim: int) -> int:
        """How many places a window spans."""
        return self.dilations[dim] * (self.kernel[dim] - 1) + 1

    def along(self, dim: int) -> "Window":
        """Windows of the same rank that span several places of one dim only."""

        def alone(sizes: tuple[int, ...], other: int) -> tuple[int, ...]:
            return tuple(size if at == dim else other for at, size in enumerate(sizes))

        return replace(
            self,
            kernel=alone(self.kernel, 1),
            strides=alone(self.strides, 1),
            dilations=alone(self.dilations, 1),
            before=alone(self.before, 0),
            after=alone(self.after, 0),
        )

    @property
    def attributes(self) -> dict[str, object]:
        """As a Conv or ConvTranspose has them."""
        return {
            "strides": self.strides,
            "dilations": self.dilations,
            "pads": (*self.before, *self.after),
            "group": self.groups,
        }


def window_of(node: Node, data: Value, result: Value, w: GradientWriter) -> Window:
    """The windows of a Conv or ConvTranspose over the larger of its tensors.

    Args:
        node: the node.
        data: what the windows slide over: the operand of a Conv, the result of a ConvTranspose.
        result: the other one: an element for each window.
        w: for dims.

    Raises:
        CannotTellError: sizes are not known that padding depends on.
    """
    kernel = tuple(w.dims(needed(node, 1))[2:])
    rank = len(kernel)
    sizes = [size for size in kernel if isinstance(size, int)]
    if len(sizes) != rank:
        raise CannotTellError("the size of the windows")
    ones = (1,) * rank
    strides = tuple(ints_attribute(node, "strides") or ones)
    dilations = tuple(ints_attribute(node, "dilations") or ones)
    groups = int_attribute(node, "group", 1)
    auto_pad = text_attribute(node, "auto_pad", "NOTSET")
    asked = node.op_type == "ConvTranspose" and ints_attribute(node, "output_shape") is not None
    if not asked and not auto_pad.startswith("SAME"):
        pads = tuple(ints_attribute(node, "pads") or (0,) * (2 * rank)) if auto_pad == "NOTSET" else (0,) * (2 * rank)
        return Window(tuple(sizes), strides, dilations, pads[:rank], pads[rank:], groups)
    more = tuple(ints_attribute(node, "output_padding") or (0,) * rank)
    pairs = []
    for dim, (size, count) in enumerate(zip(w.dims(data)[2:], w.dims(result)[2:], strict=True)):
        if not isinstance(size, int) or not isinstance(count, int):
            raise CannotTellError("the sizes that its padding is found from")
        total = (count - 1) * strides[dim] + dilations[dim] * (sizes[dim] - 1) + 1 + more[dim] - size
        less = max(total, 0) // 2
        is_upper = auto_pad != "SAME_LOWER" if node.op_type == "Conv" else auto_pad == "SAME_UPPER"
        pairs.append((less, max(total, 0) - less) if is_upper else (max(total, 0) - less, less))
    before, after = zip(*pairs, strict=True)
    return Window(tuple(sizes), strides, dilations, tuple(before), tuple(after), groups)


def of_conv(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Of the data by ConvTranspose, of the kernel by `kernel_gradient`, of the bias the sum."""
    x, kernel, bias, g = needed(node, 0), needed(node, 1), operand(node, 2), of[0]
    assert g is not None
    window = window_of(node, x, g, w)
    return w.each(
        lambda: spread(g, kernel, window, x, w),
        lambda: kernel_gradient(x, g, window, kernel, w),
        None if bias is None else lambda: _sum_channels(g, w),
    )


def of_conv_transpose(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """The other way round: of the data by Conv."""
    x, kernel, bias, g = needed(node, 0), needed(node, 1), operand(node, 2), of[0]
    assert g is not None
    window = window_of(node, g, x, w)
    return w.each(
        lambda: _gathered(g, kernel, window, x, w),
        lambda: kernel_gradient(g, x, window, kernel, w),
        None if bias is None else lambda: _sum_channels(g, w),
    )


def _sum_channels(g: Value, w: GradientWriter) -> Value:
    return w.sum(g, [dim for dim in range(len(w.dims(g))) if dim != 1], keep=False)


def _gathered(g: Value, kernel: Value, window: Window, x: Value, w: GradientWriter) -> Value:
    """The Conv of the gradient; output padding that makes more windows than there were is left out."""
    made = w.op("Conv", [g, kernel], window.attributes)
    for dim, (count, wanted) in enumerate(zip(w.dims(made)[2:], w.dims(x)[2:], strict=True), 2):
        if count is None or count != wanted:
            made = w.op("Slice", [made, w.ints([0]), w.size_of(x, dim), w.ints([dim])])
    made.type = x.type
    return made


def spread(g: Value, kernel: Value, window: Window, x: Value, w: GradientWriter) -> Value:
    """The transposed convolution of a gradient, of the size of what was convolved.

    Raises:
        NoGradientError: sizes are not known, and windows leave out places.
    """
    more = []
    for dim, (size, count) in enumerate(zip(w.dims(x)[2:], w.dims(g)[2:], strict=True)):
        stride, padding = window.strides[dim], window.before[dim] + window.after[dim]
        if isinstance(size, int) and isinstance(count, int):
            more.append(size - ((count - 1) * stride + window.reach(dim) - padding))
        elif stride == 1:
            more.append(0)
        else:
            raise NoGradientError("it has strides along a dim of unknown size")
    attributes = dict(window.attributes)
    tail = [max(extra - stride + 1, 0) for extra, stride in zip(more, window.strides, strict=True)]
    # Output padding is less than the stride; what no window covers beyond that gets zeros.
    attributes["output_padding"] = tuple(extra - rest for extra, rest in zip(more, tail, strict=True))
    if not any(tail):
        return w.op("ConvTranspose", [g, kernel], attributes, type=x.type)
    made = w.op("ConvTranspose", [g, kernel], attributes)
    return w.pad(made, {dim + 2: (0, rest) for dim, rest in enumerate(tail)}, type=x.type)


def kernel_gradient(data: Value, g: Value, window: Window, kernel: Value, w: GradientWriter) -> Value:
    """For each weight the sum over batch and places of the gradient times the data that it met.

    Args:
        data: what windows slide over: [n, groups * c, places].
        g: [n, groups * m, windows].
        window: how.
        kernel: [groups * m, c, window].
        w: the writer.

    Raises:
        CannotTellError: the number of channels is not known.
    """
    if prod(window.kernel) > MOST_SHIFTS:
        return _by_convolution(data, g, window, kernel, w)
    groups, last = window.groups, len(w.dims(g)) - 1
    # What is summed over is made to stand last on the left and first on the right, and is one dim in memory: ONNX
    # Runtime moves blocks in a Transpose, and single elements in an Einsum.
    left = w.transpose(_columns(data, g, window, w), [1, 2, 0, *range(3, last + 2)])
    right = w.transpose(g, [0, *range(2, last + 1), 1])
    places = _LETTERS[: len(window.kernel)]
    if groups == 1:
        made = w.einsum([left, right], f"ckn{places},n{places}m->ckm")
        made = w.transpose(made, [2, 0, 1])
    else:
        left, right = _by_group(left, 0, groups, w), _by_group(right, last, groups, w)
        made = w.einsum([left, right], f"gckn{places},n{places}gm->gmck")
    return w.reshape(made, w.shape_of(kernel), kernel.type)


def _columns(data: Value, g: Value, window: Window, w: GradientWriter) -> Value:
    """For each channel and place of a window what lies there in each window: [n, channels, kernel, windows].

    The windows slide over the data itself, as those of the convolution do: what these fetch from neighbours where
    places are sharded is fetched once. Of the ways to copy, a Conv over whole windows is the fastest in ONNX Runtime,
    then one over the last dim alone, of what slices have laid out for the others, and slices for all are the slowest.
    """
    count, last = prod(window.kernel), len(window.kernel) - 1
    most = _affordable(data, g, window, w)
    if count > 1 and count <= most:
        return _copied(data, g, window, w)
    if last > 0 and 1 < window.kernel[last] <= most:
        rows = [data]
        for dim in range(last):
            rows = [each for value in rows for each in _shifted_along(value, g, window, dim, w, None)]
        stacked = w.op("Concat", [w.unsqueeze(each, [2]) for each in rows], {"axis": 2})
        sizes = [*((g, dim + 2) for dim in range(last)), (data, last + 2)]
        stacked = w.reshaped(stacked, [(data, 0), _known_channels(data, w) * len(rows), *sizes])
        made = _copied(stacked, g, window.along(last), w)
        return w.reshaped(made, [(data, 0), _known_channels(data, w), count, *_windows_of(g, w)])
    return w.op("Concat", [w.unsqueeze(each, [2]) for each in shifted(data, g, window, w)], {"axis": 2})


def _copied(data: Value, g: Value, window: Window, w: GradientWriter) -> Value:
    """`_columns` by a Conv whose kernels have a single one each."""
    channels, count = _known_channels(data, w), prod(window.kernel)
    one_each = np.eye(count).reshape(count, 1, *window.kernel)
    kernels = np.tile(one_each, (channels, *[1] * (len(window.kernel) + 1))).astype(data.dtype.numpy)
    attributes = replace(window, groups=channels).attributes
    made = w.op("Conv", [data, w.constant(kernels, "places")], attributes)
    return w.reshaped(made, [(data, 0), channels, count, *_windows_of(g, w)])


def _affordable(data: Value, g: Value, window: Window, w: GradientWriter) -> int:
    """How many places the windows of a Conv may have that copies; 0 where none can.

    It multiplies each of its results as often as its windows have places, and the gradient as often as a group has
    channels. Ranks that have a share of these channels each copy for all of them, so that it has to be little work.
    """
    outputs = w.dims(g)[1]
    if len(window.kernel) > 3 or not isinstance(w.dims(data)[1], int) or not isinstance(outputs, int):
        return 0
    for dim, (size, windows) in enumerate(zip(w.dims(data)[2:], w.dims(g)[2:], strict=True)):
        if not isinstance(size, int) or not isinstance(windows, int):
            return 0
        span = size + window.before[dim] + window.after[dim] - window.reach(dim)
        if span // window.strides[dim] + 1 != windows:
            return 0
    return outputs // window.groups // LEAST_CHANNELS


def _known_channels(value: Value, w: GradientWriter) -> int:
    channels = w.dims(value)[1]
    if not isinstance(channels, int):
        raise CannotTellError("the number of channels")
    return channels


def _windows_of(g: Value, w: GradientWriter) -> list[tuple[Value, int]]:
    return [(g, dim) for dim in range(2, len(w.dims(g)))]


def _by_group(value: Value, at: int, groups: int, w: GradientWriter) -> Value:
    """[..., g * c, ...] as [..., g, c, ...], of the dim `at`."""
    if groups == 1:
        return w.unsqueeze(value, [at])
    channels = w.dims(value)[at]
    if not isinstance(channels, int):
        raise CannotTellError("the number of channels")
    before = [(value, dim) for dim in range(at)]
    after = [(value, dim) for dim in range(at + 1, len(w.dims(value)))]
    return w.reshaped(value, [*before, groups, channels // groups, *after])


def shifted(data: Value, windows: Value, window: Window, w: GradientWriter, filler: Value | None = None) -> list[Value]:
    """For each place of a window, row-major, the data that lies there: of the size of the windows.

    Args:
        data: what the windows slide over.
        windows: has an element for each.
        window: how they slide.
        w: the writer.
        filler: what lies in the padding; None: zeros.
    """
    found = [data]
    for dim in range(len(window.kernel)):
        found = [each for value in found for each in _shifted_along(value, windows, window, dim, w, filler)]
    return found


def _shifted_along(
    value: Value, windows: Value, window: Window, dim: int, w: GradientWriter, filler: Value | None
) -> list[Value]:
    """The same along one dim: a Pad of which a side may take elements away, so that blocks stay aligned; with strides
    a Slice."""
    stride, axis = window.strides[dim], dim + 2
    size, count = w.dims(value)[axis], w.dims(windows)[axis]
    made = []
    for place in range(window.kernel[dim]):
        before = window.before[dim] - place * window.dilations[dim]
        if before == 0 and stride == 1 and size is not None and size == count:
            made.append(value)
            continue
        if isinstance(size, int) and isinstance(count, int):
            after = (count - 1) * stride + 1 - size - before
        else:
            after = window.after[dim] - (window.kernel[dim] - 1 - place) * window.dilations[dim]
        moved, type_ = value, value.tensor_type.with_shape(with_dim(w.dims(value), axis, count))
        if stride == 1:
            moved = w.pad(value, {axis: (before, after)}, filler)
        else:
            if max(before, after) > 0:
                moved = w.pad(value, {axis: (max(before, 0), max(after, 0))}, filler)
            start, end = max(-before, 0), min(after, 0) or 2**62
            moved = w.op("Slice", [moved, *(w.ints([number]) for number in (start, end, axis, stride))])
        moved.type = type_
        made.append(moved)
    return made


def _by_convolution(data: Value, g: Value, window: Window, kernel: Value, w: GradientWriter) -> Value:
    """The same for large windows: the gradient is the kernel, batch and channels change places, as do stride and
    dilation."""
    groups = window.groups
    inside = _by_group(data, 1, groups, w)
    rank = len(w.dims(inside))
    turned = w.transpose(inside, [2, 1, 0, *range(3, rank)])
    turned = w.reshaped(turned, [(turned, 0), -1, *((turned, dim) for dim in range(3, rank))])
    kernels = w.transpose(g, [1, 0, *range(2, rank - 1)])
    attributes = dict(window.attributes) | {"strides": window.dilations, "dilations": window.strides}
    made = w.op("Conv", [turned, kernels], attributes)
    axes = range(2, rank - 1)
    cut = w.op("Slice", [made, w.ints([0] * len(axes)), w.ints(window.kernel), w.ints(axes)])
    return w.reshape(w.transpose(cut, [1, 0, *axes]), w.shape_of(kernel), kernel.type)
