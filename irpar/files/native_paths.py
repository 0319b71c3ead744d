"""Paths that are no text, for libraries that take text only (UTF-8)."""

import os
import weakref
from pathlib import Path


def is_text(path: str | Path) -> bool:
    """Whether a path is UTF-8; file names may be any bytes, which Python has as lone surrogates."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


class NativeFolders:
    """Folders by names that are text, for as long as this object lives."""

    def __init__(self) -> None:
        self._open: list[int] = []
        weakref.finalize(self, _close, self._open)

    def name(self, folder: Path) -> str:
        """Its own name; where that is no text, that of an open descriptor of it, if the system has those."""
        descriptors = Path("/proc/self/fd")
        if is_text(folder) or not descriptors.is_dir():
            return str(folder)
        self._open.append(os.open(folder, os.O_RDONLY | os.O_CLOEXEC))
        return str(descriptors / str(self._open[-1]))


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
