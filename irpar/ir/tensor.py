"""Lazy tensors: they know dtype, shape and where their bytes lie, and are read when something needs the numbers."""

import math
import os
import stat
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from irpar.sharding import IrparError

from .dims import with_dim
from .dtypes import DType, dtype_of_numpy
from .types import TensorType

Array = np.ndarray[Any, Any]

_KINDS = {stat.S_IFDIR: "folder", stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}
"""What a path may lead to that is no file."""


class TensorError(IrparError):
    """The bytes of a tensor cannot be read, or do not fit its type."""


class Tensor:
    """A constant tensor. Subclasses say where the numbers come from.

    Attributes:
        dtype: element type.
        shape: ints, one a dim.
    """

    __slots__ = ("dtype", "shape")

    def __init__(self, dtype: DType, shape: Sequence[int]) -> None:
        self.dtype = dtype
        self.shape = tuple(shape)

    @property
    def type(self) -> TensorType:
        """The type of a value that holds this tensor."""
        return TensorType(self.dtype, self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in ONNX's raw form."""
        return self.dtype.nbytes(self.size)

    @property
    def base(self) -> "Tensor":
        """The tensor that this one is a block of: another one for a slice, else itself."""
        return self

    @property
    def bases(self) -> "tuple[Tensor, ...]":
        """The tensors that its numbers are read from: several for one that is put together of pieces."""
        return (self.base,)

    @property
    def region(self) -> tuple[tuple[int, int], ...]:
        """Which block of `base` it is: per dim the half-open range."""
        return tuple((0, size) for size in self.shape)

    def numpy(self) -> Array:
        """The numbers, as a read-only array of `shape`.

        Raises:
            TensorError: the bytes cannot be read.
        """
        raise NotImplementedError

    def raw(self) -> bytes:
        """The numbers in ONNX's raw form: little-endian, types below a byte packed."""
        return pack(self.numpy(), self.dtype)

    def slice(self, region: Sequence[tuple[int, int]]) -> "Tensor":
        """The block [start, stop) of each dim, lazy as well."""
        region = tuple(region)
        if all(start == 0 and stop == size for (start, stop), size in zip(region, self.shape, strict=True)):
            return self
        return SlicedTensor(self, region)

    def reshaped(self, shape: Sequence[int]) -> "Tensor":
        """The same elements in the same order under another shape of as many, lazy as well."""
        shape = tuple(shape)
        made = LazyTensor(self.dtype, shape, lambda: self.numpy().reshape(shape))
        made.origin = self
        return made

    def equals(self, other: "Tensor") -> bool:
        """True where dtype, shape and every bit agree (reads both unless they lie at the same place)."""
        if self is other:
            return True
        return (
            self.dtype is other.dtype and self.shape == other.shape and self.raw_or_strings() == other.raw_or_strings()
        )

    def raw_or_strings(self) -> object:
        """What equality compares: raw bytes, or the list of strings."""
        return self.numpy().ravel().tolist() if self.dtype is DType.STR else self.raw()


class ArrayTensor(Tensor):
    """A tensor held in memory."""

    __slots__ = ("_array",)

    _array: Array

    def __init__(self, array: Any, dtype: DType | None = None) -> None:
        array = np.asarray(array)
        dtype = dtype or dtype_of_numpy(array.dtype)
        if dtype is DType.STR and array.dtype != object:
            array = array.astype(object)
        elif array.dtype != dtype.numpy:
            array = array.astype(dtype.numpy)
        view = array.view()
        view.flags.writeable = False
        super().__init__(dtype, array.shape)
        self._array = view

    def numpy(self) -> Array:
        return self._array

    def reshaped(self, shape: Sequence[int]) -> Tensor:
        return ArrayTensor(self._array.reshape(shape), self.dtype)


class LazyTensor(Tensor):
    """A tensor whose raw bytes a function gives, e.g. out of a protobuf that is already in memory.

    Attributes:
        name: what the file calls it that its raw bytes are in; empty where they are in none.
        origin: the tensor that has the same elements under another shape, where it was made of one.
    """

    __slots__ = ("_load", "name", "origin")

    def __init__(self, dtype: DType, shape: Sequence[int], load: Callable[[], Array], name: str = "") -> None:
        super().__init__(dtype, shape)
        self._load = load
        self.name = name
        self.origin: Tensor | None = None

    def numpy(self) -> Array:
        array = self._load()
        array.flags.writeable = False
        return array

    def reshaped(self, shape: Sequence[int]) -> Tensor:
        shape = tuple(shape)
        made = LazyTensor(self.dtype, shape, lambda: self._load().reshape(shape), self.name)
        made.origin = self.origin or self
        return made


_READ_BYTES = 4096
"""Up to a page is read: to map it takes several times as long."""


class ExternalTensor(Tensor):
    """A tensor whose raw bytes lie in a file.

    Attributes:
        path: the file.
        name: the file as the model calls it.
        offset: first byte in the file.
        length: number of bytes.
    """

    __slots__ = ("length", "name", "offset", "path")

    def __init__(self, dtype: DType, shape: Sequence[int], path: Path, name: str, offset: int, length: int) -> None:
        super().__init__(dtype, shape)
        self.path = path
        self.name = name
        self.offset = offset
        self.length = length

    def numpy(self) -> Array:
        self.check()
        if self.size == 0:
            return np.empty(self.shape, self.dtype.numpy)
        if self.dtype.bits < 8:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                return unpack(file.read(self.length), self.dtype, self.shape)
        if self.length <= _READ_BYTES:
            array = np.fromfile(self.path, self.dtype.numpy, self.size, offset=self.offset).reshape(self.shape)
            array.flags.writeable = False
            return array
        return np.memmap(self.path, self.dtype.numpy, "r", self.offset, self.shape)

    def reshaped(self, shape: Sequence[int]) -> Tensor:
        return ExternalTensor(self.dtype, shape, self.path, self.name, self.offset, self.length)

    def check(self) -> None:
        """Refuse a file that is missing or too short.

        Raises:
            TensorError: naming the file and the range.
        """
        if self.length != self.nbytes:
            raise TensorError(
                f"external data of {self.length} bytes for a tensor {self.type} of {self.nbytes} bytes",
                where=f"{self.name}, offset {self.offset}",
                do="write the model again; its external data does not fit its tensors",
            )
        try:
            found = os.stat(self.path)
        except OSError as error:
            raise TensorError(
                f"cannot read external data: {error.strerror}", where=str(self.path), do="put the file beside the model"
            ) from error
        if not stat.S_ISREG(found.st_mode):
            raise TensorError(
                f"external data is in a {_KINDS.get(stat.S_IFMT(found.st_mode), 'device')}, not in a file",
                where=str(self.path),
                do="put the file itself beside the model",
            )
        size = found.st_size
        if self.offset + self.length > size:
            raise TensorError(
                f"external data ends at byte {size}, but a tensor {self.type} needs bytes "
                f"{self.offset} to {self.offset + self.length}",
                where=str(self.path),
                do="the file is cut short: copy it again",
            )


class SlicedTensor(Tensor):
    """A block of another tensor.

    Attributes:
        base: the full tensor.
        region: per dim the half-open range.
    """

    __slots__ = ("base", "region")

    base: Tensor
    region: tuple[tuple[int, int], ...]

    def __init__(self, base: Tensor, region: tuple[tuple[int, int], ...]) -> None:
        region = tuple((o + a, o + b) for (o, _), (a, b) in zip(base.region, region, strict=True))
        base = base.base
        for (start, stop), size in zip(region, base.shape, strict=True):
            if not 0 <= start <= stop <= size:
                raise ValueError(f"range [{start}, {stop}) is outside a dim of {size}")
        super().__init__(base.dtype, [stop - start for start, stop in region])
        self.base = base
        self.region = region

    def numpy(self) -> Array:
        view = self.base.numpy()[tuple(slice(start, stop) for start, stop in self.region)]
        view.flags.writeable = False
        return view


class JoinedTensor(Tensor):
    """Tensors side by side along a dim, part by part: the first part of each, then the second part of each ...

    q, k, v of 4 columns each, in 2 parts:  q0 q1 k0 k1 v0 v1 q2 q3 k2 k3 v2 v3. A half has blocks of q, of k and of v.

    Attributes:
        pieces: the tensors; alike but for their sizes along `dim`, which `parts` divides.
        dim: along which they stand side by side.
        parts: into how many equal parts each is sharded.
    """

    __slots__ = ("dim", "parts", "pieces")

    def __init__(self, pieces: Sequence[Tensor], dim: int, parts: int = 1) -> None:
        first = pieces[0]
        for piece in pieces:
            others = (piece.shape[:dim], piece.shape[dim + 1 :]) == (first.shape[:dim], first.shape[dim + 1 :])
            if piece.dtype is not first.dtype or not others or parts < 1 or piece.shape[dim] % parts:
                raise ValueError(f"{piece.type} does not stand beside {first.type} along dim {dim} in {parts} parts")
        size = sum(piece.shape[dim] for piece in pieces)
        super().__init__(first.dtype, (*first.shape[:dim], size, *first.shape[dim + 1 :]))
        self.pieces = tuple(pieces)
        self.dim = dim
        self.parts = parts

    @property
    def bases(self) -> tuple[Tensor, ...]:
        return tuple(base for piece in self.pieces for base in piece.bases)

    def numpy(self) -> Array:
        array = np.concatenate([block.numpy() for block in self.blocks()], self.dim)
        array.flags.writeable = False
        return array

    @property
    def sections(self) -> tuple[tuple[int, int], ...] | None:
        """Of pieces that are blocks of one tensor, which of its elements along `dim` each has; else None."""
        if len({place_of(piece.base) for piece in self.pieces}) > 1:
            return None
        return tuple(piece.region[self.dim] for piece in self.pieces)

    def blocks(self) -> list[Tensor]:
        """The parts of the pieces, as they stand side by side."""
        return [self._part(piece, part) for part in range(self.parts) for piece in self.pieces]

    def _part(self, piece: Tensor, part: int) -> Tensor:
        size = piece.shape[self.dim] // self.parts
        return range_along(piece, self.dim, part * size, (part + 1) * size)

    def slice(self, region: Sequence[tuple[int, int]]) -> Tensor:
        region = tuple(region)
        for (start, stop), size in zip(region, self.shape, strict=True):
            if not 0 <= start <= stop <= size:
                raise ValueError(f"range [{start}, {stop}) is outside a dim of {size}")
        first, last = region[self.dim]
        kept: list[Tensor] = []
        place = 0
        for block in self.blocks():
            size = block.shape[self.dim]
            own = max(first - place, 0), min(last - place, size)
            place += size
            if own[0] < own[1]:
                kept.append(block.slice((*region[: self.dim], own, *region[self.dim + 1 :])))
        if not kept:
            # Blocks of joins have no text form: without elements any piece will do.
            return self.pieces[0].slice((*region[: self.dim], (0, 0), *region[self.dim + 1 :]))
        return joined_tensor(kept, self.dim)


def joined_tensor(pieces: Sequence[Tensor], dim: int, parts: int = 1) -> Tensor:
    """Tensors side by side along a dim, part by part, as in `JoinedTensor`; neighbours in one tensor are one block."""
    if parts == 1:
        whole = [pieces[0]]
        for piece in pieces[1:]:
            region = _beside(whole[-1], piece, dim)
            if region is None:
                whole.append(piece)
            else:
                whole[-1] = piece.base.slice(region)
        pieces = whole
    return pieces[0] if len(pieces) == 1 else JoinedTensor(pieces, dim, parts)


def _beside(first: Tensor, second: Tensor, dim: int) -> tuple[tuple[int, int], ...] | None:
    """The region of two blocks of one tensor of which the second follows the first along a dim; else None."""
    (start, end), (begin, stop) = first.region[dim], second.region[dim]
    both = with_dim(first.region, dim, (start, stop))
    follows = begin == end and with_dim(second.region, dim, (start, stop)) == both
    return both if follows and place_of(first.base) == place_of(second.base) else None


def place_of(tensor: Tensor) -> Hashable:
    """Equal for tensors whose bytes are the same because they lie at the same place; reads nothing."""
    return tensor.dtype, _place_of_base(tensor.base), tensor.region


def _place_of_base(base: Tensor) -> Hashable:
    if isinstance(base, ExternalTensor):
        return base.path, base.offset, base.shape
    if isinstance(base, LazyTensor) and base.origin is not None:
        return place_of(base.origin), base.shape
    return id(base)


def range_along(tensor: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """The elements [start, stop) of one dim, lazy."""
    return tensor.slice(with_dim([(0, size) for size in tensor.shape], dim, (start, stop)))


def pack(array: Array, dtype: DType) -> bytes:
    """An array in ONNX's raw form.

    Raises:
        TensorError: strings have no raw form.
    """
    if dtype is DType.STR:
        raise TensorError("strings have no raw form", do="keep string tensors inside the model")
    array = np.ascontiguousarray(array)
    if dtype.bits == 8 or dtype.bits > 8:
        return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    codes = array.reshape(-1).view(np.uint8) & ((1 << dtype.bits) - 1)
    if 8 % dtype.bits:
        # 6-bit types run across bytes, the low bits first.
        bits = np.unpackbits(codes[:, None].astype(np.uint8), axis=1, count=dtype.bits, bitorder="little")
        return np.packbits(bits, bitorder="little").tobytes()
    per_byte = 8 // dtype.bits
    codes = np.pad(codes, (0, -len(codes) % per_byte)).reshape(-1, per_byte)
    shifts = np.arange(per_byte, dtype=np.uint8) * dtype.bits
    return np.bitwise_or.reduce(codes << shifts, axis=1).astype(np.uint8).tobytes() if len(codes) else b""


def unpack(data: bytes, dtype: DType, shape: Sequence[int]) -> Array:
    """An array from ONNX's raw form.

    Raises:
        TensorError: the bytes do not fill the shape.
    """
    count = math.prod(shape)
    if len(data) != dtype.nbytes(count):
        raise TensorError(
            f"{len(data)} bytes of data for a tensor {TensorType(dtype, tuple(shape))} of {dtype.nbytes(count)}",
            do="the data is cut short or belongs to another tensor: write it again",
        )
    if dtype.bits >= 8:
        return np.frombuffer(data, dtype.numpy).reshape(shape)
    codes = np.frombuffer(data, np.uint8)
    if 8 % dtype.bits:
        bits = np.unpackbits(codes, count=count * dtype.bits, bitorder="little").reshape(count, dtype.bits)
        return np.packbits(bits, axis=1, bitorder="little").reshape(-1).view(dtype.numpy).reshape(shape)
    parts = [(codes >> shift) & ((1 << dtype.bits) - 1) for shift in range(0, 8, dtype.bits)]
    flat = np.stack(parts, axis=1).reshape(-1)[:count]
    # ml_dtypes keeps a small integer or float in the low bits; signed ones sign-extended.
    if dtype in (DType.I4, DType.I2):
        sign = 1 << (dtype.bits - 1)
        return ((flat.astype(np.int8) ^ sign) - sign).astype(dtype.numpy).reshape(shape)
    return flat.astype(np.uint8).view(dtype.numpy).reshape(shape)
