"""Gradients of Softmax and its kin, and of normalisations.

Of y = xhat * scale + bias with xhat = (x - mean) / deviation: with gs = dy * scale the gradient of x is
(gs - mean(gs) - xhat * mean(gs * xhat)) / deviation (Ioffe and Szegedy, 2015, section 3; Ba et al., 2016).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from irpar.ir import DType, Node, TensorType, Value

from ..facts import CannotTellError, axis_attribute, float_attribute, int_attribute, ints_attribute, needed, operand
from .writer import GradientWriter, NoGradientError, Of, safe_result


def _gradient(of: Of) -> Value:
    g = of[0]
    assert g is not None
    return g


# -- along one axis -------------------------------------------------------------------------------------------------


def of_softmax(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """y * (g - sum(g * y))."""
    g, y = _gradient(of), safe_result(node)
    axis = axis_attribute(node, len(w.dims(y)), -1)
    return w.each(lambda: w.mul(y, w.sub(g, w.sum(w.mul(g, y), [axis]))))


def of_log_softmax(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """g - exp(y) * sum(g)."""
    g, y = _gradient(of), safe_result(node)
    axis = axis_attribute(node, len(w.dims(y)), -1)
    return w.each(lambda: w.sub(g, w.mul(w.op("Exp", [y]), w.sum(g, [axis]))))


def of_lp_norm(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """(g - d * sum(g * y)) / norm, with d = y for p = 2 and sign(x) for p = 1; nothing where the norm is 0."""
    x, y, g = (w.widened(value) for value in (needed(node, 0), node.result, _gradient(of)))
    axis = axis_attribute(node, len(w.dims(x)), -1)

    def data() -> Value:
        is_one = int_attribute(node, "p", 2) == 1
        size = w.op("Abs", [x]) if is_one else w.mul(x, x)
        norm = w.sum(size, [axis])
        norm = norm if is_one else w.op("Sqrt", [norm])
        is_zero = w.compare("Equal", norm, 0)
        slope = w.op("Sign", [x]) if is_one else y
        bent = w.sub(g, w.mul(slope, w.sum(w.mul(g, y), [axis])))
        return w.cast(w.where(is_zero, 0.0, w.div(bent, w.where(is_zero, 1.0, norm))), needed(node, 0).dtype)

    return w.each(data)


# -- statistics -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Normalised:
    """What a normalisation has made of its operand.

    Attributes:
        hat: the normalised operand, before scale and bias.
        inverse: one over the deviation, its dims of size 1 where statistics were taken.
        axes: over which.
        is_centred: whether the mean was taken away.
    """

    hat: Value
    inverse: Value
    axes: Sequence[int]
    is_centred: bool = True

    def gradient(self, of_hat: Value, w: GradientWriter) -> Value:
        """The gradient of the operand, given that of `hat`; linear in it."""
        made = of_hat
        if self.is_centred:
            made = w.sub(made, _mean(of_hat, self.axes, w))
        made = w.sub(made, w.mul(self.hat, _mean(w.mul(of_hat, self.hat), self.axes, w)))
        return w.mul(made, self.inverse)


def _mean(value: Value, axes: Sequence[int], w: GradientWriter) -> Value:
    return w.op("ReduceMean", [value, w.ints(axes)], {"keepdims": 1})


def normalised(x: Value, axes: Sequence[int], epsilon: float, w: GradientWriter, is_centred: bool = True) -> Normalised:
    """The statistics of a value, computed anew."""
    centred = w.sub(x, _mean(x, axes, w)) if is_centred else x
    variance = _mean(w.mul(centred, centred), axes, w)
    inverse = w.op("Reciprocal", [w.op("Sqrt", [w.add(variance, epsilon)])])
    return Normalised(w.mul(centred, inverse), inverse, axes, is_centred)


def of_layer_norm(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Of the operand, and the sums of dy * xhat and of dy over what scale and bias were repeated along."""
    x, scale, bias = needed(node, 0), needed(node, 1), operand(node, 2)
    rank = len(w.dims(x))
    axes = range(axis_attribute(node, rank, -1), rank)
    found = _layer_statistics(node, x, axes, w)
    g = None if of[0] is None else w.widened(of[0])

    def data() -> Value:
        total = None
        if g is not None:
            total = found.gradient(w.mul(g, w.widened(scale)), w)
        for extra in _of_statistics(node, of, found, w):
            total = extra if total is None else w.add(total, extra)
        assert total is not None
        return w.cast(total, x.dtype)

    return w.each(
        data,
        None if g is None else lambda: w.cast(w.sum_to(w.mul(g, found.hat), scale), scale.dtype),
        None if g is None or bias is None else lambda: w.cast(w.sum_to(g, bias), bias.dtype),
    )


