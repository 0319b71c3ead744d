"""A thread that lets started collectives go on while their rank computes."""

import threading
from collections.abc import Callable

PAUSE = 1e-3
"""Seconds between two steps."""


class Progress:
    """Takes steps while there is something to do.

    Args:
        step: takes one, in a thread of its own; whether there is more to do. It raises nothing.
    """

    def __init__(self, step: Callable[[], bool]) -> None:
        self._step = step
        self._wanted = threading.Event()
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """There is something to do."""
        self._wanted.set()
        if self._thread is None and not self._has_ended.is_set():
            self._thread = threading.Thread(target=self._run, name="irpar-progress", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Take no step any more, from now on."""
        self._has_ended.set()
        self._wanted.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._has_ended.is_set():
            self._wanted.wait()
            self._wanted.clear()
            while not self._has_ended.is_set() and self._step():
                self._has_ended.wait(PAUSE)
