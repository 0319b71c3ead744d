"""What the ranks of test_mpi.py run, one process each: `mpiexec -n N python -m tests.runtime.groups.mpi_ranks NAME ...`."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import irpar
from irpar.runtime.driver import abort
from irpar.runtime.errors import ProgramError
from irpar.runtime.executor import Executor
from irpar.runtime.groups import Call, Collective, make_group
from irpar.runtime.groups.mpi import MpiGroup
from irpar.runtime.groups.mpi_parcels import Parcels
from irpar.sharding import Axis, IrparError, Mesh

from ..programs import MLP, mlp_input, mlp_reference, mlp_weights, module
from .collective_cases import cases, check

MESHES = {2: {"x": 2}, 3: {"x": 3}, 4: {"a": 2, "b": 2}, 8: {"a": 4, "b": 2}}


def join(mesh: Mesh, seconds: float = 60.0) -> MpiGroup:
    group = make_group("mpi", mesh, seconds)
    assert isinstance(group, MpiGroup)
    return group


def collectives(count: str, chunk: str = "") -> None:
    """All kinds; first one after the other, then begun together and waited for in another order on each rank."""
    if chunk:
        Parcels.chunk = int(chunk)
    mesh = Mesh(MESHES[int(count)])
    group = join(mesh)
    rank = group.rank
    done = 0
    for seed, rows in ((0, 3), (1, 3), (5, 20_000 if not chunk else 2000)):
        listed = list(cases(mesh, rows=rows, seed=seed))
        for case in listed:
            check(case, mesh, rank, group.exchange({rank: case.call(mesh, rank)})[rank])
        for start in range(0, len(listed), 6):
            some = listed[start : start + 6]
            calls = [case.call(mesh, rank) for case in some]
            for call in calls:
                group.start(call)
            turned = [(place + rank) % len(some) for place in range(len(some))]
            for place in turned:
                check(some[place], mesh, rank, group.exchange({rank: calls[place]})[rank])
        done += 2 * len(listed)
    group.close()
    if rank == 0:
        print(f"{done} collectives are right")


def mlp(where: str = "", seconds: str = "60", victim: str = "2") -> None:
    """The MLP of the tests three times on dp=2,tp=2; something happens to one rank."""
    loaded = module(MLP, **mlp_weights())
    with Faulty(loaded, loaded.mesh, engine="numpy", group="mpi") as executor:
        executor._group.seconds = float(seconds)
        executor.fault = where if executor._group.ranks == (int(victim),) else ""
        if not executor.is_driver:
            executor.serve()
            return
        for _ in range(3):
            given = executor.run(mlp_input())["y"]
        np.testing.assert_allclose(given, mlp_reference(mlp_input()["x"], mlp_weights()), rtol=1e-5)
        assert len(executor.log) == 1
        print("the numbers are right")


def now() -> None:
    """Tell when the fault happens."""
    print(f"[{time.time()}]", file=sys.stderr, flush=True)


class Faulty(Executor):
    """Something happens before its first segment ("before") or as it comes to the collective ("inside")."""

    fault = ""

    def _compute(self, states):
        self.happen("before")
        super()._compute(states)
        begin = self._group.begin

        def begin_and_happen(meeting):
            finish = begin(meeting)
            self.happen("inside")
            return finish

        if self.fault:
            self._group.begin = begin_and_happen

    def happen(self, where: str) -> None:
        if self.fault.endswith(f"-{where}"):
            now()
        if self.fault == f"kill-{where}":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault == f"hang-{where}":
            time.sleep(100)
        elif self.fault == f"exit-{where}":
            sys.exit(7)
        elif self.fault == f"fail-{where}":
            raise ProgramError("the disk is gone", do="buy another")


def partitions(folder: str, engine: str = "ort") -> None:
    """Verify the partitions in a folder; each rank has one of its own, with its own parts alone."""
    rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    for path in sorted(Path(folder, f"rank{rank}").iterdir()):
        with irpar.Partition.open(path) as partition:
            executor = partition.executor(engine, "mpi", 60.0)
            if not executor.is_driver:
                executor.serve()
                continue
            partition.verify(engine=engine, group="mpi").check()
            different = executor.log.differences(partition.plan.collectives)
            assert different == [], f"{path.name}: {different}"
            print(f"{path.name} is right: {len(executor.log)} collectives")


def crossed() -> None:
    """Two ranks over different axes come to their collectives in another order."""
    group = join(Mesh({"a": 2, "b": 2}))
    group.seconds = 1.5
    rank = group.rank
    first, second = (Collective("AllReduce", number, (Axis(axis),)) for number, axis in enumerate("ab"))
    for collective in (second, first) if rank in (0, 3) else (first, second):
        come(group, Call(rank, group.mesh.coords(rank), collective, np.ones(3, np.float32)))


def unlike(what: str) -> None:
    """One rank comes to something else over the same axes."""
    group = join(Mesh({"x": 4}))
    rank = group.rank
    odd = rank == 2
    kind = "AllGather" if what == "kind" and odd else "AllReduce"
    dtype = np.float64 if what == "dtype" and odd else np.float32
    shape = (5,) if what == "shape" and odd else (4,)
    number = 1 if what == "id" and odd else 0
    come(group, Call(rank, (rank,), Collective(kind, number, (Axis("x"),)), np.ones(shape, dtype)))


def come(group: MpiGroup, call: Call) -> None:
    """Exchange, and tell of what fails as the executor does."""
    now()
    try:
        group.exchange({group.rank: call})
    except BaseException as error:
        abort(group, error)
        raise


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


def latency() -> None:
    """Median seconds of an all-reduce."""
    group = join(Mesh({"x": 4}))
    for size, times in ((1024, 200), (1 << 20, 50), (1 << 26, 5)):
        operand = np.ones(size // 4, np.float32)
        seconds = []
        for _ in range(times):
            start = time.perf_counter()
            group.exchange(
                {group.rank: Call(group.rank, (group.rank,), Collective("AllReduce", 0, (Axis("x"),)), operand)}
            )
            seconds.append(time.perf_counter() - start)
        if group.rank == 0:
            print(f"{size} bytes: {np.median(seconds) * 1e3:.3f} ms")
    group.close()


def messages(size: str, chunk: str) -> None:
    """Each rank sends some to each other."""
    Parcels.chunk = int(chunk)
    group = join(Mesh({"x": 3}))
    others = [rank for rank in range(3) if rank != group.rank]
    sizes = [0, 1, 4096, 4097, int(size)]
    for each in sizes:
        for rank in others:
            group.send(rank, bytes([group.rank * 16 + rank]) * each)
    for each in sizes:
        for rank in others:
            assert group.receive(rank) == bytes([rank * 16 + group.rank]) * each
    group.close()
    print("the messages are right")


def start(seconds: str, how: str) -> None:
    """A rank ends before it has met the others."""
    if "1" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
        now()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(100)
        sys.exit(3)
    join(Mesh({"x": 4}), float(seconds))


if __name__ == "__main__":
    try:
        globals()[sys.argv[1]](*sys.argv[2:])
    except IrparError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
