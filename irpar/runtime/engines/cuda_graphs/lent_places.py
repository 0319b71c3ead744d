"""Places of an arena for what a kernel makes and nobody reads after it, in a capture and in its replays."""

from collections.abc import Callable, Sequence
from typing import Any

from irpar.runtime.engines.arena import Arena

_ALIGNMENT = 256
"""Where CUDA's own allocations begin at least, in bytes."""


class LentPlaces:
    """Gives out memory where nothing else lies in an arena while one node runs, and other memory when that is full.

    Args:
        cupy: the module.
        arena: of the run.
        free: the places: offset and end.
        otherwise: gives other memory.
    """

    def __init__(
        self, cupy: Any, arena: Arena, free: Sequence[tuple[int, int]], otherwise: Callable[[int], Any]
    ) -> None:
        self._cupy = cupy
        self._memory = arena.memory
        self._free = [(-(-offset // _ALIGNMENT) * _ALIGNMENT, end) for offset, end in free]
        self._otherwise = otherwise
        self._given: list[tuple[int, int]] = []

    def holds(self, array: Any) -> bool:
        """Whether an array lies in a place that was given out, where the next node may write."""
        return any(begin <= array.data.ptr < end for begin, end in self._given)

    def grow(self, size: int) -> Any:
        """Memory at the smallest place with room for it."""
        fitting = [place for place, (offset, end) in enumerate(self._free) if end - offset >= size]
        if not fitting:
            return self._otherwise(size)
        place = min(fitting, key=lambda place: self._free[place][1] - self._free[place][0])
        offset, end = self._free[place]
        self._free[place] = offset + -(-size // _ALIGNMENT) * _ALIGNMENT, end
        begin = self._memory.data.ptr + offset
        self._given.append((begin, begin + size))
        memory = self._cupy.cuda.UnownedMemory(begin, size, self._memory, self._memory.data.device_id)
        return self._cupy.cuda.MemoryPointer(memory, 0)
