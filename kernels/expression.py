"""irpar.Fused: several operators computed by one kernel, which an expression names step by step.

    t0 = Add(x0, x1)
    t1 = ReduceMean(t0, axes=[-1])
    y0 = Sub(t0, t1)

x0, x1 ... are the operands, y0, y1 ... the results, t0, t1 ... what lies between. A step is one of ONNX's operators
with broadcasting; reductions keep the reduced dims, of size 1. Numbers stand for scalars of the other operands' dtype.

What has a smaller float's dtype (f16, bf16) is computed in f32 from the first step to the last, and rounded once, where
it becomes a result; a Cast in between rounds, since the program says so.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from .operands import compute_dtype, is_float

DTYPES: Mapping[str, "np.dtype[Any]"] = {
    name: np.dtype(kind)
    for name, kind in {
        **{"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64},
        **{"i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64},
        **{"u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64, "bool": np.bool_},
    }.items()
}
"""The dtypes of values, by the names that Cast uses."""

Shape = tuple[int, ...]
Attribute = int | float | str | tuple[int, ...]
Kind = Literal["elementwise", "reduction", "squeeze", "unsqueeze", "rotation", "index"]


class ExpressionError(ValueError):
    """An expression that cannot be read, or that does not fit its operands: what, in which step, which rule."""


class Operand(NamedTuple):
    """What is known of a value of an expression."""

    shape: Shape
    dtype: "np.dtype[Any]"


@dataclass(frozen=True)
class Operator:
    """An operator of expressions.

    Attributes:
        version: of ONNX's operator set whose kernel computes it.
        operands: how many it has.
        defaults: its attributes, with their values where a step does not set them.
        takes: the dtypes of its operands: any, floats, numbers, integers, or bools.
        kind: how it makes a shape.
        gives_bool: whether results are bools; else they have the dtype of the last operand, or of `to`.
    """

    version: int
    operands: int = 1
    defaults: Mapping[str, Attribute | None] = ()  # type: ignore[assignment]
    takes: Literal["any", "float", "number", "integer", "bool"] = "float"
    kind: Kind = "elementwise"
    gives_bool: bool = False


def _operators() -> dict[str, Operator]:
    found: dict[str, Operator] = {}
    for names, version in (
        ("Ceil Erf Exp Floor Log Reciprocal Relu Sigmoid Sqrt Tanh", 13),
        ("Acos Acosh Asin Asinh Atan Atanh Cos Cosh HardSwish Mish Round Sin Sinh Softplus Softsign Tan", 22),
    ):
        found.update({name: Operator(version) for name in names.split()})
    found.update({name: Operator(13, takes="number") for name in ("Abs", "Neg", "Sign")})
    for name, version, defaults in (
        ("Celu", 12, {"alpha": 1.0}),
        ("Elu", 22, {"alpha": 1.0}),
        ("Gelu", 20, {"approximate": "none"}),
        ("HardSigmoid", 22, {"alpha": 0.2, "beta": 0.5}),
        ("LeakyRelu", 16, {"alpha": 0.01}),
        ("Selu", 22, {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875}),
        ("Shrink", 9, {"bias": 0.0, "lambd": 0.5}),
        ("Swish", 24, {"alpha": 1.0}),
        ("ThresholdedRelu", 22, {"alpha": 1.0}),
    ):
        found[name] = Operator(version, defaults=defaults)
    found.update({name: Operator(14, 2, takes="number") for name in ("Add", "Sub", "Mul", "Div", "Max", "Min")})
    found["Mod"] = Operator(13, 2, {"fmod": 0}, "number")
    found["Pow"] = Operator(15, 2)
    found["PRelu"] = Operator(16, 2)
    for name in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"):
        found[name] = Operator(19, 2, takes="any" if name == "Equal" else "number", gives_bool=True)
    for name, count in (("BitwiseAnd", 2), ("BitwiseOr", 2), ("BitwiseXor", 2), ("BitwiseNot", 1)):
        found[name] = Operator(18, count, takes="integer")
    for name, count in (("And", 2), ("Or", 2), ("Xor", 2), ("Not", 1)):
        found[name] = Operator(7, count, takes="bool", gives_bool=True)
    found["IsNaN"] = Operator(20, gives_bool=True)
    found["IsInf"] = Operator(20, defaults={"detect_negative": 1, "detect_positive": 1}, gives_bool=True)
    found["Where"] = Operator(16, 3, takes="any")
    found["Cast"] = Operator(13, 1, {"to": None}, "any")
    for name in ("ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "ReduceSumSquare"):
        found[name] = Operator(1, defaults={"axes": None}, kind="reduction")
    found["RotateHalf"] = Operator(0, kind="rotation")
    found["IsIndex"] = Operator(0, 1, {"axis": None, "size": None}, "integer", "index", gives_bool=True)
    found["Unsqueeze"] = Operator(1, defaults={"axes": None}, takes="any", kind="unsqueeze")
    found["Squeeze"] = Operator(1, defaults={"axes": None}, takes="any", kind="squeeze")
    return found


OPERATORS = _operators()
"""What steps can be, by ONNX's names.

