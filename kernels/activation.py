"""Activation functions; the smaller floats are computed in float32."""

import math

import numpy as np

from .elementwise import erf_of
from .operands import check_same_dtype, fitting, narrow, one_of, widen, written
from .pieces import elementwise
from .registry import Array, ArrayModule, kernel
from .temporaries import arrays_like, rounded


def sigmoid_of(xp: ArrayModule, x: Array) -> Array:
    """1 / (1 + exp(-x)); exp overflows to infinity for very negative x, which gives the right 0."""
    y = xp.asarray(-x)
    xp.exp(y, out=y)
    y += 1
    return xp.divide(1, y, out=y)


def softplus_of(xp: ArrayModule, x: Array) -> Array:
    """log(1 + exp(x)), without overflow."""
    return xp.maximum(x, x.dtype.type(0)) + xp.log1p(xp.exp(-xp.abs(x)))


@kernel("Relu", since=6, temporaries=rounded)
def relu(xp: ArrayModule, x: Array, *, out: Array | None = None) -> Array:
    """max(x, 0)."""
    return xp.maximum(x, x.dtype.type(0), out=fitting(out, x.dtype, x))


@kernel("Sigmoid", since=6)
@elementwise
def sigmoid(xp: ArrayModule, x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    return sigmoid_of(xp, x)


def gelu_of_tanh(xp: ArrayModule, x: Array) -> Array:
    """Gaussian error linear unit by tanh, of a float32 or float64 array."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
    return 0.5 * x * (1 + xp.tanh(inner))


@kernel("Gelu", since=20)
@elementwise
def gelu(xp: ArrayModule, x: Array, *, approximate: str = "none") -> Array:
    """Gaussian error linear unit, exact or by tanh."""
    one_of("approximate", approximate, ("none", "tanh"))
    if approximate == "tanh":
        return gelu_of_tanh(xp, x)
    return 0.5 * x * (1 + erf_of(xp, x * x.dtype.type(math.sqrt(0.5))))


@kernel("Swish", since=24)
@elementwise
def swish(xp: ArrayModule, x: Array, *, alpha: float = 1.0) -> Array:
    """x * sigmoid(alpha * x)."""
    return x * sigmoid_of(xp, alpha * x)


@kernel("SwiGLU", since=28, temporaries=arrays_like(2.5, 0))
def swiglu(xp: ArrayModule, gate: Array, linear: Array, *, alpha: float = 1.0, out: Array | None = None) -> Array:
    """swish(gate) * linear; both operands have one shape."""
    check_same_dtype(gate, linear)
    if gate.shape != linear.shape:
        raise ValueError(f"operands must have one shape, not {gate.shape} and {linear.shape}")
    wide = widen(gate)
    return written(xp, narrow(wide * sigmoid_of(xp, alpha * wide) * widen(linear), gate.dtype), out)


@kernel("LeakyRelu", since=6)
@elementwise
def leaky_relu(xp: ArrayModule, x: Array, *, alpha: float = 0.01) -> Array:
    """x where positive, else alpha * x."""
    return xp.where(x < 0, alpha * x, x)


@kernel("PRelu", since=7, temporaries=arrays_like(2.5, 0))
def prelu(xp: ArrayModule, x: Array, slope: Array, *, out: Array | None = None) -> Array:
    """x where positive, else slope * x; the slope broadcasts to x."""
    check_same_dtype(x, slope)
    if np.broadcast_shapes(x.shape, slope.shape) != x.shape:
        raise ValueError(f"slope of shape {slope.shape} does not broadcast to {x.shape}")
    return written(xp, narrow(xp.where(x < x.dtype.type(0), slope * x, x), x.dtype), out)


@kernel("Elu", since=6)
@elementwise
def elu(xp: ArrayModule, x: Array, *, alpha: float = 1.0) -> Array:
    """x where positive, else alpha * (exp(x) - 1)."""
    return xp.where(x > 0, x, alpha * xp.expm1(x))


@kernel("Celu", since=12)
@elementwise
def celu(xp: ArrayModule, x: Array, *, alpha: float = 1.0) -> Array:
    """max(0, x) + min(0, alpha * (exp(x / alpha) - 1))."""
    return xp.where(x > 0, x, alpha * xp.expm1(x / alpha))


@kernel("Selu", since=6)
@elementwise
def selu(
    xp: ArrayModule,
    x: Array,
    *,
    alpha: float = 1.67326319217681884765625,
    gamma: float = 1.05070102214813232421875,
) -> Array:
    """Scaled exponential linear unit."""
    return gamma * xp.where(x > 0, x, alpha * xp.expm1(x))


@kernel("HardSigmoid", since=6)
@elementwise
def hard_sigmoid(xp: ArrayModule, x: Array, *, alpha: float = 0.2, beta: float = 0.5) -> Array:
    """alpha * x + beta, limited to [0, 1]."""
    return xp.clip(alpha * x + beta, 0, 1)


@kernel("HardSwish", since=14)
@elementwise
def hard_swish(xp: ArrayModule, x: Array) -> Array:
    """x * clip(x / 6 + 1/2, 0, 1)."""
    return x * xp.clip(x / 6 + 0.5, 0, 1)


@kernel("Softplus", since=1)
@elementwise
def softplus(xp: ArrayModule, x: Array) -> Array:
    """log(1 + exp(x))."""
    return softplus_of(xp, x)


@kernel("Mish", since=18)
@elementwise
def mish(xp: ArrayModule, x: Array) -> Array:
    """x * tanh(softplus(x))."""
    return x * xp.tanh(softplus_of(xp, x))


@kernel("ThresholdedRelu", since=10)
@elementwise
def thresholded_relu(xp: ArrayModule, x: Array, *, alpha: float = 1.0) -> Array:
    """x where above alpha, else 0."""
    return xp.where(x > alpha, x, xp.zeros_like(x))


@kernel("Shrink", since=9)
@elementwise
def shrink(xp: ArrayModule, x: Array, *, bias: float = 0.0, lambd: float = 0.5) -> Array:
    """x pulled towards zero by `bias` where |x| > lambd, else 0."""
    return xp.where(x < -lambd, x + bias, xp.where(x > lambd, x - bias, xp.zeros_like(x)))
