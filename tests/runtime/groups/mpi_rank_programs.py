"""What ranks of an MPI job run that there is of MPI alone: `mpiexec -n N python -m tests.runtime.groups.mpi_rank_programs
SCENARIO ...`."""

import os
import sys
import time
from collections.abc import Callable

import numpy as np

from irpar.cli import main
from irpar.runtime.driver import abort
from irpar.runtime.groups import Call, Collective, make_group
from irpar.runtime.groups.mpi.group import MpiGroup
from irpar.runtime.groups.mpi.job import Job
from irpar.runtime.groups.mpi.neighbours import Neighbours
from irpar.runtime.groups.mpi.parcels import Parcels
from irpar.runtime.launch.environment import World
from irpar.sharding import Axis, Mesh
from tests.patience import slowness

from . import rank_programs
from .rank_programs import come


def join(mesh: Mesh) -> MpiGroup:
    group = make_group("mpi", mesh, 60.0)
    assert isinstance(group, MpiGroup)
    return group


def chunked(chunk: str, scenario: str, *words: str) -> None:
    """A scenario of any group, with messages of MPI that are so many bytes at most."""
    Parcels.chunk = int(chunk)
    rank_programs.SCENARIOS[scenario]("mpi", *words)


def crowded(cores: str, scenario: str, *words: str) -> None:
    """A scenario of any group, as where ranks share so many cores."""
    Neighbours.cores = lambda neighbours: int(cores)
    rank_programs.SCENARIOS[scenario]("mpi", *words)


def shared() -> None:
    """All ranks know how many cores they share, each of which may use one of them."""
    every = sorted(os.sched_getaffinity(0))
    job = Job.enter(Mesh({"x": 3}), 20)
    os.sched_setaffinity(0, [every[job.mpi.COMM_WORLD.rank % len(every)]])
    assert Neighbours.meet(job, 20).cores() == min(3, len(every))
    print("the cores are known", flush=True)


def overlap() -> None:
    """What was started comes about while all ranks do something else."""
    group = join(Mesh({"x": 3}))
    rank = group.rank
    for number in range(5):
        collective = Collective("AllReduce", number, (Axis("x"),))
        call = Call(rank, (rank,), collective, np.full(1 << 20, rank + 1.0))
        group.start(call)
        end = time.monotonic() + 40
        while any(group._begun.values()) and time.monotonic() < end:
            time.sleep(0.01)
        assert not any(group._begun.values()), "nobody moved it"
        assert (group.exchange({rank: call})[rank] == 6).all()
    # An error that the thread finds is raised by what comes next.
    call = Call(rank, (rank,), Collective("AllReduce", 7 + (rank == 1), (Axis("x"),)), np.zeros(1 << 20))
    group.start(call)
    time.sleep(0.2)
    come(group, call)


def computing(how: str) -> None:
    """Ranks 2 and 3 compute for ever, the first with a collective under way; another one waits for it."""
    group = join(Mesh({"a": 2, "b": 2}))
    rank, group.seconds = group.rank, 1.0
    over = {axis: Collective("AllReduce", number, (Axis(axis),)) for number, axis in enumerate("ab")}
    call = Call(rank, group.mesh.coords(rank), over["b" if rank == 2 else "a"], np.ones(3, np.float32))
    if rank == 2:
        group.start(call)
    if rank:
        time.sleep(100)
    if how == "asked":
        group.send(2, b"?")
        try:
            group.receive(2)
        except BaseException as error:
            abort(group, error)
            raise
    come(group, call)


def leaving(late: str, what: str) -> None:
    """All is well, and then a rank takes long for its end, or never comes to it."""
    group = join(Mesh({"x": 3}))
    group._job.seconds = 1.0
    group.seconds = 1.0 if what == "open" else 60.0
    is_late = group.rank == int(late)
    if is_late and what == "open":
        time.sleep(100)
    group.close()
    print("the run is over", flush=True)
    if is_late:
        time.sleep(4 if what == "slow" else 100)


