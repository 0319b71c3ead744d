"""Reductions; axes are an attribute in older versions, an operand in newer ones. Small floats are summed in float32."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from .operands import compute_dtype, is_float, is_integer, narrow, normalize_axes, to_ints, widen, written
from .registry import Array, ArrayModule, HostArray, ScratchBytes, Shaped, register
from .scratch import SCRATCH, piece_bytes

Axes = tuple[int, ...]
Reducer = Callable[..., Array]
"""Reduces an array over axes, which are kept or not; on request into one of the result's shape and its own dtype."""


def total(xp: ArrayModule, x: Array, axes: Axes, keepdims: bool, out: Array | None = None) -> Array:
    """Sum in the dtype of x (NumPy would widen small integers).

    In the order of a contiguous array: NumPy's own is that of the strides, so that rounding would tell how x was made.
    """
    if is_float(x.dtype) and x.ndim:
        x = _contiguous(xp, x)
    return xp.sum(x, axis=axes, keepdims=keepdims, dtype=x.dtype, out=out)


def _contiguous(xp: ArrayModule, x: Array) -> Array:
    """The array, or a copy of it, one element after the other."""
    if xp.__name__ != "numpy" or x.flags.c_contiguous:
        return xp.ascontiguousarray(x)
    copy = SCRATCH.array("contiguous", x.shape, x.dtype)
    np.copyto(copy, x)
    return copy


def _terms(xp: ArrayModule, name: str, *operands: Array) -> Array:
    """An elementwise function of what is to be summed."""
    function = getattr(xp, name)
    if xp.__name__ != "numpy":
        return function(*operands)
    return function(*operands, out=SCRATCH.array("terms", operands[0].shape, operands[0].dtype))


def _scratch_bytes(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For a copy in one piece of what is summed."""
    x = operands[0]
    return _terms_bytes(operands, results, attributes) if x is not None and x.is_strided else 0


def _terms_bytes(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For a function of each element."""
    x = operands[0]
    if x is None:
        return 0
    return piece_bytes(x.elements, 8 if is_integer(x.dtype) else compute_dtype(x.dtype).itemsize)


def _temporary_bytes(
    operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]
) -> int:
    """For operands that are computed in another dtype, and what is small beside: a few arrays like the result."""
    x, y = operands[0], results[0]
    if x is None:
        return 0
    if is_integer(x.dtype):
        itemsize = np.dtype(np.float64).itemsize
        return (2 * x.elements + 6 * y.elements) * itemsize
    kind = compute_dtype(x.dtype)
    return (4 * y.elements + (x.elements if kind != x.dtype else 0)) * kind.itemsize


def _product(xp: ArrayModule, x: Array, axes: Axes, keepdims: bool, out: Array | None = None) -> Array:
    return xp.prod(x, axis=axes, keepdims=keepdims, dtype=x.dtype, out=out)


def _mean(xp: ArrayModule, x: Array, axes: Axes, keepdims: bool, out: Array | None = None) -> Array:
    return xp.divide(total(xp, x, axes, keepdims, out), x.dtype.type(_count(x, axes)), out=out)


def _l1(xp: ArrayModule, x: Array, axes: Axes, keepdims: bool, out: Array | None = None) -> Array:
    return total(xp, _terms(xp, "abs", x), axes, keepdims, out)


def _l2(xp: ArrayModule, x: Array, axes: Axes, keepdims: bool, out: Array | None = None) -> Array:
    return xp.sqrt(total(xp, _terms(xp, "multiply", x, x), axes, keepdims, out), out=out)


def _sum_square(xp: ArrayModule, x: Array, axes: Axes, keepdims: bool, out: Array | None = None) -> Array:
    return total(xp, _terms(xp, "multiply", x, x), axes, keepdims, out)


def _log_sum(xp: ArrayModule, x: Array, axes: Axes, keepdims: bool, out: Array | None = None) -> Array:
    return xp.log(total(xp, x, axes, keepdims, out), out=out)


def log_sum_exp(xp: ArrayModule, x: Array, axes: Axes, keepdims: bool, out: Array | None = None) -> Array:
    """log(sum(exp(x))), shifted by the greatest element so that nothing overflows."""
    peak = _max(xp, x, axes, True)
    peak = xp.where(xp.isfinite(peak), peak, xp.zeros_like(peak))
    shifted = _terms(xp, "subtract", x, peak)
    result = xp.log(total(xp, xp.exp(shifted, out=shifted), axes, True)) + peak
    return written(xp, result if keepdims else xp.squeeze(result, axis=axes), out)


