"""Normalisations and the Softmax family. Statistics of small floats are computed in float32."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .operands import (
    compute_dtype,
    contiguous_result,
    dtype_of,
    fitting,
    in_compute_dtype,
    is_float,
    mean_over,
    narrow,
    normalize_axis,
    one_of,
    widen,
    written,
)
from .pieces import row_pieces
from .registry import Array, ArrayModule, Shaped, kernel
from .scratch import SCRATCH, piece_bytes
from .temporaries import arrays_like


def _stash_dtype(x: Array, stash_type: int) -> np.dtype[Any]:
    """The dtype of the statistics: what `stash_type` names, but never less precise than x or float32."""
    stash = dtype_of(stash_type)
    if not is_float(stash):
        raise ValueError(f"attribute stash_type={stash_type} is not a floating-point type")
    return np.promote_types(compute_dtype(stash), compute_dtype(x.dtype))


def _last_axes(x: Array, axis: int) -> tuple[int, ...]:
    return tuple(range(normalize_axis(axis, x.ndim), x.ndim))


def _strided_bytes(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For an operand that does not lie in one piece, or in rows of it: what is computed on the way, as a whole."""
    x = operands[0]
    is_whole = x is not None and (x.is_strided or x.shape != results[0].shape)
    return 9 * results[0].elements * _itemsize(x) // 2 if is_whole else 0


