"""Capturing what a stream is given, and the memory that what was captured goes on using."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from irpar.runtime.engines.arena import Arena

from .lent_places import LentPlaces

_TO_DEVICE = 1  # cudaMemcpyKind


class NotCapturedError(Exception):
    """What was to be done cannot be part of a CUDA graph."""


class GraphMemory:
    """Memory of one stream for what captured graphs make inside.

    A graph uses the addresses of its capture whenever it is replayed, so that nothing else may lie there: blocks are
    taken from CuPy's pool and kept. Graphs of one stream run one after the other and share them; what outlives a replay
    lies elsewhere.

    Args:
        cupy: the module.
    """

    def __init__(self, cupy: Any) -> None:
        blocks: list[Any] = []

        def grow(size: int) -> Any:
            pointer = cupy.get_default_memory_pool().malloc(size)
            blocks.append(pointer.mem)
            return pointer

        pool = cupy.cuda.MemoryPool(grow)
        self._blocks = blocks
        self.allocate = pool.malloc
        weakref.finalize(self, _let_go, cupy.cuda.Device(), pool.free_all_blocks).atexit = False


class Recording:
    """A capture of what the calling thread gives a stream.

    Args:
        cupy: the module.
        stream: that.
        memory: where arrays lie that are made underway.

    Attributes:
        kept: what the graph needs as long as it lives.
        graph: what was captured, at the end.
    """

    def __init__(self, cupy: Any, stream: Any, memory: GraphMemory) -> None:
        self._cupy = cupy
        self._stream = stream
        self._memory = memory
        self._allocate: Any = None
        self.kept: list[Any] = []
        self.graph: Any = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """In here the stream notes what it is given, and does nothing.

        Raises:
            Exception: what was raised inside, or something in here cannot be captured; the stream can go on.
        """
        # What is brought to the device underway may lie where the stream was at work before.
        self._stream.synchronize()
        self._allocate = self._cupy.cuda.get_allocator()
        self._stream.begin_capture()
        try:
            with self._cupy.cuda.using_allocator(self._memory.allocate):
                yield
        except BaseException:
            self._discard()
            raise
        self.graph = self._stream.end_capture()

    def _discard(self) -> None:
        """End a capture that has failed, which CUDA may have given up already."""
        try:
            self._stream.end_capture()
        except Exception:
            return

    @contextmanager
    def lending(self, arena: Arena, free: Sequence[tuple[int, int]]) -> Iterator[LentPlaces]:
        """In here arrays lie at free places of an arena, as far as there are."""
        places = LentPlaces(self._cupy, arena, free, self._memory.allocate)
        pool = self._cupy.cuda.MemoryPool(places.grow)
        try:
            with self._cupy.cuda.using_allocator(pool.malloc):
                yield places
        finally:
            pool.free_all_blocks()  # With a pool that is gone its free blocks would not go.

    @contextmanager
    def apart(self) -> Iterator[None]:
        """In here arrays lie where no replay but of this graph writes."""
        with self._cupy.cuda.using_allocator(self._allocate):
            yield

    def upload(self, array: "np.ndarray[Any, Any]") -> Any:
        """A device array with the numbers of a numpy array, copied once and now, beside what is captured."""
        with self.apart():
            target = self._cupy.empty(array.shape, array.dtype)
        if array.nbytes:
            source, side = np.ascontiguousarray(array), self._cupy.cuda.Stream(non_blocking=True)
            address = target.data.ptr
            self._cupy.cuda.runtime.memcpyAsync(address, source.ctypes.data, source.nbytes, _TO_DEVICE, side.ptr)
            side.synchronize()
        self.kept.append(target)
        return target


def _let_go(device: Any, free_all_blocks: Callable[[], None]) -> None:
    """Give back the free blocks that a pool has on a device, which would stay taken when it is gone."""
    with device:
        free_all_blocks()
