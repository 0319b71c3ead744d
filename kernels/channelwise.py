"""Convolutions of each channel with kernels of its own, on a processor.

What takes the time is how often elements are read and written, not the products: for each kind of image a form with few
passes over memory.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from . import blocks
from .registry import Array, Kept
from .scratch import SCRATCH
from .windows import Windows

Form: TypeAlias = Callable[[Array, Array, Windows, Kept, Array], None]
"""Writes the convolution of x (batch, channels, *spatial) with matrices (channels, multiplier, elements of a kernel)
into y (batch, channels * multiplier, *counts)."""

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


def form(x: Array, windows: Windows) -> Form | None:
    """The form that is quicker than columns for x; None where none is."""
    are_close = set(windows.strides) == {1}
    if len(windows.counts) == 2 and windows.dilations[0] == 1 and windows.counts[1] >= LEAST_WIDTH:
        return _by_rows
    channels = LEAST_CHANNELS if are_close else LEAST_CHANNELS_APART
    is_small = channels * math.prod(windows.padded(x.shape[2:])) * x.itemsize <= blocks.BLOCK_BYTES
    if x.shape[1] >= channels and is_small and min(map(min, windows.pads)) >= 0:
        return _by_places
    return _by_pitch if are_close else None


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
    (height, width), (down, across) = windows.counts, windows.kernel
    step = max((n for n in range(1, height + 1) if height % n == 0 and height // n * width >= LEAST_PLACES), default=1)
    (stride_down, stride_across), dilation = windows.strides, windows.dilations[1]
    shape = (stride_down * (step - 1) + down, across, height // step, width)
    # Fewer and larger blocks: twice the cache is quicker than once.
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


def _by_places(x: Array, matrices: Array, windows: Windows, kept: Kept, y: Array) -> None:
    """Many channels: these lie side by side, and the windows of a place are summed for all of them together."""
    group, features, _ = matrices.shape
    rank, padded = len(windows.counts), windows.padded(x.shape[2:])
    weights = kept.of(WEIGHT, "channels last", lambda: np.ascontiguousarray(np.moveaxis(matrices, 0, 2)))
    weights = weights.reshape(features, *windows.kernel, group)
    inside = tuple(slice(before, before + n) for n, (before, _) in zip(x.shape[2:], windows.pads, strict=True))
    fitting = max(LEAST_CHANNELS, blocks.BLOCK_BYTES // 2 // (math.prod(padded) * x.itemsize))
    count = -(-group // max(1, group // fitting))
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


def _by_pitch(x: Array, matrices: Array, windows: Windows, kept: Kept, y: Array) -> None:
    """Windows of one channel and stride 1: each element of a window is the padded image, some places further.

    So columns are copied in one long piece each. What they have between the end of a row and the start of the next is
    computed as well, and left out of the result. A row of 4 places, padded to 6, and a window of 3:

        padded   0 a b c d 0 | 0 e f g h 0
        columns  0 a b c d 0 0 e f g     a b c d 0 0 e f g h     b c d 0 0 e f g h 0
        result   ^ ^ ^ ^     ^ ^ ^ ^
    """
    group, features, depth = matrices.shape
    padded_shape = windows.padded(x.shape[2:])
    pitches = [math.prod(padded_shape[axis + 1 :]) for axis in range(len(padded_shape))]
    length = sum((n - 1) * pitch for n, pitch in zip(windows.counts, pitches, strict=True)) + 1
    steps = [d * pitch * x.itemsize for d, pitch in zip(windows.dilations, pitches, strict=True)]
    for images, groups, padded in blocks.padded_blocks(x, group, (depth + features) * length * x.itemsize, windows):
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
