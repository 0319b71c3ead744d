"""Elementwise operators: unary, binary with broadcasting, comparisons, logic, selection and casts."""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

from irpar.ir import DType, Node, TensorType, Type

from .facts import (
    broadcast_dims,
    data_of,
    dims_of,
    dtype_attribute,
    ints_operand,
    operand,
    result_shape,
    same_type,
    shape_of,
    shapes_of,
    tensor_of,
)
from .gradients import elementwise as gradients
from .gradients.zero import zero
from .op_def import OpDef
from .registry import define
from .rule import FactorRule, RuleBuilder, broadcast_rule, whole

UNARY = (
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Ceil", "Celu", "Cos", "Cosh", "Elu",
    "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal",
    "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Swish",
    "Tan", "Tanh", "ThresholdedRelu",
)  # fmt: skip
BINARY = (
    "Add", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Mod", "Mul", "PRelu", "Pow", "Sub",
)  # fmt: skip
COMPARISONS = ("And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Or", "Xor")
TESTS = ("IsInf", "IsNaN")
VARIADIC = ("Max", "Mean", "Min", "Sum")


def _broadcast_type(node: Node, dtype: DType) -> list[Type]:
    types = [tensor_of(node, index) for index, value in enumerate(node.operands) if value is not None]
    if types and all(type_ == types[0] for type_ in types) and types[0].dtype is dtype and types[0].shape is not None:
        return [types[0]]  # Most operands are of one type.
    dims = broadcast_dims([dims_of(node, index) for index, value in enumerate(node.operands) if value is not None])
    return [TensorType(dtype, dims)]


def infer_broadcast(node: Node) -> Sequence[Type]:
    """The dtype of the first operand, dims by broadcasting."""
    return _broadcast_type(node, tensor_of(node, 0).dtype)


def infer_comparison(node: Node) -> Sequence[Type]:
    """Bools, dims by broadcasting."""
    return _broadcast_type(node, DType.BOOL)


def _infer_where(node: Node) -> Sequence[Type]:
    return _broadcast_type(node, tensor_of(node, 1).dtype)


def rule_broadcast(node: Node) -> FactorRule:
    """Every dim of the result, and the same dim of the operands that have it."""
    return broadcast_rule(shapes_of(node), result_shape(node))


def per_element(count: int) -> Callable[[Node], int]:
    """A cost of `count` operations for each element of the first result."""
    return lambda node: count * prod(result_shape(node))


def _cost_variadic(node: Node) -> int:
    extra = 1 if node.op_type == "Mean" else 0
    return (len(node.operands) - 1 + extra) * prod(result_shape(node))


_elementwise = partial(OpDef, "", is_elementwise=True)
for _name in UNARY:
    _slope = gradients.SLOPES.get(_name)
    _gradient = zero if _slope is None else gradients.of_first(_slope)
    define(_elementwise(_name, same_type, rule_broadcast, per_element(1), gradient=_gradient))
for _name in BINARY:
    _gradient = gradients.BINARY.get(_name, zero)
    define(_elementwise(_name, infer_broadcast, rule_broadcast, per_element(1), gradient=_gradient))
for _name in (*COMPARISONS, *TESTS):
    define(_elementwise(_name, infer_comparison, rule_broadcast, per_element(1), gradient=zero))
for _name in VARIADIC:
    _gradient = gradients.VARIADIC[_name]
    define(_elementwise(_name, infer_broadcast, rule_broadcast, _cost_variadic, gradient=_gradient))
define(_elementwise("Where", _infer_where, rule_broadcast, per_element(1), gradient=gradients.of_where))
define(OpDef("", "Identity", same_type, rule_broadcast, view=True, moves_elements=True, gradient=gradients.of_identity))
define(_elementwise("SwiGLU", same_type, rule_broadcast, per_element(3), gradient=gradients.of_swiglu))


# -- Clip: bounds are scalars, left out or not --------------------------------------------------------------------


def _infer_first(node: Node) -> Sequence[Type]:
    return [tensor_of(node, 0)]


def rule_scalars(node: Node) -> FactorRule:
    """The first operand elementwise; all others whole."""
    rule = RuleBuilder()
    dims = rule.dims(shape_of(node, 0))
    others = [() if shape is None else whole(len(shape)) for shape in shapes_of(node)[1:]]
    return rule.done([dims, *others], [dims] * len(node.results))


define(_elementwise("Clip", _infer_first, rule_scalars, per_element(2), gradient=gradients.of_clip))


# -- Cast, CastLike -----------------------------------------------------------------------------------------------


def _infer_cast(node: Node) -> Sequence[Type]:
    return [TensorType(dtype_attribute(node, "to"), tensor_of(node, 0).shape)]


def _infer_cast_like(node: Node) -> Sequence[Type]:
    return [TensorType(tensor_of(node, 1).dtype, tensor_of(node, 0).shape)]


def _rule_cast_like(node: Node) -> FactorRule:
    """Of the second operand only the dtype counts, so that it may lie in any way."""
    rule = RuleBuilder()
    dims = rule.dims(shape_of(node, 0))
    like = rule.dims(shape_of(node, 1))
    return rule.done([dims, like], [dims], runs_empty=(factor for parts in like for factor in parts))


define(_elementwise("Cast", _infer_cast, rule_broadcast, gradient=gradients.of_cast))
define(_elementwise("BitCast", _infer_cast, rule_broadcast, gradient=zero))
define(OpDef("", "CastLike", _infer_cast_like, _rule_cast_like, gradient=gradients.of_cast))


# -- Dropout ------------------------------------------------------------------------------------------------------


def _infer_dropout(node: Node) -> Sequence[Type]:
    data = tensor_of(node, 0)
    return [data, TensorType(DType.BOOL, data.shape)][: len(node.results)]


def is_random_dropout(node: Node) -> bool:
    """True for a Dropout that is, or may be, in training mode."""
    mode = operand(node, 2)
    return mode is not None and (data_of(mode) is None or bool(ints_operand(node, 2) != (0,)))


def _rule_dropout(node: Node) -> FactorRule | None:
    return None if is_random_dropout(node) else rule_scalars(node)


define(OpDef("", "Dropout", _infer_dropout, _rule_dropout, random=is_random_dropout, gradient=gradients.of_dropout))
