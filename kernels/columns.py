"""Convolutions on a processor: windows laid out as columns and multiplied, block by block in its cache.

Columns of a whole image are as many times as large as it as a window has elements: written to memory and read again
they take longer than the product.
"""

import math

import numpy as np

from . import blocks, channelwise
from .registry import Array, Kept
from .scratch import SCRATCH, pieces_bytes
from .windows import Windows

Ints = tuple[int, ...]

LEAST_COLUMNS = 256
"""A product of fewer columns spends its time on packing the weights, however many rows they have."""


def convolve(x: Array, weight: Array, group: int, windows: Windows, kept: Kept, y: Array) -> None:
    """Write the convolution of x (batch, channels, *spatial) into y (batch, features, *counts), all of one dtype."""
    if not y.size:
        return
    depth = x.shape[1] // group
    if not depth * math.prod(windows.kernel):
        y.fill(0)
        return
    matrices = np.ascontiguousarray(weight).reshape(group, -1, depth * math.prod(windows.kernel))
    result = y.reshape(len(x), group, len(weight) // group, -1)
    if _is_plain(windows):
        np.matmul(matrices, np.ascontiguousarray(x).reshape(len(x), group, depth, -1), out=result)
    elif depth == 1 and (quicker := channelwise.form(x.shape, x.itemsize, windows)) is not None:
        quicker.convolve(x, matrices, windows, kept, y)
    else:
        _by_columns(x, matrices, windows, result)


def scratch_bytes(shape: Ints, weight: Ints, group: int, windows: Windows, itemsize: int) -> int:
    """What a convolution of an operand and a weight of some shapes takes of `SCRATCH`."""
    depth = shape[1] // group
    if not math.prod(windows.counts) or not depth * math.prod(windows.kernel) or _is_plain(windows):
        return 0
    matrices = (group, weight[0] // group, depth * math.prod(windows.kernel))
    if depth == 1 and (quicker := channelwise.form(shape, itemsize, windows)) is not None:
        return pieces_bytes(quicker.shapes(shape, matrices, windows, itemsize).values(), itemsize)
    row_bytes, rows = _rows_of(matrices, windows, itemsize)
    padded = blocks.padded_shape(shape, group, row_bytes * rows, windows)
    return pieces_bytes((padded, (*padded[:2], *windows.kernel, rows, *windows.counts[1:])), itemsize)


def _rows_of(matrices: Ints, windows: Windows, itemsize: int) -> tuple[int, int]:
    """The bytes of the columns of one row of results in one group, and how many rows at a time are laid out."""
    row = math.prod(windows.counts[1:])
    rows = max(blocks.BLOCK_BYTES // (matrices[2] * itemsize), LEAST_COLUMNS) // row
    return matrices[2] * row * itemsize, max(1, min(windows.counts[0], rows))


def _is_plain(windows: Windows) -> bool:
    """Whether windows are single elements, one after the other, so that x itself is the columns."""
    return {*windows.kernel, *windows.strides} <= {1} and not any(map(any, windows.pads)) and not any(windows.extra)


def _by_columns(x: Array, matrices: Array, windows: Windows, result: Array) -> None:
    """Columns of as many groups and images as fit; of an image that is too large, of some rows at a time."""
    group, _, depth = matrices.shape
    anything = (slice(None),) * (2 + len(windows.kernel))
    row = math.prod(windows.counts[1:])
    row_bytes, rows = _rows_of(matrices.shape, windows, x.itemsize)
    for images, groups, padded in blocks.padded_blocks(x, group, row_bytes * rows, windows):
        view = windows.over_padded(padded)
        count = len(padded), groups.stop - groups.start
        for start in range(0, windows.counts[0], rows):
            piece = view[(*anything, slice(start, start + rows))]
            block = SCRATCH.array("columns", piece.shape, x.dtype)
            np.copyto(block, piece)
            places = slice(start * row, start * row + math.prod(piece.shape[len(anything) :]))
            np.matmul(matrices[groups], block.reshape(*count, depth, -1), out=result[images, groups, :, places])
