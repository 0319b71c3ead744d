"""What follows on a matrix product: factors, a residual, a bias, an activation."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..operands import narrow
from ..registry import Array, ArrayModule
from .gpu import Gpu, pointers_of
from .indexing import ELEMENTS
from .programs import Program

ACTIVATIONS = {None: 0, "relu": 1, "gelu_tanh": 2, "silu": 3}
_THREADS, _BLOCKS_EACH = 256, 32


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

    def of_columns(self, columns: slice) -> "Finish":
        """What follows in some columns of the result, where nothing is added that is of its shape."""
        return self if self.bias is None else self._replace(bias=self.bias[columns])

    def arguments(self, wide: "np.dtype[Any]") -> tuple[list[Any], list[Any]]:
        """As a launch takes them, for sums in some dtype: pointers, and numbers."""
        pointers = pointers_of(self.bias, self.residual)
        return pointers, [wide.type(self.alpha), wide.type(self.beta), np.int32(ACTIVATIONS[self.activation])]

    def launch(self, gpu: Gpu, sums: Array, result: Array) -> None:
        """Write what follows on sums in their compute dtype.

        Args:
            gpu: the current device.
            sums: contiguous.
            result: contiguous, of the dtype of bias and residual; may be the sums.
        """
        pointers, numbers = self.arguments(sums.dtype)
        sizes = np.int64(result.size), np.int64(result.shape[-1])
        blocks = min(-(-result.size // _THREADS), _BLOCKS_EACH * gpu.multiprocessors)
        arguments = (sums, result, *pointers, *sizes, *numbers)
        gpu.launch(_program(ELEMENTS[result.dtype]), "finish", blocks, _THREADS, arguments)


def _program(element: int) -> Program:
    return Program.file("finish.cu", ELEMENT=element)


def all_programs() -> Iterator[Program]:
    """Every program that is launched here."""
    return map(_program, ELEMENTS.values())
