"""com.microsoft's elementwise operators, and those that move data, in plain operators."""

import math

import numpy as np

from irpar.ir import DType, Node, Value

from ..facts import CannotTellError, axis_attribute, float_attribute, int_attribute, needed, needed_ints, operand
from .writer import GradientWriter, NoGradientError

_END = 2**62
"""Beyond any dim."""


def cut(value: Value, axis: int, start: int, end: int, w: GradientWriter) -> Value:
    """Elements from `start` to `end` along an axis."""
    return w.op("Slice", [value, *(w.ints([number]) for number in (start, end, axis))])


def halves(value: Value, w: GradientWriter) -> tuple[Value, Value]:
    """The last dim in two.

    Raises:
        CannotTellError: it is symbolic, or odd.
    """
    axis, size = len(w.dims(value)) - 1, w.dims(value)[-1]
    if not isinstance(size, int) or size % 2:
        raise CannotTellError("the halves")
    return cut(value, axis, 0, size // 2, w), cut(value, axis, size // 2, size, w)


# -- activations ----------------------------------------------------------------------------------------------------


def gelu(x: Value, w: GradientWriter) -> Value:
    """x / 2 * (1 + erf(x / sqrt(2)))."""
    return w.mul(w.mul(x, 0.5), w.add(w.op("Erf", [w.mul(x, math.sqrt(0.5))]), 1.0))


def swish(x: Value, alpha: float, w: GradientWriter) -> Value:
    """x * sigmoid(alpha * x)."""
    return w.mul(x, w.op("Sigmoid", [w.mul(x, alpha) if alpha != 1 else x]))


def decompose_gelu(node: Node, w: GradientWriter) -> list[Value]:
    """Gelu and BiasGelu."""
    x, bias = needed(node, 0), operand(node, 1)
    return [gelu(x if bias is None else w.add(x, bias), w)]


def decompose_fast_gelu(node: Node, w: GradientWriter) -> list[Value]:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))."""
    x, bias = needed(node, 0), operand(node, 1)
    given = x if bias is None else w.add(x, bias)
    x = w.widened(given)  # Its cubes overflow in float16.
    cubic = w.mul(x, w.add(w.mul(w.mul(x, x), 0.044715), 1.0))
    bent = w.op("Tanh", [w.mul(cubic, math.sqrt(2 / math.pi))])
    return [w.cast(w.mul(w.mul(x, 0.5), w.add(bent, 1.0)), given.dtype)]


def decompose_quick_gelu(node: Node, w: GradientWriter) -> list[Value]:
    """See `swish`."""
    return [swish(needed(node, 0), float_attribute(node, "alpha", 1.702), w)]


def decompose_scaled_silu(node: Node, w: GradientWriter) -> list[Value]:
    """z * sigmoid(z) of z = scale * x."""
    x, scale = needed(node, 0), operand(node, 1)
    scaled = w.mul(x, float_attribute(node, "alpha", 1.0)) if scale is None else w.mul(x, scale)
    return [swish(scaled, 1.0, w)]


def decompose_split_gelu(node: Node, w: GradientWriter) -> list[Value]:
    """left * gelu(right) of x + bias."""
    left, right = halves(w.add(needed(node, 0), needed(node, 1)), w)
    return [w.mul(left, gelu(right, w))]


def decompose_bias_add(node: Node, w: GradientWriter) -> list[Value]:
    """x + bias + skip."""
    return [w.add(w.add(needed(node, 0), needed(node, 1)), needed(node, 2))]


def decompose_gated_add(node: Node, w: GradientWriter) -> list[Value]:
    """x + y * gate.

    Raises:
        NoGradientError: the gate is projected.
    """
    if operand(node, 3) is not None:
        raise NoGradientError("because its gate is projected in bfloat16")
    return [w.add(needed(node, 0), w.mul(needed(node, 1), needed(node, 2)))]


def decompose_attention_gate(node: Node, w: GradientWriter) -> list[Value]:
    """decay = scale * softplus(a + bias), in the bias's dtype; beta = sigmoid(b)."""
    a, bias, scale, b = needed(node, 0), needed(node, 1), needed(node, 2), operand(node, 3)
    decay = w.mul(scale, w.op("Softplus", [w.add(w.cast(a, bias.dtype), bias)]))
    results = [w.cast(decay, a.dtype)]
    if len(node.results) > 1:
        if b is None:
            raise CannotTellError("a gate of no operand")
        results.append(w.op("Sigmoid", [b]))
    return results


