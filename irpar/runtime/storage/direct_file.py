"""Files that are read and written past the system's cache (O_DIRECT), where their file system can do that.

What is streamed from disk once a step would only push other things out of that cache, and be copied once more on its
way. O_DIRECT wants positions, lengths and addresses that are multiples of a block.
"""

import errno
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from irpar.files.regular_file import open_file
from irpar.runtime.errors import StorageError
from irpar.system_errors import remedy

Array = np.ndarray[Any, Any]

BLOCK = 4096
"""Bytes of a block: at least what disks ask of O_DIRECT, 512 or 4096."""
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_O_TMPFILE: int = getattr(os, "O_TMPFILE", 0)
_HAS_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
"""What file systems answer that have no O_DIRECT, or for larger blocks only."""


def aligned(nbytes: int) -> Array:
    """Fresh memory that begins at a multiple of BLOCK bytes."""
    room = np.empty(nbytes + BLOCK, np.uint8)
    first = -room.ctypes.data % BLOCK
    return room[first : first + nbytes]


class DirectFile:
    """An open file, for several threads at once.

    Args:
        name: what messages call it.
        cached: its descriptor; the file is closed with it.
        path: where it can be opened once more.
        access: what that descriptor may be used for, as `os.open` has it.
        elsewhere: how the user says that such files are to be in another folder; empty: it is one that is only read.

    Attributes:
        is_direct: whether it is used past the system's cache.
    """

    def __init__(self, name: str, cached: int, path: str, access: int, elsewhere: str = "") -> None:
        self.name = name
        self._elsewhere = elsewhere
        self._cached = cached
        self._direct = -1
        self._handles = [cached]
        self._closing = weakref.finalize(self, _close, self._handles)
        if _O_DIRECT:
            with suppress(OSError):
                direct = os.open(path, access | _O_DIRECT | os.O_CLOEXEC)
                self._handles.append(direct)
                if os.path.sameopenfile(direct, cached):  # Else another file has that name by now.
                    self._direct = direct
        self.is_direct = self._direct >= 0
        self._written = os.fstat(cached).st_mtime_ns

    @classmethod
    def of_path(cls, path: Path) -> "DirectFile":
        """A file to read.

        Raises:
            StorageError: it cannot be opened.
        """
        try:
            with open_file(path) as file:
                return cls(str(path), os.dup(file.fileno()), str(path), os.O_RDONLY)
        except OSError as error:
            raise StorageError(f"cannot read it: {error.strerror}", where=str(path), do=remedy(error)) from error

    @classmethod
    def unlinked(cls, folder: Path, what: str, elsewhere: str = "") -> "DirectFile":
        """A fresh file without a name in a folder: however its process ends, nothing of it stays.

        Args:
            folder: that.
            what: what it is for, as messages call it.
            elsewhere: how the user names another folder.

        Raises:
            StorageError: there is no such folder, or no file can be made in it.
        """
        name = f"{what} in {folder}"
        try:
            return cls._nameless(folder, name, elsewhere) or cls._unlinked(folder, name, elsewhere)
        except OSError as error:
            raise StorageError(
                f"cannot make a file for {what}: {error.strerror}", where=str(folder), do=_do(error, elsewhere)
            ) from error

    @classmethod
    def _nameless(cls, folder: Path, name: str, elsewhere: str) -> "DirectFile | None":
        """One that never had a name; None where the system or the file system has no such files."""
        if not _O_TMPFILE:
            return None
        try:
            handle = os.open(folder, _O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                return None
            raise
        return cls(name, handle, f"/proc/self/fd/{handle}", os.O_RDWR, elsewhere)

    @classmethod
    def _unlinked(cls, folder: Path, name: str, elsewhere: str) -> "DirectFile":
        handle, path = tempfile.mkstemp(prefix=".irpar-", dir=folder)
        try:
            return cls(name, handle, path, os.O_RDWR, elsewhere)
        finally:
            os.unlink(path)

    def close(self) -> None:
        """Let go of it."""
        self._closing()
        self._cached = self._direct = -1

    def remedy(self, error: OSError) -> str:
        """What to do about an error of the system."""
        return _do(error, self._elsewhere)

    def size(self) -> int:
        """Its bytes."""
        return os.fstat(self._cached).st_size

    def stream(self) -> BinaryIO:
        """What writes to it through the system's cache, to close."""
        return os.fdopen(os.dup(self._cached), "r+b", 0)

    def read(self, memory: Array, position: int, least: int) -> None:
        """Fill memory from a position; both are those of blocks, as is the length. The file may end after `least`.

        Raises:
            StorageError: it ends before, or cannot be read.
        """
        done = 0
        while done < least:
            count = self._call("read", os.preadv, [memory[done:].data], position + done)
            came = self._whole_blocks(done + count) if done + count < least else done + count
            if came <= done:
                raise self._short("read", position, least, done + count)
            done = came

    def check_unchanged(self) -> None:
        """Refuse what was read of a file that others have written to since it was opened.

        Raises:
            StorageError: they have.
        """
        if os.fstat(self._cached).st_mtime_ns != self._written:
            raise StorageError(
                "the file was written to while the program ran: what was read may be of before or after",
                where=self.name,
                do="run it again when the file is whole; it must stay as it is meanwhile",
            )

    def write(self, memory: Array, position: int) -> None:
        """Write memory at a position; both are those of blocks, as is the length.

        Raises:
            StorageError: the disk is full, or fails.
        """
        done, least = 0, memory.nbytes
        while done < least:
            count = self._call("write", os.pwritev, [memory[done:].data], position + done)
            came = self._whole_blocks(done + count)
            if came <= done:
                raise self._short("write", position, least, done + count)
            done = came

    def _whole_blocks(self, count: int) -> int:
        """Where to go on after some bytes: past the cache, where a block begins."""
        return count - count % BLOCK if self.is_direct else count

    def _call(
        self, what: str, function: Callable[[int, Sequence[Any], int], int], memory: Sequence[Any], position: int
    ) -> int:
        """Read or write; through the system's cache from where the file system refuses to go past it."""
        try:
            if self.is_direct:
                try:
                    return function(self._direct, memory, position)
                except OSError as error:
                    if error.errno not in _HAS_NO_DIRECT:
                        raise
                    self.is_direct = False
            return function(self._cached, memory, position)
        except OSError as error:
            raise StorageError(
                f"cannot {what} {len(memory[0]):,} bytes at byte {position:,}: {error.strerror or error}",
                where=self.name,
                do=self.remedy(error),
            ) from error

    def _short(self, what: str, position: int, least: int, count: int) -> StorageError:
        return StorageError(
            f"{count:,} of {least:,} bytes at byte {position:,} could be {'read' if what == 'read' else 'written'}",
            where=self.name,
            notes=(f"the file has {self.size():,} bytes",),
            do="it is cut short, or being changed: write it again" if what == "read" else "check the disk",
        )


def _do(error: OSError, elsewhere: str) -> str:
    return f"{remedy(error)}: {elsewhere}" if elsewhere else remedy(error)


def _close(handles: list[int]) -> None:
    """Close descriptors; of a file that nobody closed, when it is let go of."""
    while handles:
        os.close(handles.pop())
