"""Memory that kernels on a processor use again: fresh memory costs a page fault for every 4 KB."""

import math
import threading
from typing import Any

import numpy as np

from .registry import Array

Ints = tuple[int, ...]

KEPT_BYTES = 2**22
"""The most memory that a thread keeps for one purpose."""


class Scratch(threading.local):
    """Memory of a thread."""

    def __init__(self) -> None:
        self._memory: dict[str, np.ndarray[Any, Any]] = {}

    def array(self, purpose: str, shape: Ints, dtype: "np.dtype[Any]") -> Array:
        """An array for one purpose at a time, of any content; what is large is not kept."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > KEPT_BYTES:
            return np.empty(shape, dtype)
        memory = self._memory.get(purpose)
        if memory is None or memory.nbytes < nbytes:
            memory = self._memory[purpose] = np.empty(nbytes, np.uint8)
        return memory[:nbytes].view(dtype).reshape(shape)


SCRATCH = Scratch()