def late(seconds: str) -> None:
    """A rank closes later than ranks wait for each other, while the driver works on with what it has."""
    group = join(Mesh({"x": 3}))
    group._job.seconds = group.seconds = float(seconds)
    if group.rank == 1:
        time.sleep(2 * float(seconds))
    group.close()
    if group.rank == 0:
        time.sleep(6 * float(seconds))
        print("the results are kept", flush=True)


def many(count: str) -> None:
    """Ranks join and close at their own pace, with messages left unread."""
    world = World.of_environment()
    assert world is not None
    pace = np.random.default_rng(world.rank)
    for number in range(int(count)):
        group = join(Mesh({"x": 3}))
        rank = group.rank
        if rank == number % 3:
            group.send((rank + 1) % 3, b"unread" * pace.integers(1, 1000))
        call = Call(rank, (rank,), Collective("AllReduce", number, (Axis("x"),)), np.full(3000, rank + 1.0))
        assert (group.exchange({rank: call})[rank] == 6).all()
        time.sleep(pace.random() * 0.01)
        group.close()
    assert len(group._job.communicators) <= 3, "communicators are not used again"
    print("all joined", flush=True)


def two(seconds: str) -> None:
    """The driver closes one of two groups while the others still use both."""
    first, second = join(Mesh({"x": 3})), join(Mesh({"x": 3}))
    second.seconds = first.seconds = first._job.seconds = float(seconds)
    if first.rank == 0:
        first.close()
        time.sleep(2 * float(seconds))
        for rank in (1, 2):
            second.send(rank, b"go on")
    else:
        assert second.receive(0) == b"go on"
        first.close()
    second.close()
    print("both have ended", flush=True)


def apart(seconds: str) -> None:
    """The driver joins a second group too late for the others."""
    join(Mesh({"x": 3})).close()
    if Job.enter(Mesh({"x": 3}), float(seconds)).mpi.COMM_WORLD.rank == 0:
        time.sleep(2 * float(seconds))
    group = make_group("mpi", Mesh({"x": 3}), float(seconds))
    group.receive(1)


def finalizing() -> None:
    """The program ends MPI itself, and goes on."""
    seconds = slowness()
    group = make_group("mpi", Mesh({"x": 3}), seconds)
    for size in (2, 20_000):
        for _ in range(2):
            collective = Collective("AllReduce", size, (Axis("x"),))
            group.exchange({group.rank: Call(group.rank, (group.rank,), collective, np.ones(size))})
    group.close()
    job = group._job
    rank = group.rank
    job.mpi.Finalize()
    if rank == 0:
        time.sleep(2 * seconds)
        print("went on", flush=True)


def deaf(seconds: str) -> None:
    """One rank takes nothing for long; the others wait for the driver, which lives, and is not given up."""
    group = make_group("mpi", Mesh({"x": 3}), float(seconds))
    if group.rank == 0:
        time.sleep(8 * float(seconds))
        group.send(1, b"go on")
    elif group.rank == 1:
        assert group.receive(0) == b"go on"
        print("it lived", flush=True)
    else:
        time.sleep(8.05 * float(seconds))
    group.close()


def lost(folder: str) -> None:
    """Rank 2 does not find the partition."""
    rank = World.of_environment()
    assert rank is not None
    sys.exit(main(["verify", f"{folder}2" if rank.rank == 2 else folder, "--group", "mpi"]))


def absent(seconds: str) -> None:
    """The last of three ranks comes to MPI, and not to where the ranks of `hosts` meet."""
    mesh = Mesh({"x": 3})
    job = Job.enter(mesh, 30.0)
    if job.mpi.COMM_WORLD.rank == 2:
        time.sleep(100)
    rank_programs.join("hosts", mesh, float(seconds))


SCENARIOS: dict[str, Callable[..., None]] = {
    scenario.__name__: scenario
    for scenario in (
        chunked,
        crowded,
        shared,
        overlap,
        computing,
        leaving,
        late,
        many,
        two,
        apart,
        finalizing,
        deaf,
        lost,
        absent,
    )
}

if __name__ == "__main__":
    rank_programs.run(SCENARIOS[sys.argv[1]], *sys.argv[2:])
