"""Convolutions on a processor: windows laid out as columns and multiplied, block by block in its cache.

Columns of a whole image are as many times as large as it as a window has elements: written to memory and read again
they take longer than the product.
"""

import math
from collections.abc import Iterator

import numpy as np

from .registry import Array
from .scratch import SCRATCH
from .windows import Windows

BLOCK_BYTES = 2**20
"""What the columns of a block may take: about the level-2 cache of a core."""

LEAST_COLUMNS = 256
"""A product of fewer columns spends its time on packing the weights, however many rows they have."""


def convolve(x: Array, weight: Array, group: int, windows: Windows, y: Array) -> None:
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
    elif depth == 1 and set(windows.strides) == {1}:
        _by_pitch(x, matrices, windows, y)
    else:
        _by_columns(x, matrices, windows, result)


def _is_plain(windows: Windows) -> bool:
    """Whether windows are single elements, one after the other, so that x itself is the columns."""
    return {*windows.kernel, *windows.strides} <= {1} and not any(map(any, windows.pads)) and not any(windows.extra)


def _by_columns(x: Array, matrices: Array, windows: Windows, result: Array) -> None:
    """Columns of as many groups and images as fit; of an image that is too large, of some rows at a time."""
    group, _, depth = matrices.shape
    anything = (slice(None),) * (2 + len(windows.kernel))
    row = math.prod(windows.counts[1:])
    rows = max(1, min(windows.counts[0], max(BLOCK_BYTES // (depth * x.itemsize), LEAST_COLUMNS) // row))
    for images, groups, padded in _padded_blocks(x, group, depth * rows * row * x.itemsize, windows):
        view = windows.over_padded(padded)
        count = len(padded), groups.stop - groups.start
        for start in range(0, windows.counts[0], rows):
            piece = view[(*anything, slice(start, start + rows))]
            block = SCRATCH.array("columns", piece.shape, x.dtype)
            np.copyto(block, piece)
            places = slice(start * row, start * row + math.prod(piece.shape[len(anything) :]))
            np.matmul(matrices[groups], block.reshape(*count, depth, -1), out=result[images, groups, :, places])


def _by_pitch(x: Array, matrices: Array, windows: Windows, y: Array) -> None:
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
    for images, groups, padded in _padded_blocks(x, group, (depth + features) * length * x.itemsize, windows):
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


def _padded_blocks(x: Array, group: int, nbytes: int, windows: Windows) -> Iterator[tuple[slice, slice, Array]]:
    """Images and groups that are convolved together, and their channels with padding around, in memory used again.

    Args:
        x: the operand.
        group: how many groups its channels are.
        nbytes: what one group of one image takes.
        windows: what is laid over it.
    """
    fitting = max(1, BLOCK_BYTES // nbytes)
    groups = min(group, fitting)
    images = max(1, min(len(x), fitting // group))
    depth, spatial = x.shape[1] // group, windows.padded(x.shape[2:])
    shape = (images, groups * depth, *spatial)
    inside = tuple(slice(before, before + n) for n, (before, _) in zip(x.shape[2:], windows.pads, strict=True))
    cropped = any(min(pair) < 0 for pair in windows.pads)
    has_room = spatial != x.shape[2:] and not cropped
    if has_room:
        buffer = SCRATCH.array("padded", shape, x.dtype)
        buffer.fill(0)
    for image in range(0, len(x), images):
        for first in range(0, group, groups):
            taken = slice(image, min(image + images, len(x))), slice(first, min(first + groups, group))
            piece = x[taken[0], taken[1].start * depth : taken[1].stop * depth]
            if cropped:
                padded = windows.with_pads(np, piece, 0)
            elif not has_room:
                padded = piece
            else:
                padded = buffer[: piece.shape[0], : piece.shape[1]]
                padded[(slice(None), slice(None), *inside)] = piece
            yield *taken, padded