def _layer_statistics(node: Node, x: Value, axes: Sequence[int], w: GradientWriter) -> Normalised:
    """The mean and deviation that a LayerNormalization gives; of float64, which it gives as float32, computed anew."""
    if x.dtype is DType.F64 or int_attribute(node, "stash_type", 1) != DType.F32.value:
        return normalised(x, axes, float_attribute(node, "epsilon", 1e-5), w)
    dims = w.dims(x)
    while len(node.results) < 3:
        type_ = TensorType(DType.F32, (*dims[: axes[0]], *[1] * len(axes)))
        node.add_result(Value(("mean", "inverse_deviation")[len(node.results) - 1], type_))
    mean, inverse = node.results[1:]
    return Normalised(w.mul(w.sub(w.widened(x), mean), inverse), inverse, axes)


def _of_statistics(node: Node, of: Of, found: Normalised, w: GradientWriter) -> list[Value]:
    """What flows back through the mean and the inverse deviation where these are results of the model."""
    x = needed(node, 0)
    parts = []
    if len(of) > 1 and of[1] is not None:
        share = w.cast(of[1], found.hat.dtype)
        parts.append(_shared(share, x, found.axes, w))
    if len(of) > 2 and of[2] is not None:
        square = w.mul(found.inverse, found.inverse)
        slope = w.neg(w.mul(w.cast(of[2], found.hat.dtype), square))
        parts.append(w.mul(found.hat, _shared(slope, x, found.axes, w)))
    return parts


def _shared(value: Value, x: Value, axes: Sequence[int], w: GradientWriter) -> Value:
    """A value divided by the number of elements that made it, repeated to all of these."""
    sizes = [w.dims(x)[axis] for axis in axes]
    count = 1
    for size in sizes:
        if not isinstance(size, int):
            raise CannotTellError("the size of what is normalised")
        count *= size
    return w.op("Expand", [w.div(value, count), w.shape_of(x)])


