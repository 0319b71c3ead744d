"""Copying blocks of tensors into a file, range by range, never through a full tensor in Python."""

import errno
import math
import os
from collections.abc import Callable, Sequence
from typing import BinaryIO

import numpy as np

from .tensor import ExternalTensor, JoinedTensor, Tensor, TensorError, range_along

BUFFER_BYTES = 1 << 20
"""Small enough to stay in a core's cache between reading and writing."""
LEAST_RANGE_BYTES = 16 << 10
"""Shorter runs are cut out of larger reads rather than read one by one."""

Progress = Callable[[int], None]
"""Called with the number of bytes written since the last call."""


def write_tensor(tensor: Tensor, out: BinaryIO, offset: int, progress: Progress = lambda _: None) -> None:
    """Write the raw bytes of a tensor at an offset of an open file.

    Slices of external tensors are copied in the kernel where they are contiguous (holes stay holes), else through a
    buffer of BUFFER_BYTES.

    Raises:
        TensorError: the bytes cannot be read.
        OSError: they cannot be written.
    """
    if isinstance(tensor, JoinedTensor) and tensor.dtype.bits >= 8:
        _write_joined(tensor, out, offset, progress)
        return
    base = tensor.base
    if isinstance(base, ExternalTensor) and base.dtype.bits >= 8:
        base.check()
        with open(base.path, "rb") as source:
            _Copy(base, source.fileno(), out.fileno(), progress).run(tensor.region, offset)
        return
    data = tensor.raw()
    _write_all(out.fileno(), memoryview(data), offset)
    progress(len(data))


