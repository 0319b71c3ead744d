"""Reading ordinary files, and nothing else: a named pipe would be waited for without an end, and a device has none."""

import errno
import os
import stat
from collections.abc import Callable
from io import BufferedReader

KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
"""What is no ordinary file, by the test of its mode."""


def open_file(path: str | os.PathLike[str]) -> BufferedReader:
    """Open an ordinary file, or a link to one, for reading.

    Raises:
        OSError: it is something else (EINVAL, of which `strerror` says what; EISDIR of a folder), or it cannot be read.
    """
    _check(os.stat(path), path)
    # It may have been exchanged since; so opened, a pipe is not waited for.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        _check(os.fstat(handle), path)
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """All bytes of an ordinary file.

    Raises:
        OSError: see `open_file`.
    """
    with open_file(path) as file:
        return file.read()


def read_text(path: str | os.PathLike[str], encoding: str = "utf-8") -> str:
    """All text of an ordinary file, its ends of lines as `\\n`.

    Raises:
        OSError: see `open_file`.
        UnicodeDecodeError: it is not of that encoding.
    """
    text = read_bytes(path).decode(encoding)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _check(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    kind = next((kind for is_kind, kind in KINDS if is_kind(status.st_mode)), "something else")
    raise OSError(errno.EINVAL, f"it is {kind}, not a file", os.fspath(path))
