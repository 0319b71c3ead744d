"""Convolutions of each channel with kernels of its own, on a processor.

What takes the time is how often elements are read and written, not the products: for each kind of image a form with few
passes over memory.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from . import blocks
from .registry import Array, Kept
from .scratch import SCRATCH
from .windows import Windows

Ints: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """A way to convolve.

    Attributes:
        convolve: writes the convolution of x (batch, channels, *spatial) with matrices (channels, multiplier, elements
            of a kernel) into y (batch, channels * multiplier, *counts).
        shapes: the largest array for each purpose that it takes of `SCRATCH`, by the shapes of x and the matrices and
            the bytes of an element.
    """

    convolve: Callable[[Array, Array, Windows, Kept, Array], None]
    shapes: Callable[[Ints, Ints, Windows, int], Mapping[str, Ints]]


WEIGHT = 1
"""The place of the weight among the operands, for what is kept of it."""

LEAST_WIDTH = 28
"""Shorter rows than that are copied slowly, one by one."""

LEAST_PLACES = 200
"""Products of a vector with fewer columns spend their time on being called."""

LEAST_CHANNELS = 384
"""Sums over fewer channels side by side spend their time on finding the next place."""

LEAST_CHANNELS_APART = 128
"""As `LEAST_CHANNELS`, where strides make any other form copy elements one by one."""


def form(shape: Ints, itemsize: int, windows: Windows) -> Form | None:
    """The form that is quicker than columns for x of a shape; None where none is."""
    are_close = set(windows.strides) == {1}
    if len(windows.counts) == 2 and windows.dilations[0] == 1 and windows.counts[1] >= LEAST_WIDTH:
        return _BY_ROWS
    channels = LEAST_CHANNELS if are_close else LEAST_CHANNELS_APART
    is_small = channels * math.prod(windows.padded(shape[2:])) * itemsize <= blocks.BLOCK_BYTES
    if shape[1] >= channels and is_small and min(map(min, windows.pads)) >= 0:
        return _BY_PLACES
    return _BY_PITCH if are_close else None


def _row_step(windows: Windows) -> int:
    """How far apart the rows are that share columns."""
    height, width = windows.counts
    return max((n for n in range(1, height + 1) if height % n == 0 and height // n * width >= LEAST_PLACES), default=1)


def _row_columns(windows: Windows) -> Ints:
    """The columns of one image and channel by rows."""
    (height, width), (down, across), step = windows.counts, windows.kernel, _row_step(windows)
    return windows.strides[0] * (step - 1) + down, across, height // step, width


def _row_shapes(shape: Ints, matrices: Ints, windows: Windows, itemsize: int) -> dict[str, Ints]:
    columns, step = _row_columns(windows), _row_step(windows)
    # Fewer and larger blocks: twice the cache is quicker than once.
    padded = blocks.padded_shape(shape, matrices[0], math.prod(columns) * itemsize // 2, windows)
    sums = (*padded[:2], step, matrices[1], math.prod(columns[2:]))
    return {"padded": padded, "columns": (*padded[:2], *columns), "sums": sums}


def _by_rows(x: Array, matrices: Array, windows: Windows, kept: Kept, y: Array) -> None:
    """Wide images: columns of several rows that are `step` apart, so that neighbours share columns.

    The results of a row are a vector times the columns of its windows. The next row's windows have all columns but the
    first and one more (with strides, but the first few): rows of results need no copies of their own. Six rows of
    results, a step of 3, and kernels of 3 rows and one column, over rows 0 to 7 of the padded image:

        columns        0 3 | 1 4 | 2 5 | 3 6 | 4 7
        results 0 3    0 3 | 1 4 | 2 5
        results 1 4          1 4 | 2 5 | 3 6
        results 2 5                2 5 | 3 6 | 4 7
    """
    group, features, depth = matrices.shape
    height, width = windows.counts
    step, shape = _row_step(windows), _row_columns(windows)
    (stride_down, stride_across), dilation = windows.strides, windows.dilations[1]
    for images, groups, padded in blocks.padded_blocks(x, group, math.prod(shape) * x.itemsize // 2, windows):
        lead, strides = padded.shape[:2], padded.strides
        columns = SCRATCH.array("columns", (*lead, *shape), x.dtype)
        row, column = strides[2:]
        view = (*strides[:2], row, dilation * column, step * stride_down * row, stride_across * column)
        np.copyto(columns, np.lib.stride_tricks.as_strided(padded, columns.shape, view))
        places = height // step * width
        image, channel, row, column = columns.strides[:4]
        view = (image, channel, stride_down * row, column, x.itemsize)
        shared = np.lib.stride_tricks.as_strided(columns, (*lead, step, depth, places), view)
        sums = SCRATCH.array("sums", (*lead, step, features, places), x.dtype)
        np.matmul(matrices[groups, None], shared, out=sums)
        target = y.reshape(len(x), group, features, height // step, step, width)[images, groups]
        np.copyto(target, np.moveaxis(sums.reshape(*lead, step, features, height // step, width), 2, 4))


def _place_count(shape: Ints, windows: Windows, itemsize: int) -> int:
    """How many channels are summed at once."""
    fitting = max(LEAST_CHANNELS, blocks.BLOCK_BYTES // 2 // (math.prod(windows.padded(shape[2:])) * itemsize))
    return -(-shape[1] // max(1, shape[1] // fitting))


def _place_shapes(shape: Ints, matrices: Ints, windows: Windows, itemsize: int) -> dict[str, Ints]:
    count = _place_count(shape, windows, itemsize)
    return {"padded": (*windows.padded(shape[2:]), count), "sums": (*windows.counts, count)}


def _by_places(x: Array, matrices: Array, windows: Windows, kept: Kept, y: Array) -> None:
    """Many channels: these lie side by side, and the windows of a place are summed for all of them together."""
    group, features, _ = matrices.shape
    rank, padded = len(windows.counts), windows.padded(x.shape[2:])
    weights = kept.of(WEIGHT, "channels last", lambda: np.ascontiguousarray(np.moveaxis(matrices, 0, 2)))
    weights = weights.reshape(features, *windows.kernel, group)
    inside = tuple(slice(before, before + n) for n, (before, _) in zip(x.shape[2:], windows.pads, strict=True))
    count = _place_count(x.shape, windows, x.itemsize)
    places, elements = [*range(rank)], [*range(rank, 2 * rank)]
    for image, result in zip(x, y.reshape(len(x), group, features, *windows.counts), strict=True):
        for first in range(0, group, count):
            taken = slice(first, min(first + count, group))
            block = SCRATCH.array("padded", (*padded, taken.stop - first), x.dtype)
            block.fill(0)
            block[inside] = np.moveaxis(image[taken], 0, -1)
            view = windows.over_padded(np.moveaxis(block, -1, 0)[None])[0]
            sums = SCRATCH.array("sums", (*windows.counts, taken.stop - first), x.dtype)
            for feature in range(features):
                operands = view, [2 * rank, *elements, *places], weights[feature, ..., taken], [*elements, 2 * rank]
                np.einsum(*operands, [*places, 2 * rank], out=sums)
                result[taken, feature] = np.moveaxis(sums, -1, 0)


def _pitches(shape: Ints, windows: Windows) -> tuple[list[int], int]:
    """How far apart neighbours lie in each dim of a padded image, and how long a row of columns is."""
    padded = windows.padded(shape[2:])
    pitches = [math.prod(padded[axis + 1 :]) for axis in range(len(padded))]
    return pitches, sum((n - 1) * pitch for n, pitch in zip(windows.counts, pitches, strict=True)) + 1


def _pitch_shapes(shape: Ints, matrices: Ints, windows: Windows, itemsize: int) -> dict[str, Ints]:
    group, features, depth = matrices
    _, length = _pitches(shape, windows)
    padded = blocks.padded_shape(shape, group, (depth + features) * length * itemsize, windows)
    lead = padded[:2]
    return {"padded": padded, "columns": (*lead, *windows.kernel, length), "sums": (*lead, features, length)}


def _by_pitch(x: Array, matrices: Array, windows: Windows, kept: Kept, y: Array) -> None:
    """Windows of one channel and stride 1: each element of a window is the padded image, some places further.

    So columns are copied in one long piece each. What they have between the end of a row and the start of the next is
    computed as well, and left out of the result. A row of 4 places, padded to 6, and a window of 3:

        padded   0 a b c d 0 | 0 e f g h 0
        columns  0 a b c d 0 0 e f g     a b c d 0 0 e f g h     b c d 0 0 e f g h 0
        result   ^ ^ ^ ^     ^ ^ ^ ^
    """
    group, features, depth = matrices.shape
    pitches, length = _pitches(x.shape, windows)
    steps = [d * pitch * x.itemsize for d, pitch in zip(windows.dilations, pitches, strict=True)]
    for images, groups, padded in blocks.padded_blocks(x, group, (depth + features) * length * x.itemsize, windows):
        padded = np.ascontiguousarray(padded)  # Without pads it is the operand, which may be a block of a larger image.
        lead = padded.shape[:2]
        block = SCRATCH.array("columns", (*lead, *windows.kernel, length), x.dtype)
        view = (*padded.strides[:2], *steps, x.itemsize)
        np.copyto(block, np.lib.stride_tricks.as_strided(padded, block.shape, view))
        sums = SCRATCH.array("sums", (*lead, features, length), x.dtype)
        np.matmul(matrices[groups], block.reshape(*lead, depth, length), out=sums)
        shape = (*lead, features, *windows.counts)
        strides = (*sums.strides[:3], *(pitch * x.itemsize for pitch in pitches))
        target = y.reshape(len(x), group, features, *windows.counts)[images, groups]
        np.copyto(target, np.lib.stride_tricks.as_strided(sums, shape, strides))


_BY_ROWS = Form(_by_rows, _row_shapes)
_BY_PLACES = Form(_by_places, _place_shapes)
_BY_PITCH = Form(_by_pitch, _pitch_shapes)
