"""Processes that make themselves ready together, and are timed one by one."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

BEGUN = "begun"
"""The file by which a process tells that others wait for it."""


class Turns:
    """One process of several.

    Who started them holds on to the lock until all have begun: nobody is alone while one is still to make itself ready.

    Args:
        lock: a file that they lock; None: there is one process.
        own: a folder of this one; None: of who started them.
    """

    def __init__(self, lock: Path | None, own: Path | None = None) -> None:
        self._path = lock
        self._file: IO[str] | None = None
        self._own = own

    def together(self) -> None:
        """From here on the device may be used beside others."""
        self._lock(fcntl.LOCK_SH)
        if self._own is not None:
            (self._own / BEGUN).touch()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """In here nobody else uses the device; comes when nobody is making himself ready any more."""
        self.let_go()  # Two that held on to it while they ask for more would wait for each other.
        self._lock(fcntl.LOCK_EX)
        yield
        self.let_go()

    def let_go(self) -> None:
        """Others need not wait for this process."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _lock(self, how: int) -> None:
        # Locks of a process, which what it forks does not hold on to.
        if self._path is not None:
            self._file = self._path.open("a+")
            fcntl.lockf(self._file, how)
