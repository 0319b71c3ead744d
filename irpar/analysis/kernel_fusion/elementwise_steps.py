"""Elementwise operators as steps of an expression, most of them as they are."""

from collections.abc import Mapping, Sequence

import numpy as np

from irpar.ir import DType, Node, Value
from irpar.kernels.expression import DTYPES, OPERATORS, Attribute, Number
from irpar.kernels.operands import compute_dtype
from irpar.ops.facts import (
    CannotTellError,
    axis_attribute,
    dtype_attribute,
    float_attribute,
    int_attribute,
    ints_operand,
    needed,
    operand,
    replicated_data,
)

from .drafts import Given, Lower, Lowered


def _operand(node: Node, index: int) -> Given:
    """An operand, or its number where it is a constant scalar that no shape comes of."""
    value = needed(node, index)
    others = [other for place, other in enumerate(node.inputs) if place != index and not _is_scalar(other)]
    data = replicated_data(value)
    if data is not None and _is_scalar(value) and others:
        widest = max(len(other.shape) for other in others)
        if len(value.shape) <= widest:
            return Number.of(data.numpy().reshape(())[()], value.dtype.numpy)
    return value


def _is_scalar(value: Value) -> bool:
    return all(size == 1 for size in value.shape)


def _plain(node: Node, made: Lowered) -> Sequence[Given | None]:
    operator = OPERATORS[node.op_type]
    if len(node.operands) != operator.operands:
        raise CannotTellError("operands")
    settings: dict[str, Attribute] = {}
    for name, default in dict(operator.defaults).items():
        given = node.attributes.get(name, default)
        if not isinstance(given, int | float | str):
            raise CannotTellError(name)
        settings[name] = float(np.float32(given)) if isinstance(given, float) else given
    return [made.step(node.op_type, *(_operand(node, index) for index in range(operator.operands)), **settings)]


def _where(node: Node, made: Lowered) -> Sequence[Given | None]:
    condition = needed(node, 0)
    chosen = [_operand(node, 1), _operand(node, 2)]
    if all(isinstance(given, Number) for given in chosen):
        chosen[0] = needed(node, 1)
    return [made.step("Where", condition, *chosen)]


def _power(node: Node, made: Lowered) -> Sequence[Given | None]:
    base, exponent = needed(node, 0), needed(node, 1)
    given = _operand(node, 1)
    if not base.dtype.is_float:
        raise CannotTellError("a power of integers")
    if isinstance(given, Number):  # Of any dtype: it is a number beside the base.
        assert exponent.data is not None
        given = Number.of(float(exponent.data.numpy().reshape(())[()]), base.dtype.numpy)
    elif exponent.dtype is not base.dtype:
        raise CannotTellError("an exponent of another dtype")
    return [made.step("Pow", base, given)]


def _folded(op_type: str) -> Lower:
    """Of any number of operands, from the first on."""

    def lower(node: Node, made: Lowered) -> Sequence[Given | None]:
        if len(node.operands) < 2:
            raise CannotTellError("operands")
        name = {"Sum": "Add", "Mean": "Add"}.get(op_type, op_type)
        total: Given = needed(node, 0)
        for index in range(1, len(node.operands)):
            total = made.step(name, total, _operand(node, index))
        if op_type == "Mean":
            total = made.step("Div", total, made.number(len(node.operands)))
        return [total]

    return lower


def _clip(node: Node, made: Lowered) -> Sequence[Given | None]:
    value: Given = needed(node, 0)
    for index, (name, op_type) in enumerate((("min", "Max"), ("max", "Min")), start=1):
        bound: Given | None = None
        if node.version < 11:
            limit = float(np.finfo(np.float32).max)
            bound = made.number(float_attribute(node, name, -limit if name == "min" else limit))
        elif operand(node, index) is not None:
            bound = _operand(node, index)
        if bound is not None:
            value = made.step(op_type, value, bound)
    return [value]


def _cast(node: Node, made: Lowered) -> Sequence[Given | None]:
    to = dtype_attribute(node, "to") if node.op_type == "Cast" else needed(node, 1).dtype
    if to.text not in DTYPES:
        raise CannotTellError("to")
    if needed(node, 0).dtype is DType.F64 and to in (DType.F16, DType.BF16):
        raise CannotTellError("rounding twice")
    return [made.step("Cast", needed(node, 0), to=to.text)]


def _swiglu(node: Node, made: Lowered) -> Sequence[Given | None]:
    gate, linear = needed(node, 0), needed(node, 1)
    return [made.step("Mul", _swish(made, gate, float_attribute(node, "alpha", 1.0)), linear)]


def _swish(made: Lowered, value: Given, alpha: float) -> Given:
    inner = value if alpha == 1 else made.step("Mul", value, made.number(alpha))
    return made.step("Mul", value, made.step("Sigmoid", inner))


