"""What follows on a matrix product: factors, a residual, a bias, an activation."""

import math
from typing import Any, NamedTuple

import numpy as np

from ..operands import narrow, widen
from ..registry import Array, ArrayModule

_GELU_FACTOR, _GELU_CUBE = math.sqrt(2 / math.pi), 0.044715


class Finish(NamedTuple):
    """activation(alpha * product + beta * residual + bias).

    Attributes:
        bias: a number for each column; or None.
        activation: None, "relu" or "gelu_tanh".
        residual: of the result's shape; or None.
        alpha, beta: factors.
    """

    bias: Array | None = None
    activation: str | None = None
    residual: Array | None = None
    alpha: float = 1.0
    beta: float = 1.0

    @property
    def is_any(self) -> bool:
        """Whether anything follows but a factor."""
        return not (self.bias is None and self.activation is None and self.residual is None)

    def of_dtype(self, xp: ArrayModule, dtype: "np.dtype[Any]") -> "Finish":
        """As the library takes them: one after the other in memory, in the result's dtype."""

        def taken(x: Array | None) -> Array | None:
            return None if x is None else xp.ascontiguousarray(narrow(x, dtype))

        return Finish(taken(self.bias), self.activation, taken(self.residual), self.alpha, self.beta)

    def added(self, xp: ArrayModule, product: Array, result: Array) -> Array:
        """Into `result`, what follows on a product in its compute dtype, which has its factor."""
        kind = product.dtype.type
        if self.residual is not None:
            product = product + widen(self.residual) * kind(self.beta)
        if self.bias is not None:
            product = product + widen(self.bias)
        if self.activation == "relu":
            product = xp.maximum(product, kind(0))
        elif self.activation == "gelu_tanh":
            inner = kind(_GELU_FACTOR) * (product + kind(_GELU_CUBE) * (product * product * product))
            product = kind(0.5) * product * (kind(1) + xp.tanh(inner))
        result[...] = product.astype(result.dtype, copy=False)
        return result
