"""Gradients of elementwise operators; at kinks and ties as PyTorch has them.

Operands that were broadcast get the sum over what was repeated.
"""

import math
from collections.abc import Callable, Sequence

from irpar.ir import DType, Node, TensorType, Value

from ..facts import float_attribute, needed, operand, text_attribute
from .writer import GradientWriter, Of, safe_result

Slope = Callable[[Node, Value, Value, GradientWriter], Value]
"""(node, x, gradient of the result, writer) to the gradient of x."""

_TWO_OVER_ROOT_PI = 2 / math.sqrt(math.pi)
_ROOT_2_OVER_PI = math.sqrt(2 / math.pi)
_CUBIC = 0.044715
"""Of the tanh form of Gelu (Hendrycks and Gimpel, 2016)."""


def of_first(slope: Slope) -> Callable[[Node, Of, GradientWriter], Sequence[Value | None]]:
    """The gradient of an operator of one operand."""

    def gradient(node: Node, of: Of, writer: GradientWriter) -> Sequence[Value | None]:
        g = of[0]
        assert g is not None
        return writer.each(lambda: slope(node, needed(node, 0), g, writer))

    return gradient


def _of_squares(slope: Slope) -> Slope:
    """A slope that squares its operand: of narrow floats it is computed in float32."""

    def wide(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
        return w.cast(slope(node, w.widened(x), w.widened(g), w), x.dtype)

    return wide


def _abs(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    return w.mul(g, w.op("Sign", [x]))


def _acos(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    return w.neg(_asin(node, x, g, w))


@_of_squares
def _acosh(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    return w.div(g, w.op("Sqrt", [w.mul(w.sub(x, 1), w.add(x, 1))]))


def _asin(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    return w.div(g, w.op("Sqrt", [w.mul(w.sub(1, x), w.add(1, x))]))


@_of_squares
def _asinh(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    return w.div(g, w.op("Sqrt", [w.add(w.mul(x, x), 1)]))


@_of_squares
def _atan(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    return w.div(g, w.add(w.mul(x, x), 1))


def _atanh(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    return w.div(g, w.mul(w.sub(1, x), w.add(1, x)))


def _celu(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    alpha = float_attribute(node, "alpha", 1.0)
    bent = w.mul(g, w.op("Exp", [w.div(x, alpha)]))
    return w.where(w.compare("Greater", x, 0), g, bent)


def _cos(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    return w.neg(w.mul(g, w.op("Sin", [x])))


def _cosh(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    return w.mul(g, w.op("Sinh", [x]))


def _elu(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    bent = w.mul(g, w.mul(w.op("Exp", [x]), float_attribute(node, "alpha", 1.0)))
    return w.where(w.compare("Greater", x, 0), g, bent)


def _erf(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    return w.mul(g, w.mul(w.op("Exp", [w.neg(w.mul(x, x))]), _TWO_OVER_ROOT_PI))


def _exp(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    return w.mul(g, safe_result(node))


@_of_squares
def _gelu(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    """x * P(x): P + x * P'; with tanh, P = (1 + tanh(u)) / 2, u = sqrt(2 / pi) * (x + 0.044715 x^3)."""
    square = w.mul(x, x)
    if text_attribute(node, "approximate", "none") == "tanh":
        t = w.op("Tanh", [w.mul(w.mul(x, w.add(w.mul(square, _CUBIC), 1)), _ROOT_2_OVER_PI)])
        inner = w.mul(w.add(w.mul(square, 3 * _CUBIC), 1), _ROOT_2_OVER_PI)
        bent = w.mul(w.mul(x, inner), w.sub(1, w.mul(t, t)))
        return w.mul(g, w.mul(w.add(w.add(t, 1), bent), 0.5))
    share = w.mul(w.add(w.op("Erf", [w.mul(x, math.sqrt(0.5))]), 1), 0.5)
    density = w.mul(w.op("Exp", [w.mul(square, -0.5)]), 1 / math.sqrt(2 * math.pi))
    return w.mul(g, w.add(share, w.mul(x, density)))


def _hard_sigmoid(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    alpha, beta = float_attribute(node, "alpha", 0.2), float_attribute(node, "beta", 0.5)
    line = w.add(w.mul(x, alpha), beta)
    inside = w.op("And", [w.compare("Greater", line, 0), w.compare("Less", line, 1)])
    return w.where(inside, w.mul(g, alpha), 0.0)


def _hard_swish(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    middle = w.mul(g, w.add(w.mul(x, 1 / 3), 0.5))
    rising = w.where(w.compare("Less", x, 3), middle, g)
    return w.where(w.compare("Greater", x, -3), rising, 0.0)


def _leaky_relu(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    return w.where(w.compare("Greater", x, 0), g, w.mul(g, float_attribute(node, "alpha", 0.01)))


def _log(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    return w.div(g, x)


def _mish(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    """x * t with t = tanh(softplus(x)): t + x * (1 - t^2) * sigmoid(x)."""
    t = w.op("Tanh", [w.op("Softplus", [x])])
    bent = w.mul(w.mul(x, w.op("Sigmoid", [x])), w.sub(1, w.mul(t, t)))
    return w.mul(g, w.add(t, bent))


def _neg(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    return w.neg(g)


def _reciprocal(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    y = safe_result(node)
    return w.neg(w.mul(g, w.mul(y, y)))


def _relu(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    # A product by a mask would be faster in ONNX Runtime, and NaN where the gradient is infinite, as behind a Sqrt.
    return w.where(w.compare("Greater", node.result, 0), g, 0.0)


def _selu(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    alpha = float_attribute(node, "alpha", 1.67326319217681884765625)
    gamma = float_attribute(node, "gamma", 1.05070102214813232421875)
    slope = w.where(w.compare("Greater", x, 0), gamma, w.mul(w.op("Exp", [x]), alpha * gamma))
    return w.mul(g, slope)


def _shrink(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    return w.where(w.compare("Greater", w.op("Abs", [x]), float_attribute(node, "lambd", 0.5)), g, 0.0)


def _sigmoid(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    y = safe_result(node)
    return w.mul(g, w.mul(y, w.sub(1, y)))


def _sin(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    return w.mul(g, w.op("Cos", [x]))


def _sinh(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    return w.mul(g, w.op("Cosh", [x]))


def _softplus(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    return w.mul(g, w.op("Sigmoid", [x]))


@_of_squares
def _softsign(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    size = w.add(w.op("Abs", [x]), 1)
    return w.div(g, w.mul(size, size))


def _sqrt(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    return w.div(w.mul(g, 0.5), safe_result(node))


def _swish(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    """x * s with s = sigmoid(alpha * x): s + alpha * x * s * (1 - s)."""
    alpha = float_attribute(node, "alpha", 1.0)
    s = w.op("Sigmoid", [w.mul(x, alpha)])
    bent = w.mul(w.mul(w.mul(x, alpha), s), w.sub(1, s))
    return w.mul(g, w.add(s, bent))


def _tan(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    y = safe_result(node)
    return w.mul(g, w.add(w.mul(y, y), 1))


def _tanh(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    y = safe_result(node)
    return w.mul(g, w.sub(1, w.mul(y, y)))


def _thresholded_relu(node: Node, x: Value, g: Value, w: GradientWriter) -> Value:
    return w.where(w.compare("Greater", x, float_attribute(node, "alpha", 1.0)), g, 0.0)


SLOPES: dict[str, Slope] = {
    "Abs": _abs,
    "Acos": _acos,
    "Acosh": _acosh,
    "Asin": _asin,
    "Asinh": _asinh,
    "Atan": _atan,
    "Atanh": _atanh,
    "Celu": _celu,
    "Cos": _cos,
    "Cosh": _cosh,
    "Elu": _elu,
    "Erf": _erf,
    "Exp": _exp,
    "Gelu": _gelu,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "LeakyRelu": _leaky_relu,
    "Log": _log,
    "Mish": _mish,
    "Neg": _neg,
    "Reciprocal": _reciprocal,
    "Relu": _relu,
    "Selu": _selu,
    "Shrink": _shrink,
    "Sigmoid": _sigmoid,
    "Sin": _sin,
    "Sinh": _sinh,
    "Softplus": _softplus,
    "Softsign": _softsign,
    "Sqrt": _sqrt,
    "Swish": _swish,
    "Tan": _tan,
    "Tanh": _tanh,
    "ThresholdedRelu": _thresholded_relu,
}
"""Of operators of one operand. Those that are not here have the derivative zero."""


# -- two operands ---------------------------------------------------------------------------------------------------


def _pair(node: Node, of: Of) -> tuple[Value, Value, Value]:
    assert of[0] is not None
    return needed(node, 0), needed(node, 1), of[0]


def of_add(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Both operands get the gradient."""
    a, b, g = _pair(node, of)
    return w.each(lambda: w.sum_to(g, a), lambda: w.sum_to(g, b))


def of_sub(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """The second gets it with the other sign."""
    a, b, g = _pair(node, of)
    return w.each(lambda: w.sum_to(g, a), lambda: w.neg(w.sum_to(g, b)))


def of_mul(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Each gets it times the other operand."""
    a, b, g = _pair(node, of)
    return w.each(lambda: w.sum_to(w.mul(g, b), a), lambda: w.sum_to(w.mul(g, a), b))


def of_div(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """g / b, and -g * (a / b) / b."""
    a, b, g = _pair(node, of)
    return w.each(
        lambda: w.sum_to(w.div(g, b), a),
        lambda: w.neg(w.sum_to(w.div(w.mul(g, safe_result(node)), b), b)),
    )


def of_mod(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """fmod(a, b) = a - b * trunc(a / b): g, and -g * trunc(a / b); trunc has no slope."""
    a, b, g = _pair(node, of)

    def divisor() -> Value:
        quotient = w.div(a, b)
        whole = w.mul(w.op("Sign", [quotient]), w.op("Floor", [w.op("Abs", [quotient])]))
        return w.neg(w.sum_to(w.mul(g, whole), b))

    return w.each(lambda: w.sum_to(g, a), divisor)


def of_pow(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """b * a^(b - 1), 0 where b is 0; and a^b * log(a), 0 where a is not positive.

    Of a negative base no logarithm is taken.
    """
    a, b, g = _pair(node, of)

    def base() -> Value:
        exponent = w.cast(b, a.dtype)
        slope = _power_slope(a, b, exponent, w)
        return w.sum_to(w.mul(g, slope), a)

    def exponent() -> Value:
        is_positive = w.compare("Greater", a, 0)
        log = w.op("Log", [w.where(is_positive, a, 1.0)])
        y = w.where(is_positive, node.result, 0.0)
        return w.cast(w.sum_to(w.mul(g, w.mul(y, log)), b), b.dtype)

    return w.each(base, exponent)


def _power_slope(a: Value, b: Value, exponent: Value, w: GradientWriter) -> Value:
    """The slope of a^b along a."""
    if b.data is not None and b.data.size == 1:
        number = float(b.data.numpy().ravel()[0])
        if number == 0:
            return w.zeros(a)
        if number == 1:
            return w.filled(1, a)
        rest = a if number == 2 else w.op("Pow", [a, w.number(number - 1, a)])
        return w.mul(rest, number)
    slope = w.mul(exponent, w.op("Pow", [a, w.sub(exponent, 1)]))
    return w.where(w.compare("Equal", exponent, 0), 0.0, slope)


def of_prelu(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """x where positive, else slope * x."""
    x, slope, g = _pair(node, of)
    is_positive = w.compare("Greater", x, 0)
    return w.each(
        lambda: w.where(is_positive, g, w.mul(g, slope)),
        lambda: w.sum_to(w.where(is_positive, 0.0, w.mul(g, x)), slope),
    )


BINARY = {"Add": of_add, "Div": of_div, "Mod": of_mod, "Mul": of_mul, "PRelu": of_prelu, "Pow": of_pow, "Sub": of_sub}
"""Of operators of two operands. Those that are not here have the derivative zero."""


# -- any number of operands -----------------------------------------------------------------------------------------


def of_sum(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Each operand gets the gradient."""
    g = of[0]
    assert g is not None
    return w.each(*(_summed(g, value, w) for value in node.operands))


def _summed(g: Value, value: Value | None, w: GradientWriter) -> Callable[[], Value] | None:
    return None if value is None else lambda: w.sum_to(g, value)


def of_mean(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Each operand gets its share."""
    assert of[0] is not None
    share = w.div(of[0], len(node.operands))
    return of_sum(node, [share], w)


def of_extreme(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Max and Min: the operands that are the extreme share the gradient evenly."""
    g = of[0]
    assert g is not None
    if len(node.operands) == 1:
        return [g]
    y = node.result
    are = [w.cast(w.compare("Equal", value, y), g.dtype) for value in node.inputs]
    count = are[0]
    for one in are[1:]:
        count = w.add(count, one)
    share = w.div(g, count)
    return w.each(*(_shared(share, one, value, w) for one, value in zip(are, node.inputs, strict=True)))


def _shared(share: Value, is_extreme: Value, value: Value, w: GradientWriter) -> Callable[[], Value]:
    return lambda: w.sum_to(w.mul(share, is_extreme), value)


VARIADIC = {"Max": of_extreme, "Mean": of_mean, "Min": of_extreme, "Sum": of_sum}


# -- others ---------------------------------------------------------------------------------------------------------


def of_where(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Each side gets the gradient where it was taken, and zero elsewhere: selected, not multiplied."""
    condition, yes, no = (needed(node, index) for index in range(3))
    g = of[0]
    assert g is not None
    return w.each(
        None,
        lambda: w.sum_to(w.where(condition, g, 0.0), yes),
        lambda: w.sum_to(w.where(condition, 0.0, g), no),
    )


def of_identity(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """The gradient itself."""
    return of


def of_clip(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """The operand gets the gradient where it is within the bounds, these included; a bound where it is cut off."""
    x, low, high = needed(node, 0), operand(node, 1), operand(node, 2)
    g = of[0]
    assert g is not None

    def data() -> Value:
        found = g
        if low is not None:
            found = w.where(w.compare("GreaterOrEqual", x, low), found, 0.0)
        if high is not None:
            found = w.where(w.compare("LessOrEqual", x, high), found, 0.0)
        return found

    def lower() -> Value:
        assert low is not None
        is_cut = w.compare("Less", x, low)
        if high is not None:
            is_cut = w.op("And", [is_cut, w.compare("Less", low, high)])
        return w.sum_to(w.where(is_cut, g, 0.0), low)

    def upper() -> Value:
        assert high is not None
        is_cut = w.compare("Greater", x, high)
        if low is not None:
            is_cut = w.op("Or", [is_cut, w.compare("GreaterOrEqual", low, high)])
        return w.sum_to(w.where(is_cut, g, 0.0), high)

    return w.each(data, lower if low is not None else None, upper if high is not None else None)


def of_cast(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """The gradient in the operand's dtype."""
    g = of[0]
    assert g is not None
    return w.each(lambda: w.cast(g, needed(node, 0).dtype))


def of_dropout(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """The gradient where the mask kept the operand, scaled as it was."""
    g = of[0]
    assert g is not None
    training = operand(node, 2)
    if training is None or (training.data is not None and not training.data.numpy().any()):
        return w.each(lambda: g)
    if len(node.results) < 2:
        node.add_result(Value("mask", TensorType(DType.BOOL, w.dims(node.results[0]))))
    ratio = operand(node, 1)
    dropped = 0.5 if ratio is None else w.cast(ratio, g.dtype)
    kept = w.sub(w.number(1, g), dropped)
    if training.data is None:
        kept = w.where(training, kept, w.number(1, g))
    return w.each(lambda: w.where(node.results[1], w.div(g, kept), 0.0))


def of_swiglu(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """Swish(a) * b, with the slope of Swish along a."""
    a, b, g = _pair(node, of)
    gate = w.mul(a, w.op("Sigmoid", [w.mul(a, float_attribute(node, "alpha", 1.0))]))
    return w.each(lambda: _swish(node, a, w.mul(g, b), w), lambda: w.mul(g, gate))
