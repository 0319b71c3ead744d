"""Nodes as steps of an expression: elementwise operators as they are, normalisations as the reductions that they are.

y = Softmax(x) {axis=-1}      Exp(Sub(x, ReduceMax(x))), divided by its ReduceSum
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from irpar.ir import DType, Node, Value, tensor_type
from irpar.kernels import has_kernel
from irpar.kernels.expression import DTYPES, OPERATORS, Attribute, Number
from irpar.kernels.operands import compute_dtype
from irpar.ops.facts import (
    CannotTellError,
    axes_of,
    axis_attribute,
    dtype_attribute,
    float_attribute,
    int_attribute,
    ints_attribute,
    ints_operand,
    needed,
    operand,
    replicated_data,
)


@dataclass(frozen=True)
class Ref:
    """The result of a step, by its place."""

    place: int


Given = Value | Ref | Number


@dataclass(frozen=True)
class DraftStep:
    """A step whose operands have no names yet."""

    op_type: str
    operands: tuple[Given, ...]
    attributes: tuple[tuple[str, Attribute], ...]


@dataclass
class Lowered:
    """A node as steps.

    Attributes:
        node: it.
        wanted: the results that something reads.
        steps: in order.
        results: the step of each of these.
        space: the shape over which the node computes.
        reduced: how many dims at the end of it are reduced.
    """

    node: Node
    wanted: frozenset[Value]
    steps: list[DraftStep] = field(default_factory=list)
    results: dict[Value, Ref] = field(default_factory=dict)
    space: tuple[int, ...] = ()
    reduced: int = 0

    def step(self, op_type: str, *operands: Given, **attributes: Attribute) -> Ref:
        """Add a step."""
        kept = {name: value for name, value in attributes.items() if value != dict(OPERATORS[op_type].defaults)[name]}
        self.steps.append(DraftStep(op_type, operands, tuple(sorted(kept.items()))))
        return Ref(len(self.steps) - 1)

    def reduce(self, op_type: str, value: Given) -> Ref:
        """Add a reduction of the dims that the node reduces."""
        return self.step(op_type, value, axes=tuple(range(-self.reduced, 0)))

    def number(self, number: float) -> Number:
        """A number beside values of the first operand's dtype."""
        return Number.of(number, needed(self.node, 0).dtype.numpy)

    def cast(self, value: Given, dtype: DType, to: DType) -> Given:
        """A value of a dtype in another one."""
        return value if dtype is to else self.step("Cast", value, to=to.text)

    def values(self) -> tuple[Value, ...]:
        """The values that steps read, each once."""
        found = (given for step in self.steps for given in step.operands if isinstance(given, Value))
        return tuple(dict.fromkeys(found))


Lower = Callable[[Node, Lowered], Sequence[Given | None]]
"""Writes a node's steps; gives what stands for each result."""


def lowered(node: Node, read: Set[Value]) -> Lowered | None:
    """A node as steps; None where it has none: an operator, a dtype, a shape or an attribute that is not covered.

    Args:
        node: it.
        read: the values that something reads.
    """
    lower = _LOWER.get(node.identity)
    if lower is None or node.callee is not None or not has_kernel(node.domain, node.op_type, node.version):
        return None
    wanted = [value for value in node.results if value in read]
    if not wanted or not all(map(_is_covered, (*node.inputs, *wanted))):
        return None
    made = Lowered(node, frozenset(wanted), space=max((value.shape for value in wanted), key=len))
    try:
        found = lower(node, made)
    except CannotTellError:
        return None
    made.results = {
        value: given
        for value, given in zip(node.results, found, strict=False)
        if value in read and isinstance(given, Ref)
    }
    return made if len(made.results) == len(wanted) else None


def _is_covered(value: Value) -> bool:
    type_ = tensor_type(value.type)
    is_known = type_ is not None and type_.is_static and type_.dtype.text in DTYPES
    return is_known and 0 not in value.shape


# -- elementwise ------------------------------------------------------------------------------------------------------


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


# -- rows -------------------------------------------------------------------------------------------------------------


def _rows(made: Lowered, shape: Sequence[int], axes: Sequence[int]) -> None:
    """Let a node reduce axes of a shape, which must be its last ones."""
    if sorted(axes) != list(range(len(shape) - len(axes), len(shape))) or not axes:
        raise CannotTellError("reduced dims that are not the last ones")
    made.space, made.reduced = tuple(shape), len(axes)


def _softmax_axes(node: Node, rank: int) -> Sequence[int]:
    if node.version >= 13:
        return (axis_attribute(node, rank, -1),)
    return range(axis_attribute(node, rank, 1), rank)


