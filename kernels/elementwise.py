"""Elementwise arithmetic and mathematical functions, with multidirectional broadcasting."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .operands import (
    FLOAT32,
    check_same_dtype,
    compute_dtype,
    fitting,
    is_float,
    is_integer,
    narrow,
    one_of,
    widen,
    written,
)
from .pieces import elementwise
from .registry import Array, ArrayModule, Shaped, kernel, register
from .temporaries import arrays_like, rounded, widened

# ONNX name -> (since, name in the array module). The result has the operand's dtype.
_UNARY = {
    "Abs": (6, "abs"),
    "Neg": (6, "negative"),
    "Ceil": (6, "ceil"),
    "Floor": (6, "floor"),
    "Round": (11, "rint"),
    "Sign": (9, "sign"),
    "Exp": (6, "exp"),
    "Log": (6, "log"),
    "Sqrt": (6, "sqrt"),
    "Sin": (7, "sin"),
    "Cos": (7, "cos"),
    "Tan": (7, "tan"),
    "Asin": (7, "arcsin"),
    "Acos": (7, "arccos"),
    "Atan": (7, "arctan"),
    "Sinh": (9, "sinh"),
    "Cosh": (9, "cosh"),
    "Tanh": (6, "tanh"),
    "Asinh": (9, "arcsinh"),
    "Acosh": (9, "arccosh"),
    "Atanh": (9, "arctanh"),
}


def _unary(name: str) -> Callable[[ArrayModule, Array], Array]:
    def unary(xp: ArrayModule, x: Array, *, out: Array | None = None) -> Array:
        return narrow(getattr(xp, name)(x, out=fitting(out, x.dtype, x)), x.dtype)

    return unary


def _binary(name: str) -> Callable[[ArrayModule, Array, Array], Array]:
    def binary(xp: ArrayModule, a: Array, b: Array, *, out: Array | None = None) -> Array:
        check_same_dtype(a, b)
        return getattr(xp, name)(a, b, out=fitting(out, a.dtype, a, b))

    return binary


for _op_type, (_since, _name) in _UNARY.items():
    register(_op_type, _since, _unary(_name), temporaries=rounded)
for _op_type, _name in {"Add": "add", "Sub": "subtract", "Mul": "multiply"}.items():
    register(_op_type, 7, _binary(_name), temporaries=rounded)


def _quotient_bytes(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For the steps from a quotient that is rounded down to one that is truncated."""
    is_signed = results[0].dtype.kind == "i"
    return _like_quotient(operands, results, attributes) if is_signed else rounded(operands, results, attributes)


_like_quotient = arrays_like(0, results=3)


