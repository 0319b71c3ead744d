"""irpar.Fused: what one kernel computes, as an expression over its operands; see `irpar.kernels.expression`."""

import math
from collections.abc import Sequence

import numpy as np

from irpar.ir import DOMAIN, Node, Strings, TensorType, Type, Value, dtype_of_numpy, tensor_type
from irpar.kernels.expression import DTYPES, Expression, ExpressionError, Number, Operand, Step
from irpar.kernels.expression_reading import parse
from irpar.sharding import IrparError

from .facts import CannotTellError, dims_of, needed, operand, result_shape, tensor_of, text_attribute
from .gradients.writer import GradientWriter
from .matmul import cost_matmul, matmul_dims
from .op_def import OpDef
from .registry import define


def expression_of(node: Node) -> Expression:
    """The expression of a node.

    Raises:
        IrparError: it cannot be read, or there is none.
    """
    lines = node.attributes.get("expression")
    if not isinstance(lines, Strings):
        raise _wrong_expression(node, "there is no attribute expression, a list of texts")
    try:
        return parse(tuple(line if isinstance(line, str) else line.decode() for line in lines))
    except ExpressionError as error:
        raise _wrong_expression(node, str(error)) from error


def _wrong_expression(node: Node, what: str) -> IrparError:
    return _wrong(node, f"an expression that cannot be: {what}", "mend the expression, or let fuse-kernels write it")


def _wrong(node: Node, what: str, do: str) -> IrparError:
    return IrparError(f"irpar.{node.op_type} with {what}", where=f"node {node.label}", do=do)


def _types(node: Node) -> dict[str, Operand]:
    operands = []
    for value in node.inputs:
        type_ = tensor_type(value.type)
        if type_ is None or not type_.is_static:
            raise CannotTellError("a shape")
        operands.append(Operand(type_.static_shape, type_.dtype.numpy))
    try:
        return expression_of(node).types(operands)
    except ExpressionError as error:
        raise _wrong_expression(node, str(error)) from error


def _infer(node: Node) -> Sequence[Type]:
    types = _types(node)
    made = (types[name] for name in expression_of(node).results)
    return [TensorType(dtype_of_numpy(found.dtype), found.shape) for found in made]


def _flops(node: Node) -> int:
    """One for each element that a step makes or reduces; none for one that only converts."""
    types = _types(node)
    counted = (step for step in expression_of(node).steps if step.op_type not in ("Cast", "Squeeze", "Unsqueeze"))
    return sum(max(math.prod(types[name].shape) for name in (step.target, *step.names)) for step in counted)