def _quick_gelu(node: Node, made: Lowered) -> Sequence[Given | None]:
    return [_swish(made, needed(node, 0), float_attribute(node, "alpha", 1.702))]


def _gelu(approximate: str) -> Lower:
    """com.microsoft's, of an operand and a bias."""

    def lower(node: Node, made: Lowered) -> Sequence[Given | None]:
        value: Given = needed(node, 0)
        if operand(node, 1) is not None:
            value = made.step("Add", value, needed(node, 1))
        return [made.step("Gelu", value, approximate=approximate)]

    return lower


def _rotated(node: Node, made: Lowered) -> Sequence[Given | None]:
    """Concat(Neg(x[..., half:]), x[..., :half]), of a value that something else makes."""
    rank = len(made.space)
    if len(node.operands) != 2 or axis_attribute(node, rank) != rank - 1:
        raise CannotTellError("another Concat")
    negated, first = needed(node, 0), needed(node, 1)
    if negated.node is None or negated.node.identity != ("", "Neg"):
        raise CannotTellError("another Concat")
    (second,) = negated.node.inputs
    x, half = _part_of(first), first.shape[-1]
    if x is None or x != _part_of(second, half) or x.shape[-1] != 2 * half or second.shape != first.shape:
        raise CannotTellError("other parts")
    return [made.step("RotateHalf", x)]


def _one_hot(node: Node, made: Lowered) -> Sequence[Given | None]:
    """Whether an index, counted from the end where it is negative, is the place along the axis."""
    indices, depth, values = needed(node, 0), ints_operand(node, 1), needed(node, 2)
    if not indices.dtype.is_integer or depth is None or len(depth) != 1:
        raise CannotTellError("depth")
    data = replicated_data(values)
    if data is None or values.dtype.text not in DTYPES or not values.dtype.is_float:
        raise CannotTellError("values")
    rank, (size,) = len(indices.shape) + 1, depth
    place = int_attribute(node, "axis", -1)
    axis = place if place < 0 else place - rank
    index = made.step("Unsqueeze", indices, axes=(axis,))
    end = made.step("Add", index, Number.of(size, indices.dtype.numpy))
    is_place = made.step("Or", *(made.step("IsIndex", each, axis=axis, size=size) for each in (index, end)))
    found: Given = made.step("Cast", is_place, to=values.dtype.text)
    off, on = data.numpy().astype(compute_dtype(values.dtype.numpy))
    if (off, on) != (0, 1):
        with np.errstate(all="ignore"):
            step = on - off
            if not np.isfinite(step) or abs(off + step - on) > 1e-6 * abs(on):
                raise CannotTellError("values so far apart")
        found = made.step("Mul", found, Number.of(step, values.dtype.numpy))
        found = made.step("Add", found, Number.of(off, values.dtype.numpy))
    return [found]


def _part_of(value: Value, begin: int = 0) -> Value | None:
    """What a value is a range of along the last dim, that begins there; by Slice or Split."""
    node = value.node
    if node is None or node.domain or not node.operands or node.operands[0] is None:
        return None
    x, rank = node.operands[0], len(value.shape)
    if node.op_type == "Split" and axis_attribute(node, rank, 0) == rank - 1:
        return x if sum(other.shape[-1] for other in node.results[: value.index]) == begin else None
    if node.op_type == "Slice" and node.version >= 10 and len(node.operands) > 3:
        starts, axes = ints_operand(node, 1), ints_operand(node, 3)
        steps = ints_operand(node, 4) if len(node.operands) > 4 else None
        is_last = axes is not None and tuple(axis % rank for axis in axes) == (rank - 1,)
        return x if is_last and starts is not None and starts == (begin,) and steps in (None, (1,)) else None
    return None


_PLAIN = (
    "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil Celu Cos Cosh "
    "Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish IsInf IsNaN LeakyRelu Less "
    "LessOrEqual Log Mish Mod Mul Neg Not Or PRelu Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh "
    "Softplus Softsign Sqrt Sub Swish Tan Tanh ThresholdedRelu Xor"
)
ELEMENTWISE: Mapping[tuple[str, str], Lower] = {
    **{("", name): _plain for name in _PLAIN.split()},
    **{("", name): _folded(name) for name in ("Max", "Mean", "Min", "Sum")},
    ("", "Cast"): _cast,
    ("", "CastLike"): _cast,
    ("", "Concat"): _rotated,
    ("", "Clip"): _clip,
    ("", "OneHot"): _one_hot,
    ("", "Pow"): _power,
    ("", "SwiGLU"): _swiglu,
    ("", "Where"): _where,
    ("com.microsoft", "BiasGelu"): _gelu("none"),
    ("com.microsoft", "FastGelu"): _gelu("tanh"),
    ("com.microsoft", "Gelu"): _gelu("none"),
    ("com.microsoft", "QuickGelu"): _quick_gelu,
}
"""What writes the steps of an operator, by its domain and name."""
