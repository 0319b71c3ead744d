"""Files and folders that take their place only when they are complete, so that a failure leaves what was there.

Each is written as `.NAME.<8 hex digits>.new` beside its place, under a lock that ends with its process. What a killed
process left of that kind is removed when the same target is written again: a lock that can be had has no owner.

A folder and the one that it replaces exchange their names in one step, where the file system can do that (Linux,
renameat2). Elsewhere the old one is `.NAME.<8 hex digits>.old` for a moment; `left_aside` finds it, should the process
be killed in that moment.
"""

import errno
import os
import re
import shutil
import stat
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from irpar.sharding import IrparError

from .regular_file import KINDS

try:
    import fcntl
except ImportError:  # a system without POSIX locks: leftovers stay
    fcntl = None  # type: ignore[assignment]

_MOST_NAME_BYTES = 230
"""File systems hold 255 bytes; the rest is for the dots, the mark and the ending."""
_LEFTOVER = re.compile(r"\..*\.[0-9a-f]{8}\.(new|old)", re.DOTALL)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_FULL = {
    errno.ENOSPC: "free some room, or write to another disk",
    errno.EDQUOT: "free some of your quota, or write to another disk",
}


class WriteError(IrparError):
    """A file that cannot be written, or must not be replaced."""


def is_leftover(name: str) -> bool:
    """Whether a file or folder is called as those that are not complete yet."""
    return _LEFTOVER.fullmatch(name) is not None


def check_file(path: str | os.PathLike[str], what: str, error: type[IrparError] = WriteError) -> None:
    """Refuse a target that is there and is no ordinary file: a file that takes its place would put an end to it.

    Args:
        path: the target; links are followed.
        what: what is written, for messages.
        error: what to raise.

    Raises:
        WriteError: or `error`; for a path that no file can have as well.
    """
    try:
        mode = os.stat(path or ".").st_mode
    except OSError:
        return
    except ValueError as failure:  # A null character.
        raise error(f"cannot write {what}: {failure}", where=ascii(os.fspath(path)), do="give a path") from None
    if not stat.S_ISREG(mode):
        kind = next((kind for is_kind, kind in KINDS if is_kind(mode)), "no file")
        raise error(f"cannot write {what}: the target is {kind}", where=os.fspath(path), do="give a file")


@contextmanager
def new_file(path: str | os.PathLike[str], what: str, error: type[IrparError] = WriteError) -> Iterator[Path]:
    """A fresh empty file beside the target, which takes its place when the block ends well and else goes.

    Args:
        path: the target; where it is a link, what it points to is replaced.
        what: what is written, such as "the arrays", for messages.
        error: what to raise.

    Yields:
        The file to write to.

    Raises:
        WriteError: or `error`: the target is no ordinary file, or the system refuses.
    """
    with _told(path, what, error), _fresh_file(path, what, error) as (fresh, target):
        yield fresh
        os.replace(fresh, target)


@contextmanager
def new_pair(
    path: str | os.PathLike[str], data: str | os.PathLike[str], what: str, error: type[IrparError] = WriteError
) -> Iterator[tuple[Path, Path]]:
    """As `new_file`, for a file and the data file that it refers to; a data file that stays empty is not made.

    Yields:
        The file and the data file to write to.

    Raises:
        WriteError: or `error`: a target is no ordinary file, or the system refuses.
    """
    with (
        _told(path, what, error),
        _fresh_file(path, what, error) as (fresh, target),
        _fresh_file(data, what, error) as (fresh_data, data_target),
    ):
        yield fresh, fresh_data
        if fresh_data.stat().st_size:
            # The old file would be read with the new data, were the process to end between the two.
            target.unlink(missing_ok=True)
            os.replace(fresh_data, data_target)
        os.replace(fresh, target)


@contextmanager
def _told(path: str | os.PathLike[str], what: str, error: type[IrparError]) -> Iterator[None]:
    """Tell what the system refuses."""
    try:
        yield
    except OSError as failure:
        do = _FULL.get(failure.errno or 0, "give a file in a folder that exists, can be written and has room")
        raise error(f"cannot write {what}: {failure.strerror or failure}", where=os.fspath(path), do=do) from failure


