"""Convolutions with channels last: operands, and what a result must be, in float64."""

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from irpar.kernels import lookup
from irpar.kernels.cuda import lookup as lookup_cuda

Array = np.ndarray
Ints = tuple[int, ...]

DTYPES = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype(np.float32)}
UNITS = {"f16": 2.0**-11, "bf16": 2.0**-8, "f32": 2.0**-22}
ADDED = ("", "bias", "residual", "both")


@dataclass(frozen=True)
class Case:
    """One convolution.

    Attributes:
        x, weight: their shapes.
        attributes: of the node.
        added: a bias, a residual, both or nothing.
    """

    x: Ints
    weight: Ints
    attributes: dict[str, Any] = field(default_factory=dict)
    added: str = "both"

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.attributes.items()]
        return " ".join(["x".join(map(str, self.x)), "x".join(map(str, self.weight)), *words, self.added])

    def operands(self, dtype: str, seed: int | None = None) -> list[Array | None]:
        """x, weight, bias and residual; the products of a sum are of the size of one."""
        random = np.random.default_rng(seed)
        shapes: list[Ints | None] = [self.x, self.weight, self.weight[:1], self.result_shape()]
        if self.added in ("", "residual"):
            shapes[2] = None
        if self.added in ("", "bias"):
            shapes[3] = None
        made = [None if shape is None else random.standard_normal(shape) for shape in shapes]
        made[1] = np.asarray(made[1]) / np.sqrt(max(1, np.prod(self.weight[1:])))
        return [None if each is None else each.astype(DTYPES[dtype]) for each in made]

    def result_shape(self) -> Ints:
        """Of the result."""
        return tuple(_kernel()(np, [np.zeros(self.x), np.zeros(self.weight)], self._geometry(), 1)[0].shape)

    def expected(self, operands: list[Array | None]) -> Array:
        """The result in float64."""
        wide = [None if each is None else each.astype(np.float64) for each in operands]
        return np.asarray(_kernel()(np, wide, self.attributes, 1)[0])

    def check(self, found: Any, operands: list[Array | None], dtype: str) -> None:
        """Whether a result is as near as rounding it once makes it, and float32 sums do."""
        wanted = self.expected(operands)
        assert found.dtype == DTYPES[dtype]
        assert found.shape == wanted.shape
        error, room = np.abs(found.astype(np.float64) - wanted), UNITS[dtype] * np.abs(wanted) + 2e-5
        assert (error <= room).all(), f"{self} {dtype}: {(error - room).max():.3g} too far"

    def _geometry(self) -> dict[str, Any]:
        return {name: value for name, value in self.attributes.items() if name not in ("activation", "min", "max")}


def _kernel() -> Any:
    found = lookup("irpar", "ConvChannelsLast", 1)
    assert found is not None
    return found


def found(gpu: Any, case: Case, operands: list[Any], out: Any = None) -> Any:
    """The result of the CUDA kernel, or None."""
    kernel = lookup_cuda("irpar", "ConvChannelsLast", 1)
    assert kernel is not None
    results = kernel(gpu, operands, case.attributes, 1, out)
    return None if results is None else results[0]


def padded(*pads: int, **others: Any) -> dict[str, Any]:
    """Attributes."""
    return {"pads": pads, **others}


CASES = [
    Case((2, 6, 5, 16), (24, 3, 3, 16), padded(1, 1, 1, 1, activation="Relu")),
    Case((1, 9, 10, 72), (72, 3, 3, 72), padded(1, 0, 2, 1, strides=(2, 2), activation="Clip", min=-0.25, max=0.5)),
    Case((1, 11, 9, 3), (20, 7, 5, 3), padded(3, 2, 3, 2, strides=(2, 2), activation="Silu"), "bias"),
    Case((2, 12, 13, 3), (16, 7, 7, 3), padded(3, 3, 3, 3, strides=(2, 2), activation="Relu"), "bias"),
    Case((1, 6, 7, 12), (7, 2, 3, 12), padded(0, 1, 1, 0, dilations=(2, 1), activation="Sigmoid"), "residual"),
    Case((1, 8, 8, 64), (64, 1, 1, 64), {"strides": (2, 2), "activation": "HardSwish"}),
    Case((2, 5, 5, 40), (16, 1, 1, 40), {"activation": "Relu"}),
    Case((1, 5, 4, 32), (48, 3, 3, 16), padded(1, 1, 1, 1, group=2)),
    Case((1, 3, 4, 5, 8), (8, 2, 3, 2, 8), padded(1, 1, 0, 0, 1, 1, strides=(1, 2, 1)), ""),
    Case((2, 13, 6), (5, 4, 6), padded(3, 0, dilations=(2,))),
    Case((1, 4, 5, 6), (8, 3, 3, 6), padded(-1, 1, 1, 0)),
    Case((2, 6, 7, 16), (16, 3, 3, 1), padded(1, 1, 1, 1, group=16, activation="Relu")),
    Case((1, 7, 9, 40), (40, 5, 3, 1), padded(2, 1, 2, 1, group=40, strides=(2, 2), dilations=(1, 2))),
    Case((1, 5, 5, 6), (12, 3, 3, 1), padded(1, 1, 1, 1, group=6)),
    Case((1, 5, 5, 16), (16, 3, 3, 4), padded(1, 1, 1, 1, group=4), "bias"),
]
"""Of each kind and kernel one at least, with sizes that nothing divides."""
