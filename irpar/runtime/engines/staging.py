"""Copies between numpy arrays and a device through pinned memory, so that the device copies while the host goes on."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from irpar.kernels.cuda.padding import row_pitch

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

BLOCK_BYTES = 4 * 2**20
"""Size of each of the pinned buffers of a stream; larger arrays go through them piece by piece."""
_ALIGNMENT = 256
_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind


class _Block:
    """A pinned buffer that fills up from the front."""

    def __init__(self, cupy: Any, size: int) -> None:
        memory = cupy.cuda.alloc_pinned_memory(size)
        self.address: int = memory.ptr
        self.bytes: Bytes = np.frombuffer(memory, np.uint8, size)
        self.free = cupy.cuda.Event(disable_timing=True)
        self.used = 0

    def take(self, size: int) -> int | None:
        """The start of the next `size` bytes; None where there are not so many."""
        start = self.used
        if start + size > len(self.bytes):
            return None
        self.used = -(-(start + size) // _ALIGNMENT) * _ALIGNMENT
        return start


class _Coming(NamedTuple):
    """Bytes on their way to the host.

    Attributes:
        target: where they belong.
        place: where they lie in the pinned buffer.
        pitch: bytes from row to row there; 0: they lie one behind the other.
        source: the device array that they are copied from, which is there until they have come.
    """

    target: Bytes
    place: int
    pitch: int
    source: Any


class Staging:
    """The pinned buffers of one stream: two for what goes to the device, in turn, and one for what comes back.

    Not for several threads at once.

    Attributes:
        stream: that; it may become another which comes after all that it was given.
    """

    def __init__(self, cupy: Any, stream: Any, block_bytes: int = BLOCK_BYTES) -> None:
        self._cupy = cupy
        self.stream = stream
        self._size = block_bytes
        self._up: list[_Block] = []
        self._down: _Block | None = None

    def upload(self, array: "np.ndarray[Any, Any]") -> Any:
        """A device array with the numbers of a numpy array, which may change from here on.

        The copy is done on the stream: what runs there later sees it.
        """
        target = self._cupy.empty(array.shape, array.dtype)
        self.fill(target.data.ptr, array)
        return target

    def fill(self, address: int, array: "np.ndarray[Any, Any]") -> None:
        """As `upload`, to memory of the device that is there already."""
        source = _bytes_of(np.ascontiguousarray(array))
        for start, size in self._pieces(len(source)):
            block, place = self._upload_space(size)
            block.bytes[place : place + size] = source[start : start + size]
            self._copy(address + start, block.address + place, size, _TO_DEVICE)

    def download(self, arrays: Sequence[Any]) -> list["np.ndarray[Any, Any]"]:
        """Numpy copies of device arrays; waits for all that the stream does."""
        results = [np.empty(array.shape, array.dtype) for array in arrays]
        if self._down is None:
            self._down = _Block(self._cupy, self._size)
        pending: list[_Coming] = []
        for array, result in zip(arrays, results, strict=True):
            source, pitch = self._lines(array)
            for piece, start, size in self._parts(result, pitch):
                place = self._down.take(size)
                if place is None:
                    self._finish(self._down, pending)
                    place = self._down.take(size)
                    assert place is not None
                self._copy(self._down.address + place, source.data.ptr + start, size, _TO_HOST)
                pending.append(_Coming(piece, place, pitch, source))
        self._finish(self._down, pending)
        return results

    def _lines(self, array: Any) -> tuple[Any, int]:
        """An array as it is copied to the host, and the bytes from row to row where there is little between rows."""
        if not array.flags.c_contiguous:
            pitch = (row_pitch(array) or 0) * array.dtype.itemsize
            if 0 < pitch <= min(self._size, 2 * array.shape[-1] * array.dtype.itemsize):
                return array, pitch
        return self._cupy.ascontiguousarray(array), 0

    def _parts(self, result: "np.ndarray[Any, Any]", pitch: int) -> Iterator[tuple[Bytes, int, int]]:
        """What is copied at once: bytes of a result, where they begin in the source, and how many lie there."""
        target = _bytes_of(result)
        if not pitch:
            yield from ((target[start : start + size], start, size) for start, size in self._pieces(len(target)))
            return
        width = result.shape[-1] * result.itemsize
        rows = target.reshape(-1, width)
        for first in range(0, len(rows), count := self._size // pitch):
            piece = rows[first : first + count]
            yield piece, first * pitch, (len(piece) - 1) * pitch + width

    def _finish(self, block: _Block, pending: "list[_Coming]") -> None:
        """Wait for the copies to the host, and hand out what they brought."""
        self.stream.synchronize()
        for target, place, pitch, _ in pending:
            steps = (pitch, 1) if pitch else (1,)
            target[:] = np.lib.stride_tricks.as_strided(block.bytes[place:], target.shape, steps)
        pending.clear()
        block.used = 0

    def _pieces(self, size: int) -> Iterator[tuple[int, int]]:
        for start in range(0, size, self._size):
            yield start, min(self._size, size - start)

    def _upload_space(self, size: int) -> tuple[_Block, int]:
        """Pinned bytes that no copy reads any more."""
        if not self._up:
            self._up = [_Block(self._cupy, self._size) for _ in range(2)]
        place = self._up[0].take(size)
        if place is None:
            # The full buffer rests until the copies out of it are done; the other one has had as long for its own.
            self._up[0].free.record(self.stream)
            self._up.reverse()
            self._up[0].free.synchronize()
            self._up[0].used = 0
            place = self._up[0].take(size)
        assert place is not None
        return self._up[0], place

    def _copy(self, target: int, source: int, size: int, kind: int) -> None:
        self._cupy.cuda.runtime.memcpyAsync(target, source, size, kind, self.stream.ptr)


def _bytes_of(array: "np.ndarray[Any, Any]") -> Bytes:
    """The bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8)
