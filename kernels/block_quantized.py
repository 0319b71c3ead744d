"""Products with weights of a few bits, which have a scale for each block of them."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from .gemm import product
from .operands import compute_dtype, narrow, widen
from .registry import Array, ArrayModule, Shaped, kernel
from .scratch import SCRATCH, piece_bytes
from .temporaries import copies_of_strided, widened

_PIECE_BYTES = 2 << 20
"""Of weights as floats that are there at a time: what a core has in its caches."""
_DEVICE_PIECE_BYTES = 256 << 20
"""The same on a device, where each piece takes several launches."""


@lru_cache(maxsize=8)
def _table(bits: int, dtype: "np.dtype[Any]", less: int) -> "np.ndarray[Any, Any]":
    """The numbers of two bytes, the lowest bits first, less one number."""
    numbers = np.arange(1 << 16)[:, None] >> np.arange(0, 16, bits) & (1 << bits) - 1
    return (numbers - less).astype(dtype)


def unpacked(xp: ArrayModule, data: Array, bits: int, dtype: "np.dtype[Any]") -> Array:
    """The numbers of bytes, the lowest bits first: as many times longer rows of floats."""
    each = 8 // bits
    found = xp.empty((*data.shape, each), dtype)
    for place in range(each):
        moved = xp.right_shift(data, np.uint8(place * bits))
        found[..., place] = xp.bitwise_and(moved, np.uint8((1 << bits) - 1))
    return found.reshape(*data.shape[:-1], data.shape[-1] * each)


def _looked_up(data: Array, bits: int, dtype: "np.dtype[Any]", less: int) -> Array:
    """The same on a processor, of rows of an even number of bytes, less one number; they are gone with the next ones.

    Looking up all numbers of two bytes takes an eighth of the time of shifts.
    """
    *lead, size = data.shape
    found = SCRATCH.array("numbers", (*lead, size // 2, 16 // bits), dtype)
    np.take(_table(bits, dtype, less), data.view(np.uint16), axis=0, out=found, mode="clip")
    return found.reshape(*lead, size * 8 // bits)


class PackedWeights:
    """The weights of a MatMulNBits.

    Args:
        xp: the array module.
        data: uint8 [N, blocks, block_size * bits / 8].
        scales: of N x blocks.
        points: None, packed as the numbers are or as a float for each block.
        order: the block whose scale each of K numbers has; None: that in which it stands.
        inner, columns, block: K, N and block_size.
        bits: of a number.
    """

    def __init__(
        self,
        xp: ArrayModule,
        data: Array,
        scales: Array,
        points: Array | None,
        order: Array | None,
        inner: int,
        columns: int,
        block: int,
        bits: int,
    ) -> None:
        if bits not in (2, 4, 8):
            raise ValueError(f"attribute bits={bits} is not supported: 2, 4 and 8 are")
        count = -(-inner // block)
        if data.size != columns * count * block * bits // 8 or scales.size != columns * count:
            raise ValueError(f"weights or scales are not those of {columns} columns of {count} blocks of {block}")
        self.xp, self.inner, self.columns, self.bits, self.order = xp, inner, columns, bits, order
        self.data, self.scales = data.reshape(columns, count, -1), scales.reshape(columns, count)
        if points is not None and points.dtype == np.uint8:
            points = unpacked(xp, points.reshape(columns, -1), bits, np.dtype(np.float32))[:, :count]
        self.points = None if points is None else points.reshape(columns, count)

    def floats(self, start: int, stop: int, dtype: "np.dtype[Any]") -> Array:
        """(numbers - zero points) * scales of some columns: [columns, K]."""
        middle = 0 if self.points is not None else 2 ** (self.bits - 1)
        data = self.data[start:stop]
        if self.xp is np and data.shape[-1] % 2 == 0:
            numbers = _looked_up(np.ascontiguousarray(data), self.bits, dtype, middle)
        else:
            numbers = unpacked(self.xp, data, self.bits, dtype)
            numbers -= dtype.type(middle)
        if self.order is not None:
            numbers = numbers.reshape(stop - start, -1)[:, : self.inner]
            return self.xp.multiply(numbers, self.scales[start:stop].astype(dtype)[:, self.order], out=numbers)
        for values, combine in ((self.points, self.xp.subtract), (self.scales, self.xp.multiply)):
            if values is not None:
                combine(numbers, values[start:stop].astype(dtype)[..., None], out=numbers)
        return numbers.reshape(stop - start, -1)[:, : self.inner]


def columns_at_a_time(inner: int, columns: int, most_bytes: int = _PIECE_BYTES) -> int:
    """How many columns of weights are floats at a time."""
    return max(1, min(columns, most_bytes // (4 * max(inner, 1))))


def _sizes(attributes: Mapping[str, Any]) -> tuple[int, int, int]:
    """K in full blocks, N, and how many of these are floats at a time."""
    inner, columns, block = (int(attributes[name]) for name in ("K", "N", "block_size"))
    return -(-inner // block) * block, columns, columns_at_a_time(inner, columns)


def _scratch(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """The weights of a piece."""
    inner, _, piece = _sizes(attributes)
    return piece_bytes(piece * inner, compute_dtype(results[0].dtype).itemsize)


def _temporaries(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """Places in the table, the product of a piece, small floats wider; zero points, and scales and they of a piece."""
    inner, columns, piece = _sizes(attributes)
    wide, blocks = compute_dtype(results[0].dtype).itemsize, inner // int(attributes["block_size"])
    products = 2 * results[0].elements // columns * piece * wide
    has_points, has_order = (len(operands) > place and operands[place] is not None for place in (3, 4))
    # Packed ones become floats of all columns, byte by byte.
    of_blocks = 2 * wide * piece * blocks + has_points * 10 * columns * (blocks + 7)
    order = has_order * 4 * wide * piece * inner
    copies = copies_of_strided(0, 1, 2, 3)(operands, results, attributes)
    return 4 * piece * inner + products + widened(operands[:1], results, attributes) + of_blocks + order + copies


@kernel("MatMulNBits", since=1, domain="com.microsoft", scratch=_scratch, temporaries=_temporaries)
def matmul_nbits(
    xp: ArrayModule,
    a: Array,
    b: Array,
    scales: Array,
    zero_points: Array | None = None,
    g_idx: Array | None = None,
    bias: Array | None = None,
    *,
    K: int,
    N: int,
    block_size: int,
    bits: int = 4,
    accuracy_level: int = 0,
    weight_prepacked: int = 0,
    out: Array | None = None,
) -> Array:
    """a times the transposed weights (numbers - zero points) * scales, a piece of the columns at a time.

    Computed in floats whatever `accuracy_level` asks for.
    """
    if weight_prepacked:
        raise ValueError("attribute weight_prepacked is not supported: the weights are in the layout of a device")
    if g_idx is not None and zero_points is not None:
        raise ValueError("zero points beside g_idx are not supported: nothing says whether they follow it")
    if a.shape[-1:] != (K,):
        raise ValueError(f"attribute K={K} is not the last dim of {a.shape}")
    weights = PackedWeights(xp, b, scales, zero_points, g_idx, K, N, block_size, bits)
    shape, dtype = (*a.shape[:-1], N), compute_dtype(a.dtype)
    y = out if out is not None and out.shape == shape and out.dtype == a.dtype else xp.empty(shape, a.dtype)
    rows, results = widen(a).reshape(prod(a.shape[:-1]), K), y.reshape(-1, N)
    piece = columns_at_a_time(K, N, _PIECE_BYTES if xp is np else _DEVICE_PIECE_BYTES)
    for start in range(0, N, piece):
        stop = min(start + piece, N)
        made = product(xp, rows, weights.floats(start, stop, dtype).T)
        if bias is not None:
            made += widen(bias[start:stop])
        results[:, start:stop] = narrow(made, a.dtype)
    return y