def _softmax(node: Node, made: Lowered) -> Sequence[Given | None]:
    x = needed(node, 0)
    _rows(made, x.shape, _softmax_axes(node, len(x.shape)))
    shifted = made.step("Sub", x, made.reduce("ReduceMax", x))
    exponential = made.step("Exp", shifted)
    total = made.reduce("ReduceSum", exponential)
    if node.op_type == "LogSoftmax":
        return [made.step("Sub", shifted, made.step("Log", total))]
    return [made.step("Div", exponential, total)]


def _reduction(node: Node, made: Lowered) -> Sequence[Given | None]:
    x = needed(node, 0)
    if not x.dtype.is_float:
        raise CannotTellError("integers")
    axes = ints_attribute(node, "axes") if len(node.operands) < 2 else ints_operand(node, 1)
    if not axes and int_attribute(node, "noop_with_empty_axes", 0):
        raise CannotTellError("no axes")
    _rows(made, x.shape, axes_of(axes or range(len(x.shape)), len(x.shape)))
    found = made.reduce(node.op_type, x)
    if int_attribute(node, "keepdims", 1):
        return [found]
    return [made.step("Squeeze", found, axes=tuple(range(-made.reduced, 0)))]


def _fitting(made: Lowered, *vectors: Value | None) -> None:
    """Check that operands of a normalisation broadcast to what is normalised."""
    for vector in vectors:
        if vector is not None and (
            len(vector.shape) > len(made.space) or np.broadcast_shapes(vector.shape, made.space) != made.space
        ):
            raise CannotTellError("an operand that the result is broadcast to")


def _layer_norm(node: Node, made: Lowered) -> Sequence[Given | None]:
    x, scale, bias = needed(node, 0), needed(node, 1), operand(node, 2)
    rank = len(x.shape)
    _rows(made, x.shape, range(axis_attribute(node, rank, -1), rank))
    _fitting(made, scale, bias)
    return _standardized(node, made, x, x.dtype, scale, bias)


def _standardized(
    node: Node, made: Lowered, x: Given, dtype: DType, scale: Value, bias: Value | None
) -> list[Given | None]:
    """The normalised value, the mean, and the inverse of the standard deviation."""
    mean = made.reduce("ReduceMean", x)
    centred = made.step("Sub", x, mean)
    variance = made.reduce("ReduceMean", made.step("Mul", centred, centred))
    inverse = _inverse_root(node, made, variance)
    y: Given = made.step("Mul", centred, inverse)
    y = made.step("Mul", y, made.cast(scale, scale.dtype, dtype))
    if bias is not None:
        y = made.step("Add", y, made.cast(bias, bias.dtype, dtype))
    statistics = [
        made.cast(given, dtype, value.dtype) if value in made.wanted else None
        for given, value in zip((mean, inverse), node.results[1:3], strict=False)
    ]
    return [y, *statistics]


def _inverse_root(node: Node, made: Lowered, mean_square: Given) -> Ref:
    usual = 1e-12 if node.domain else 1e-5
    epsilon = made.number(float_attribute(node, "epsilon", usual))
    return made.step("Reciprocal", made.step("Sqrt", made.step("Add", mean_square, epsilon)))


def _scaled_to_root_mean(node: Node, made: Lowered, x: Given, dtype: DType, scale: Value) -> tuple[Given, Given]:
    """x divided by its root mean square, times the scale, in the scale's dtype; and the inverse of that root."""
    inverse = _inverse_root(node, made, made.reduce("ReduceMean", made.step("Mul", x, x)))
    normalised = made.cast(made.step("Mul", x, inverse), dtype, scale.dtype)
    return made.step("Mul", normalised, scale), inverse


def _rms_norm(node: Node, made: Lowered) -> Sequence[Given | None]:
    x, scale = needed(node, 0), needed(node, 1)
    rank = len(x.shape)
    _rows(made, x.shape, range(axis_attribute(node, rank, -1), rank))
    _fitting(made, scale)
    y, inverse = _scaled_to_root_mean(node, made, x, x.dtype, scale)
    found: list[Given | None] = [y]
    if len(node.results) > 1 and node.results[1] in made.wanted:
        found.append(made.cast(inverse, x.dtype, node.results[1].dtype))
    return [*found, *(None for _ in node.results[len(found) :])]


def _along_channels(made: Lowered, value: Value, rank: int, to: DType) -> Given:
    """A number for each channel, which is dim 1 of a rank, in a dtype."""
    cast = made.cast(
        made.step("Unsqueeze", value, axes=tuple(range(2 - rank, 0))) if rank > 2 else value, value.dtype, to
    )
    if value.shape != (made.space[1],):
        raise CannotTellError("channels")
    return cast


