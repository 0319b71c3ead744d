"""Measuring the disk that a folder is on."""

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SIZE = 64 << 20
"""Bytes that are written and read: more than what a disk's own cache takes in no time."""
_PIECE = 4 << 20
_LEFT_FREE = 4
"""Nothing is measured where the file would take more than this part of what is free."""


@dataclass(frozen=True)
class DiskSpeed:
    """What a disk does.

    Attributes:
        read, write: bytes/s, one process after the other.
        capacity: bytes that are free.
    """

    read: float
    write: float
    capacity: float


def measure_disk(folder: Path) -> DiskSpeed | None:
    """Write a file to a folder, to the disk itself, and read it back; None where that cannot be, or has no room.

    What is written is dropped from the system's memory before it is read, where the system does that (Linux does;
    elsewhere the rate is that of memory).
    """
    try:
        free = shutil.disk_usage(folder).free
        if free // _LEFT_FREE < SIZE:
            return None
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".irpar-") as file:
            written, read = _write(file.fileno()), _read(file.fileno())
    except OSError:
        return None
    return DiskSpeed(SIZE / read, SIZE / written, free)


def _write(file: int) -> float:
    """Seconds of writing to the disk; bytes that no file system makes smaller."""
    piece = os.urandom(_PIECE)
    start = time.perf_counter()
    for _ in range(SIZE // _PIECE):
        os.write(file, piece)
    os.fsync(file)
    return time.perf_counter() - start


def _read(file: int) -> float:
    """Seconds of reading from the disk."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(file, 0, os.SEEK_SET)
    start = time.perf_counter()
    while os.read(file, _PIECE):
        pass
    return time.perf_counter() - start
