"""Where entries are kept: one file each, in a folder of bounded size; those not used for the longest go first.

Whatever the system refuses here is a miss, and nothing that a user is told: a partition is made without a cache, too.
"""

import hashlib
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from irpar.errors import IrparError
from irpar.files.atomic import is_leftover, new_file
from irpar.units import bytes_text

DIRECTORY, LIMIT = "IRPAR_CACHE_DIR", "IRPAR_CACHE_LIMIT"
DEFAULT_LIMIT = 1 << 30
_SUFFIX = ".partition"
_DIGEST_BYTES = 32
_LEFTOVER_SECONDS = 3600.0
"""A file that is not complete after an hour is one of a killed process."""
_UNITS = {"": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_SIZE = re.compile(r"(\d{1,15})\s*(|KB|MB|GB)", re.ASCII)


@dataclass(frozen=True)
class CacheFolder:
    """A folder of entries.

    Attributes:
        path: it; it need not exist.
        limit: the most bytes of all entries.
    """

    path: Path
    limit: int

    @classmethod
    def of_environment(cls) -> "CacheFolder | None":
        """The user's; None where there is none, or the limit is 0.

        Raises:
            IrparError: the limit cannot be read.
        """
        limit = _limit(os.environ.get(LIMIT, ""))
        path = _path()
        return cls(path, limit) if path is not None and limit else None

    def load(self, key: str) -> bytes | None:
        """The content of an entry, which counts as used now; None where there is none. A damaged one is dropped."""
        path = self.path / f"{key}{_SUFFIX}"
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if len(data) < _DIGEST_BYTES or _digest(memoryview(data)[_DIGEST_BYTES:]) != data[:_DIGEST_BYTES]:
            self.drop(key)
            return None
        with suppress(OSError):
            os.utime(path)
        return data[_DIGEST_BYTES:]

    def store(self, key: str, data: bytes) -> None:
        """Keep an entry, unless it is larger than all of them may be; the ones not used for the longest make room."""
        if len(data) + _DIGEST_BYTES > self.limit:
            return
        with suppress(OSError, IrparError):
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Under a name of its own until it is complete: two processes may be here at once.
            with new_file(self.path / f"{key}{_SUFFIX}", "the cache") as fresh, open(fresh, "wb") as file:
                file.write(_digest(data))
                file.write(data)
            self._make_room()

    def drop(self, key: str) -> None:
        """Remove an entry."""
        with suppress(OSError):
            (self.path / f"{key}{_SUFFIX}").unlink()

    def _make_room(self) -> None:
        """Remove what is beyond the limit, and what killed processes left."""
        entries, old = [], time.time() - _LEFTOVER_SECONDS
        with os.scandir(self.path) as found:
            for entry in found:
                with suppress(OSError):  # Another process removed it.
                    known = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(_SUFFIX):
                        entries.append((known.st_mtime_ns, known.st_size, entry.path))
                    elif is_leftover(entry.name) and known.st_mtime < old:
                        os.unlink(entry.path)
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.limit:
                break
            with suppress(OSError):
                os.unlink(path)
            total -= size


def _path() -> Path | None:
    given = os.environ.get(DIRECTORY, "")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base and os.path.isabs(base):
        return Path(base) / "irpar"
    try:
        return Path.home() / ".cache" / "irpar"
    except RuntimeError:  # Nobody knows where the user's home is.
        return None


def _limit(given: str) -> int:
    if not given:
        return DEFAULT_LIMIT
    found = _SIZE.fullmatch(given.strip())
    if found is None:
        raise IrparError(
            f'{LIMIT} is "{given}"',
            do=f"give bytes, or as here: {LIMIT}=500MB; {LIMIT}=0 keeps nothing; "
            f"by default it is {bytes_text(DEFAULT_LIMIT)}",
        )
    return int(found[1]) * _UNITS[found[2]]


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
