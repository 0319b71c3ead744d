"""POSIX semaphores in shared memory: what orders the writes of one process before the reads of another.

Python has no fences, and aarch64 lets other processors see writes in another order than that of the program: a flag in
shared memory would say nothing about the data beside it. Semaphores do: POSIX (4.12, memory synchronization) has
`sem_post` and the waits order memory on every architecture. So all that processes tell each other here lies behind a
semaphore: it is written, then the semaphore is posted; it is read after the semaphore was taken. A failed `take` costs
0.2 us, a post 0.25 us (0.6 us where it wakes someone).
"""

import ctypes
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from irpar.sharding import IrparError, option

SEMAPHORE_BYTES = 64
"""Of the segment, for each semaphore: a cache line; the C libraries take up to 32 bytes of it."""


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


@cache
def _library() -> Any:
    """The C library; its calls keep the interpreter's lock, which giving back and taking costs more than they do."""
    found = ctypes.PyDLL(None)
    if not hasattr(found, "sem_timedwait") or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise IrparError(
            f"the system has no POSIX semaphores that processes can share, which {option('group', 'processes')} needs",
            do=f"run on 64-bit Linux, or with {option('group', 'mpi')}",
        )
    return found


@cache
def _timed_wait() -> tuple[Any, int]:
    """The call that waits, without the interpreter's lock, and its clock."""
    library: Any = ctypes.CDLL(None)
    if hasattr(library, "sem_clockwait"):
        call = library.sem_clockwait
        return (lambda pointer, until: call(pointer, time.CLOCK_MONOTONIC, until)), time.CLOCK_MONOTONIC
    return library.sem_timedwait, time.CLOCK_REALTIME


class Semaphore:
    """A semaphore at an address of memory that the processes share.

    Attributes:
        post: adds 1.
        refuses: takes 1 where there is one; otherwise it gives what is not 0. As `take`, without a call of Python.
    """

    __slots__ = ("_pointer", "post", "refuses")

    def __init__(self, address: int) -> None:
        library = _library()
        self._pointer = ctypes.c_void_p(address)
        self.post: Callable[[], object] = partial(library.sem_post, self._pointer)
        self.refuses: Callable[[], int] = partial(library.sem_trywait, self._pointer)

    def create(self) -> None:
        """Begin with 0; once, before other processes use it.

        Raises:
            IrparError: the system has none that processes can share.
        """
        if _library().sem_init(self._pointer, 1, 0):
            raise IrparError(
                f"the system refuses a semaphore that processes share, which {option('group', 'processes')} needs",
                do=f"run with {option('group', 'mpi')}",
            )

    def take(self) -> bool:
        """Take 1 where there is one."""
        return self.refuses() == 0

    def wait(self, seconds: float) -> bool:
        """Take 1, or give up after some seconds, or when a signal comes; whether it was taken."""
        call, clock = _timed_wait()
        until = time.clock_gettime_ns(clock) + int(seconds * 1e9)
        return bool(call(self._pointer, ctypes.byref(_Time(*divmod(until, 10**9)))) == 0)

    @property
    def value(self) -> int:
        """How much there is to take."""
        found = ctypes.c_int()
        _library().sem_getvalue(self._pointer, ctypes.byref(found))
        return found.value
