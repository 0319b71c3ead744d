"""The layout of a data file: tensors at aligned offsets, each stored once."""

from collections.abc import Iterable
from pathlib import Path

from .copying import Progress, write_tensor
from .tensor import Tensor, place_of

_LARGE_BYTES = 64 * 1024
_LARGE_ALIGNMENT = 4096
"""Of tensors of 64 KiB and more: a page, so that readers can map them."""
_SMALL_ALIGNMENT = 64
"""Of smaller ones: a cache line."""


class DataFile:
    """Places tensors in a data file, then writes it.

    Attributes:
        size: bytes so far.
    """

    def __init__(self) -> None:
        self.size = 0
        self._places: dict[object, tuple[int, Tensor]] = {}

    def place(self, tensor: Tensor) -> int:
        """The offset of a tensor in the file; the same for a tensor that was placed before."""
        key = place_of(tensor)
        known = self._places.get(key)
        if known is not None:
            return known[0]
        alignment = _LARGE_ALIGNMENT if tensor.nbytes >= _LARGE_BYTES else _SMALL_ALIGNMENT
        offset = -(-self.size // alignment) * alignment
        self._places[key] = (offset, tensor)
        self.size = offset + tensor.nbytes
        return offset

    @classmethod
    def of(cls, size: int, placed: Iterable[tuple[int, Tensor]]) -> "DataFile":
        """A file of known layout: its size, and tensors with their offsets."""
        made = cls()
        made.size = size
        made._places = {offset: (offset, tensor) for offset, tensor in placed}
        return made

    @property
    def placed(self) -> list[tuple[int, Tensor]]:
        """The tensors with their offsets."""
        return list(self._places.values())

    def write(self, path: Path, progress: Progress = lambda _: None) -> None:
        """Write all placed tensors, copied range by range; holes in their files stay holes.

        Raises:
            OSError: the file cannot be written.
            TensorError: the bytes of a tensor cannot be read.
        """
        with open(path, "wb") as file:
            file.truncate(self.size)
            for offset, tensor in self._places.values():
                write_tensor(tensor, file, offset, progress)
