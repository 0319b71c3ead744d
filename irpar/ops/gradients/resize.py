"""Gradients of Resize, which is linear: along each dim a matrix, whose transpose it is."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from irpar.ir import Node, Value, with_dim

from ..facts import needed
from .writer import GradientWriter, Of

Taps = "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]"
"""Places and weights, each [resized, taps], and how many elements the operand has along the dim."""


def of_resize(node: Node, of: Of, w: GradientWriter, taps: Mapping[int, Any]) -> Sequence[Value | None]:
    """Each element gets the gradients of those that it was part of, weighted as it was.

    Args:
        node, of, w: as for all gradients.
        taps: dim to `Taps`.
    """
    x, g = needed(node, 0), of[0]
    assert g is not None

    def data() -> Value:
        made = g
        for dim, (places, weights, size) in taps.items():
            copies = _copies(places, weights, size)
            made = _summed(made, dim, copies, w) if copies else _product(made, dim, _matrix(places, weights, size), w)
        made.type = x.type
        return made

    return w.each(data)


def _copies(places: "np.ndarray[Any, Any]", weights: "np.ndarray[Any, Any]", size: int) -> int:
    """How often each element is repeated, where the result is nothing else; 0 where it is."""
    count, rest = divmod(len(places), size)
    if rest or places.shape[1] != 1 or not (weights == 1).all():
        return 0
    return count if np.array_equal(places[:, 0], np.repeat(np.arange(size), count)) else 0


def _summed(g: Value, dim: int, copies: int, w: GradientWriter) -> Value:
    sizes: list[int | tuple[Value, int]] = [(g, at) for at in range(len(w.dims(g)))]
    size = w.dims(g)[dim]
    assert isinstance(size, int)
    sizes[dim : dim + 1] = [size // copies, copies]
    return w.sum(w.reshaped(g, sizes), [dim + 1], keep=False)


def _matrix(places: "np.ndarray[Any, Any]", weights: "np.ndarray[Any, Any]", size: int) -> "np.ndarray[Any, Any]":
    """[resized, size]: what each element of the result is made of."""
    made = np.zeros((len(places), size))
    np.add.at(made, (np.arange(len(places))[:, None], places), weights)
    return made


def _product(g: Value, dim: int, matrix: "np.ndarray[Any, Any]", w: GradientWriter) -> Value:
    """The gradient times the matrix along a dim."""
    rank = len(w.dims(g))
    constant = w.constant(matrix.astype(g.dtype.numpy), "weights")
    if dim == rank - 1:
        return w.op("MatMul", [g, constant])
    order = [*(at for at in range(rank) if at != dim), dim]
    back = [order.index(at) for at in range(rank)]
    made = w.transpose(w.op("MatMul", [w.transpose(g, order), constant]), back)
    made.type = g.tensor_type.with_shape(with_dim(w.dims(g), dim, matrix.shape[1]))
    return made
