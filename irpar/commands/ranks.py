"""Where the ranks of a command run: in this process, or each in one of its own."""

import atexit
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .launch import launch_ranks
from .options import choice

if TYPE_CHECKING:
    from irpar.api import Partition
    from irpar.runtime.launch.environment import World

GroupName = Annotated[
    str | None,
    typer.Option(
        "--group",
        metavar="NAME",
        help="What moves data between ranks: threads (all ranks in this process), processes (one process a rank, on "
        "one machine), mpi, or nccl (GPUs). By default what the launcher asks for, and threads where there is none.",
        show_default=False,
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        help="How long a rank waits for others at a collective; 60 if neither this nor IRPAR_TIMEOUT says.",
        show_default=False,
    ),
]


def on_ranks(
    context: typer.Context,
    out: Path,
    work: "Callable[[Partition, dict[str, Any]], None]",
    *,
    engine: str | None,
    group: str | None,
    timeout: float | None,
    strict: bool,
    tf32: bool,
) -> None:
    """Do a command's work on the ranks of a partition: on rank 0, where others run elsewhere.

    Where `processes` is asked for and no launcher has made any, it is launched here.

    Args:
        context: of the command; holds the words of the command line.
        out: the partition's folder.
        work: takes the partition, and the engine and the group to run it with.
        engine: as given; None: what fits the machine.
        group: as given; None: what fits the launcher.
        timeout, strict, tf32: as given.

    Raises:
        IrparError: the ranks cannot be run so, or the work failed.
    """
    from irpar.api import Partition
    from irpar.runtime.engines.base import ENGINES
    from irpar.runtime.errors import PeerError
    from irpar.runtime.groups import GROUPS, checked_timeout
    from irpar.runtime.launch.environment import ERROR_FILE, IRPAR_LAUNCH, World

    if engine is not None:
        choice("--engine", engine, ENGINES)
    world = World.of_environment()
    checked_timeout(timeout)
    kind = None if group is None else GROUPS[choice("--group", group, GROUPS)]
    if world is not None and world.size == 1 and world.launcher != IRPAR_LAUNCH and not (kind and kind.over_mpi):
        world = None  # What started one process started it for something else, or has nothing to tell.
    with _told_once(world):
        if group is not None and _must_launch(group, world):
            launch_ranks(context.obj)
    with _told_once(world), _ending_job(world, group, engine), Partition.open(out) as partition:
        computing: Any = engine or partition.default_engine(world)
        name = group or _default_group(world, computing)
        if not GROUPS[name].in_one_process or strict or tf32:
            # The ranks meet before rank 0 reads what only it has, so that they end with it if that is missing.
            executor = partition.executor(computing, name, timeout, strict, tf32)
            if not executor.is_driver:
                try:
                    executor.serve()
                except PeerError as error:
                    if error.rank and ERROR_FILE not in os.environ:
                        # That rank tells, and so does rank 0. (irpar launch finds out by itself whose error to tell.)
                        raise typer.Exit(2) from None
                    raise
                return
        work(partition, {"engine": computing, "group": name})


@contextmanager
def _told_once(world: "World | None") -> Iterator[None]:
    """Of what all ranks of a host find out about how they were started, the first of them tells."""
    from irpar.runtime.errors import LaunchError
    from irpar.runtime.launch.environment import ERROR_FILE

    try:
        yield
    except LaunchError:
        if world is not None and world.local_rank and ERROR_FILE not in os.environ:
            raise typer.Exit(2) from None
        raise


@contextmanager
def _ending_job(world: "World | None", group: str | None, engine: str | None) -> Iterator[None]:
    """Where a rank of an MPI job fails, perhaps before MPI has begun, tell which, and then end the job."""
    from irpar.runtime.errors import LaunchError, PeerError
    from irpar.sharding import IrparError

    try:
        yield
    except (LaunchError, PeerError):
        raise  # All ranks find that out; or it is told of another one, and MPI has begun.
    except IrparError as error:
        if world is not None and world.size > 1 and _enters_mpi(world, group, engine):
            error.notes += (f"on rank {world.rank}, in {os.environ.get('PWD', '.')} of host {socket.gethostname()}",)
            atexit.register(_end_failed_job)
        raise


def _enters_mpi(world: "World", group: str | None, engine: str | None) -> bool:
    from irpar.runtime.groups import GROUPS
    from irpar.runtime.groups.wire.connect import meets_over_mpi

    name = group or _default_group(world, engine or "ort")
    return GROUPS[name].over_mpi or (name == "nccl" and meets_over_mpi(world))


def _end_failed_job() -> None:
    from irpar.runtime.groups.mpi.job import Job
    from irpar.sharding import IrparError

    with suppress(IrparError):
        Job.end_failed()


def _default_group(world: "World | None", engine: str) -> str:
    from irpar.runtime.launch.environment import MPI_LAUNCHERS

    if world is None:
        return "threads"
    if engine == "cupy":
        return "nccl"
    return "mpi" if world.launcher in MPI_LAUNCHERS else "processes"


def _must_launch(name: str, world: "World | None") -> bool:
    """Whether ranks are to be started from here.

    Raises:
        IrparError: the ranks would all run everything, or have nobody to meet; says how to start them.
    """
    from irpar.runtime.errors import LaunchError
    from irpar.runtime.groups import GROUPS

    kind = GROUPS[name]
    if kind.in_one_process and world is not None and world.size > 1:
        raise LaunchError(
            f"--group {name} runs all ranks in one process; this is one of {world.size} that {world.launcher} started",
            do="leave --group out, or run irpar without the launcher",
        )
    if world is None and kind.over_mpi:
        from irpar.runtime.launch.environment import no_launcher

        raise no_launcher(name)
    return world is None and kind.is_launched
