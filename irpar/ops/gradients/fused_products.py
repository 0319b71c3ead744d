"""com.microsoft's products in plain operators."""

from collections.abc import Sequence

from irpar.ir import Node, Value
from irpar.ir.attributes import Floats

from ..facts import float_attribute, needed, operand, text_attribute
from .writer import GradientWriter, NoGradientError


def decompose_fused_matmul(node: Node, w: GradientWriter, orders: Sequence[Sequence[int]]) -> list[Value]:
    """alpha * A @ B.

    Args:
        node, w: see `OpDef.decompose`.
        orders: of each operand its dims in the order in which they are multiplied.
    """
    sides = [w.transpose(needed(node, place), order) for place, order in enumerate(orders)]
    made = w.op("MatMul", sides)
    alpha = float_attribute(node, "alpha", 1.0)
    return [w.mul(made, alpha) if alpha != 1 else made]


# -- products and an activation -------------------------------------------------------------------------------------

_PARAMETERS = {"LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta"), "Elu": ("alpha",)}
_PLAIN = frozenset({"Relu", "Sigmoid", "Tanh", "Softplus", "Softsign"})


def _activated(x: Value, name: str, numbers: Sequence[float], w: GradientWriter) -> Value:
    """An activation by its name.

    Raises:
        NoGradientError: it is not one of ONNX Runtime's.
    """
    if not name:
        return x
    if name == "Clip" and len(numbers) == 2:
        return w.op("Clip", [x, *(w.bound(number, x) for number in numbers)])
    if name in _PLAIN or name in _PARAMETERS:
        return w.op(name, [x], dict(zip(_PARAMETERS.get(name, ()), numbers, strict=False)))
    raise NoGradientError(f'because its activation is "{name}"')


def decompose_fused_gemm(node: Node, w: GradientWriter) -> list[Value]:
    """Gemm and an activation."""
    names = ("alpha", "beta", "transA", "transB")
    given = {name: node.attributes[name] for name in names if name in node.attributes}
    made = w.op("Gemm", [value for value in node.operands if value is not None], given)
    name = text_attribute(node, "activation")
    numbers = []
    for parameter in ("activation_alpha", "activation_beta"):
        if parameter not in node.attributes:
            break
        numbers.append(float_attribute(node, parameter, 0.0))
    return [_activated(made, name, numbers, w)]


def decompose_fused_conv(node: Node, w: GradientWriter) -> list[Value]:
    """Conv, what is added to it, and an activation."""
    own = ("activation", "activation_params")
    given = {name: value for name, value in node.attributes.items() if name not in own}
    data, kernel, bias, more = (operand(node, place) for place in range(4))
    made = w.op("Conv", [data, kernel, *([] if bias is None else [bias])], given)
    if more is not None:
        made = w.add(made, more)
    numbers = node.attributes.get("activation_params", Floats())
    assert isinstance(numbers, Floats)
    return [_activated(made, text_attribute(node, "activation"), numbers, w)]


def decompose_distance(node: Node, w: GradientWriter) -> list[Value]:
    """The distance of each row of A from each row of B, or its square.

    Raises:
        NoGradientError: it is measured otherwise.
    """
    metric = text_attribute(node, "metric", "sqeuclidean")
    if metric not in ("euclidean", "sqeuclidean"):
        raise NoGradientError(f'because its metric is "{metric}"')
    apart = w.sub(w.unsqueeze(needed(node, 0), [1]), w.unsqueeze(needed(node, 1), [0]))
    return [w.op("ReduceL2" if metric == "euclidean" else "ReduceSumSquare", [apart, w.ints([2])], {"keepdims": 0})]