def _training_bytes(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For the distance of each element from the mean, and its square, in training."""
    x = operands[0]
    return 2 * x.elements * _itemsize(x) if x is not None and attributes.get("training_mode") else 0


def _itemsize(x: Shaped | None) -> int:
    """Bytes of an element as it is computed."""
    return compute_dtype(np.dtype(np.float32) if x is None else x.dtype).itemsize


def _layer_bytes(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """As `_strided_bytes`, and for statistics that nobody asks for."""
    shape = results[0].shape
    rows = math.prod(shape[: normalize_axis(int(attributes.get("axis", -1)), len(shape))])
    return _strided_bytes(operands, results, attributes) + (3 - len(results)) * rows * _itemsize(operands[0])


@kernel("LayerNormalization", since=17, temporaries=_layer_bytes)
def layer_normalization(
    xp: ArrayModule,
    x: Array,
    scale: Array,
    bias: Array | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    outs: Sequence[Array | None] = (),
) -> tuple[Array, Array, Array]:
    """Zero mean and unit variance over the dims from `axis` on; gives y, mean, 1 / standard deviation."""
    axes, kind, statistics = _last_axes(x, axis), _stash_dtype(x, stash_type), dtype_of(stash_type)
    operands = widen(scale), None if bias is None else widen(bias)
    x = _in_order(xp, x)
    if not _is_by_rows(xp, x, np.broadcast_shapes(x.shape, scale.shape)):
        found = _layer_normalized(xp, x.astype(kind, copy=False), axes, *operands, epsilon)
        made = zip(found, (x.dtype, statistics, statistics), (*outs, None, None, None), strict=False)
        y, mean, inverse = (written(xp, narrow(array, dtype), out) for array, dtype, out in made)
        return y, mean, inverse
    y, mean, inverse = _results(x, axes, statistics, outs)
    tail = x.shape[axes[0] :]
    operand, result = x.reshape(-1, *tail), y.reshape(-1, *tail)
    means, inverses = (array.reshape(-1, *(1,) * len(tail)) for array in (mean, inverse))
    trailing = tuple(range(1, 1 + len(tail)))
    for piece in row_pieces(len(operand), math.prod(tail)):
        found = _layer_normalized(xp, operand[piece].astype(kind, copy=False), trailing, *operands, epsilon)
        result[piece], means[piece], inverses[piece] = found
    return y, mean, inverse


def _in_order(xp: ArrayModule, x: Array) -> Array:
    """x with its rows side by side, so that their sums do not depend on how it lies."""
    return np.ascontiguousarray(x) if xp.__name__ == "numpy" else x


def _is_by_rows(xp: ArrayModule, x: Array, shape: tuple[int, ...]) -> bool:
    """Whether rows of x, in order, can be normalised by themselves, in pieces; the result has a shape."""
    return xp.__name__ == "numpy" and bool(x.size) and x.shape == shape


def _layer_normalized(
    xp: ArrayModule, wide: Array, axes: tuple[int, ...], scale: Array, bias: Array | None, epsilon: float
) -> tuple[Array, Array, Array]:
    mean = mean_over(wide, axes)
    centred = wide - mean
    variance = mean_over(centred * centred, axes)
    inverse = 1 / xp.sqrt(variance + epsilon)
    y = centred * inverse * scale
    return y if bias is None else y + bias, mean, inverse


def _results(
    x: Array, axes: tuple[int, ...], statistics: "np.dtype[Any]", outs: Sequence[Array | None]
) -> tuple[Array, Array, Array]:
    """Where the results of a normalisation go: one like x, and two of one element for all that stand in some axes."""
    given = (*outs, None, None, None)
    small = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
    return (
        contiguous_result(given[0], x.shape, x.dtype),
        contiguous_result(given[1], small, statistics),
        contiguous_result(given[2], small, statistics),
    )


@kernel("RMSNormalization", since=23, temporaries=_strided_bytes)
def rms_normalization(
    xp: ArrayModule,
    x: Array,
    scale: Array,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    out: Array | None = None,
) -> Array:
    """Unit root mean square over the dims from `axis` on; the result has the scale's dtype."""
    axes, kind, wide_scale = _last_axes(x, axis), _stash_dtype(x, stash_type), widen(scale)
    x = _in_order(xp, x)
    if not _is_by_rows(xp, x, np.broadcast_shapes(x.shape, scale.shape)):
        return written(xp, narrow(_root_mean_normalized(xp, x, axes, wide_scale, epsilon, kind), scale.dtype), out)
    y, tail = contiguous_result(out, x.shape, scale.dtype), x.shape[axes[0] :]
    operand, result = x.reshape(-1, *tail), y.reshape(-1, *tail)
    trailing = tuple(range(1, 1 + len(tail)))
    for piece in row_pieces(len(operand), math.prod(tail)):
        result[piece] = _root_mean_normalized(xp, operand[piece], trailing, wide_scale, epsilon, kind)
    return y


def _root_mean_normalized(
    xp: ArrayModule, x: Array, axes: tuple[int, ...], scale: Array, epsilon: float, kind: "np.dtype[Any]"
) -> Array:
    wide = x.astype(kind, copy=False)
    normalized = narrow(wide / xp.sqrt(mean_over(wide * wide, axes) + epsilon), x.dtype)
    return widen(normalized) * scale


def _per_channel(x: Array, vector: Array) -> Array:
    """A vector over dim 1 of x, shaped to broadcast against x; a vector x is a batch of one channel."""
    channels = x.shape[1] if x.ndim > 1 else 1
    if vector.shape != (channels,):
        raise ValueError(f"expected one value for each of {channels} channels, not shape {vector.shape}")
    if x.ndim == 1:
        return widen(vector)
    return widen(vector).reshape((-1,) + (1,) * (x.ndim - 2))


@kernel("BatchNormalization", since=14, temporaries=_training_bytes)
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


def _standardized_rows(
    xp: ArrayModule, x: Array, rows: int, epsilon: float, dtype: "np.dtype[Any]", out: Array | None
) -> Array:
    """x with so many equal parts of it, one after the other, standardised each; in a dtype that it is computed in."""
    shape = (rows, x.size // max(1, rows))
    if xp.__name__ != "numpy":
        return _standardized(xp, x.reshape(shape).astype(dtype, copy=False), (1,), epsilon).reshape(x.shape)
    y = contiguous_result(out, x.shape, dtype)
    operand, result = np.ascontiguousarray(x).reshape(shape), y.reshape(shape)
    for piece in row_pieces(*shape):
        result[piece] = _standardized(xp, operand[piece].astype(dtype, copy=False), (1,), epsilon)
    return y


def _scaled(xp: ArrayModule, y: Array, scale: Array, bias: Array, out: Array | None, dtype: "np.dtype[Any]") -> Array:
    """y * scale + bias, over y where its dtype stays as it is, then in the dtype of the result."""
    y = xp.multiply(y, scale, out=y if scale.dtype == y.dtype else None)
    y = xp.add(y, bias, out=y if bias.dtype == y.dtype else None)
    return written(xp, narrow(y, dtype), out)


@kernel("InstanceNormalization", since=6, temporaries=_strided_bytes)
def instance_normalization(
    xp: ArrayModule, x: Array, scale: Array, bias: Array, *, epsilon: float = 1e-5, out: Array | None = None
) -> Array:
    """Standardise each channel of each instance."""
    y = _standardized_rows(xp, x, math.prod(x.shape[:2]), epsilon, compute_dtype(x.dtype), out)
    return _scaled(xp, y, _per_channel(x, scale), _per_channel(x, bias), out, x.dtype)


def _grouped(
    xp: ArrayModule, x: Array, num_groups: int, epsilon: float, dtype: "np.dtype[Any]", out: Array | None
) -> Array:
    """x standardised over each group of channels."""
    batch, channels = x.shape[:2]
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"attribute num_groups={num_groups} does not divide {channels} channels")
    return _standardized_rows(xp, x, batch * num_groups, epsilon, dtype, out)


@kernel("GroupNormalization", since=18, temporaries=_strided_bytes)
def group_normalization_by_group(
    xp: ArrayModule,
    x: Array,
    scale: Array,
    bias: Array,
    *,
    num_groups: int,
    epsilon: float = 1e-5,
    out: Array | None = None,
) -> Array:
    """Standardise groups of channels; scale and bias hold one value per group (before version 21)."""
    y = _grouped(xp, x, num_groups, epsilon, compute_dtype(x.dtype), out)
    y = y.reshape(len(x), num_groups, math.prod(x.shape[1:]) // num_groups)
    return _scaled(xp, y, _per_channel(y, scale), _per_channel(y, bias), None, x.dtype).reshape(x.shape)


@kernel("GroupNormalization", since=21, temporaries=_strided_bytes)
def group_normalization(
    xp: ArrayModule,
    x: Array,
    scale: Array,
    bias: Array,
    *,
    num_groups: int,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    out: Array | None = None,
) -> Array:
    """Standardise groups of channels; scale and bias hold one value per channel."""
    y = _grouped(xp, x, num_groups, epsilon, _stash_dtype(x, stash_type), out)
    return _scaled(xp, y, _per_channel(x, scale), _per_channel(x, bias), out, x.dtype)


@kernel("LpNormalization", since=1, temporaries=arrays_like(2))
@in_compute_dtype
def lp_normalization(xp: ArrayModule, x: Array, *, axis: int = -1, p: int = 2) -> Array:
    """Divide by the L1 or L2 norm along an axis; zeros where that norm is zero."""
    one_of("p", p, (1, 2))
    axis = normalize_axis(axis, x.ndim)
    norm = xp.abs(x).sum(axis=axis, keepdims=True) if p == 1 else xp.sqrt((x * x).sum(axis=axis, keepdims=True))
    return x / xp.where(norm == 0, xp.ones_like(norm), norm)


@kernel("MeanVarianceNormalization", since=9, temporaries=arrays_like(2.5))
@in_compute_dtype
def mean_variance_normalization(xp: ArrayModule, x: Array, *, axes: tuple[int, ...] = (0, 2, 3)) -> Array:
    """(x - mean) / (standard deviation + 1e-9) over the given axes."""
    centred = x - mean_over(x, axes)
    return centred / (xp.sqrt(mean_over(centred * centred, axes)) + 1e-9)


@kernel("LRN", since=1, temporaries=arrays_like(5.5))
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


def softmax_of(xp: ArrayModule, x: Array, axis: int, out: Array | None = None) -> Array:
    """Softmax of a float32 or float64 array along one axis, on request in an array like it."""
    if not x.size:
        return x.copy()
    e = xp.subtract(x, x.max(axis=axis, keepdims=True), out=_on_the_way(xp, x, out))
    xp.exp(e, out=e)
    return xp.divide(e, e.sum(axis=axis, keepdims=True), out=e if out is None else out)


def log_softmax_of(xp: ArrayModule, x: Array, axis: int, out: Array | None = None) -> Array:
    """Logarithm of softmax of a float32 or float64 array along one axis, on request in an array like it."""
    if not x.size:
        return x.copy()
    shifted = xp.subtract(x, x.max(axis=axis, keepdims=True), out=_on_the_way(xp, x, out))
    return xp.subtract(shifted, xp.log(_sum_of_exp(xp, shifted, axis)), out=shifted if out is None else out)


def _on_the_way(xp: ArrayModule, x: Array, out: Array | None) -> Array | None:
    """Where what is summed goes: NumPy's sums are in the order in which x lies."""
    if out is None or xp.__name__ != "numpy" or x.flags.c_contiguous:
        return out
    return SCRATCH.like("shifted", x)


def _sum_of_exp(xp: ArrayModule, x: Array, axis: int) -> Array:
    if xp.__name__ != "numpy":
        return xp.exp(x).sum(axis=axis, keepdims=True)
    if not x.flags.c_contiguous:
        return np.exp(x, out=SCRATCH.like("exp", x)).sum(axis=axis, keepdims=True)
    # Piece by piece over the dims before: each sum is that of the whole.
    before = x.reshape(-1, *x.shape[axis:])
    sums = np.empty((len(before), 1, *x.shape[axis + 1 :]), x.dtype)
    for piece in row_pieces(len(before), math.prod(x.shape[axis:])):
        sums[piece] = np.exp(before[piece]).sum(axis=1, keepdims=True)
    return sums.reshape(*x.shape[:axis], 1, *x.shape[axis + 1 :])


def softmax_scratch(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For an operand that does not lie in one piece: what is summed, in the operand's order, and its exponentials."""
    x = operands[0]
    if x is None or not x.is_strided:
        return 0
    return 2 * piece_bytes(x.elements, compute_dtype(x.dtype).itemsize)


def softmax_temporaries(
    operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any], axis: int = -1
) -> int:
    """For the greatest and the sums along the axis, exponentials of one piece, and operands that are computed wider."""
    x = operands[0]
    if x is None or not x.elements:
        return 0
    place = normalize_axis(int(attributes.get("axis", axis)), len(x.shape))
    elements = x.elements // math.prod(x.shape[:place]) + 3 * x.elements // x.shape[place]
    if compute_dtype(x.dtype) != x.dtype:
        elements += 3 * x.elements
    return elements * _itemsize(x)


def _hardmax_of(xp: ArrayModule, x: Array, axis: int, out: Array | None = None) -> Array:
    if not x.size:
        return written(xp, xp.zeros_like(x), out)
    first = xp.expand_dims(xp.argmax(x, axis=axis), axis)
    places = xp.arange(x.shape[axis]).reshape((-1,) + (1,) * (x.ndim - 1 - axis))
    return written(xp, (first == places).astype(x.dtype), out)


_SOFTMAX_FAMILY = {"Softmax": softmax_of, "LogSoftmax": log_softmax_of, "Hardmax": _hardmax_of}


def _register_softmax_family() -> None:
    for op_type, function in _SOFTMAX_FAMILY.items():
        _register_softmax(op_type, function)


def _register_softmax(op_type: str, function: Any) -> None:
    beside = arrays_like(2.5) if op_type == "Hardmax" else softmax_temporaries

    @kernel(op_type, since=13, scratch=softmax_scratch, temporaries=beside)
    def along_axis(xp: ArrayModule, x: Array, *, axis: int = -1, out: Array | None = None) -> Array:
        axis = normalize_axis(axis, x.ndim)
        return written(xp, narrow(function(xp, widen(x), axis, fitting(out, x.dtype, x)), x.dtype), out)

    @kernel(op_type, since=1, temporaries=arrays_like(2.5))
    def flattened(xp: ArrayModule, x: Array, *, axis: int = 1, out: Array | None = None) -> Array:
        # before version 13 all dims from `axis` on are normalised together
        axis = axis + x.ndim if axis < 0 else axis
        rows = math.prod(x.shape[:axis])
        y = function(xp, widen(x).reshape(rows, math.prod(x.shape[axis:])), 1)
        return written(xp, narrow(y, x.dtype).reshape(x.shape), out)


_register_softmax_family()