def _write_joined(tensor: JoinedTensor, out: BinaryIO, offset: int, progress: Progress) -> None:
    """Write what stands side by side: one after the other along the outermost dim, else some rows at once.

    Only where rows are wider than the buffer is more than the buffer in memory: one row.
    """
    level = next((dim for dim, size in enumerate(tensor.shape) if size > 1), tensor.dim)
    if level >= tensor.dim:
        for block in tensor.blocks():
            write_tensor(block, out, offset, progress)
            offset += block.nbytes
        return
    row = tensor.nbytes // max(tensor.shape[level], 1)
    step = max(1, BUFFER_BYTES // max(row, 1))
    for start in range(0, tensor.shape[level], step):
        rows = range_along(tensor, level, start, min(start + step, tensor.shape[level]))
        data = rows.raw()
        _write_all(out.fileno(), memoryview(data), offset)
        progress(len(data))
        offset += len(data)


class _Copy:
    """Copies one region of one external tensor."""

    def __init__(self, tensor: ExternalTensor, source: int, target: int, progress: Progress) -> None:
        self.shape = tensor.shape
        self.start = tensor.offset
        self.item = tensor.dtype.bits // 8
        self.dtype = np.dtype((np.void, self.item))
        self.source = source
        self.target = target
        self.progress = progress

    def run(self, region: Sequence[tuple[int, int]], offset: int) -> None:
        """Copy the region to `offset` of the target."""
        if any(start == stop for start, stop in region):
            return
        self.region = region
        self.written = offset
        self._level(0, self.start)

    def _row_bytes(self, level: int) -> int:
        """Bytes of the source below a level: one index of dim `level - 1`."""
        return math.prod(self.shape[level:]) * self.item

    def _is_contiguous_below(self, level: int) -> bool:
        return all(
            (start, stop) == (0, size)
            for (start, stop), size in zip(self.region[level:], self.shape[level:], strict=True)
        )

    def _level(self, level: int, position: int) -> None:
        """Copy the part of the region inside one index of the dims before `level`; `position` is where that begins."""
        if level == len(self.shape):
            self._range(position, self.item)
            return
        start, stop = self.region[level]
        row = self._row_bytes(level + 1)
        if self._is_contiguous_below(level + 1):
            self._range(position + start * row, (stop - start) * row)
        elif self._run_bytes(level + 1) >= LEAST_RANGE_BYTES and self._is_contiguous_below(level + 2):
            self._gather(level, position, row)
        elif row <= BUFFER_BYTES:
            self._cut(level, position, row)
        else:
            for index in range(start, stop):
                self._level(level + 1, position + index * row)

    def _run_bytes(self, level: int) -> int:
        """Bytes of the region within one index of the dims before `level`, if that is one run."""
        start, stop = self.region[level]
        return (stop - start) * self._row_bytes(level + 1)

    def _gather(self, level: int, position: int, row: int) -> None:
        """Each index of this dim has one run of the region: read the runs side by side into a buffer, write that."""
        first, last = self.region[level]
        inner = self.region[level + 1][0] * self._row_bytes(level + 2)
        run = self._run_bytes(level + 1)
        count = max(1, BUFFER_BYTES // run)
        if count == 1:
            for index in range(first, last):
                self._range(position + index * row + inner, run)
            return
        buffer = memoryview(bytearray(min(count, last - first) * run))
        for begin in range(first, last, count):
            end = min(begin + count, last)
            for number, index in enumerate(range(begin, end)):
                self._read(buffer[number * run : (number + 1) * run], position + index * row + inner)
            self._write(buffer[: (end - begin) * run])

    def _cut(self, level: int, position: int, row: int) -> None:
        """Read whole rows of this dim into a buffer and cut the region out of them."""
        first, last = self.region[level]
        inner = tuple(slice(start, stop) for start, stop in self.region[level + 1 :])
        count = max(1, BUFFER_BYTES // row)
        buffer = np.empty((min(count, last - first), *self.shape[level + 1 :]), self.dtype)
        for begin in range(first, last, count):
            block = buffer[: min(count, last - begin)]
            self._read(memoryview(block.reshape(-1).view(np.uint8).data), position + begin * row)
            cut = np.ascontiguousarray(block[(slice(None), *inner)])
            self._write(memoryview(cut.reshape(-1).view(np.uint8).data))

    def _read(self, buffer: memoryview, position: int) -> None:
        done = 0
        while done < len(buffer):
            count = os.preadv(self.source, [buffer[done:]], position + done)
            if count == 0:
                raise TensorError("external data ended while it was read", do="the file is being changed: try again")
            done += count

    def _write(self, data: memoryview) -> None:
        _write_all(self.target, data, self.written)
        self.written += len(data)
        self.progress(len(data))

    def _range(self, position: int, length: int) -> None:
        """Copy one run of bytes in the kernel, leaving out its holes."""
        end = position + length
        while position < end:
            data, hole = _next_data(self.source, position, end)
            self._advance(data - position)
            for begin in range(data, hole, BUFFER_BYTES * 4):
                stop = min(begin + BUFFER_BYTES * 4, hole)
                self._copy_range(begin, stop)
                self._advance(stop - begin)
            position = hole

    def _advance(self, count: int) -> None:
        self.written += count
        self.progress(count)

    def _copy_range(self, position: int, end: int) -> None:
        target = self.written
        while position < end:
            try:
                count = os.copy_file_range(self.source, self.target, end - position, position, target)
            except (OSError, AttributeError):
                # Not on this system, or not between these two file systems.
                self._copy_through_buffer(position, end, target)
                return
            if count == 0:
                raise TensorError("external data ended while it was read", do="the file is being changed: try again")
            position += count
            target += count

    def _copy_through_buffer(self, position: int, end: int, target: int) -> None:
        buffer = memoryview(bytearray(min(BUFFER_BYTES, end - position)))
        while position < end:
            part = buffer[: min(len(buffer), end - position)]
            self._read(part, position)
            _write_all(self.target, part, target)
            position += len(part)
            target += len(part)


def _next_data(file: int, position: int, end: int) -> tuple[int, int]:
    """The next run of data at or after `position`, up to `end`: (first byte, first byte after it)."""
    try:
        data = os.lseek(file, position, os.SEEK_DATA)
    except (OSError, AttributeError) as error:
        # ENXIO: only a hole is left. Anything else: the file system cannot tell, so all counts as data.
        is_hole = isinstance(error, OSError) and error.errno == errno.ENXIO
        return (end, end) if is_hole else (position, end)
    if data >= end:
        return end, end
    return data, min(os.lseek(file, data, os.SEEK_HOLE), end)


def _write_all(file: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)
