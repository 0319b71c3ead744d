"""Convolutions of 3x3 kernels on a processor by Winograd's minimal filtering, F(2x2, 3x3).

A tile of 2x2 results takes 16 products for each channel instead of 36. With a kernel g, the 4x4 elements d that it sees
and the matrices below, the tile is A'((G g G') (B' d B))A, the product in the middle element by element (Lavin and
Gray, Fast Algorithms for Convolutional Neural Networks, 2016). Each of the 16 elements, of all tiles, is one matrix
product over the channels; the rest is sums.

    G =  1    0    0      B' = 1  0 -1  0      A' = 1  1  1  0
        1/2  1/2  1/2          0  1  1  0           0  1 -1 -1
        1/2 -1/2  1/2          0 -1  1  0
         0    0    1           0  1  0 -1
"""

import math
from collections.abc import Iterator

import numpy as np

from . import blocks
from .registry import Array
from .scratch import SCRATCH, pieces_bytes
from .windows import Windows

Ints = tuple[int, ...]

LEAST_CHANNELS = 64
"""With fewer channels, or features, the sums take longer than the products that they save."""

LEAST_TILES = 48
"""With fewer tiles the 16 matrices of transformed kernels take longer to read than the products that they save."""

LEAST_PRODUCTS = 2**21
"""With fewer products for each element of the tiles, calling NumPy takes longer than the products that are saved."""

LEAST_COLUMNS = 128
"""A block of fewer tiles spends its time on reading the transformed kernels."""

OUTLIERS = 1 / 8
"""What part of the number of products in a sum the greatest element may be, in root mean squares.

The rounding error of an element is in all results of its tiles, also in those that do not see it. Up to here it is less
than what the sums round.
"""

_G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])


def is_fit(x: Array, weight: Array, group: int, windows: Windows) -> bool:
    """Whether tiles are quicker than columns, and round no worse."""
    return x.dtype.kind == "f" and bool(x.size) and _may_fit(x.shape, weight.shape, group, windows) and _is_even(x)


def _may_fit(shape: Ints, weight: Ints, group: int, windows: Windows) -> bool:
    """Whether tiles are quicker than columns, as far as shapes tell."""
    if group != 1 or windows.kernel != (3, 3) or {*windows.strides, *windows.dilations} != {1}:
        return False
    if min(map(min, windows.pads)) < 0 or min(weight[:2]) < LEAST_CHANNELS:
        return False
    tiles = shape[0] * math.prod(_tiles(windows))
    return tiles >= LEAST_TILES and tiles * math.prod(weight[:2]) >= LEAST_PRODUCTS