def _batch_norm(node: Node, made: Lowered) -> Sequence[Given | None]:
    """In inference: the statistics are operands."""
    x, rank = needed(node, 0), len(made.space)
    vectors = [needed(node, index) for index in range(1, 5)]
    if rank < 2 or int_attribute(node, "training_mode", 0) or not made.wanted.isdisjoint(node.results[1:]):
        raise CannotTellError("training")
    wide = DType.F32 if any(vector.dtype is not x.dtype for vector in vectors) else x.dtype
    if wide is not x.dtype and DType.F64 in (x.dtype, *(vector.dtype for vector in vectors)):
        raise CannotTellError("float64 beside others")
    scale, bias, mean, variance = (_along_channels(made, vector, rank, wide) for vector in vectors)
    epsilon = Number.of(float_attribute(node, "epsilon", 1e-5), wide.numpy)
    factor = made.step("Div", scale, made.step("Sqrt", made.step("Add", variance, epsilon)))
    centred = made.step("Sub", made.cast(x, x.dtype, wide), mean)
    y = made.step("Add", made.step("Mul", centred, factor), bias)
    return [made.cast(y, wide, x.dtype)]


def _instance_norm(node: Node, made: Lowered) -> Sequence[Given | None]:
    x, rank = needed(node, 0), len(made.space)
    vectors = [needed(node, index) for index in (1, 2)]
    if rank < 3 or any(vector.dtype is not x.dtype for vector in vectors):
        raise CannotTellError("rank or dtypes")
    _rows(made, x.shape, range(2, rank))
    scale, bias = (_along_channels(made, vector, rank, x.dtype) for vector in vectors)
    centred = made.step("Sub", x, made.reduce("ReduceMean", x))
    inverse = _inverse_root(node, made, made.reduce("ReduceMean", made.step("Mul", centred, centred)))
    y = made.step("Mul", made.step("Mul", centred, inverse), scale)
    return [made.step("Add", y, bias)]


def _skip_norm(node: Node, made: Lowered) -> Sequence[Given | None]:
    """com.microsoft's normalisations of a sum, which is their fourth result."""
    x, skip, scale = needed(node, 0), needed(node, 1), needed(node, 2)
    is_plain = node.op_type == "SkipLayerNormalization"
    shift, bias = (operand(node, 3), operand(node, 4)) if is_plain else (None, operand(node, 3))
    _rows(made, x.shape, [len(x.shape) - 1])
    _fitting(made, skip, scale, shift, bias)
    total = made.step("Add", x, skip)
    if bias is not None:
        total = made.step("Add", total, bias)
    if not made.wanted.isdisjoint(node.results[1:3]):
        raise CannotTellError("statistics")
    if is_plain:
        (y, *_) = _standardized(node, made, total, x.dtype, scale, shift)
    else:
        y, _ = _scaled_to_root_mean(node, made, total, x.dtype, scale)
    return [y, None, None, total][: len(node.results)]


_PLAIN = (
    "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil Celu Cos Cosh "
    "Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish IsInf IsNaN LeakyRelu Less "
    "LessOrEqual Log Mish Mod Mul Neg Not Or PRelu Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh "
    "Softplus Softsign Sqrt Sub Swish Tan Tanh ThresholdedRelu Xor"
)
_LOWER: Mapping[tuple[str, str], Lower] = {
    **{("", name): _plain for name in _PLAIN.split()},
    **{("", name): _folded(name) for name in ("Max", "Mean", "Min", "Sum")},
    **{("", name): _reduction for name in OPERATORS if name.startswith("Reduce")},
    ("", "BatchNormalization"): _batch_norm,
    ("", "Cast"): _cast,
    ("", "CastLike"): _cast,
    ("", "Concat"): _rotated,
    ("", "Clip"): _clip,
    ("", "InstanceNormalization"): _instance_norm,
    ("", "LayerNormalization"): _layer_norm,
    ("", "LogSoftmax"): _softmax,
    ("", "OneHot"): _one_hot,
    ("", "Pow"): _power,
    ("", "RMSNormalization"): _rms_norm,
    ("", "SimplifiedLayerNormalization"): _rms_norm,
    ("", "Softmax"): _softmax,
    ("", "SwiGLU"): _swiglu,
    ("", "Where"): _where,
    ("com.microsoft", "BiasGelu"): _gelu("none"),
    ("com.microsoft", "FastGelu"): _gelu("tanh"),
    ("com.microsoft", "Gelu"): _gelu("none"),
    ("com.microsoft", "QuickGelu"): _quick_gelu,
    ("com.microsoft", "SkipLayerNormalization"): _skip_norm,
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): _skip_norm,
}
