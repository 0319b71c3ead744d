"""Images whose channels are their last dim: convolutions with what follows on their sums, pools, groups of channels."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .activation import sigmoid_of
from .channelwise import WEIGHT
from .columns import scratch_bytes as columns_bytes
from .convolution import convolved
from .operands import check_same_dtype, compute_dtype, contiguous_result, mean_over, one_of, widen, written
from .pooling import average_pool, max_pool
from .registry import Array, ArrayModule, Kept, Shaped, kernel
from .windows import Windows

Ints = tuple[int, ...]

ACTIVATIONS: dict[str, Callable[[ArrayModule, Array, float, float], Array]] = {
    "": lambda xp, x, low, high: x,
    "Relu": lambda xp, x, low, high: xp.maximum(x, x.dtype.type(0)),
    "Clip": lambda xp, x, low, high: xp.minimum(xp.maximum(x, x.dtype.type(low)), x.dtype.type(high)),
    "Sigmoid": lambda xp, x, low, high: sigmoid_of(xp, x),
    "HardSwish": lambda xp, x, low, high: x * xp.clip(x / 6 + 0.5, 0, 1),
    "Silu": lambda xp, x, low, high: x * sigmoid_of(xp, x),
}
"""What may follow on sums, given the bounds of Clip."""


def first(shape: Ints) -> Ints:
    """A shape with channels behind the batch: (n, h, w, c) is (n, c, h, w)."""
    return (shape[0], shape[-1], *shape[1:-1])


def windows_of(
    x: Ints,
    weight: Ints,
    group: int,
    kernel_shape: Ints | None,
    strides: Ints | None,
    dilations: Ints | None,
    pads: Ints | None,
) -> Windows:
    """The windows of a convolution of operands of some shapes.

    Raises:
        ValueError: the operands do not fit each other, or the attributes.
    """
    if not 3 <= len(x) == len(weight) or x[-1] != weight[-1] * group or weight[0] % group:
        raise ValueError(f"{group} groups of a kernel {list(weight)} do not fit an image {list(x)}")
    if kernel_shape is not None and tuple(kernel_shape) != weight[1:-1]:
        raise ValueError(f"attribute kernel_shape={kernel_shape} is not the kernel's {weight[1:-1]}")
    return Windows.over(x[1:-1], weight[1:-1], strides=strides, dilations=dilations, pads=pads, auto_pad="NOTSET")


def check_addends(bias: Array | None, residual: Array | None, shape: Ints) -> None:
    """Raise ValueError unless a bias has the features of a result of some shape, and a residual its shape."""
    if bias is not None and bias.shape != shape[-1:]:
        raise ValueError(f"a bias {list(bias.shape)} does not fit a result {list(shape)}")
    if residual is not None and residual.shape != shape:
        raise ValueError(f"a residual {list(residual.shape)} does not fit a result {list(shape)}")


def _scratch_bytes(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For columns."""
    x, weight = operands[0], operands[WEIGHT]
    if x is None or weight is None:
        return 0
    geometry: dict[str, Any] = {name: attributes.get(name) for name in ("kernel_shape", "strides", "dilations", "pads")}
    group = int(attributes.get("group", 1))
    windows = windows_of(x.shape, weight.shape, group, **geometry)
    return columns_bytes(first(x.shape), first(weight.shape), group, windows, compute_dtype(x.dtype).itemsize)


@kernel("ConvChannelsLast", since=1, domain="irpar", scratch=_scratch_bytes)
def conv_channels_last(
    xp: ArrayModule,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    *,
    activation: str = "",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    max: float = math.inf,
    min: float = -math.inf,
    pads: Ints | None = None,
    strides: Ints | None = None,
    out: Array | None = None,
) -> Array:
    """activation(convolution + bias + residual), rounded once: of x (batch, *spatial, channels), like the residual.

    The weight is (features, *kernel, channels of a group).
    """
    one_of("activation", activation, ACTIVATIONS)
    check_same_dtype(x, weight, bias, residual)
    windows = windows_of(x.shape, weight.shape, group, kernel_shape, strides, dilations, pads)
    shape = (len(x), *windows.counts, len(weight))
    check_addends(bias, residual, shape)
    sums = convolved(xp, xp.moveaxis(x, -1, 1), xp.moveaxis(weight, -1, 1), group, windows, Kept())
    y = xp.moveaxis(sums, 1, -1)
    for addend in (bias, residual):
        if addend is not None:
            y += widen(addend)
    result = contiguous_result(out, shape, x.dtype, xp)
    result[...] = ACTIVATIONS[activation](xp, y, min, max)
    return result


@kernel("PoolChannelsLast", since=1, domain="irpar")
def pool_channels_last(
    xp: ArrayModule,
    x: Array,
    *,
    mode: str,
    kernel_shape: Ints,
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
    out: Array | None = None,
) -> Array:
    """The greatest or the mean element of each window of x (batch, *spatial, channels), as MaxPool and AveragePool."""
    one_of("mode", mode, ("max", "average"))
    geometry = {"ceil_mode": ceil_mode, "dilations": dilations, "pads": pads, "strides": strides}
    images = xp.moveaxis(x, -1, 1)
    if mode == "max":
        (y,) = max_pool(xp, images, kernel_shape=kernel_shape, n_outputs=1, **geometry)
    else:
        y = average_pool(xp, images, kernel_shape=kernel_shape, count_include_pad=count_include_pad, **geometry)
    return written(xp, xp.moveaxis(y, 1, -1), out)


@kernel("GroupNormChannelsLast", since=1, domain="irpar")
def group_norm_channels_last(
    xp: ArrayModule,
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    num_groups: int,
    activation: str = "",
    epsilon: float = 1e-5,
    max: float = math.inf,
    min: float = -math.inf,
    out: Array | None = None,
) -> Array:
    """activation(standardised * scale + bias), rounded once, of groups of channels of x (batch, *spatial, channels)."""
    one_of("activation", activation, ACTIVATIONS)
    check_same_dtype(x, scale, bias)
    channels = x.shape[-1]
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"{channels} channels do not divide into {num_groups} groups")
    wide = widen(x).reshape(len(x), math.prod(x.shape[1:-1]), num_groups, channels // num_groups)
    centered = wide - mean_over(wide, (1, 3))
    variance = mean_over(centered * centered, (1, 3))
    y = (centered / xp.sqrt(variance + variance.dtype.type(epsilon))).reshape(x.shape)
    y = y if scale is None else y * widen(scale)
    y = y if bias is None else y + widen(bias)
    result = contiguous_result(out, x.shape, x.dtype, xp)
    result[...] = ACTIVATIONS[activation](xp, y, min, max)
    return result
