"""Piece by piece on a processor: what a kernel computes on the way stays small, and in a core's cache."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from .operands import contiguous_result, narrow, widen, with_out
from .registry import Array, ArrayModule, Function

ELEMENTS = 2**14
"""Of a piece: a few of them in float32 are a quarter of a core's level-2 cache."""


def elementwise(function: Function) -> Function:
    """Let an elementwise function of one float operand compute piece by piece in the compute dtype.

    The result has the operand's dtype, and may be written over it.
    """

    @functools.wraps(function)
    def wrapper(xp: ArrayModule, x: Array, *, out: Array | None = None, **attributes: Any) -> Array:
        if xp.__name__ != "numpy":
            return narrow(xp.asarray(function(xp, widen(x), **attributes)), x.dtype)
        y = contiguous_result(out, x.shape, x.dtype)
        if not x.flags.c_contiguous:
            np.copyto(y, x)
            x = y
        operand, result = x.reshape(-1), y.reshape(-1)
        for start in range(0, operand.size, ELEMENTS):
            piece = slice(start, start + ELEMENTS)
            result[piece] = function(xp, widen(operand[piece]), **attributes)
        return y

    return with_out(wrapper, function)


def row_pieces(rows: int, width: int) -> Iterator[slice]:
    """As many rows of a matrix at a time as a piece has room for, and at least one."""
    count = max(1, ELEMENTS // max(1, width))
    for start in range(0, rows, count):
        yield slice(start, start + count)
