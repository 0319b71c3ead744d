"""The files that a run keeps in memory, named so that they can be removed whatever ended it.

All are called `irpar-RUNID...`, in one folder: that of shared memory, where the system has one. Whoever owns the run,
the launcher or else rank 0, holds a lock on `irpar-RUNID.lock` as long as it lives. The next run on this machine
removes what a dead owner left: a lock that can be had has none. (Process ids would not do: containers that share the
folder do not see each other's processes.)

    with OwnedRun() as run:           # in the launcher, or in rank 0 where a launcher of others started the ranks
        path = run_file(run.id, "segment")
"""

import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from irpar.files.atomic import lock, lock_ownerless
from irpar.sharding import IrparError

from .guard import remove_files

_SHARED = "/dev/shm"
_LOCK = ".lock"
_START = "irpar-"


class RunFilesError(IrparError):
    """The folder of shared memory cannot be used."""


def shared_folder() -> Path:
    """Where files of runs are: in memory if the system has a folder for that, else that of temporary files."""
    is_usable = os.path.isdir(_SHARED) and os.access(_SHARED, os.W_OK | os.X_OK)
    return Path(_SHARED if is_usable else tempfile.gettempdir())


def run_file(run_id: str, name: str) -> Path:
    """The path of a run's file of that name; it goes with the run."""
    return shared_folder() / f"{_START}{run_id}-{name}"


class OwnedRun:
    """A run that this process owns: its id, and the files of that name, which go when it is closed.

    Attributes:
        id: not used by any other run, and not to be guessed.

    Raises:
        RunFilesError: the folder cannot be written.
    """

    def __init__(self) -> None:
        remove_leftovers()
        while True:
            self.id = f"{os.getpid()}-{secrets.token_hex(8)}"
            path = Path(f"{self.prefix}{_LOCK}")
            try:
                self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise RunFilesError(
                    f"cannot begin a run: {error.strerror}",
                    where=str(path),
                    do="see that the folder has room and can be written (in a container: --shm-size)",
                ) from error
            if lock(self._handle, path):
                return
            os.close(self._handle)  # Another run took it for a leftover before it was locked.

    @property
    def prefix(self) -> str:
        """How the paths of its files begin."""
        return f"{shared_folder()}/{_START}{self.id}"

    def close(self) -> None:
        """Remove its files."""
        if self._handle >= 0:
            remove_files(self.prefix)
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def remove_leftovers() -> None:
    """Remove the files of runs whose owners are dead."""
    found: list[Path] = []
    with suppress(OSError):
        found = list(shared_folder().glob(f"{_START}*{_LOCK}"))
    for path in found:
        with suppress(OSError):
            handle = lock_ownerless(path)
            try:
                # The lock's own file last: without it the others would stay for good.
                prefix = str(path).removesuffix(_LOCK)
                remove_files(f"{prefix}-")
                remove_files(prefix)
            finally:
                os.close(handle)
