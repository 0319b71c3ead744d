"""Lazy tensors as plain data: where their bytes lie, in which file, and which block of that it is; and back.

["file", file, dtype, shape, offset, length]       bytes of a file
["block", tensor, region]                          a block of a tensor
["join", tensors, dim, parts]                      tensors side by side
["narrow", tensor, dtype]                          in a narrower dtype
["bytes", dtype, shape, start, stop]               numbers that no file has, which the entry holds: few
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from irpar.ir import DType, ExternalTensor, Tensor, dtype_of_text
from irpar.ir.tensor import ArrayTensor, JoinedTensor, LazyTensor, SlicedTensor, unpack

from .entry import NotKeptError, Plain
from .initializers import Ranges, initializer_ranges

MOST_BYTES = 1 << 20
"""Of all numbers of an entry that no file has."""


class WeightsWriter:
    """Tensors to plain data.

    Args:
        model: the model file, which initializers may lie in.

    Attributes:
        files: the files that the plain data names by number.
        data: the bytes that no file has.
    """

    def __init__(self, model: Path) -> None:
        self.files: list[list[str]] = []
        self.data = bytearray()
        self._model = model
        self._ranges: Ranges | None = None
        self._numbers: dict[tuple[str, str], int] = {}
        self._known: dict[int, tuple[Tensor, Plain]] = {}

    def plain(self, tensor: Tensor) -> Plain:
        """A tensor as plain data.

        Raises:
            NotKeptError: there is too much of which no file has the numbers.
        """
        known = self._known.get(id(tensor))
        if known is None:
            # The tensor is held, so that no other one gets its id.
            known = self._known[id(tensor)] = tensor, self._plain(tensor)
        return known[1]

    def _plain(self, tensor: Tensor) -> Plain:
        from irpar.passes.lower_precision import NarrowedTensor

        match tensor:
            case SlicedTensor():
                return ["block", self.plain(tensor.base), tensor.region]
            case JoinedTensor():
                return ["join", [self.plain(piece) for piece in tensor.pieces], tensor.dim, tensor.parts]
            case NarrowedTensor():
                return ["narrow", self.plain(tensor.wide), tensor.dtype.text]
            case ExternalTensor():
                return self._file(tensor, str(tensor.path), tensor.name, tensor.offset, tensor.length)
        return self._of_model(tensor) or self._bytes(tensor)

    def _file(self, tensor: Tensor, path: str, name: str, offset: int, length: int) -> Plain:
        number = self._numbers.setdefault((path, name), len(self.files))
        if number == len(self.files):
            self.files.append([os.path.abspath(path), name])
        return ["file", number, tensor.dtype.text, tensor.shape, offset, length]

    def _of_model(self, tensor: Tensor) -> Plain | None:
        """Where an initializer lies in the model file. Names may be of other graphs, too: the bytes are compared."""
        if not isinstance(tensor, LazyTensor) or not tensor.name or tensor.dtype is DType.STR:
            return None
        if self._ranges is None:
            self._ranges = initializer_ranges(self._model)
        offset, length = self._ranges.get(tensor.name, (0, -1))
        if length != tensor.nbytes:
            return None
        found = ExternalTensor(tensor.dtype, tensor.shape, self._model, self._model.name, offset, length)
        return self._file(tensor, str(self._model), self._model.name, offset, length) if found.equals(tensor) else None

    def _bytes(self, tensor: Tensor) -> Plain:
        if tensor.dtype is DType.STR or len(self.data) + tensor.nbytes > MOST_BYTES:
            raise NotKeptError
        start = len(self.data)
        self.data += tensor.raw()
        return ["bytes", tensor.dtype.text, tensor.shape, start, len(self.data)]


class WeightsReader:
    """Plain data to tensors.

    Args:
        files: as from a `WeightsWriter`.
        data: its bytes.
    """

    def __init__(self, files: Sequence[Sequence[str]], data: bytes) -> None:
        self._files = [(Path(path), name) for path, name in files]
        self._data = data

    def tensor(self, plain: Sequence[Any]) -> Tensor:
        """The tensor that plain data means."""
        match plain:
            case ["file", number, dtype, shape, offset, length]:
                path, name = self._files[number]
                return ExternalTensor(_dtype(dtype), shape, path, name, offset, length)
            case ["block", base, region]:
                return self.tensor(base).slice([(start, stop) for start, stop in region])
            case ["join", pieces, dim, parts]:
                return JoinedTensor([self.tensor(piece) for piece in pieces], dim, parts)
            case ["narrow", wide, dtype]:
                from irpar.passes.lower_precision import NarrowedTensor

                return NarrowedTensor(self.tensor(wide), _dtype(dtype))
            case ["bytes", dtype, shape, start, stop]:
                return ArrayTensor(unpack(self._data[start:stop], _dtype(dtype), tuple(shape)), _dtype(dtype))
        raise ValueError(f"no tensor is {plain[:1]}")


def _dtype(text: str) -> DType:
    found = dtype_of_text(text)
    assert found is not None
    return found
