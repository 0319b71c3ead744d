"""How the processes of an MPI job tell each other what they need to connect without MPI."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from irpar.runtime.errors import RunError

from .job import Job, await_all, duplicate


@contextmanager
def all_gather_of(job: Job, seconds: float) -> Iterator[Callable[[bytes], list[bytes]]]:
    """What gives every rank of a job what all ranks gave, in order of rank; each time in so many seconds.

    Raises:
        RunError: not all ranks came in time, or MPI failed; in what is given too.
    """
    try:
        comm = duplicate(job.mpi.COMM_WORLD, seconds)

        def finish(request: Any, *buffers: Any) -> None:
            await_all(comm, request.Test, seconds, (request, buffers))

        def gather(mine: bytes) -> list[bytes]:
            sizes = np.empty(comm.size, np.int64)
            own = np.array([len(mine)], np.int64)
            finish(comm.Iallgather(own, sizes), own, sizes)
            whole = np.empty(int(sizes.sum()), np.uint8)
            finish(comm.Iallgatherv(np.frombuffer(mine, np.uint8), (whole, sizes.tolist())), mine, whole)
            ends = np.cumsum(sizes).tolist()
            return [whole[end - size : end].tobytes() for size, end in zip(sizes.tolist(), ends, strict=True)]

        yield gather
        finish(comm.Ibarrier())
        comm.Free()
    except job.mpi.Exception as error:
        job.has_failed = True
        what, *more = str(error).splitlines() or [type(error).__name__]
        raise RunError(
            f"MPI failed: {what}",
            notes=tuple(more[:3]),
            do="see what MPI wrote, and whether all hosts of the job live and reach each other",
        ) from None
    except BaseException:
        job.has_failed = True  # What is under way of MPI may never end.
        raise