@contextmanager
def _fresh_file(path: str | os.PathLike[str], what: str, error: type[IrparError]) -> Iterator[tuple[Path, Path]]:
    """A fresh file, and where it goes."""
    check_file(path, what, error)
    target = Path(os.path.realpath(path))
    _sweep(target, ".new")
    with _locked(_new_file, target) as fresh:
        yield fresh, target


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A fresh empty folder beside the target, which takes its place when the block ends well and else goes.

    A folder in that place is removed once the new one is there.

    Yields:
        The folder to write to.

    Raises:
        OSError: the system refuses.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() or not left_aside(path):
        # Without the target they would be the last copies: the process was killed between two renames.
        _sweep(path, ".new")
        _sweep(path, ".old")
    with _locked(_new_folder, path) as fresh:
        yield fresh
        _exchange(fresh, path)


def left_aside(path: Path) -> list[Path]:
    """Folders that were to be replaced, and those to replace them, of a process that was killed between two renames.

    Returns:
        What is now called `.old` and `.new`, the old ones first; nothing where the target is there.
    """
    if os.path.lexists(path):
        return []
    old = _leftovers(path, ".old")
    return [*old, *_leftovers(path, ".new")] if old else []


def notes_on_aside(paths: Sequence[Path]) -> tuple[str, ...]:
    """What messages say of `left_aside`."""
    said = {".old": "what was there is now", ".new": "what was to take its place is"}
    return tuple(f"{said[path.suffix]} {path}" for path in paths)


def _exchange(fresh: Path, path: Path) -> None:
    """Give a folder its place; the one that is there gets the fresh name, or goes."""
    if path.exists() and _exchange_names(fresh, path):
        return
    old = _beside(path, ".old")
    if path.exists():
        os.rename(path, old)
    try:
        os.rename(fresh, path)
    except OSError:
        if old.exists():
            os.rename(old, path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _exchange_names(one: Path, other: Path) -> bool:
    """Let two folders exchange their names in one step; False where that cannot be, and nothing was done."""
    if not sys.platform.startswith("linux"):
        return False
    import ctypes

    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and not rename(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)
    )


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f"{_prefix(path)}{uuid.uuid4().hex[:8]}{ending}")


def _prefix(path: Path) -> str:
    return f".{os.fsdecode(os.fsencode(path.name)[:_MOST_NAME_BYTES])}."


def _new_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _new_folder(path: Path) -> int:
    while True:
        path.mkdir()
        with suppress(FileNotFoundError):  # Between the two another process may take it for a leftover.
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


@contextmanager
def _locked(make: Callable[[Path], int], target: Path) -> Iterator[Path]:
    """A fresh file or folder beside the target, locked; what is still called so at the end is removed."""
    fresh, handle = _beside(target, ".new"), -1
    try:
        handle = make(fresh)
        while not lock(handle, fresh):
            # Another process took it for a leftover before it was locked.
            os.close(handle)
            handle = -1
            fresh = _beside(target, ".new")
            handle = make(fresh)
        yield fresh
    finally:
        _remove(fresh)
        if handle >= 0:
            os.close(handle)


def lock(handle: int, path: Path) -> bool:
    """Lock an open file or folder; False where the path is not it any more."""
    if fcntl is not None:
        with suppress(OSError):  # Some network file systems have no locks: there leftovers stay.
            fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError:
        return False


def _sweep(target: Path, ending: str) -> None:
    """Remove what killed processes left beside a target."""
    if fcntl is None:
        return
    for path in _leftovers(target, ending):
        with suppress(OSError):
            _remove_ownerless(path)


def _leftovers(target: Path, ending: str) -> list[Path]:
    """What is called as files and folders that are not complete yet, or not removed yet."""
    prefix, length = _prefix(target), len(_prefix(target)) + 8 + len(ending)
    with suppress(OSError), os.scandir(target.parent) as entries:
        return [
            Path(entry.path)
            for entry in entries
            if len(entry.name) == length
            and entry.name.startswith(prefix)
            and entry.name.endswith(ending)
            and is_leftover(entry.name)
        ]
    return []


def lock_ownerless(path: Path) -> int:
    """Open and lock a file or folder that a process left when it was killed.

    Raises:
        OSError: its process lives, or it cannot be opened, or the system has no such locks.
    """
    if fcntl is None:
        raise OSError(errno.ENOSYS, "no locks")
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def _remove_ownerless(path: Path) -> None:
    handle = lock_ownerless(path)
    try:
        _remove(path)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
