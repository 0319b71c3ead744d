"""An entry: the files of a partition, weights as places where they lie, and what the command said of it.

8 bytes: the length of the head, little-endian · the head, JSON · the contents of the files · numbers that no file has,
all of it compressed.
"""

import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

_LENGTH = struct.Struct("<Q")
_LEVEL = 1
"""Of the compression: plans and programs are repetitive, and whoever writes an entry waits."""

Plain = list[Any]
"""A tensor as plain data; see `weights`."""
FileState = tuple[str, int, int, int, int]
"""A file as the system tells it: path, size, times of the last change of content and of inode in ns, inode."""


def file_state(path: str | os.PathLike[str]) -> FileState:
    """What tells that a file is as it was, without reading it.

    Raises:
        OSError: there is none.
    """
    known = os.stat(path)
    return os.fspath(path), known.st_size, known.st_mtime_ns, known.st_ctime_ns, known.st_ino


class NotKeptError(Exception):
    """A partition of which the cache keeps nothing: it is not there as it was written, or too large."""


@dataclass
class Entry:
    """A partition that was made.

    Attributes:
        report: what the command said of it.
        external: the files of external data, as they were.
        files: the contents of files, by path in the folder.
        sources: the files that weights lie in: path, and name in messages.
        data_files: data files by path in the folder: size, and tensors by offset.
        safetensors: safetensors files by path in the folder: tensors by name.
        numbers: the bytes of tensors that no file has.
    """

    report: Mapping[str, Any]
    external: Sequence[Sequence[Any]] = ()
    files: dict[str, bytes] = field(default_factory=dict)
    sources: Sequence[Sequence[str]] = ()
    data_files: dict[str, tuple[int, list[tuple[int, Plain]]]] = field(default_factory=dict)
    safetensors: dict[str, dict[str, Plain]] = field(default_factory=dict)
    numbers: bytes = b""

    @property
    def is_current(self) -> bool:
        """Whether its external data is as it was."""
        try:
            return all(list(file_state(state[0])) == list(state) for state in self.external)
        except OSError:
            return False

    def encode(self) -> bytes:
        """Its bytes."""
        contents = b"".join(self.files.values())
        sizes = {path: len(content) for path, content in self.files.items()}
        rest = {name: value for name, value in vars(self).items() if name not in ("files", "numbers")}
        head = json.dumps({**rest, "files": sizes}).encode()
        return zlib.compress(b"".join((_LENGTH.pack(len(head)), head, contents, self.numbers)), _LEVEL)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The entry of these bytes.

        Raises:
            ValueError: they are of none, or of another version.
        """
        try:
            whole = zlib.decompress(data)
            (length,) = _LENGTH.unpack_from(whole)
            place = _LENGTH.size + length
            head = json.loads(whole[_LENGTH.size : place])
            files = {}
            for path, size in head.pop("files").items():
                if Path(path).is_absolute() or ".." in Path(path).parts:
                    raise ValueError(f"a file outside the folder: {path}")
                files[path] = whole[place : place + size]
                place += size
            return cls(**head, files=files, numbers=whole[place:])
        except (zlib.error, struct.error, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"no entry: {error}") from error
