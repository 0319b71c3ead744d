"""Normalisations and the Softmax family. Statistics of small floats are computed in float32."""

import math
from typing import Any

import numpy as np

from .operands import (
    compute_dtype,
    dtype_of,
    fitting,
    in_compute_dtype,
    is_float,
    mean_over,
    narrow,
    normalize_axis,
    one_of,
    widen,
)
from .registry import Array, ArrayModule, kernel


def _stash_dtype(x: Array, stash_type: int) -> np.dtype[Any]:
    """The dtype of the statistics: what `stash_type` names, but never less precise than x or float32."""
    stash = dtype_of(stash_type)
    if not is_float(stash):
        raise ValueError(f"attribute stash_type={stash_type} is not a floating-point type")
    return np.promote_types(compute_dtype(stash), compute_dtype(x.dtype))


def _last_axes(x: Array, axis: int) -> tuple[int, ...]:
    return tuple(range(normalize_axis(axis, x.ndim), x.ndim))


@kernel("LayerNormalization", since=17)
def layer_normalization(
    xp: ArrayModule,
    x: Array,
    scale: Array,
    bias: Array | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[Array, Array, Array]:
    """Zero mean and unit variance over the dims from `axis` on; gives y, mean, 1 / standard deviation."""
    axes = _last_axes(x, axis)
    wide = x.astype(_stash_dtype(x, stash_type), copy=False)
    mean = mean_over(wide, axes)
    centred = wide - mean
    variance = mean_over(centred * centred, axes)
    inverse = 1 / xp.sqrt(variance + epsilon)
    y = centred * inverse * widen(scale)
    if bias is not None:
        y = y + widen(bias)
    statistics = dtype_of(stash_type)
    return narrow(y, x.dtype), narrow(mean, statistics), narrow(inverse, statistics)


@kernel("RMSNormalization", since=23)
def rms_normalization(
    xp: ArrayModule, x: Array, scale: Array, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Array:
    """Unit root mean square over the dims from `axis` on; the result has the scale's dtype."""
    wide = x.astype(_stash_dtype(x, stash_type), copy=False)
    square = mean_over(wide * wide, _last_axes(x, axis))
    normalized = narrow(wide / xp.sqrt(square + epsilon), x.dtype)
    return narrow(widen(normalized) * widen(scale), scale.dtype)


def _per_channel(x: Array, vector: Array) -> Array:
    """A vector over dim 1 of x, shaped to broadcast against x; a vector x is a batch of one channel."""
    channels = x.shape[1] if x.ndim > 1 else 1
    if vector.shape != (channels,):
        raise ValueError(f"expected one value for each of {channels} channels, not shape {vector.shape}")
    if x.ndim == 1:
        return widen(vector)
    return widen(vector).reshape((-1,) + (1,) * (x.ndim - 2))


@kernel("BatchNormalization", since=14)
def batch_normalization(
    xp: ArrayModule,
    x: Array,
    scale: Array,
    bias: Array,
    mean: Array,
    variance: Array,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
    out: Array | None = None,
) -> tuple[Array, ...]:
    """Normalise each channel by running statistics, or by the batch's own (which then update the running ones)."""
    if not training_mode:
        return (_batch_normalized(xp, x, scale, bias, mean, variance, epsilon, out),)
    axes = tuple(axis for axis in range(x.ndim) if axis != 1)
    centred = widen(x) - mean_over(widen(x), axes)
    batch_mean, batch_variance = (mean_over(found, axes).reshape(-1) for found in (widen(x), centred * centred))
    y = _batch_normalized(xp, x, scale, bias, batch_mean, batch_variance, epsilon)
    new_mean = widen(mean) * momentum + batch_mean * (1 - momentum)
    new_variance = widen(variance) * momentum + batch_variance * (1 - momentum)
    return y, narrow(new_mean, mean.dtype), narrow(new_variance, variance.dtype)


@kernel("BatchNormalization", since=9)
def batch_normalization_inference(
    xp: ArrayModule,
    x: Array,
    scale: Array,
    bias: Array,
    mean: Array,
    variance: Array,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    out: Array | None = None,
) -> Array:
    """Normalise each channel by running statistics (before version 14 the results tell the mode; this is inference)."""
    return _batch_normalized(xp, x, scale, bias, mean, variance, epsilon, out)


def _batch_normalized(
    xp: ArrayModule,
    x: Array,
    scale: Array,
    bias: Array,
    mean: Array,
    variance: Array,
    epsilon: float,
    out: Array | None = None,
) -> Array:
    factor = _per_channel(x, scale) / xp.sqrt(_per_channel(x, variance) + epsilon)
    wide, mean = widen(x), _per_channel(x, mean)
    y = xp.subtract(wide, mean, out=fitting(out, x.dtype, wide, mean) if mean.dtype == x.dtype else None)
    y = xp.multiply(y, factor, out=y if factor.dtype == y.dtype else None)
    shift = _per_channel(x, bias)
    return narrow(xp.add(y, shift, out=y if shift.dtype == y.dtype else None), x.dtype)


def _standardized(xp: ArrayModule, wide: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    centred = wide - mean_over(wide, axes)
    return centred / xp.sqrt(mean_over(centred * centred, axes) + epsilon)


@kernel("InstanceNormalization", since=6)
def instance_normalization(xp: ArrayModule, x: Array, scale: Array, bias: Array, *, epsilon: float = 1e-5) -> Array:
    """Standardise each channel of each instance."""
    y = _standardized(xp, widen(x), tuple(range(2, x.ndim)), epsilon)
    return narrow(y * _per_channel(x, scale) + _per_channel(x, bias), x.dtype)


def _grouped(xp: ArrayModule, x: Array, num_groups: int, epsilon: float, dtype: np.dtype[Any]) -> Array:
    """x standardised over each group of channels, with shape (batch, groups, elements of a group)."""
    batch, channels = x.shape[:2]
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"attribute num_groups={num_groups} does not divide {channels} channels")
    length = math.prod(x.shape[1:]) // num_groups
    return _standardized(xp, x.reshape(batch, num_groups, length).astype(dtype, copy=False), (2,), epsilon)


@kernel("GroupNormalization", since=18)
def group_normalization_by_group(
    xp: ArrayModule, x: Array, scale: Array, bias: Array, *, num_groups: int, epsilon: float = 1e-5
) -> Array:
    """Standardise groups of channels; scale and bias hold one value per group (before version 21)."""
    y = _grouped(xp, x, num_groups, epsilon, compute_dtype(x.dtype))
    y = y * _per_channel(y, scale) + _per_channel(y, bias)
    return narrow(y.reshape(x.shape), x.dtype)


@kernel("GroupNormalization", since=21)
def group_normalization(
    xp: ArrayModule,
    x: Array,
    scale: Array,
    bias: Array,
    *,
    num_groups: int,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Array:
    """Standardise groups of channels; scale and bias hold one value per channel."""
    y = _grouped(xp, x, num_groups, epsilon, _stash_dtype(x, stash_type)).reshape(x.shape)
    return narrow(y * _per_channel(x, scale) + _per_channel(x, bias), x.dtype)


@kernel("LpNormalization", since=1)
@in_compute_dtype
def lp_normalization(xp: ArrayModule, x: Array, *, axis: int = -1, p: int = 2) -> Array:
    """Divide by the L1 or L2 norm along an axis; zeros where that norm is zero."""
    one_of("p", p, (1, 2))
    axis = normalize_axis(axis, x.ndim)
    norm = xp.abs(x).sum(axis=axis, keepdims=True) if p == 1 else xp.sqrt((x * x).sum(axis=axis, keepdims=True))
    return x / xp.where(norm == 0, xp.ones_like(norm), norm)


@kernel("MeanVarianceNormalization", since=9)
@in_compute_dtype
def mean_variance_normalization(xp: ArrayModule, x: Array, *, axes: tuple[int, ...] = (0, 2, 3)) -> Array:
    """(x - mean) / (standard deviation + 1e-9) over the given axes."""
    centred = x - mean_over(x, axes)
    return centred / (xp.sqrt(mean_over(centred * centred, axes)) + 1e-9)


@kernel("LRN", since=1)
@in_compute_dtype
def local_response_normalization(
    xp: ArrayModule, x: Array, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0
) -> Array:
    """Divide by a power of the mean square over `size` neighbouring channels."""
    before, channels = (size - 1) // 2, x.shape[1]
    padded = xp.zeros((x.shape[0], channels + size - 1, *x.shape[2:]), dtype=x.dtype)
    padded[:, before : before + channels] = x * x
    sums = sum(padded[:, offset : offset + channels] for offset in range(size))
    return x / (bias + (alpha / size) * sums) ** beta


def softmax_of(xp: ArrayModule, x: Array, axis: int) -> Array:
    """Softmax of a float32 or float64 array along one axis."""
    if not x.shape[axis]:
        return x
    e = xp.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def log_softmax_of(xp: ArrayModule, x: Array, axis: int) -> Array:
    """Logarithm of softmax of a float32 or float64 array along one axis."""
    if not x.shape[axis]:
        return x
    shifted = x - x.max(axis=axis, keepdims=True)
    return shifted - xp.log(xp.exp(shifted).sum(axis=axis, keepdims=True))


def _hardmax_of(xp: ArrayModule, x: Array, axis: int) -> Array:
    first = xp.expand_dims(xp.argmax(x, axis=axis), axis)
    places = xp.arange(x.shape[axis]).reshape((-1,) + (1,) * (x.ndim - 1 - axis))
    return (first == places).astype(x.dtype)


_SOFTMAX_FAMILY = {"Softmax": softmax_of, "LogSoftmax": log_softmax_of, "Hardmax": _hardmax_of}


def _register_softmax_family() -> None:
    for op_type, function in _SOFTMAX_FAMILY.items():
        _register_softmax(op_type, function)


def _register_softmax(op_type: str, function: Any) -> None:
    @kernel(op_type, since=13)
    @in_compute_dtype
    def along_axis(xp: ArrayModule, x: Array, *, axis: int = -1) -> Array:
        return function(xp, x, normalize_axis(axis, x.ndim))

    @kernel(op_type, since=1)
    @in_compute_dtype
    def flattened(xp: ArrayModule, x: Array, *, axis: int = 1) -> Array:
        # before version 13 all dims from `axis` on are normalised together
        axis = axis + x.ndim if axis < 0 else axis
        rows = math.prod(x.shape[:axis])
        return function(xp, x.reshape(rows, math.prod(x.shape[axis:])), 1).reshape(x.shape)


_register_softmax_family()
