"""A partition's folder while it is being written: a fresh one beside the target, with room for what goes into it."""

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from irpar.files.atomic import new_folder
from irpar.sharding import option

from .target import OutputError, check_target, told

if TYPE_CHECKING:
    from irpar.ir.data_file import DataFile

FILES_AT_ONCE = min(2, os.cpu_count() or 1)

Progress = Callable[[int, int], None]
"""Called with (bytes written so far, bytes in all)."""


@contextmanager
def fresh_partition(folder: Path, force: bool, sources: Sequence[Path]) -> Iterator[Path]:
    """A fresh folder that takes the place of the target when the block ends well; else the target is as it was.

    Args:
        folder: the target.
        force: replace a target that holds a partition and nothing else.
        sources: files that are read: they must not lie in the target.

    Yields:
        The folder to write to.

    Raises:
        OutputError: the target exists (and is not to be replaced), or the system refuses.
    """
    check_target(folder, force, sources)
    with told(folder), _told_when_full(folder), new_folder(folder) as fresh:
        yield fresh
        # Others may have written to the target in the meantime.
        check_target(folder, force, sources)


@contextmanager
def _told_when_full(folder: Path) -> Iterator[None]:
    """Tell that the disk ran full, as the check for room does."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OutputError(
            f"the disk ran full: {error.strerror}; nothing was written", where=str(folder.parent), do=_more_room()
        ) from error


def check_room(folder: Path, needed: int) -> None:
    """Refuse to begin what does not fit on the disk.

    Raises:
        OutputError: saying how much there is.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OutputError(
            f"the weights need {needed:,} bytes, the disk has {free:,} free",
            where=str(folder.parent),
            do=_more_room(),
        )


def _more_room() -> str:
    return f"free some room, give another folder, or write {option('weights', 'none')}"


class WriteReport:
    """Adds up written bytes for the progress display; called from the threads that write."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress = progress
        self.total = total
        self.done = 0
        self.is_stopped = False
        self.lock = Lock()

    def __call__(self, count: int) -> None:
        with self.lock:
            if self.is_stopped:
                raise OutputError("stopped")
            self.done += count
            if self.progress is not None:
                self.progress(self.done, self.total)


def write_data_files(files: "Iterable[tuple[Path, DataFile]]", report: WriteReport) -> None:
    """Write some data files at a time, each through buffers of its own; the kernel does the copying."""
    pool = ThreadPoolExecutor(FILES_AT_ONCE, "irpar-write")
    try:
        jobs = [pool.submit(file.write, path, report) for path, file in files]
        for job in jobs:
            job.result()
    except BaseException:
        report.is_stopped = True  # Nobody waits for the rest of a large file.
        raise
    finally:
        # After a failure, what has not begun is not worth beginning.
        pool.shutdown(cancel_futures=True)
