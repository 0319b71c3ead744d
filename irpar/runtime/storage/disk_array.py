"""Arrays that lie on disk while a program runs."""

import math
from collections import deque
from typing import Any

import numpy as np

from irpar.ir import DType, ExternalTensor, Tensor
from irpar.ir.tensor import unpack

from .direct_file import BLOCK, Array, DirectFile


class Extent:
    """Bytes of a file.

    Attributes:
        file: that.
        offset: the first one.
        nbytes: how many.
    """

    __slots__ = ("file", "nbytes", "offset")

    def __init__(self, file: DirectFile, offset: int, nbytes: int) -> None:
        self.file = file
        self.offset = offset
        self.nbytes = nbytes

    @property
    def first_block(self) -> int:
        """Where the block begins that has the first byte."""
        return self.offset - self.offset % BLOCK

    def read(self, memory: Array, position: int, least: int) -> None:
        """As `DirectFile.read`; nobody else writes to the file."""
        self.file.read(memory, position, least)
        self.file.check_unchanged()

    def write(self, memory: Array, position: int) -> None:
        """As `DirectFile.write`; nobody else gets these bytes before that has ended."""
        self.file.write(memory, position)

    @property
    def room(self) -> int:
        """Bytes of all blocks that have some of it."""
        return -(-(self.offset + self.nbytes) // BLOCK) * BLOCK - self.first_block


class LentExtent(Extent):
    """Bytes of a file that others get once nobody holds this any more."""

    __slots__ = ("_free",)

    def __init__(self, file: DirectFile, offset: int, nbytes: int, free: deque[int]) -> None:
        super().__init__(file, offset, nbytes)
        self._free = free

    def read(self, memory: Array, position: int, least: int) -> None:
        """As `DirectFile.read`; the rank that has the file writes to it all the time."""
        self.file.read(memory, position, least)

    def __del__(self) -> None:
        self._free.append(self.first_block)


class DiskArray:
    """An array that lies in a file: what a value in memory `disk` is while a program runs.

    Attributes:
        extent: where.
        dtype: of the array that it is read as.
        shape: that of the array.
        packed: the type of a tensor whose elements share bytes; None: it lies as an array does in memory.
    """

    __slots__ = ("dtype", "extent", "packed", "shape")

    def __init__(
        self, extent: Extent, dtype: "np.dtype[Any]", shape: tuple[int, ...], packed: DType | None = None
    ) -> None:
        self.extent = extent
        self.dtype = dtype
        self.shape = shape
        self.packed = packed

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.extent.nbytes

    def of_blocks(self, memory: Array) -> Array:
        """The array, in memory that the blocks of its extent were read to: not copied where it can be used there."""
        first = self.extent.offset - self.extent.first_block
        data = memory[first : first + self.nbytes]
        if self.packed is not None:
            return unpack(data.tobytes(), self.packed, self.shape)
        if first % self.dtype.alignment:
            data = data.copy()
        return data.view(self.dtype).reshape(self.shape)


def tensor_at(file: DirectFile, offset: int, tensor: Tensor) -> DiskArray:
    """A tensor whose raw bytes stand one after the other in a file."""
    packed = tensor.dtype if tensor.dtype.bits < 8 else None
    return DiskArray(Extent(file, offset, tensor.nbytes), np.dtype(tensor.dtype.numpy), tensor.shape, packed)


def offset_in_file(tensor: Tensor) -> int | None:
    """Where the raw bytes of a tensor begin in its base's file; None where they do not stand there one after the other.

    A block of [4, 6] does where only the first dim that has more than one index is cut: rows 1 to 3, not columns.
    """
    base = tensor.base
    if not isinstance(base, ExternalTensor) or len(tensor.bases) > 1:
        return None
    cut = [dim for dim, (start, stop) in enumerate(tensor.region) if (start, stop) != (0, base.shape[dim])]
    if not cut:
        return base.offset
    before = math.prod(stop - start for start, stop in tensor.region[: cut[-1]])
    if before > 1 or base.dtype.bits < 8:
        return None
    sizes = [math.prod(base.shape[dim + 1 :]) for dim in range(len(base.shape))]
    first = sum(start * size for (start, _), size in zip(tensor.region, sizes, strict=True))
    return base.offset + base.dtype.nbytes(first)
