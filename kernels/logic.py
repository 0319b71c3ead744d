"""Comparison, logic, bitwise operators, and selection by a condition."""

from collections.abc import Callable

import numpy as np

from .operands import FLOAT8_DTYPES, check_same_dtype, fitting, narrow, widen, written
from .registry import Array, ArrayModule, kernel, register

# ONNX name -> (since, name in the array module)
_COMPARISON = {
    "Equal": (7, "equal"),
    "Less": (7, "less"),
    "LessOrEqual": (12, "less_equal"),
    "Greater": (7, "greater"),
    "GreaterOrEqual": (12, "greater_equal"),
}
_LOGIC = {"And": "logical_and", "Or": "logical_or", "Xor": "logical_xor"}
_BITWISE = {"BitwiseAnd": "bitwise_and", "BitwiseOr": "bitwise_or", "BitwiseXor": "bitwise_xor"}


def _comparison(name: str) -> Callable[[ArrayModule, Array, Array], Array]:
    def compare(xp: ArrayModule, a: Array, b: Array, *, out: Array | None = None) -> Array:
        check_same_dtype(a, b)
        is_plain = a.dtype.kind not in "OV"
        result = getattr(xp, name)(a, b, out=_bools(out, a, b) if is_plain else None)
        return written(xp, xp.asarray(result).astype(bool, copy=False), out)

    return compare


def _logic(name: str) -> Callable[[ArrayModule, Array, Array], Array]:
    def combine(xp: ArrayModule, a: Array, b: Array, *, out: Array | None = None) -> Array:
        _check_bool(a, b)
        return getattr(xp, name)(a, b, out=_bools(out, a, b))

    return combine


def _bitwise(name: str) -> Callable[[ArrayModule, Array, Array], Array]:
    def combine(xp: ArrayModule, a: Array, b: Array, *, out: Array | None = None) -> Array:
        check_same_dtype(a, b)
        return getattr(xp, name)(a, b, out=fitting(out, a.dtype, a, b))

    return combine


def _bools(out: Array | None, *operands: Array) -> Array | None:
    """Where an elementwise function of some operands writes its truth values."""
    return fitting(out, np.dtype(bool), *operands)


def _check_bool(*operands: Array) -> None:
    wrong = sorted({str(operand.dtype) for operand in operands if operand.dtype != bool})
    if wrong:
        raise ValueError(f"operands must be bool, not {', '.join(wrong)}")


for _op_type, (_since, _name) in _COMPARISON.items():
    register(_op_type, _since, _comparison(_name))
for _op_type, _name in _LOGIC.items():
    register(_op_type, 7, _logic(_name))
for _op_type, _name in _BITWISE.items():
    register(_op_type, 18, _bitwise(_name))


@kernel("Not", since=1)
def not_(xp: ArrayModule, x: Array, *, out: Array | None = None) -> Array:
    """Logical negation."""
    _check_bool(x)
    return xp.logical_not(x, out=_bools(out, x))


@kernel("BitwiseNot", since=18)
def bitwise_not(xp: ArrayModule, x: Array, *, out: Array | None = None) -> Array:
    """Bitwise negation."""
    return xp.invert(x, out=fitting(out, x.dtype, x))


@kernel("Where", since=9)
def where(xp: ArrayModule, condition: Array, x: Array, y: Array, *, out: Array | None = None) -> Array:
    """x where the condition holds, else y; all three broadcast."""
    _check_bool(condition)
    check_same_dtype(x, y)
    result = fitting(out, x.dtype, condition, x, y)
    if result is None:
        return narrow(xp.where(condition, x, y), x.dtype)
    if result is x:
        xp.copyto(result, y, where=xp.invert(condition))
    else:
        if result is not y:
            xp.copyto(result, y)
        xp.copyto(result, x, where=condition)
    return result


@kernel("IsNaN", since=9)
def is_nan(xp: ArrayModule, x: Array, *, out: Array | None = None) -> Array:
    """Whether each element is not a number."""
    return written(xp, xp.isnan(widen(x) if x.dtype in FLOAT8_DTYPES else x), out)


@kernel("IsInf", since=10)
def is_inf(
    xp: ArrayModule, x: Array, *, detect_negative: int = 1, detect_positive: int = 1, out: Array | None = None
) -> Array:
    """Whether each element is an infinity of a sign that is asked for."""
    wide = widen(x)
    infinite = xp.isinf(wide)
    if not detect_negative:
        infinite = infinite & (wide > 0)
    if not detect_positive:
        infinite = infinite & (wide < 0)
    return written(xp, infinite, out)
