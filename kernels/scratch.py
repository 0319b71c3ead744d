"""Memory that kernels on a processor use beside their results: lent by who planned it, or used again by the thread.

Fresh memory costs a page fault for every 4 KB.
"""

import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, Any]

KEPT_BYTES = 2**22
"""The most memory that a thread keeps for one purpose."""

ALIGNMENT = 64
"""Where pieces of lent memory begin, in bytes."""


def piece_bytes(elements: int, itemsize: int) -> int:
    """What an array takes of lent memory."""
    return -(-elements * itemsize // ALIGNMENT) * ALIGNMENT


def pieces_bytes(shapes: Iterable[tuple[int, ...]], itemsize: int) -> int:
    """What arrays for several purposes take of lent memory."""
    return sum(piece_bytes(math.prod(shape), itemsize) for shape in shapes)


class Scratch(threading.local):
    """Memory of a thread."""

    def __init__(self) -> None:
        self._memory: dict[str, Bytes] = {}
        self._lent: Bytes | None = None
        self._taken: dict[str, Bytes] = {}
        self._used = 0

    @contextmanager
    def lent(self, memory: Bytes | None) -> Iterator[None]:
        """Take from an array of bytes first while this lasts."""
        if memory is None:
            yield
            return
        before = self._lent, self._taken, self._used
        self._lent, self._taken, self._used = memory, {}, 0
        try:
            yield
        finally:
            self._lent, self._taken, self._used = before

    def array(self, purpose: str, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> Any:
        """An array for one purpose at a time, of any content; what is large and not lent is not kept."""
        nbytes = math.prod(shape) * dtype.itemsize
        memory = self._taken.get(purpose) if self._lent is not None else None
        if memory is None or memory.nbytes < nbytes:
            memory = self._from_lent(purpose, nbytes) if self._lent is not None else None
        if memory is None:
            if nbytes > KEPT_BYTES:
                return np.empty(shape, dtype)
            memory = self._memory.get(purpose)
        if memory is None or memory.nbytes < nbytes:
            memory = self._memory[purpose] = np.empty(nbytes, np.uint8)
        return memory[:nbytes].view(dtype).reshape(shape)

    def like(self, purpose: str, x: Any) -> Any:
        """As `array`, of the shape and dtype of an array, with dims in memory in the order of its own."""
        order = sorted(range(x.ndim), key=lambda axis: -abs(x.strides[axis]))
        found = self.array(purpose, tuple(x.shape[axis] for axis in order), x.dtype)
        return found.transpose([order.index(axis) for axis in range(x.ndim)])

    def in_dtype(self, purpose: str, x: Any, dtype: "np.dtype[Any]") -> Any:
        """An array in a dtype: itself, or a copy here."""
        if x.dtype == dtype:
            return x
        found = self.array(purpose, x.shape, dtype)
        np.copyto(found, x, casting="unsafe")
        return found

    def _from_lent(self, purpose: str, nbytes: int) -> Bytes | None:
        """The next piece of what was lent, where it is long enough."""
        assert self._lent is not None
        end = self._used + piece_bytes(nbytes, 1)
        if end > self._lent.nbytes:
            return None
        found = self._taken[purpose] = self._lent[self._used : end]
        self._used = end
        return found


SCRATCH = Scratch()
