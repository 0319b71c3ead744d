"""Copies between numpy arrays and a device through pinned memory, so that the device copies while the host goes on."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

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
        pending: list[tuple[Bytes, int]] = []
        for array, result in zip(arrays, results, strict=True):
            source, target = self._cupy.ascontiguousarray(array), _bytes_of(result)
            for start, size in self._pieces(len(target)):
                place = self._down.take(size)
                if place is None:
                    self._finish(self._down, pending)
                    place = self._down.take(size)
                    assert place is not None
                self._copy(self._down.address + place, source.data.ptr + start, size, _TO_HOST)
                pending.append((target[start : start + size], place))
        self._finish(self._down, pending)
        return results

    def _finish(self, block: _Block, pending: list[tuple[Bytes, int]]) -> None:
        """Wait for the copies to the host, and hand out what they brought."""
        self.stream.synchronize()
        for target, place in pending:
            target[:] = block.bytes[place : place + len(target)]
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
