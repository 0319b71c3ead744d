"""Reductions; axes are an attribute in older versions, an operand in newer ones. Small floats are summed in float32."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from .operands import is_float, is_integer, narrow, normalize_axes, to_ints, widen
from .registry import Array, ArrayModule, HostArray, register

Axes = tuple[int, ...]
Reducer = Callable[[ArrayModule, Array, Axes, bool], Array]


def total(xp: ArrayModule, x: Array, axes: Axes, keepdims: bool) -> Array:
    """Sum in the dtype of x (NumPy would widen small integers).

    In the order of a contiguous array: NumPy's own is that of the strides, so that rounding would tell how x was made.
    """
    if is_float(x.dtype) and x.ndim:
        x = xp.ascontiguousarray(x)
    return xp.sum(x, axis=axes, keepdims=keepdims, dtype=x.dtype)


def _product(xp: ArrayModule, x: Array, axes: Axes, keepdims: bool) -> Array:
    return xp.prod(x, axis=axes, keepdims=keepdims, dtype=x.dtype)


def _mean(xp: ArrayModule, x: Array, axes: Axes, keepdims: bool) -> Array:
    return total(xp, x, axes, keepdims) / x.dtype.type(_count(x, axes))


def _l1(xp: ArrayModule, x: Array, axes: Axes, keepdims: bool) -> Array:
    return total(xp, xp.abs(x), axes, keepdims)


def _l2(xp: ArrayModule, x: Array, axes: Axes, keepdims: bool) -> Array:
    return xp.sqrt(total(xp, x * x, axes, keepdims))


def _sum_square(xp: ArrayModule, x: Array, axes: Axes, keepdims: bool) -> Array:
    return total(xp, x * x, axes, keepdims)


def _log_sum(xp: ArrayModule, x: Array, axes: Axes, keepdims: bool) -> Array:
    return xp.log(total(xp, x, axes, keepdims))


def log_sum_exp(xp: ArrayModule, x: Array, axes: Axes, keepdims: bool) -> Array:
    """log(sum(exp(x))), shifted by the greatest element so that nothing overflows."""
    peak = _max(xp, x, axes, True)
    peak = xp.where(xp.isfinite(peak), peak, xp.zeros_like(peak))
    result = xp.log(total(xp, xp.exp(x - peak), axes, True)) + peak
    return result if keepdims else xp.squeeze(result, axis=axes)


def _whole_log_sum_exp(xp: ArrayModule, x: Array, axes: Axes, keepdims: bool) -> Array:
    """Of integers: ONNX Runtime adds up exp(x - peak) as integers, so that only the greatest elements count."""
    peak = _max(xp, x, axes, True)
    result = xp.log(total(xp, (x == peak).astype(x.dtype), axes, True)) + peak
    return result if keepdims else xp.squeeze(result, axis=axes)


def _extreme(name: str, least: bool) -> Reducer:
    def reduce(xp: ArrayModule, x: Array, axes: Axes, keepdims: bool) -> Array:
        if _count(x, axes):
            return getattr(xp, name)(x, axis=axes, keepdims=keepdims)
        # over no elements: the identity, which array modules refuse to give
        shape = [1 if d in axes else n for d, n in enumerate(x.shape) if keepdims or d not in axes]
        return xp.full(shape, identity_of(x.dtype, least), dtype=x.dtype)

    return reduce


def identity_of(dtype: np.dtype[Any], least: bool) -> Any:
    """What a maximum (least=True) or a minimum (least=False) over no elements is."""
    if dtype.kind == "b":
        return not least
    if is_float(dtype):
        return -np.inf if least else np.inf
    limits = ml_dtypes.iinfo(dtype)
    return limits.min if least else limits.max


def _count(x: Array, axes: Axes) -> int:
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    return count


_max = _extreme("max", least=True)
_min = _extreme("min", least=False)

# ONNX name -> (the version that made axes an operand, reducer)
_REDUCERS: dict[str, tuple[int, Reducer]] = {
    "ReduceSum": (13, total),
    "ReduceMean": (18, _mean),
    "ReduceMax": (18, _max),
    "ReduceMin": (18, _min),
    "ReduceProd": (18, _product),
    "ReduceL1": (18, _l1),
    "ReduceL2": (18, _l2),
    "ReduceSumSquare": (18, _sum_square),
    "ReduceLogSum": (18, _log_sum),
    "ReduceLogSumExp": (18, log_sum_exp),
}


def _reduce(xp: ArrayModule, reducer: Reducer, x: Array, axes: Axes, keepdims: int) -> Array:
    axes = normalize_axes(axes, x.ndim)
    if not is_integer(x.dtype) or reducer in (_max, _min):
        return narrow(xp.asarray(reducer(xp, widen(x), axes, bool(keepdims))), x.dtype)
    # As ONNX Runtime has it: in double precision, and no further than the type goes.
    if reducer is log_sum_exp:
        reducer = _whole_log_sum_exp
    result = reducer(xp, x.astype(np.float64), axes, bool(keepdims))
    return _as_integers(xp, xp.asarray(result), x.dtype)


def _as_integers(xp: ArrayModule, x: Array, dtype: np.dtype[Any]) -> Array:
    """Numbers of double precision without their fractions; beyond the dtype its bounds, for NaN the lower."""
    limits = ml_dtypes.iinfo(dtype)
    least, most = int(limits.min), int(limits.max)
    beyond = float(most) + (most < 2**53)  # A power of 2; beside it the doubles are not all integers that fit.
    inside = xp.where(x >= least, xp.minimum(x, np.nextafter(beyond, 0)), least).astype(dtype)
    return xp.where(x >= beyond, dtype.type(most), inside)


def _by_attribute(reducer: Reducer) -> Callable[..., Array]:
    def reduce(xp: ArrayModule, x: Array, *, axes: Axes | None = None, keepdims: int = 1) -> Array:
        return _reduce(xp, reducer, x, axes or tuple(range(x.ndim)), keepdims)

    return reduce


def _by_operand(reducer: Reducer) -> Callable[..., Array]:
    def reduce(
        xp: ArrayModule, x: Array, axes: HostArray | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> Array:
        chosen = () if axes is None else to_ints(axes)
        if not chosen and not noop_with_empty_axes:
            chosen = tuple(range(x.ndim))
        return _reduce(xp, reducer, x, chosen, keepdims)

    return reduce


for _op_type, (_since, _reducer) in _REDUCERS.items():
    register(_op_type, 1, _by_attribute(_reducer))
    register(_op_type, _since, _by_operand(_reducer))