def _whole_log_sum_exp(xp: ArrayModule, x: Array, axes: Axes, keepdims: bool, out: Array | None = None) -> Array:
    """Of integers: ONNX Runtime adds up exp(x - peak) as integers, so that only the greatest elements count."""
    peak = _max(xp, x, axes, True)
    result = xp.log(total(xp, (x == peak).astype(x.dtype), axes, True)) + peak
    return result if keepdims else xp.squeeze(result, axis=axes)


def _extreme(name: str, least: bool) -> Reducer:
    def reduce(xp: ArrayModule, x: Array, axes: Axes, keepdims: bool, out: Array | None = None) -> Array:
        if _count(x, axes):
            return getattr(xp, name)(x, axis=axes, keepdims=keepdims, out=out)
        # over no elements: the identity, which array modules refuse to give
        shape = [1 if d in axes else n for d, n in enumerate(x.shape) if keepdims or d not in axes]
        return written(xp, xp.full(shape, identity_of(x.dtype, least), dtype=x.dtype), out)

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

# ONNX name -> (the version that made axes an operand, reducer, what it takes of SCRATCH)
_REDUCERS: dict[str, tuple[int, Reducer, ScratchBytes | None]] = {
    "ReduceSum": (13, total, _scratch_bytes),
    "ReduceMean": (18, _mean, _scratch_bytes),
    "ReduceMax": (18, _max, None),
    "ReduceMin": (18, _min, None),
    "ReduceProd": (18, _product, None),
    "ReduceL1": (18, _l1, _terms_bytes),
    "ReduceL2": (18, _l2, _terms_bytes),
    "ReduceSumSquare": (18, _sum_square, _terms_bytes),
    "ReduceLogSum": (18, _log_sum, _scratch_bytes),
    "ReduceLogSumExp": (18, log_sum_exp, _terms_bytes),
}


def _reduce(xp: ArrayModule, reducer: Reducer, x: Array, axes: Axes, keepdims: int, out: Array | None = None) -> Array:
    axes = normalize_axes(axes, x.ndim)
    if not is_integer(x.dtype) or reducer in (_max, _min):
        into = out if _fits(xp, out, x, axes, keepdims) else None
        return narrow(xp.asarray(reducer(xp, widen(x), axes, bool(keepdims), into)), x.dtype)
    # As ONNX Runtime has it: in double precision, and no further than the type goes.
    if reducer is log_sum_exp:
        reducer = _whole_log_sum_exp
    result = reducer(xp, x.astype(np.float64), axes, bool(keepdims), None)
    return written(xp, _as_integers(xp, xp.asarray(result), x.dtype), out)


def _fits(xp: ArrayModule, out: Array | None, x: Array, axes: Axes, keepdims: int) -> bool:
    """Whether a reduction can write into an array, of which a model may say what is wrong."""
    if out is None or xp.__name__ != "numpy" or out.dtype != x.dtype or compute_dtype(x.dtype) != x.dtype:
        return False
    return bool(out.shape == tuple(1 if d in axes else n for d, n in enumerate(x.shape) if keepdims or d not in axes))


def _as_integers(xp: ArrayModule, x: Array, dtype: np.dtype[Any]) -> Array:
    """Numbers of double precision without their fractions; beyond the dtype its bounds, for NaN the lower."""
    limits = ml_dtypes.iinfo(dtype)
    least, most = int(limits.min), int(limits.max)
    beyond = float(most) + (most < 2**53)  # A power of 2; beside it the doubles are not all integers that fit.
    inside = xp.where(x >= least, xp.minimum(x, np.nextafter(beyond, 0)), least).astype(dtype)
    return xp.where(x >= beyond, dtype.type(most), inside)


def _by_attribute(reducer: Reducer) -> Callable[..., Array]:
    def reduce(
        xp: ArrayModule, x: Array, *, axes: Axes | None = None, keepdims: int = 1, out: Array | None = None
    ) -> Array:
        return _reduce(xp, reducer, x, axes or tuple(range(x.ndim)), keepdims, out)

    return reduce


def _by_operand(reducer: Reducer) -> Callable[..., Array]:
    def reduce(
        xp: ArrayModule,
        x: Array,
        axes: HostArray | None = None,
        *,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
        out: Array | None = None,
    ) -> Array:
        chosen = () if axes is None else to_ints(axes)
        if not chosen and not noop_with_empty_axes:
            chosen = tuple(range(x.ndim))
        return _reduce(xp, reducer, x, chosen, keepdims, out)

    return reduce


for _op_type, (_since, _reducer, _scratch) in _REDUCERS.items():
    register(_op_type, 1, _by_attribute(_reducer), scratch=_scratch, temporaries=_temporary_bytes)
    register(_op_type, _since, _by_operand(_reducer), scratch=_scratch, temporaries=_temporary_bytes)