def of_rms_norm(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """As LayerNormalization, without a mean."""
    x, scale, g = needed(node, 0), needed(node, 1), w.widened(_gradient(of))
    rank = len(w.dims(x))
    axes = range(axis_attribute(node, rank, -1), rank)
    found = normalised(w.widened(x), axes, float_attribute(node, "epsilon", 1e-5), w, is_centred=False)
    return w.each(
        lambda: w.cast(found.gradient(w.mul(g, w.widened(scale)), w), x.dtype),
        lambda: w.cast(w.sum_to(w.mul(g, found.hat), scale), scale.dtype),
    )


def of_mean_variance(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """(x - mean) / (deviation + 1e-9): nothing is repaired where the deviation is 0."""
    x, g = w.widened(needed(node, 0)), w.widened(_gradient(of))
    axes = [axis % len(w.dims(x)) for axis in ints_attribute(node, "axes") or (0, 2, 3)]

    def data() -> Value:
        centred = w.sub(x, _mean(x, axes, w))
        deviation = w.op("Sqrt", [_mean(w.mul(centred, centred), axes, w)])
        inverse = w.op("Reciprocal", [w.add(deviation, 1e-9)])
        along = w.div(w.mul(_mean(w.mul(g, centred), axes, w), w.mul(inverse, inverse)), deviation)
        straight = w.sub(w.mul(g, inverse), w.mul(centred, along))
        return w.cast(w.sub(straight, _mean(straight, axes, w)), needed(node, 0).dtype)

    return w.each(data)


def of_lrn(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """y = x * s^-beta, s = bias + alpha / size * (sum of squares of neighbouring channels)."""
    x, g = w.widened(needed(node, 0)), w.widened(_gradient(of))
    size = int_attribute(node, "size")
    alpha, beta = float_attribute(node, "alpha", 1e-4), float_attribute(node, "beta", 0.75)

    def data() -> Value:
        before = (size - 1) // 2
        scale = w.add(w.mul(_window(w.mul(x, x), before, size, w), alpha / size), float_attribute(node, "bias", 1.0))
        power = w.op("Pow", [scale, w.number(-beta, x)])
        inner = w.div(w.mul(w.mul(g, x), power), scale)
        around = _window(inner, size - 1 - before, size, w)
        made = w.sub(w.mul(g, power), w.mul(w.mul(x, around), 2 * alpha * beta / size))
        return w.cast(made, needed(node, 0).dtype)

    return w.each(data)


def _window(value: Value, before: int, size: int, w: GradientWriter) -> Value:
    """The sum of `size` neighbours along dim 1, of which `before` stand before each."""
    padded = w.pad(value, {1: (before, size - 1 - before)})
    total = None
    for start in range(size):
        end = w.ints([start + 1 - size if start + 1 < size else 2**62])
        part = w.op("Slice", [padded, w.ints([start]), end, w.ints([1])], type=value.type)
        total = part if total is None else w.add(total, part)
    assert total is not None
    return total


# -- images: (batch, channels, ...) ---------------------------------------------------------------------------------


def _per_channel(value: Value, rank: int, w: GradientWriter) -> Value:
    """A vector of channels as it broadcasts to images."""
    return w.unsqueeze(value, range(1, rank - 1))


def _sum_channels(value: Value, like: Value, w: GradientWriter) -> Value:
    """The sum over all dims but the channels."""
    axes = [dim for dim in range(len(w.dims(value))) if dim != 1]
    return w.cast(w.sum(value, axes, keep=False), like.dtype)


def of_instance_norm(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """As LayerNormalization, over the places of each channel."""
    x, scale, bias, g = needed(node, 0), needed(node, 1), needed(node, 2), w.widened(_gradient(of))
    rank = len(w.dims(x))
    found = normalised(w.widened(x), range(2, rank), float_attribute(node, "epsilon", 1e-5), w)
    factor = _per_channel(w.widened(scale), rank, w)
    return w.each(
        lambda: w.cast(found.gradient(w.mul(g, factor), w), x.dtype),
        lambda: _sum_channels(w.mul(g, found.hat), scale, w),
        lambda: _sum_channels(g, bias, w),
    )


def of_group_norm(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """As LayerNormalization, over the channels of a group and their places."""
    x, scale, bias, g = needed(node, 0), needed(node, 1), needed(node, 2), w.widened(_gradient(of))
    rank, groups = len(w.dims(x)), int_attribute(node, "num_groups")
    channels = w.dims(x)[1]
    if not isinstance(channels, int):
        raise CannotTellError("the number of channels")
    per_group = node.version < 21

    def grouped(value: Value) -> Value:
        places = [(value, dim) for dim in range(2, rank)]
        return w.reshaped(value, [(value, 0), groups, channels // groups, *places])

    split, g5 = grouped(w.widened(x)), grouped(g)
    factor = w.widened(scale)
    factor = w.unsqueeze(factor, range(1, rank)) if per_group else w.reshape(factor, [groups, -1, *[1] * (rank - 2)])
    found = normalised(split, range(2, rank + 1), float_attribute(node, "epsilon", 1e-5), w)

    def summed(value: Value, like: Value) -> Value:
        axes = [0, *range(2 if per_group else 3, rank + 1)]
        total = w.sum(value, axes, keep=False)
        return w.cast(total if per_group else w.reshape(total, [-1]), like.dtype)

    return w.each(
        lambda: w.cast(w.shaped_as(found.gradient(w.mul(g5, factor), w), x), x.dtype),
        lambda: summed(w.mul(g5, found.hat), scale),
        lambda: summed(g5, bias),
    )


def _count(x: Value, axes: Sequence[int], w: GradientWriter) -> float | Value:
    """The number of elements along axes; a value where a size is not known."""
    sizes = [w.dims(x)[axis] for axis in axes]
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) == len(sizes):
        return float(prod(known))
    return w.op("ReduceProd", [w.op("Concat", [w.size_of(x, axis) for axis in axes], {"axis": 0})], {"keepdims": 0})


def of_batch_norm(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """In inference by given statistics; in training through those of the batch, and through the running ones."""
    if int_attribute(node, "training_mode", 0):
        return _of_batch_norm_training(node, of, w)
    x, scale, bias, mean, variance = (needed(node, index) for index in range(5))
    g = w.widened(_gradient(of))
    rank = len(w.dims(x))
    deviation = w.op("Sqrt", [w.add(w.widened(variance), float_attribute(node, "epsilon", 1e-5))])
    inverse = w.op("Reciprocal", [deviation])
    factor = w.mul(w.widened(scale), inverse)

    def along_x() -> Value:
        centred = w.sub(w.widened(x), _per_channel(w.widened(mean), rank, w))
        return w.sum(w.mul(g, centred), [dim for dim in range(rank) if dim != 1], keep=False)

    def of_variance() -> Value:
        slope = w.mul(w.mul(factor, w.mul(inverse, inverse)), -0.5)
        return w.cast(w.mul(along_x(), slope), variance.dtype)

    return w.each(
        lambda: w.cast(w.mul(g, _per_channel(factor, rank, w)), x.dtype),
        lambda: w.cast(w.mul(along_x(), inverse), scale.dtype),
        lambda: _sum_channels(g, bias, w),
        lambda: w.cast(w.neg(w.mul(_sum_channels(g, factor, w), factor)), mean.dtype),
        of_variance,
    )


def _of_batch_norm_training(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """As LayerNormalization, over batch and places.

    running = old * momentum + batch * (1 - momentum): each gets its share of a running statistic's gradient.
    """
    x, scale, bias, mean, variance = (needed(node, index) for index in range(5))
    if node.version < 14:
        raise NoGradientError(f"its training mode of opset {node.version} is another one")
    rank, momentum = len(w.dims(x)), float_attribute(node, "momentum", 0.9)
    axes = [dim for dim in range(rank) if dim != 1]
    found = normalised(w.widened(x), axes, float_attribute(node, "epsilon", 1e-5), w)
    g = None if of[0] is None else w.widened(of[0])
    of_mean, of_variance = (of[index] if len(of) > index else None for index in (1, 2))
    # What scale and bias get is summed over what the means of the data's gradient are taken: each is found once.
    of_bias = None if g is None else w.sum(g, axes, keep=False)
    of_scale = None if g is None else w.sum(w.mul(g, found.hat), axes, keep=False)

    def data() -> Value:
        parts = []
        if g is not None and of_bias is not None and of_scale is not None:
            count = _count(x, axes, w)
            made = w.sub(g, _per_channel(w.share(of_bias, count), rank, w))
            made = w.sub(made, w.mul(found.hat, _per_channel(w.share(of_scale, count), rank, w)))
            parts.append(w.mul(made, w.mul(found.inverse, _per_channel(w.widened(scale), rank, w))))
        if of_mean is not None:
            share = _per_channel(w.mul(w.cast(of_mean, found.hat.dtype), 1 - momentum), rank, w)
            parts.append(_shared(share, x, axes, w))
        if of_variance is not None:
            share = _per_channel(w.mul(w.cast(of_variance, found.hat.dtype), 2 * (1 - momentum)), rank, w)
            parts.append(w.mul(w.div(found.hat, found.inverse), _shared(share, x, axes, w)))
        total = parts[0]
        for part in parts[1:]:
            total = w.add(total, part)
        return w.cast(total, x.dtype)

    return w.each(
        data,
        None if of_scale is None else lambda: w.cast(of_scale, scale.dtype),
        None if of_bias is None else lambda: w.cast(of_bias, bias.dtype),
        None if of_mean is None else lambda: w.cast(w.mul(of_mean, momentum), mean.dtype),
        None if of_variance is None else lambda: w.cast(w.mul(of_variance, momentum), variance.dtype),
    )
