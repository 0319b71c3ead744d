"""Comparison, logic, bitwise operators, and selection by a condition."""

from collections.abc import Callable

from .operands import FLOAT8_DTYPES, check_same_dtype, fitting, narrow, widen
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
    def compare(xp: ArrayModule, a: Array, b: Array) -> Array:
        check_same_dtype(a, b)
        return xp.asarray(getattr(xp, name)(a, b)).astype(bool, copy=False)

    return compare


def _logic(name: str) -> Callable[[ArrayModule, Array, Array], Array]:
    def combine(xp: ArrayModule, a: Array, b: Array) -> Array:
        _check_bool(a, b)
        return getattr(xp, name)(a, b)

    return combine


def _bitwise(name: str) -> Callable[[ArrayModule, Array, Array], Array]:
    def combine(xp: ArrayModule, a: Array, b: Array) -> Array:
        check_same_dtype(a, b)
        return getattr(xp, name)(a, b)

    return combine


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
def not_(xp: ArrayModule, x: Array) -> Array:
    """Logical negation."""
    _check_bool(x)
    return xp.logical_not(x)


@kernel("BitwiseNot", since=18)
def bitwise_not(xp: ArrayModule, x: Array) -> Array:
    """Bitwise negation."""
    return xp.invert(x)


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
def is_nan(xp: ArrayModule, x: Array) -> Array:
    """Whether each element is not a number."""
    return xp.isnan(widen(x) if x.dtype in FLOAT8_DTYPES else x)


@kernel("IsInf", since=10)
def is_inf(xp: ArrayModule, x: Array, *, detect_negative: int = 1, detect_positive: int = 1) -> Array:
    """Whether each element is an infinity of a sign that is asked for."""
    wide = widen(x)
    infinite = xp.isinf(wide)
    if not detect_negative:
        infinite = infinite & (wide > 0)
    if not detect_positive:
        infinite = infinite & (wide < 0)
    return infinite
