"""The memories of a rank: copies between them, some of them beside what else it does.

On the device and on the host values are arrays, on a disk `DiskArray`. Without a GPU device and host are two accounts
of one memory: what is copied is copied all the same, and no array stands in both.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy as shallow_copy
from typing import Any, NamedTuple

import numpy as np

from irpar.ir import Memory, Value

from .engines.arrays import Arrays, Moving
from .engines.base import Constants
from .errors import RunError
from .instructions import MemoryCopy
from .log import CopyLog
from .storage.disk import Disk
from .storage.disk_array import DiskArray


class CopyThread:
    """The thread that performs what one rank starts to copy, one after the other; it is there from the first on."""

    def __init__(self, rank: int) -> None:
        self._pool = ThreadPoolExecutor(1, f"irpar-copy-{rank}")

    def begin(self, work: Callable[[], Any]) -> "Future[Any]":
        """Let something be done."""
        return self._pool.submit(work)

    def close(self) -> None:
        """Wait until all is done, and end."""
        self._pool.shutdown()


class InFlight(NamedTuple):
    """A copy that was started.

    Attributes:
        copy: which.
        done: what it waits for.
        result: gives the copy once that is done.
        source: what is copied, which stays until then.
    """

    copy: MemoryCopy
    done: "Future[Any]"
    result: Callable[[Any], Any]
    source: Any


class Spaces:
    """What copies values of one rank.

    Args:
        rank: which.
        arrays: where its arrays lie on the device.
        thread: performs what is started.
        disk: reads and writes what lies there.
    """

    def __init__(self, rank: int, arrays: Arrays, thread: CopyThread, disk: Disk) -> None:
        self._rank = rank
        self._arrays = arrays
        self._thread = thread
        self._disk = disk
        self._log = CopyLog()
        self._on_disk: dict[Value, DiskArray] = {}

    def of_run(self, log: CopyLog) -> "Spaces":
        """The same for one run, whose copies go into its own log."""
        found = shallow_copy(self)
        found._log = log
        return found

    def copy(self, copy: MemoryCopy, value: Any) -> Any:
        """Copy a value, and wait for it."""
        self._log.add(self._rank, copy, value.nbytes)
        moving = self._moving(copy, value)
        return moving.result(moving.run())

    def start(self, copy: MemoryCopy, value: Any) -> InFlight:
        """Let a copy of a value begin."""
        self._log.add(self._rank, copy, value.nbytes)
        moving = self._moving(copy, value)
        return InFlight(copy, self._thread.begin(moving.run), moving.result, value)

    def wait(self, inflight: InFlight) -> Any:
        """What a copy came to; waits for it.

        Raises:
            BaseException: it failed.
        """
        return inflight.result(inflight.done.result())

    def constant(self, value: Value, constants: Constants) -> Any:
        """A constant where it lies: on a disk that is its own file, where its bytes stand together there."""
        if value.memory != "disk":
            return constants.array(value)
        found = self._on_disk.get(value)
        if found is None:
            found = self._on_disk[value] = self._disk.tensor(constants.tensor(value), self._rank)
        return found

    def to_disk(self, array: Any) -> DiskArray:
        """Write what came from outside to the disk, where the program has it."""
        return self._disk.begin_write(np.asarray(array), self._rank).wait()

    def outside(self, value: Any) -> Any:
        """A value as the caller of a run takes it: in numpy arrays."""
        if isinstance(value, DiskArray):
            return self._disk.begin_read(value).wait()
        return self._arrays.outside(value)

    def _moving(self, copy: MemoryCopy, value: Any) -> Moving:
        if isinstance(value, DiskArray) != (copy.source == "disk"):
            raise RunError(
                f"a copy from the {copy.source} reads what does not lie there",
                where=copy.label,
                do="this is a bug of irpar: report it",
            )
        if copy.source == "disk":
            return self._from_disk(value, copy.target)
        if copy.target == "disk":
            return self._to_disk(value)
        return self._arrays.moving(value, copy.target)

    def _from_disk(self, value: DiskArray, target: Memory) -> Moving:
        """Several requests are in flight at once, from the start on."""
        reading = self._disk.begin_read(value)
        if target == "host" or self._arrays.is_host:
            return Moving(reading.wait)

        def run() -> Any:
            moving = self._arrays.moving(reading.wait(), target)
            return moving.result(moving.run())

        return Moving(run)

    def _to_disk(self, value: Any) -> Moving:
        """What a device holds passes the host."""
        if isinstance(value, np.ndarray):
            return Moving(self._disk.begin_write(value, self._rank).wait)
        down = self._arrays.moving(value, "host")
        return Moving(lambda: self._disk.begin_write(down.result(down.run()), self._rank).wait())


def misread(value: Value, where: str, lies: str | None, label: str) -> RunError:
    """A node has come to what lies in another memory than its own."""
    return RunError(
        f"what runs on the {where} reads %{value.name}, which lies on the {lies}",
        where=label,
        do="this is a bug of irpar: report it",
    )
