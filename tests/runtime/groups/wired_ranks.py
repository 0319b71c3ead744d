"""What ranks run that are processes: `python -m tests.runtime.groups.wired_ranks GROUP SCENARIO ...`, with a launcher's
environment. GROUP is that of a run, or `hosts`: what `nccl` connects its ranks by, with the data of collectives going
over that too."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Self

import ml_dtypes
import numpy as np

from irpar.runtime.environment import World
from irpar.runtime.errors import ProgramError
from irpar.runtime.executor import Executor
from irpar.runtime.groups import Call, Collective, ThreadGroup, make_group
from irpar.runtime.groups.connect import meet
from irpar.runtime.groups.spmd import Finish, Meeting
from irpar.runtime.groups.wired import WiredGroup
from irpar.sharding import Axis, IrparError, Mesh

from ..programs import MLP, mlp_input, mlp_reference, mlp_weights, module
from .collective_cases import Case, cases

TOLERANCES = {
    np.dtype(np.float16): 2e-3,
    np.dtype(ml_dtypes.bfloat16): 2e-2,
    np.dtype(np.float32): 1e-6,
    np.dtype(np.float64): 3e-15,
    np.dtype(np.complex64): 1e-6,
}
"""Of sums and products of some ranks, which NCCL computes in another order, and may round on the way."""


class HostsGroup(WiredGroup):
    """Sends all data over the connections between hosts."""

    @classmethod
    def join(cls, mesh: Mesh, seconds: float) -> Self:
        world = World.of_environment()
        assert world is not None
        control, about = meet(world, mesh, {"rank": world.rank}, seconds)
        assert [each["rank"] for each in about] == list(range(world.size))
        return cls(mesh, world.rank, seconds, control)

    def move(self, meeting: Meeting) -> Finish:
        return self.through_hosts(meeting)


def join(name: str, mesh: Mesh, seconds: float = 30.0) -> Any:
    return HostsGroup.join(mesh, seconds) if name == "hosts" else make_group(name, mesh, seconds)


def collectives(name: str, mesh_text: str, seeds: str = "4", rows: str = "3") -> None:
    """All kinds: one after the other, then begun together and waited for in another order on each rank."""
    mesh = Mesh.parse(mesh_text)
    group = join(name, mesh)
    (rank,) = group.ranks
    done = 0
    for seed in range(int(seeds)):
        listed = list(cases(mesh, rows=int(rows), seed=seed))
        for start in range(0, len(listed), 5):
            some = listed[start : start + 5]
            for case in some:
                near(case, mesh, rank, group.exchange({rank: case.call(mesh, rank)})[rank])
            for place in (np.asarray, on_device) if group.takes_device_arrays else (np.asarray,):
                calls = [with_operand(case.call(mesh, rank), place) for case in some]
                for call in calls:
                    group.start(call)
                for i in range(len(some)):
                    turned = (i + rank) % len(some)
                    result = group.exchange({rank: calls[turned]})[rank]
                    assert type(result) is type(calls[turned].operand)
                    near(some[turned], mesh, rank, result if isinstance(result, np.ndarray) else result.get())
        done += 2 * len(listed)
    group.close()
    print(f"{done} collectives are right")


def with_operand(call: Call, place: Any) -> Call:
    return Call(call.rank, call.coords, call.collective, place(call.operand))


def on_device(operand: np.ndarray) -> Any:
    import cupy

    try:
        return cupy.asarray(operand)
    except (ValueError, TypeError):  # A dtype that there are no device arrays of.
        return operand


def near(case: Case, mesh: Mesh, rank: int, result: np.ndarray) -> None:
    """A rank's result must be what the threads group gives."""
    expected = ThreadGroup(mesh).exchange({each: case.call(mesh, each) for each in range(mesh.size)})[rank]
    label = f"rank {rank}: {case.collective} {case.collective.reduce} of {expected.dtype}{list(expected.shape)}"
    assert result.dtype == expected.dtype, label
    assert result.shape == expected.shape, f"{label}: {result.shape} != {expected.shape}"
    tolerance = TOLERANCES.get(result.dtype) if case.collective.kind in ("AllReduce", "ReduceScatter") else None
    if tolerance is not None:
        wide = np.complex128 if result.dtype.kind == "c" else np.float64
        left, right = result.astype(wide), expected.astype(wide)
        # Parts that cancel each other leave their rounding.
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=4 * tolerance, err_msg=label)
    elif result.dtype == np.object_:
        assert result.tolist() == expected.tolist(), label
    else:
        assert result.tobytes() == expected.tobytes(), f"{label}: {result} is not {expected}"


def mlp(name: str, where: str = "", seconds: str = "30", victim: str = "2") -> None:
    """The MLP of the tests three times on dp=2,tp=2; something happens to one rank."""
    loaded = module(MLP, **mlp_weights())
    group = join(name, loaded.mesh, float(seconds))
    with Faulty(loaded, loaded.mesh, engine="numpy", group=group) as executor:
        executor.fault = where if executor._group.ranks == (int(victim),) else ""
        if not executor.is_driver:
            executor.serve()
            return
        for _ in range(3):
            given = executor.run(mlp_input())["y"]
        np.testing.assert_allclose(given, mlp_reference(mlp_input()["x"], mlp_weights()), rtol=1e-5)
        print("the numbers are right")