def decompose_complex_product(node: Node, w: GradientWriter) -> list[Value]:
    """(a + bi)(c + di), or by the conjugate of the second; a last dim holds both parts."""
    sign = -1 if node.op_type == "ComplexMulConj" else 1
    (a, b), (c, d) = (halves(needed(node, place), w) for place in (0, 1))
    ac, bd, ad, bc = w.mul(a, c), w.mul(b, d), w.mul(a, d), w.mul(b, c)
    real, imaginary = (w.sub(ac, bd), w.add(ad, bc)) if sign > 0 else (w.add(ac, bd), w.sub(bc, ad))
    return [w.op("Concat", [real, imaginary], {"axis": len(w.dims(real)) - 1})]


def clamped_swiglu(gate: Value, up: Value, alpha: float, beta: float, limit: float, w: GradientWriter) -> Value:
    """gate * sigmoid(alpha * gate) * (up + beta), both sides clamped where there is a limit."""
    if limit > 0:
        gate = w.op("Clip", [gate, None, w.bound(limit, gate)])
        up = w.op("Clip", [up, w.bound(-limit, up), w.bound(limit, up)])
    return w.mul(swish(gate, alpha, w), w.add(up, beta) if beta else up)


def _swiglu_numbers(node: Node) -> tuple[float, float, float]:
    return (
        float_attribute(node, "activation_alpha", 1.0),
        float_attribute(node, "activation_beta", 0.0),
        float_attribute(node, "limit", 0.0),
    )


def decompose_swiglu(node: Node, w: GradientWriter) -> list[Value]:
    """See `clamped_swiglu`; without a second operand the first holds both, side by side."""
    up = operand(node, 1)
    gate, up = halves(needed(node, 0), w) if up is None else (needed(node, 0), up)
    return [clamped_swiglu(gate, up, *_swiglu_numbers(node), w)]


def decompose_router_projection(node: Node, w: GradientWriter) -> list[Value]:
    """The router's columns of a product, and SwiGLU of the two halves of the others."""
    columns = w.op("MatMul", [needed(node, 0), needed(node, 1)])
    size, last = int_attribute(node, "router_size"), len(w.dims(columns)) - 1
    gate, up = halves(cut(columns, last, size, _END, w), w)
    results = [cut(columns, last, 0, size, w), clamped_swiglu(gate, up, *_swiglu_numbers(node), w)]
    return results[: len(node.results)]


# -- moving data ----------------------------------------------------------------------------------------------------


def decompose_expand_dims(node: Node, w: GradientWriter) -> list[Value]:
    """Unsqueeze."""
    return [w.unsqueeze(needed(node, 0), needed_ints(node, 1))]


def decompose_unfold(node: Node, w: GradientWriter) -> list[Value]:
    """Windows along a dim, which become the last: the elements of all of them are read."""
    x = needed(node, 0)
    rank = len(w.dims(x))
    axis = axis_attribute(node, rank, -1, "dim")
    size, step, length = int_attribute(node, "size"), int_attribute(node, "step", 1), w.dims(x)[axis]
    if not isinstance(length, int):
        raise CannotTellError("a symbolic dim")
    count = (length - size) // step + 1
    places = np.arange(count, dtype=np.int64)[:, None] * step + np.arange(size, dtype=np.int64)
    read = w.op("Gather", [x, w.constant(places, "windows")], {"axis": axis})
    order = [*range(axis + 1), *range(axis + 2, rank + 1), axis + 1]
    return [w.transpose(read, order)]


def decompose_gather_nd(node: Node, w: GradientWriter) -> list[Value]:
    """ONNX's GatherND."""
    return [w.op("GatherND", [needed(node, 0), w.cast(needed(node, 1), DType.I64)])]


def decompose_pad(node: Node, w: GradientWriter) -> list[Value]:
    """ONNX's Pad, whose number to fill with has no dims."""
    value = operand(node, 2)
    if value is not None and w.dims(value):
        value = w.reshape(value, [])
    pads = needed(node, 1)
    if len(w.dims(pads)) != 1:
        pads = w.reshape(pads, [-1])
    operands = [needed(node, 0), pads, *([value] if value is not None else [])]
    return [w.op("Pad", operands, {name: node.attributes[name] for name in ("mode",) if name in node.attributes})]
