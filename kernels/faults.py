"""What kernels refuse of numbers that lie on a device: noted there, and told when the device is waited for anyway.

To look at such a number at once is to wait for the device, and a CUDA graph that is captured cannot.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

Array = Any  # a numpy.ndarray or a cupy.ndarray
Word = Callable[[str], Array]
"""The place of a problem: an array of one truth on the device, which stays where it is."""


class Faults(threading.local):
    """How a thread's kernels tell of problems with what they read."""

    def __init__(self) -> None:
        self._word: Word | None = None

    @contextmanager
    def noted(self, word: Word | None) -> Iterator[None]:
        """While this lasts, problems with a device's numbers set the word of that problem; None: they are raised."""
        before, self._word = self._word, word
        try:
            yield
        finally:
            self._word = before

    def refuse(self, is_wrong: Array, problem: str) -> None:
        """Refuse numbers of which any is wrong.

        What is computed of them thereafter may be anything, but must not read or write outside of arrays.

        Raises:
            IndexError: at once, of numpy's arrays, and where nothing is noted.
        """
        if self._word is None or isinstance(is_wrong, np.ndarray | np.generic):
            if bool(is_wrong.any()):
                raise IndexError(problem)
            return
        word = self._word(problem)
        word |= is_wrong.any()

    def word(self, problem: str) -> Array | None:
        """Where a CUDA kernel notes a problem itself; None where nothing is noted."""
        return None if self._word is None else self._word(problem)


FAULTS = Faults()
