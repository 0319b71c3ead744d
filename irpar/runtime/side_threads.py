"""Threads that work beside the one that has the work, which takes part: no more run at once than there are cores."""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Task = Callable[[], T]
_Queue = SimpleQueue[Callable[[], None] | None]

_SPINS = 1000
"""How often the thread that has the work looks whether the others are done, before it sleeps: for about 1 ms, since one
that sleeps takes 50 us and more to wake."""


class _Round(Generic[T]):
    """Tasks that several threads take one after the other."""

    def __init__(self, tasks: Sequence[Task[T]]) -> None:
        self._left = deque(enumerate(tasks))
        self._found: list[Any] = [None] * len(tasks)
        self._errors: list[BaseException | None] = [None] * len(tasks)
        self._ended: SimpleQueue[None] = SimpleQueue()

    def work_beside(self) -> None:
        """Do what nobody has begun, until nothing is left."""
        while True:
            try:
                place, task = self._left.popleft()
            except IndexError:
                return
            try:
                self._found[place] = task()
            except BaseException as error:
                self._errors[place] = error
            self._ended.put(None)

    def work(self) -> None:
        """As `work_beside`, and wait until all that others have begun has ended."""
        self.work_beside()
        spins = 0
        for _ in self._found:
            while True:
                try:
                    self._ended.get(spins >= _SPINS)
                    break
                except Empty:
                    spins += 1
                    time.sleep(0)

    def results(self) -> list[T]:
        """What the tasks gave, in order.

        Raises:
            BaseException: the first error in order.
        """
        for error in self._errors:
            if error is not None:
                raise error
        return self._found


class SideThreads:
    """Threads that are kept.

    Args:
        count: how many, beside the one that asks.
        name: how theirs begin.
    """

    def __init__(self, count: int, name: str) -> None:
        self._are_free = threading.Lock()
        self._queues: list[_Queue] = [SimpleQueue() for _ in range(count)]
        self._threads = [
            threading.Thread(target=_serve, args=(queue,), name=f"{name}_{number}", daemon=True)
            for number, queue in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _end, self._queues)

    def close(self) -> None:
        """Wait until they have ended; who has work from then on does it alone."""
        with self._are_free:
            self._end()
            self._queues = []
        for thread in self._threads:
            thread.join()

    def run(self, tasks: Sequence[Task[T]]) -> list[T]:
        """What each task gives; all have ended before an error is raised: nothing runs on behind the caller's back.

        Of several threads that ask at once, one has them; the others do their tasks alone.

        Raises:
            BaseException: the first error, in order of the tasks.
        """
        round_ = _Round(tasks)
        if not self._are_free.acquire(blocking=False):
            round_.work()
            return round_.results()
        try:
            for queue in self._queues[: len(tasks) - 1]:
                queue.put(round_.work_beside)
            round_.work()
        finally:
            self._are_free.release()
        return round_.results()


def _serve(queue: "_Queue") -> None:
    """What a thread does until it is let go."""
    while (work := queue.get()) is not None:
        work()
        del work  # It would be held, with all that it made, until the next one.


def _end(queues: "Sequence[_Queue]") -> None:
    for queue in queues:
        queue.put(None)
