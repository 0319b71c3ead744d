"""Memory of results that nobody holds any more, for the next ones of their size.

The system clears memory that it gives to a process, page by page as that is first written to: where each collective
has new memory for its result that takes longer than the collective itself.
"""

import math
import weakref
from typing import Any

import numpy as np

from ..messages import ALIGNMENT
from .base import Array

SMALLEST = 1 << 16
"""Bytes of an array below which NumPy's own memory is as quick."""
MOST = 64 << 20
"""Bytes that are kept of what nobody holds: sizes that were asked for last."""


class _Loan(weakref.ref[Array]):
    """Who holds memory: an array that all views of it refer to.

    Attributes:
        memory: what it lies in.
    """

    __slots__ = ("memory",)
    memory: memoryview


class Recycled:
    """Makes the arrays of one rank."""

    def __init__(self) -> None:
        self._free: dict[int, list[memoryview]] = {}  # By bytes; what was asked for last comes last.
        self._free_bytes = 0
        self._loans: dict[int, _Loan] = {}

    def empty(self, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> Array:
        """As `np.empty`, of large ones where messages may lie."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALLEST or dtype.hasobject:
            return np.empty(shape, dtype)
        free = self._free.pop(nbytes, [])
        if free:
            self._free[nbytes] = free
        memory = self._take(nbytes)
        if memory is None:
            room = np.empty(nbytes + ALIGNMENT, np.uint8)
            first = -room.ctypes.data % ALIGNMENT
            memory = room[first : first + nbytes].data
        # Views of views refer to the last array that lies in no other one: this.
        holder = np.frombuffer(memory, dtype)
        loan = _Loan(holder, self._take_back)
        loan.memory = memory
        self._loans[id(loan)] = loan
        return holder.reshape(shape)

    def _take(self, nbytes: int) -> memoryview | None:
        free = self._free.get(nbytes)
        if not free:
            return None
        memory = free.pop()
        self._free_bytes -= nbytes
        if not free:
            del self._free[nbytes]
        return memory

    def _take_back(self, loan: "weakref.ref[Array]") -> None:
        """Nobody holds it any more."""
        memory = self._loans.pop(id(loan)).memory
        if memory.nbytes > MOST:
            return
        while self._free_bytes + memory.nbytes > MOST:
            self._take(next(iter(self._free)))
        self._free_bytes += memory.nbytes
        self._free.setdefault(memory.nbytes, []).append(memory)