def idle(name: str, what: str, seconds: str = "1") -> None:
    """Between two runs, or after the last, the driver takes longer than a collective may, or is stopped for ever."""
    loaded = module(MLP, **mlp_weights())
    when = what.partition("-")[2]
    group = join(name, loaded.mesh, float(seconds))
    with Executor(loaded, loaded.mesh, engine="numpy", group=group) as executor:
        if not executor.is_driver:
            executor.serve()
        else:
            executor.run(mlp_input())
            if when == "between":
                rest(what, float(seconds))
            executor.run(mlp_input())
            print("the numbers are there", flush=True)
    if executor.is_driver and when == "after":
        rest(what, float(seconds))


def rest(what: str, seconds: float) -> None:
    if what.startswith("stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(4 * seconds)


class Faulty(Executor):
    """Something happens at a run: before its collective, when all have met there, or when it has begun.

    A fault is what happens, when, and at which run (the second if it does not say): `kill-met`, `hang-begun-1`.
    """

    fault = ""
    runs = 0

    def _compute(self, states):
        super()._compute(states)
        self.runs += 1
        _, when, run = (*self.fault.split("-"), "2")[:3] if self.fault else ("", "", "0")
        if self.runs != int(run):
            return
        if when == "before":
            self.happen()
        begin = self._group.begin

        def begin_and_happen(meeting):
            finish = begin(meeting)
            self.happen()
            return finish

        if when == "begun":
            self._group.begin = begin_and_happen
        if when == "met":
            self._group.move = lambda meeting: self.happen()

    def happen(self) -> None:
        what = self.fault.partition("-")[0]
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "hang":
            time.sleep(100)
        elif what == "exit":
            os._exit(7)
        elif what == "fail":
            raise ProgramError("the disk is gone", do="buy another")


def start(name: str, how: str, seconds: str) -> None:
    """The last of three ranks ends before it has met the others."""
    if os.environ["RANK"] == "2":
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    join(name, Mesh({"x": 3}), float(seconds))


def twice(name: str) -> None:
    """The ranks meet, part, and meet again."""
    for number in range(2):
        group = join(name, Mesh({"x": 2}))
        rank = group.rank
        result = group.exchange({rank: Call(rank, (rank,), Collective("AllReduce", number, (Axis("x"),)), np.ones(2))})
        assert result[rank].tolist() == [2, 2]
        group.close()
    print("met twice")


def absent(name: str, seconds: str) -> None:
    """The last rank of an MPI job comes to MPI, and no further."""
    from irpar.runtime.groups.mpi_job import Job

    mesh = Mesh({"x": 3})
    job = Job.enter(mesh, 30.0)
    if job.mpi.COMM_WORLD.rank == 2:
        time.sleep(100)
    join(name, mesh, float(seconds))


def crossed(name: str) -> None:
    """Two ranks of four come to their collectives over different axes in another order than the others."""
    group = join(name, Mesh({"a": 2, "b": 2}), 2.0)
    rank = group.rank
    first, second = (Collective("AllReduce", number, (Axis(axis),)) for number, axis in enumerate("ab"))
    for collective in (second, first) if rank in (0, 3) else (first, second):
        group.exchange({rank: Call(rank, group.mesh.coords(rank), collective, np.ones(3, np.float32))})


def unlike(name: str, what: str) -> None:
    """One rank comes to something else over the same axes."""
    group = join(name, Mesh({"x": 2}))
    rank = group.rank
    odd = rank == 1
    kind = "AllGather" if what == "kind" and odd else "AllReduce"
    dtype = np.float64 if what == "dtype" and odd else np.float32
    shape = (5,) if what == "shape" and odd else (4,)
    number = 1 if what == "id" and odd else 0
    call = Call(rank, (rank,), Collective(kind, number, (Axis("x"),)), np.ones(shape, dtype))
    group.exchange({rank: call})


def family(name: str, folder: str, engine: str, tolerance: str) -> None:
    """Verify a partition, on its ranks."""
    import irpar

    with irpar.Partition.open(Path(folder)) as partition:
        executor = partition.executor(engine, name, 60.0)
        if not executor.is_driver:
            executor.serve()
            return
        partition.verify(engine=engine, group=name, tolerance=float(tolerance)).check()
        assert executor.log.differences(partition.plan.collectives) == []
        print("verified")


def latency(name: str) -> None:
    """Median time of an all-reduce of device arrays (of host arrays where the group takes no other)."""
    group = join(name, Mesh({"x": 2}))
    rank = group.rank
    for size in (256, 1 << 18, 1 << 24):
        operand = np.ones(size, np.float32)
        given = on_device(operand) if group.takes_device_arrays else operand
        seconds = []
        for number in range(20):
            start = time.perf_counter()
            group.exchange({rank: Call(rank, (rank,), Collective("AllReduce", number, (Axis("x"),)), given)})
            seconds.append(time.perf_counter() - start)
        if rank == 0:
            print(f"{4 * size} bytes: {sorted(seconds)[10] * 1e6:.0f} us")
    group.close()


if __name__ == "__main__":
    try:
        globals()[sys.argv[2]](sys.argv[1], *sys.argv[3:])
    except IrparError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