def _tiles(windows: Windows) -> tuple[int, ...]:
    """Tiles per dim; the last may reach over the end."""
    return tuple(-(-count // 2) for count in windows.counts)


def _is_even(x: Array) -> bool:
    """Whether all elements are finite, and none stands out too much."""
    flat = x.reshape(-1)
    greatest, squares = max(float(flat.max()), -float(flat.min())), float(np.dot(flat, flat))
    products = 9 * x.shape[1]
    return math.isfinite(squares) and greatest <= OUTLIERS * products * math.sqrt(squares / flat.size)


def convolve(x: Array, kernels: Array, windows: Windows, y: Array) -> bool:
    """Write the convolution of x (batch, channels, height, width) into y, if it `is_fit`.

    Args:
        x: the operand.
        kernels: the `transformed_kernels`.
        windows: what is laid over x.
        y: the result, contiguous; all are of one dtype.

    Returns:
        Whether all results are finite. If not, y is wrong: a number that is not spoils all results of its tile.
    """
    features = kernels.shape[1]
    across = _tiles(windows)[1]
    for images, first, count in _blocks(x, features, windows):
        operand = _transformed_tiles(_phases(x[images], windows, first, count, across), across + 1)
        products = SCRATCH.array("products", (16, features, operand.shape[-1]), x.dtype)
        np.matmul(kernels, operand, out=products)
        target = y[images, :, 2 * first : 2 * (first + count)]
        _put(_sums(products).reshape(2, 2, features, len(target), count, across + 1)[..., :-1], target)
    flat = y.reshape(-1)
    return math.isfinite(float(np.dot(flat, flat)))


def _block_counts(shape: Ints, features: int, windows: Windows, itemsize: int) -> tuple[int, int]:
    """How many images, and rows of their tiles, are computed together at most."""
    down, across = _tiles(windows)
    row_bytes = 16 * max(shape[1], features) * (across + 1) * itemsize
    fitting = max(blocks.BLOCK_BYTES // row_bytes, -(-LEAST_COLUMNS // across))
    return max(1, min(shape[0], fitting // down)), -(-down // -(-down // fitting))


def scratch_bytes(
    shape: Ints, weight: Ints, group: int, windows: Windows, itemsize: int, is_constant: bool = False
) -> int:
    """What a convolution of an operand and a weight of some shapes takes of `SCRATCH`; 0 where it takes no tiles.

    What is made of a weight that `is_constant` is kept elsewhere.
    """
    if not _may_fit(shape, weight, group, windows):
        return 0
    (features, channels), across = weight[:2], _tiles(windows)[1]
    images, rows = _block_counts(shape, features, windows, itemsize)
    places = images * rows * (across + 1)
    shapes = [
        (2, 2, channels, images, rows + 1, across + 1),
        *((4, 2, channels, places), (4, 4, channels, places), (16, features, places)),
        *((2, 4, features, places), (2, 2, features, places)),
    ]
    if not is_constant:
        shapes.append((16, features, channels))
    return pieces_bytes(shapes, itemsize)


def _blocks(x: Array, features: int, windows: Windows) -> Iterator[tuple[slice, int, int]]:
    """Images, and rows of their tiles (the first, and how many), that are computed together."""
    down, _ = _tiles(windows)
    images, rows = _block_counts(x.shape, features, windows, x.itemsize)
    for image in range(0, len(x), images):
        for first in range(0, down, rows):
            yield slice(image, image + images), first, min(rows, down - first)


def transformed_kernels(weight: Array, is_kept: bool = True) -> Array:
    """G g G' of all kernels g: (16, features, channels); in `SCRATCH` where that is not kept."""
    features, channels = weight.shape[:2]
    matrix = np.kron(_G, _G).astype(weight.dtype)
    shape = (16, features * channels)
    made = None if is_kept else SCRATCH.array("transformed", shape, weight.dtype)
    return np.matmul(matrix, weight.reshape(features * channels, 9).T, out=made).reshape(16, features, channels)


def transformed_bytes(weight: tuple[int, ...], itemsize: int) -> int:
    """Bytes of the `transformed_kernels` of a weight of some shape; 0 where that is never transformed."""
    if weight[2:] != (3, 3) or min(weight[:2]) < LEAST_CHANNELS:
        return 0
    return 16 * weight[0] * weight[1] * itemsize


def _phases(images: Array, windows: Windows, first: int, rows: int, across: int) -> Array:
    """The padded elements under some rows of tiles, by whether their row and their column are odd.

    Results:
        (2, 2, channels, images, rows + 1, across + 1): a tile starts at its own place, and ends at the next one.
    """
    (top, _), (left, _) = windows.pads
    count, channels, height, width = images.shape
    phases = SCRATCH.array("phases", (2, 2, channels, count, rows + 1, across + 1), images.dtype)
    phases.fill(0)
    for is_odd_row, of_row in enumerate(phases):
        to_rows, from_rows = _every_other(2 * first + is_odd_row - top, rows + 1, height)
        for is_odd_column, phase in enumerate(of_row):
            to_columns, from_columns = _every_other(is_odd_column - left, across + 1, width)
            phase[..., to_rows, to_columns] = np.swapaxes(images, 0, 1)[..., from_rows, from_columns]
    return phases


def _every_other(start: int, count: int, size: int) -> tuple[slice, slice]:
    """Which of `count` places start, start + 2, ... lie in a dim of this size: among these places, and in the dim."""
    low = max(0, -(start // 2))
    high = max(low, min(count, (size - start + 1) // 2))
    return slice(low, high), slice(start + 2 * low, start + 2 * high, 2)


def _transformed_tiles(phases: Array, pitch: int) -> Array:
    """B' d B of all tiles d: (16, channels, tiles), with one that means nothing at the end of each row.

    Rows are not kept apart: the next row is `pitch` places further, the next column one place.
    """
    channels, images, rows_and_one = phases.shape[2:5]
    count = (rows_and_one - 1) * pitch
    even, odd = phases.reshape(2, 2, channels, images, count + pitch)
    rows = SCRATCH.array("rows", (4, 2, channels, images, count), phases.dtype)
    _differences(even[..., :count], odd[..., :count], even[..., pitch:], odd[..., pitch:], rows)
    even, odd = np.moveaxis(rows.reshape(4, 2, rows[0, 0].size), 1, 0)
    tiles = SCRATCH.array("tiles", (4, 4, rows[0, 0].size), phases.dtype)
    tiles[..., -1] = 0
    _differences(even[:, :-1], odd[:, :-1], even[:, 1:], odd[:, 1:], np.moveaxis(tiles[..., :-1], 1, 0))
    return tiles.reshape(16, channels, images * count)


def _differences(first: Array, second: Array, third: Array, fourth: Array, out: Array) -> None:
    """B' d along one dim, whose four elements are given."""
    np.subtract(first, third, out=out[0])
    np.add(second, third, out=out[1])
    np.subtract(third, second, out=out[2])
    np.subtract(second, fourth, out=out[3])


def _sums(products: Array) -> Array:
    """A' m A of all tiles m: (2, 2, features * tiles)."""
    _, features, count = products.shape
    products = products.reshape(4, 4, features * count)
    rows = SCRATCH.array("row sums", (2, 4, features * count), products.dtype)
    _sums_along(products, rows)
    results = SCRATCH.array("results", (2, 2, features * count), products.dtype)
    _sums_along(np.moveaxis(rows, 1, 0), np.moveaxis(results, 1, 0))
    return results


def _sums_along(x: Array, out: Array) -> None:
    """A' m along dim 0."""
    np.add(x[1], x[2], out=out[0])
    np.add(out[0], x[0], out=out[0])
    np.subtract(x[1], x[2], out=out[1])
    np.subtract(out[1], x[3], out=out[1])


def _put(results: Array, y: Array) -> None:
    """Put results (2, 2, features, images, down, across) side by side; the last row and column may be one too many."""
    for row, of_row in enumerate(results):
        for column, values in enumerate(of_row):
            target = y[..., row::2, column::2]
            target[...] = np.swapaxes(values, 0, 1)[..., : target.shape[2], : target.shape[3]]
