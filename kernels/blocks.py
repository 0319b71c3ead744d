"""Pieces of images that a convolution on a processor lays out in its cache."""

from collections.abc import Iterator

import numpy as np

from .registry import Array
from .scratch import SCRATCH
from .windows import Windows

BLOCK_BYTES = 2**20
"""What a block may take: about the level-2 cache of a core."""


Ints = tuple[int, ...]


def block_counts(shape: Ints, group: int, nbytes: int) -> tuple[int, int]:
    """How many images and groups at most are convolved together; see `padded_blocks`."""
    fitting = max(1, BLOCK_BYTES // nbytes)
    return max(1, min(shape[0], fitting // group)), min(group, fitting)


def padded_shape(shape: Ints, group: int, nbytes: int, windows: Windows) -> Ints:
    """The largest block with its padding around, which it may have room for."""
    images, groups = block_counts(shape, group, nbytes)
    return images, groups * (shape[1] // group), *windows.padded(shape[2:])


def padded_blocks(x: Array, group: int, nbytes: int, windows: Windows) -> Iterator[tuple[slice, slice, Array]]:
    """Images and groups that are convolved together, and their channels with padding around, in memory used again.

    Args:
        x: the operand.
        group: how many groups its channels are.
        nbytes: what one group of one image takes.
        windows: what is laid over it.
    """
    images, groups = block_counts(x.shape, group, nbytes)
    shape = padded_shape(x.shape, group, nbytes, windows)
    depth, spatial = x.shape[1] // group, shape[2:]
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
