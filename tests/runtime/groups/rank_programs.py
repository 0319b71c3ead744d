"""What ranks run that are processes: `python -m tests.runtime.groups.rank_programs GROUP SCENARIO ...`, with a launcher's
environment. GROUP is that of a run (`mpi`, `nccl`, `processes`), or `hosts`, see `HostsGroup`."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from irpar.runtime.communication import Choice
from irpar.runtime.driver import abort
from irpar.runtime.errors import ProgramError
from irpar.runtime.executor import Executor
from irpar.runtime.groups import Call, Collective, make_group
from irpar.runtime.groups.nccl.sharing import CAPTURES
from irpar.runtime.groups.results import execute
from irpar.runtime.groups.shared_memory.traffic import Traffic
from irpar.runtime.launch.environment import World
from irpar.sharding import Axis, IrparError, Mesh
from tests.patience import slowness

from ..programs import MLP, mlp_input, mlp_reference, mlp_weights, module
from .collective_cases import cases, check
from .hosts_group import HostsGroup
from .pair_cases import exchange_pairs

TOLERANCES = {
    "nccl": {
        np.dtype(np.float16): 2e-3,
        np.dtype(ml_dtypes.bfloat16): 2e-2,
        np.dtype(np.float32): 1e-6,
        np.dtype(np.float64): 3e-15,
        np.dtype(np.complex64): 1e-6,
    }
}
"""Of a group's sums and products, by dtype; where there is none they have the bits of threads. NCCL computes those of
some ranks in another order, and may round on the way."""


def join(name: str, mesh: Mesh, seconds: float = 60.0) -> Any:
    return HostsGroup.join(mesh, seconds) if name == "hosts" else make_group(name, mesh, seconds)


def world() -> World:
    """What the launcher tells, before the ranks have met."""
    found = World.of_environment()
    assert found is not None
    return found


# -- what is exchanged ------------------------------------------------------------------------------------------------


def collectives(name: str, mesh_text: str, *draws: str) -> None:
    """All kinds: one after the other, each twice in a row; then begun together and waited for in another order on each
    rank.

    A draw is seeds and rows: `5:3`, `0-3:20000`.
    """
    mesh = Mesh.parse(mesh_text)
    group = join(name, mesh)
    (rank,) = group.ranks
    tolerances = TOLERANCES.get(name, {})
    done = 0
    for seed, rows in _seeds_and_rows(draws):
        listed = list(cases(mesh, rows=rows, seed=seed))
        for start in range(0, len(listed), 5):
            some = listed[start : start + 5]
            for case in some:
                for _ in range(2):
                    check(case, mesh, rank, group.exchange({rank: case.call(mesh, rank)})[rank], tolerances)
            for place in (np.asarray, on_device) if group.takes_device_arrays else (np.asarray,):
                calls = [with_operand(case.call(mesh, rank), place) for case in some]
                for call in calls:
                    group.start(call)
                for i in range(len(some)):
                    turned = (i + rank) % len(some)
                    result = group.exchange({rank: calls[turned]})[rank]
                    assert type(result) is type(calls[turned].operand)
                    found = result if isinstance(result, np.ndarray) else result.get()
                    check(some[turned], mesh, rank, found, tolerances)
        done += 3 * len(listed)
    group.close()
    print(f"{done} collectives are right")


def _seeds_and_rows(draws: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    for draw in draws:
        seeds, rows = draw.split(":")
        first, _, last = seeds.partition("-")
        for seed in range(int(first), int(last or first) + 1):
            yield seed, int(rows)


def with_operand(call: Call, place: Callable[[np.ndarray], Any]) -> Call:
    return Call(call.rank, call.coords, call.collective, place(call.operand))


def on_device(operand: np.ndarray) -> Any:
    import cupy

    try:
        return cupy.asarray(operand)
    except (ValueError, TypeError):  # A dtype that there are no device arrays of.
        return operand


def pairs(name: str, mesh_text: str, seed: str, rows: str) -> None:
    """Tensors from rank to rank; then the last rank takes what nobody sends."""
    mesh = Mesh.parse(mesh_text)
    group = join(name, mesh)
    (rank,) = group.ranks
    count = exchange_pairs(group, rank, mesh, 24, int(seed), int(rows))
    print(f"{count} are right", flush=True)
    if rank == mesh.size - 1:
        group.seconds = 1.0
        called = Collective("Recv", 99, (), pairs=(0, rank), channel=7, dtype="f32", shape=(2,))
        group.exchange({rank: Call(rank, mesh.coords(rank), called, called.blank())})
    elif not rank:
        time.sleep(4 * slowness())
    group.close()


def messages(name: str, size: str) -> None:
    """Each of three ranks sends some to each other."""
    group = join(name, Mesh({"x": 3}))
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


def twice(name: str) -> None:
    """The ranks meet, part, and meet again."""
    for number in range(2):
        group = join(name, Mesh({"x": 2}))
        rank = group.rank
        result = group.exchange({rank: Call(rank, (rank,), Collective("AllReduce", number, (Axis("x"),)), np.ones(2))})
        assert result[rank].tolist() == [2, 2]
        group.close()
    print("met twice")


def latency(name: str, count: str = "2") -> None:
    """Median time of an all-reduce of device arrays (of host arrays where the group takes no other)."""
    group = join(name, Mesh({"x": int(count)}))
    rank = group.rank
    for size, times in ((256, 200), (1 << 18, 50), (1 << 24, 5)):
        operand = np.ones(size, np.float32)
        given = on_device(operand) if group.takes_device_arrays else operand
        seconds = []
        for number in range(times):
            start = time.perf_counter()
            group.exchange({rank: Call(rank, (rank,), Collective("AllReduce", number, (Axis("x"),)), given)})
            seconds.append(time.perf_counter() - start)
        if rank == 0:
            print(f"{operand.nbytes} bytes: {np.median(seconds) * 1e6:.0f} us")
    group.close()


# -- programs ---------------------------------------------------------------------------------------------------------


def mlp(name: str, fault: str = "", seconds: str = "30", victim: str = "2") -> None:
    """The MLP of the tests three times on dp=2,tp=2; something happens to one rank, see `Faulty`."""
    loaded = module(MLP, **mlp_weights())
    group = join(name, loaded.mesh)
    group.seconds = float(seconds)
    with Faulty(loaded, loaded.mesh, engine="numpy", group=group) as executor:
        executor.fault = fault if group.ranks == (int(victim),) else ""
        if not executor.is_driver:
            executor.serve()
            return
        for _ in range(3):
            given = executor.run(mlp_input())["y"]
        np.testing.assert_allclose(given, mlp_reference(mlp_input()["x"], mlp_weights()), rtol=1e-5)
        assert len(executor.log) == 1
        print("the numbers are right")


class FaultyReplay(Executor):
    """Something happens to it when all ranks have agreed to replay a graph with collectives.

    Attributes:
        fault: kill, or hang; "" for nothing.
    """

    fault = ""

    def agreed(self, choice: int) -> list[int]:
        """What ranks chose."""
        found: list[int] = type(self._group).agree(self._group, choice)  # type: ignore[attr-defined]
        if self.fault and Choice.GRAPH <= choice < 99:  # Long numbers say what ranks have in their segments.
            self.fail()
        return found

    def fail(self) -> None:
        """End without a word, or not at all."""
        tell_time()
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            time.sleep(1)


def captured(name: str, fault: str = "", seconds: str = "30", victim: str = "2") -> None:
    """The MLP of the tests, captured with its collectives and replayed; something happens to one rank."""
    os.environ[CAPTURES] = "1"
    loaded = module(MLP, **mlp_weights())
    group = join(name, loaded.mesh)
    group.seconds = float(seconds)
    with FaultyReplay(loaded, loaded.mesh, engine="cupy", group=group) as executor:
        if group.ranks == (int(victim),):
            executor.fault = fault
            group.agree = executor.agreed
        if not executor.is_driver:
            executor.serve()
            return
        for _ in range(6):
            given = executor.run(mlp_input())["y"]
            np.testing.assert_allclose(given, mlp_reference(mlp_input()["x"], mlp_weights()), rtol=1e-5)
            assert len(executor.log) == 1
        print("the numbers are right")


def idle(name: str, what: str, bound: str = "") -> None:
    """Between two runs, or after the last, the driver takes longer than a collective may, or is stopped for ever."""
    loaded = module(MLP, **mlp_weights())
    when = what.partition("-")[2]
    seconds = float(bound or slowness())
    group = join(name, loaded.mesh, seconds)
    with Executor(loaded, loaded.mesh, engine="numpy", group=group) as executor:
        if not executor.is_driver:
            executor.serve()
        else:
            executor.run(mlp_input())
            if when == "between":
                rest(what, seconds)
            executor.run(mlp_input())
            print("the numbers are there", flush=True)
    if executor.is_driver and when == "after":
        rest(what, seconds)


def forked(name: str) -> None:
    """The driver forks between two runs; what it forked ends as programs do, and ends nothing of the driver's."""
    loaded = module(MLP, **mlp_weights())
    executor = Executor(loaded, loaded.mesh, engine="numpy", group=join(name, loaded.mesh))
    if not executor.is_driver:
        executor.serve()
        return
    executor.run(mlp_input())
    if (child := os.fork()) == 0:
        try:
            executor.run(mlp_input())
        except ProgramError as error:
            print(error, file=sys.stderr)
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    executor.run(mlp_input())
    print("the driver went on")