class _Writer:
    """Writes the operators of an expression in place of its node.

    Args:
        node: it.
        writer: of the nodes.
    """

    def __init__(self, node: Node, writer: GradientWriter) -> None:
        self._writer = writer
        self._opset = writer.opsets.get("", 1)
        self._expression = expression_of(node)
        self._values: dict[str, Value] = {f"x{place}": value for place, value in enumerate(node.inputs)}

    def results(self) -> list[Value]:
        """Values for the results."""
        for step in self._expression.steps:
            self._values[step.target] = self._step(step)
        return [self._values[name] for name in self._expression.results]

    def _step(self, step: Step) -> Value:
        like = self._values[step.names[-1]]
        operands = [
            self._values[given] if isinstance(given, str) else self._number(given, like) for given in step.operands
        ]
        attributes = {name: step.attribute(name) for name in dict(step.operator.defaults)}
        if step.op_type == "Cast":
            attributes["to"] = dtype_of_numpy(DTYPES[attributes["to"]]).value
        if "axes" in attributes:
            return self._along(step, operands[0])
        if step.op_type == "IsIndex":
            places = np.arange(attributes["size"]).astype(like.dtype.numpy)
            shape = (-1, *(1 for _ in range(-attributes["axis"] - 1)))
            return self._writer.op("Equal", [operands[0], self._writer.constant(places.reshape(shape), "places")])
        if step.op_type == "RotateHalf":
            return self._rotated(operands[0])
        if step.op_type == "Gelu" and self._opset < 20:
            return _gelu(self._writer, operands[0], attributes["approximate"] == "tanh")
        return self._writer.op(step.op_type, operands, attributes)

    def _rotated(self, x: Value) -> Value:
        """The second half of each row, negated, before the first."""
        w, size = self._writer, x.shape[-1]
        axes = w.ints([len(x.shape) - 1])
        first, second = (
            w.op("Slice", [x, w.ints([begin]), w.ints([begin + size // 2]), axes]) for begin in (0, size // 2)
        )
        return w.op("Concat", [w.op("Neg", [second]), first], {"axis": len(x.shape) - 1})

    def _number(self, number: Number, like: Value) -> Value:
        return self._writer.constant(np.asarray(number.of_dtype(like.dtype.numpy)).astype(like.dtype.numpy), "number")

    def _along(self, step: Step, value: Value) -> Value:
        """A reduction, or dims of size 1 that go or come."""
        given = step.attribute("axes")
        rank = len(value.shape) + (len(given) if step.operator.kind == "unsqueeze" else 0)
        axes = [axis + rank for axis in given]
        settings = {"keepdims": 1} if step.operator.kind == "reduction" else {}
        if self._opset >= (13 if step.op_type in ("ReduceSum", "Squeeze", "Unsqueeze") else 18):
            return self._writer.op(step.op_type, [value, self._writer.ints(axes)], settings)
        return self._writer.op(step.op_type, [value], {"axes": axes, **settings})


def _gelu(w: GradientWriter, x: Value, is_tanh: bool) -> Value:
    """Gelu in operators that all operator sets have."""
    if is_tanh:
        cube = w.mul(w.mul(w.mul(x, x), x), 0.044715)
        inner = w.op("Tanh", [w.mul(w.add(x, cube), math.sqrt(2 / math.pi))])
    else:
        inner = w.op("Erf", [w.mul(x, math.sqrt(0.5))])
    return w.mul(w.mul(x, 0.5), w.add(inner, 1.0))


def _decompose(node: Node, writer: GradientWriter) -> Sequence[Value]:
    return _Writer(node, writer).results()


define(OpDef(DOMAIN, "Fused", _infer, flops=_flops, decompose=_decompose))


# -- FusedMatMul: a product with a bias, a residual, an activation -------------------------------------------------


_ACTIVATIONS = ("none", "gelu_tanh")


def _infer_product(node: Node) -> Sequence[Type]:
    result = TensorType(tensor_of(node, 0).dtype, matmul_dims(dims_of(node, 0), dims_of(node, 1)))
    _check_product(node, result)
    return [result]


def _check_product(node: Node, result: TensorType) -> None:
    """Check that a bias is a row of the result, that a residual is like it, and that there is such an activation."""
    activation = text_attribute(node, "activation", "none")
    if activation not in _ACTIVATIONS:
        raise _wrong(node, f"the activation {activation}", f"write one of {', '.join(_ACTIVATIONS)}")
    for index, name in ((2, "bias"), (3, "residual")):
        if operand(node, index) is None or not (result.is_static and tensor_of(node, index).is_static):
            continue
        given = tensor_of(node, index)
        leading = result.static_shape[:-1] if name == "residual" else (1,) * (len(given.static_shape) - 1)
        if given != result.with_shape((*leading, *result.static_shape[-1:])):
            raise _wrong(node, f"a {name} {given} and a result {result}", f"mend the {name}")


def _flops_of_product(node: Node) -> int:
    """Those of the product, and one for each element and operator behind it."""
    added = sum(operand(node, index) is not None for index in (2, 3)) + ("activation" in node.attributes)
    return cost_matmul(node) + added * math.prod(result_shape(node))


def _write_product(node: Node, writer: GradientWriter) -> Sequence[Value]:
    made = writer.op("MatMul", [needed(node, 0), needed(node, 1)])
    for index in (3, 2):
        addend = operand(node, index)
        made = made if addend is None else writer.add(made, addend)
    if text_attribute(node, "activation", "none") == "gelu_tanh":
        if writer.opsets.get("", 1) < 20:
            return [_gelu(writer, made, is_tanh=True)]
        return [writer.op("Gelu", [made], {"approximate": "tanh"})]
    return [made]


define(OpDef(DOMAIN, "FusedMatMul", _infer_product, flops=_flops_of_product, decompose=_write_product))