def _power_bytes(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For operands and results in another dtype: integers to the power of floats are computed as float64."""
    if is_integer(results[0].dtype):
        known = [one for one in (*operands, *results) if one is not None]
        return sum(one.elements for one in known) * np.dtype(np.float64).itemsize
    return widened(operands, results, attributes)


@kernel("Div", since=7, temporaries=_quotient_bytes)
def div(xp: ArrayModule, a: Array, b: Array, *, out: Array | None = None) -> Array:
    """Quotient; integers truncate towards zero."""
    check_same_dtype(a, b)
    if not is_integer(a.dtype):
        return xp.divide(a, b, out=fitting(out, a.dtype, a, b))
    if a.dtype.kind == "u":
        return xp.floor_divide(a, b, out=fitting(out, a.dtype, a, b))
    quotient = xp.floor_divide(a, b)
    # floor and truncation differ by one where the exact quotient is negative and not whole
    rounded_down = ((a < 0) != (b < 0)) & (quotient * b != a) & (b != 0)
    quotient += narrow(rounded_down, a.dtype)
    return written(xp, quotient, out)


@kernel("Mod", since=10)
def mod(xp: ArrayModule, a: Array, b: Array, *, fmod: int = 0, out: Array | None = None) -> Array:
    """Remainder with the divisor's sign (fmod=0) or the dividend's (fmod=1)."""
    check_same_dtype(a, b)
    one_of("fmod", fmod, (0, 1))
    if fmod:
        return xp.fmod(a, b, out=fitting(out, a.dtype, a, b))
    if xp.__name__ == "numpy" or not is_float(a.dtype):
        wide = widen(a), widen(b)
        return written(xp, narrow(xp.mod(*wide, out=fitting(out, a.dtype, *wide)), a.dtype), out)
    # CuPy's takes x - floor(x / y) * y, which is NaN where y is infinite.
    a_wide, b_wide = widen(a), widen(b)
    rest = xp.fmod(a_wide, b_wide)
    rest = xp.where((rest != 0) & ((rest < 0) != (b_wide < 0)), rest + b_wide, rest)
    return narrow(xp.where(rest == 0, xp.copysign(rest, b_wide), rest), a.dtype)


@kernel("Pow", since=7, temporaries=_power_bytes)
def pow_(xp: ArrayModule, base: Array, exponent: Array, *, out: Array | None = None) -> Array:
    """Power; the exponent's dtype may differ, the result has the base's."""
    return written(xp, narrow(_power(xp, base, exponent, out), base.dtype), out)


def _power(xp: ArrayModule, base: Array, exponent: Array, out: Array | None) -> Array:
    """The power, in the dtype that it is computed in."""
    if is_float(base.dtype):
        kind = xp.result_type(compute_dtype(base.dtype), compute_dtype(exponent.dtype))
        kind = kind if is_float(exponent.dtype) else compute_dtype(base.dtype)
        # Reading the exponent from a device would take longer than the power.
        is_readable = xp.__name__ == "numpy" and exponent.size == 1 and exponent.ndim <= base.ndim
        if is_readable and float(exponent.reshape(())) in (2.0, 3.0):
            # A library's general power takes fifty times as long as the products that tanh-Gelu and norms mean.
            x = base.astype(kind, copy=False)
            into = None if out is base else fitting(out, kind, x)
            y = xp.multiply(x, x, out=into)
            return y if float(exponent.reshape(())) == 2.0 else xp.multiply(y, x, out=into)
        operands = base.astype(kind, copy=False), exponent.astype(kind, copy=False)
        return xp.power(*operands, out=fitting(out, kind, *operands))
    if xp.__name__ != "numpy" and exponent.dtype.kind == "i":
        # Both ways, so that no number is waited for: a negative exponent of an integer gives 0, 1 or -1.
        inverse = narrow(xp.power(base.astype(np.float64), exponent.astype(np.float64)), base.dtype)
        whole = xp.power(base, xp.maximum(exponent, exponent.dtype.type(0)).astype(base.dtype, copy=False))
        return xp.where(exponent < 0, inverse, whole)
    if is_float(exponent.dtype) or (exponent.dtype.kind == "i" and bool((exponent < 0).any())):
        return xp.power(base.astype(np.float64), exponent.astype(np.float64))
    return xp.power(base, exponent.astype(base.dtype, copy=False))


@kernel("Reciprocal", since=6, temporaries=rounded)
def reciprocal(xp: ArrayModule, x: Array, *, out: Array | None = None) -> Array:
    """One over x."""
    return xp.divide(x.dtype.type(1), x, out=fitting(out, x.dtype, x))


def _combined(xp: ArrayModule, name: str, operands: Sequence[Array]) -> Array:
    """Operands combined from the first on, in a new array."""
    if len(operands) == 1:
        return operands[0].copy()
    return functools.reduce(getattr(xp, name), operands)


@kernel("Sum", since=8, temporaries=arrays_like(0, results=2))
def sum_(xp: ArrayModule, *operands: Array, out: Array | None = None) -> Array:
    """Sum of any number of operands."""
    check_same_dtype(*operands)
    total = _combined(xp, "add", [widen(operand) for operand in operands])
    return written(xp, narrow(total, operands[0].dtype), out)


@kernel("Mean", since=8, temporaries=arrays_like(0, results=2))
def mean(xp: ArrayModule, *operands: Array, out: Array | None = None) -> Array:
    """Mean of any number of operands."""
    check_same_dtype(*operands)
    total = _combined(xp, "add", [widen(operand) for operand in operands])
    return written(xp, narrow(total / total.dtype.type(len(operands)), operands[0].dtype), out)


@kernel("Max", since=8, temporaries=arrays_like(0, results=2))
def max_(xp: ArrayModule, *operands: Array, out: Array | None = None) -> Array:
    """Greatest of any number of operands; a NaN wins."""
    check_same_dtype(*operands)
    return written(xp, _combined(xp, "maximum", operands), out)


@kernel("Min", since=8, temporaries=arrays_like(0, results=2))
def min_(xp: ArrayModule, *operands: Array, out: Array | None = None) -> Array:
    """Least of any number of operands; a NaN wins."""
    check_same_dtype(*operands)
    return written(xp, _combined(xp, "minimum", operands), out)


def _twice_rounded(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For what two steps make."""
    return 2 * rounded(operands, results, attributes)


@kernel("Clip", since=6, temporaries=widened)
def clip_by_attributes(
    xp: ArrayModule,
    x: Array,
    *,
    min: float = float(np.finfo(np.float32).min),
    max: float = float(np.finfo(np.float32).max),
    out: Array | None = None,
) -> Array:
    """Limit to [min, max] given as attributes (before version 11)."""
    wide = widen(x)
    low, high = wide.dtype.type(min), wide.dtype.type(max)
    into = fitting(out, x.dtype, wide)
    return narrow(xp.minimum(xp.maximum(wide, low, out=into), high, out=into), x.dtype)


@kernel("Clip", since=11, temporaries=_twice_rounded)
def clip(
    xp: ArrayModule, x: Array, low: Array | None = None, high: Array | None = None, *, out: Array | None = None
) -> Array:
    """Limit to [low, high], either of which may be absent; `high` wins where they cross."""
    check_same_dtype(x, low, high)
    into = fitting(out, x.dtype, x)
    if low is None and high is None:
        return written(xp, x.copy(), out)
    if low is not None:
        x = xp.maximum(x, low.reshape(()), out=into)
    return x if high is None else xp.minimum(x, high.reshape(()), out=into)


def _erf_coefficients(degree: int, limit: float) -> tuple[float, ...]:
    """Polynomial in u = 2 x² / limit² - 1 that interpolates erf(x) / x on [-limit, limit] in Chebyshev points."""

    def ratio(u: float) -> float:
        x = limit * math.sqrt(max((u + 1) / 2, 0.0))
        return math.erf(x) / x if x > 1e-8 else 2 / math.sqrt(math.pi)

    points = np.cos(np.pi * (np.arange(degree + 1) + 0.5) / (degree + 1))
    fit = np.polynomial.chebyshev.chebfit(points, [ratio(float(u)) for u in points], degree)
    return tuple(float(c) for c in fit)


# dtype -> (limit beyond which erf rounds to 1, Chebyshev coefficients good to that dtype's rounding)
_ERF = {
    FLOAT32: (4.0, _erf_coefficients(22, 4.0)),
    np.dtype(np.float64): (6.0, _erf_coefficients(56, 6.0)),
}

_ERF_BLOCK = 16384  # elements whose temporaries stay in a core's cache


def erf_of(xp: ArrayModule, x: Array) -> Array:
    """The error function of a float32 or float64 array."""
    if xp.__name__ == "cupy":
        from cupyx.scipy.special import erf as device_erf

        return device_erf(x)
    flat, result = x.reshape(-1), xp.empty(x.size, dtype=x.dtype)
    for start in range(0, x.size, _ERF_BLOCK):
        block = slice(start, start + _ERF_BLOCK)
        result[block] = _erf_block(xp, flat[block])
    return result.reshape(x.shape)


def _erf_block(xp: ArrayModule, x: Array) -> Array:
    limit, coefficients = _ERF[x.dtype]
    kind = x.dtype.type
    clipped = xp.clip(x, kind(-limit), kind(limit))
    u = clipped * clipped * kind(2 / limit**2) - kind(1)
    # Clenshaw's recurrence, in place
    twice, ahead, further = u + u, xp.zeros_like(u), xp.zeros_like(u)
    for coefficient in reversed(coefficients[1:]):
        # further becomes the next `ahead`
        xp.subtract(twice * ahead, further, out=further)
        further += kind(coefficient)
        ahead, further = further, ahead
    value = clipped * (u * ahead - further + kind(coefficients[0]))
    return xp.clip(value, kind(-1), kind(1))


@kernel("Erf", since=9)
@elementwise
def erf(xp: ArrayModule, x: Array) -> Array:
    """The error function, for any real dtype."""
    return erf_of(xp, x.astype(np.float64) if is_integer(x.dtype) else x)


@kernel("BitShift", since=11, temporaries=arrays_like(4, 1))
def bit_shift(xp: ArrayModule, x: Array, amount: Array, *, direction: str, out: Array | None = None) -> Array:
    """Shift bits LEFT or RIGHT; by the width or more gives the sign extension (0 or -1)."""
    check_same_dtype(x, amount)
    one_of("direction", direction, ("LEFT", "RIGHT"))
    width = x.dtype.itemsize * 8
    outside = (amount < 0) | (amount >= width)
    safe = xp.where(outside, xp.zeros_like(amount), amount)
    if direction == "LEFT":
        shifted, beyond = xp.left_shift(x, safe), xp.zeros_like(x)
    else:
        shifted, beyond = (
            xp.right_shift(x, safe),
            narrow(x < 0, x.dtype) * x.dtype.type(-1 if x.dtype.kind == "i" else 0),
        )
    return written(xp, xp.where(outside, beyond, shifted), out)


@kernel("Softsign", since=1)
@elementwise
def softsign(xp: ArrayModule, x: Array) -> Array:
    """x / (1 + |x|)."""
    return x / (1 + xp.abs(x))


@kernel("Det", since=11, temporaries=arrays_like(2.5))
def det(xp: ArrayModule, x: Array) -> Array:
    """Determinants of the square matrices in the last two dims."""
    return narrow(xp.asarray(xp.linalg.det(widen(x))), x.dtype)