def unserved(name: str, how: str) -> None:
    """The program of rank 2 forgets to serve, or fails before it does."""
    loaded = module(MLP, **mlp_weights())
    with Executor(loaded, loaded.mesh, engine="numpy", group=join(name, loaded.mesh)) as executor:
        if executor.is_driver:
            executor.run(mlp_input())
        elif World.of_ranks(name, loaded.mesh).rank != 2:
            executor.serve()
        elif how == "fails":
            raise ProgramError("the disk is gone", do="buy another")


def rest(what: str, seconds: float) -> None:
    if what.startswith("stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(4 * seconds)


def partitions(name: str, folder: str, engine: str = "ort", tolerance: str = "") -> None:
    """Verify the partitions in a folder, and that each executes the collectives of its plan.

    `{rank}` in the name of the folder is the number of the rank, which may have its own parts alone there.
    """
    import irpar

    limit = float(tolerance) if tolerance else None
    for path in sorted(Path(folder.replace("{rank}", str(world().rank))).iterdir()):
        with irpar.Partition.open(path) as partition:
            executor = partition.executor(engine, name, 60.0)
            if not executor.is_driver:
                executor.serve()
                continue
            partition.verify(engine=engine, group=name, tolerance=limit).check()
            different = executor.log.differences(partition.plan.collectives)
            different += executor.log.copies.differences(partition.plan.copies)
            assert different == [], f"{path.name}: {different}"
            print(f"{path.name} is right: {len(executor.log)} collectives")


# -- faults -----------------------------------------------------------------------------------------------------------


def tell_time() -> None:
    """Tell when something happens, for `seconds_after_fault`."""
    print(f"[{time.time()}]", file=sys.stderr, flush=True)


def happen(what: str) -> None:
    """Something happens to this process."""
    tell_time()
    match what:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(100)
        case "exit":
            os._exit(7)
        case "leave":
            sys.exit(7)
        case "fail":
            raise ProgramError("the disk is gone", do="buy another")


class Faulty(Executor):
    """Something happens at a run: before its collective, when all have met there, or when it has begun.

    A fault is what happens, when, and at which run (the second if it does not say): `kill-met`, `hang-begun-1`.
    Members of `mpi` do not meet before their data move: it has no `met`.
    """

    fault = ""
    runs = 0

    def _start(self, *arguments):
        states = super()._start(*arguments)
        self.runs += 1
        what, when, run = (*self.fault.split("-"), "2")[:3] if self.fault else ("", "", "0")
        if self.runs != int(run):
            return states
        if when == "before":
            happen(what)
        begin = self._group.begin

        def begin_and_happen(meeting):
            finish = begin(meeting)
            happen(what)
            return finish

        if when == "begun":
            self._group.begin = begin_and_happen
        if when == "met":
            self._group.move = lambda meeting: happen(what)
        return states


def start(name: str, how: str, count: str, seconds: str = "60") -> None:
    """The last of some ranks ends, or hangs, before it has met the others."""
    if world().rank == int(count) - 1:
        happen(how)
    join(name, Mesh({"x": int(count)}), float(seconds))


def crossed(name: str) -> None:
    """Two ranks of four come to their collectives over different axes in another order than the others."""
    group = join(name, Mesh({"a": 2, "b": 2}))
    rank, group.seconds = group.rank, 1.5
    first, second = (Collective("AllReduce", number, (Axis(axis),)) for number, axis in enumerate("ab"))
    for collective in (second, first) if rank in (0, 3) else (first, second):
        come(group, Call(rank, group.mesh.coords(rank), collective, np.ones(3, np.float32)))


def unlike(name: str, count: str, what: str) -> None:
    """The rank in the middle comes to something else over the same axes."""
    group = join(name, Mesh({"x": int(count)}))
    rank = group.rank
    odd = rank == int(count) // 2
    kind = "AllGather" if what == "kind" and odd else "AllReduce"
    dtype = np.float64 if what == "dtype" and odd else np.float32
    shape = (5,) if what == "shape" and odd else (4,)
    number = 1 if what == "id" and odd else 0
    come(group, Call(rank, (rank,), Collective(kind, number, (Axis("x"),)), np.ones(shape, dtype)))


def again(name: str, rounds: str, what: str = "") -> None:
    """Four ranks execute the same small collectives again and again; in the last round rank 1 does something else.

    Args:
        name: of the group.
        rounds: how many.
        what: it comes to another collective (id), brings more (shape), or ends (end), at the first collective, or one
            whose number follows: `id:10`; empty: it does as before. Or all ranks do, and wait for nothing where they
            can do otherwise (hurried).
    """
    what, _, odd = what.partition(":")
    mesh = Mesh({"a": 2, "b": 2})
    if what == "hurried":
        Traffic.has_come = lambda traffic, lane: not lane.has_none()
    group = join(name, mesh)
    rank, pauses = group.rank, random.Random(group.rank)
    kinds = [("AllReduce", axes, size) for axes in ("a", "b", "ab") for size in (3, 700, 9001, 50_000)]
    kinds += [(kind, axes, size) for kind in ("AllGather", "AllToAll") for axes in ("b", "ab") for size in (12, 3000)]
    kinds += [("ReduceScatter", "a", 12), ("ReduceScatter", "ab", 2000), ("Broadcast", "ab", 3000)]
    typed = [(*each, np.float32) for each in kinds]
    typed += [("AllGather", "ab", 9000, ml_dtypes.int4), ("AllGather", "b", 10, ml_dtypes.uint4)]
    program = [
        (Collective(kind, number, tuple(map(Axis, axes)), dim=0, root=1, split_dim=0, concat_dim=0), size, dtype)
        for number, (kind, axes, size, dtype) in enumerate(typed)
    ]
    for turn in range(int(rounds)):
        for collective, size, dtype in program:
            numbers = [np.arange(size, dtype=np.float32) % 7 * (each + 1.7) + turn for each in range(4)]
            operands = [(each if dtype is np.float32 else each % 7).astype(dtype) for each in numbers]
            members = next(list(some) for some in mesh.groups(collective.axes) if rank in some)
            expected = execute(collective, [operands[member] for member in members])[members.index(rank)]
            time.sleep(pauses.choice([0, 0, 0, 0, 0, 0, 0, 1e-3, 1e-3, 8e-3]))
            is_last = turn == int(rounds) - 1
            if what in ("id", "shape", "end") and rank == 1 and is_last and collective.id == int(odd or 0):
                if what == "end":
                    os._exit(3)
                if what == "shape":
                    operands[1] = np.ones(size + 2, dtype)
                else:
                    collective = replace(collective, id=99)
            call = Call(rank, mesh.coords(rank), collective, operands[rank])
            result = come(group, call) if is_last else group.exchange({rank: call})[rank]
            assert result.tobytes() == expected.tobytes(), (turn, collective)
    group.close()
    print("all are right")


def come(group: Any, call: Call) -> np.ndarray:
    """Exchange, and tell of what fails as the executor does."""
    tell_time()
    try:
        return group.exchange({group.rank: call})[group.rank]
    except BaseException as error:
        abort(group, error)
        raise


SCENARIOS: dict[str, Callable[..., None]] = {
    scenario.__name__: scenario
    for scenario in (
        *(collectives, pairs, messages, twice, latency),
        *(mlp, captured, idle, forked, unserved, partitions),
        *(start, crossed, unlike, again),
    )
}
"""By name; each takes the name of a group, and words."""


def run(scenario: Callable[..., None], *words: str) -> None:
    """Run it; its error is reported, and ends the process."""
    try:
        scenario(*words)
    except IrparError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run(SCENARIOS[sys.argv[2]], sys.argv[1], *sys.argv[3:])