Squeeze makes a result of a reduction's, which lies in the same order; Unsqueeze lets an operand broadcast along dims
behind its own. RotateHalf, of rotary embeddings, is none of ONNX's: Concat(Neg(x[..., half:]), x[..., :half]).
Nor is IsIndex, of one-hot rows: whether a number is the place along an axis of size 1 that becomes one of another size.
"""


@dataclass(frozen=True)
class Number:
    """A scalar in an expression, of the dtype of the operands beside it."""

    text: str

    def __str__(self) -> str:
        return self.text

    def of_dtype(self, dtype: "np.dtype[Any]") -> Any:
        """The number itself, in the dtype that values of a dtype are computed in.

        Raises:
            ExpressionError: it is no integer, and the dtype is one of integers.
        """
        if is_float(dtype):
            return compute_dtype(dtype).type(float(self.text))
        if not re.fullmatch(r"-?\d+", self.text):
            raise ExpressionError(f"{self.text} stands beside operands of {dtype}: write an integer")
        return np.asarray(int(self.text)).astype(dtype)[()]

    @classmethod
    def of(cls, value: Any, dtype: "np.dtype[Any]") -> "Number":
        """A number beside operands of a dtype: the shortest text that gives it back."""
        return cls(str(compute_dtype(dtype).type(value)) if is_float(dtype) else str(int(value)))


@dataclass(frozen=True)
class Step:
    """One operator.

    Attributes:
        target: what the value is called that it defines.
        op_type: the operator.
        operands: names and numbers.
        attributes: those that are set, in order of their names.
    """

    target: str
    op_type: str
    operands: tuple[str | Number, ...]
    attributes: tuple[tuple[str, Attribute], ...] = ()

    @property
    def operator(self) -> Operator:
        """What is known of it."""
        return OPERATORS[self.op_type]

    @property
    def names(self) -> tuple[str, ...]:
        """The operands that are values."""
        return tuple(operand for operand in self.operands if isinstance(operand, str))

    def attribute(self, name: str) -> Any:
        """An attribute, or its default."""
        return dict(self.attributes).get(name, dict(self.operator.defaults)[name])

    def __str__(self) -> str:
        settings = (f"{name}={_value_text(value)}" for name, value in self.attributes)
        return f"{self.target} = {self.op_type}({', '.join((*map(str, self.operands), *settings))})"


def _value_text(value: Attribute) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class Expression:
    """Steps that make results of operands.

    Attributes:
        steps: in order.
    """

    steps: tuple[Step, ...]

    @property
    def operand_count(self) -> int:
        """How many operands it reads."""
        read = (int(name[1:]) + 1 for step in self.steps for name in step.names if name[0] == "x")
        return max(read, default=0)

    @property
    def results(self) -> tuple[str, ...]:
        """The results in order."""
        found = [step.target for step in self.steps if step.target[0] == "y"]
        return tuple(sorted(found, key=lambda name: int(name[1:])))

    @property
    def lines(self) -> tuple[str, ...]:
        """The text, a line for each step."""
        return tuple(map(str, self.steps))

    def types(self, operands: Sequence[Operand]) -> dict[str, Operand]:
        """Shapes and dtypes of all values, by name.

        Raises:
            ExpressionError: the operands are not those that the expression takes.
        """
        if len(operands) != self.operand_count:
            raise ExpressionError(f"{len(operands)} operands given, the expression reads {self.operand_count}")
        known = {f"x{place}": operand for place, operand in enumerate(operands)}
        for name, operand in known.items():
            if operand.dtype not in DTYPES.values():
                raise ExpressionError(f"{name} is of {operand.dtype}; operands are of {', '.join(DTYPES)}")
        for step in self.steps:
            try:
                known[step.target] = _type_of(step, known)
            except ExpressionError as error:
                raise ExpressionError(f"{step}: {error}") from None
        return known


def _type_of(step: Step, known: Mapping[str, Operand]) -> Operand:
    operator = step.operator
    values = [known[name] for name in step.names]
    if step.op_type == "Where":
        if isinstance(step.operands[0], Number) or values[0].dtype.kind != "b":
            raise ExpressionError("the condition of Where is a bool")
        _check_dtypes(operator, values[1:])
    else:
        _check_dtypes(operator, values)
    for operand in step.operands:
        if isinstance(operand, Number):
            operand.of_dtype(values[-1].dtype)
    if operator.kind == "elementwise":
        try:
            shape = np.broadcast_shapes(*(value.shape for value in values))
        except ValueError:
            shapes = " and ".join(str(list(value.shape)) for value in values)
            raise ExpressionError(f"{shapes} do not broadcast") from None
    else:
        shape = _shape_along(step, values[0].shape)
    if operator.gives_bool:
        return Operand(shape, np.dtype(bool))
    return Operand(shape, DTYPES[step.attribute("to")] if step.op_type == "Cast" else values[-1].dtype)


def _check_dtypes(operator: Operator, values: Sequence[Operand]) -> None:
    dtypes = {value.dtype for value in values}
    if len(dtypes) != 1:
        raise ExpressionError(f"operands are of one dtype, not {', '.join(sorted(map(str, dtypes))) or 'none'}")
    dtype = dtypes.pop()
    is_bool = dtype.kind == "b"
    kinds = {"float": is_float(dtype), "number": not is_bool, "integer": dtype.kind in "iu", "bool": is_bool}
    if operator.takes != "any" and not kinds[operator.takes]:
        raise ExpressionError(f"it takes {operator.takes}s, not {dtype}")


def _shape_along(step: Step, shape: Shape) -> Shape:
    """The shape after a reduction, or after dims of size 1 are dropped or put in, or halves change places."""
    if step.operator.kind == "rotation":
        if not shape or shape[-1] % 2:
            raise ExpressionError(f"the last dim of {list(shape)} has no two halves")
        return shape
    if step.operator.kind == "index":
        return _with_places(shape, step.attribute("axis"), step.attribute("size"))
    axes = step.attribute("axes")
    if step.operator.kind == "unsqueeze":
        rank = len(shape) + len(axes)
        if min(axes) < -rank:
            raise ExpressionError(f"axis {min(axes)} is outside a shape of {rank} dims")
        sizes = iter(shape)
        return tuple(1 if dim - rank in axes else next(sizes) for dim in range(rank))
    if min(axes) < -len(shape):
        raise ExpressionError(f"axis {min(axes)} is outside a shape of {len(shape)} dims")
    chosen = {axis + len(shape) for axis in axes}
    if step.operator.kind == "reduction":
        return tuple(1 if dim in chosen else size for dim, size in enumerate(shape))
    if any(shape[dim] != 1 for dim in chosen):
        raise ExpressionError(f"dims {list(axes)} of {list(shape)} are not all of size 1")
    return tuple(size for dim, size in enumerate(shape) if dim not in chosen)


def _with_places(shape: Shape, axis: int, size: int) -> Shape:
    if axis < -len(shape) or shape[axis] != 1:
        raise ExpressionError(f"dim {axis} of {list(shape)} is not of size 1")
    return (*shape[:axis], size, *shape[len(shape) + axis + 1 :])
