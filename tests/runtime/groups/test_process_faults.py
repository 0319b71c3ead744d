"""What happens when a rank of several processes dies, hangs, stops, or goes its own way: all others end, and say why."""

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irpar.runtime.errors import MismatchError, PeerError
from irpar.runtime.groups import Call, Collective, make_group
from irpar.runtime.groups.shared_memory.segment import SegmentLayout
from irpar.runtime.launch.environment import World
from irpar.sharding import Axis, IrparError, Mesh, asked_by_command
from tests.patience import patient

from .process_ranks import Ranks, joined, world

LINE = Mesh({"a": 4})
SQUARE = Mesh({"a": 2, "b": 2})
PAIR = Mesh({"a": 2})
ALL = (Axis("a"),)

Fault = Callable[[], None]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_soon() -> None:
    threading.Timer(0.05, kill).start()


def hang() -> None:
    time.sleep(60)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def interrupt() -> None:
    raise KeyboardInterrupt


Ended = tuple[IrparError | None, float]
"""The error that a rank met, and after how many seconds."""


def reduce_often(mesh: Mesh, elements: int, times: int, fault: Fault | None, seconds: float = 5) -> Ended:
    """All-reduces; something happens before the third, from when on seconds count."""
    group = joined(mesh, seconds)
    operand = np.ones(elements, np.float32)
    began = time.monotonic()
    try:
        for id_ in range(times):
            if id_ == 2:
                began = time.monotonic()
                if fault is not None:
                    fault()
            call = Call(group.rank, mesh.coords(group.rank), Collective("AllReduce", id_, ALL), operand)
            group.exchange({group.rank: call})
    except IrparError as error:
        return error, time.monotonic() - began
    except KeyboardInterrupt:
        group.abort("it was interrupted")
        raise
    finally:
        group.close()
    return None, time.monotonic() - began


def run_with_fault(fault: Fault, elements: int = 100, times: int = 5, **options: Any) -> list[Any]:
    """Four ranks, of which rank 2 has a fault; what each raised."""
    with Ranks(4) as ranks:
        given = [{"mesh": LINE, "elements": elements, "times": times, **options} for _ in range(4)]
        ranks.start(reduce_often, [{**each, "fault": fault if rank == 2 else None} for rank, each in enumerate(given)])
        found = ranks.answers(20, but=2 if fault in (hang, stop) else None)
    assert [name for name in os.listdir("/dev/shm") if ranks.run_id in name] == []
    return found


def check_named(found: list[Any], told: str, within: float) -> None:
    """All ranks but 2 say what happened to rank 2, soon."""
    for rank in (0, 1, 3):
        error, seconds = found[rank]
        assert isinstance(error, PeerError), error
        assert error.rank == 2
        assert "rank 2 (a=2)" in str(error)
        assert told in str(error)
        assert seconds < patient(within)


def test_a_rank_that_is_killed_between_collectives_is_named() -> None:
    check_named(run_with_fault(kill), "its process ended without a word", 5)


def test_a_rank_that_is_killed_inside_a_collective_is_named() -> None:
    found = run_with_fault(kill_soon, elements=16 << 20, times=50)
    check_named(found, "its process ended without a word", 10)


def test_a_rank_that_hangs_is_named_with_what_it_does() -> None:
    check_named(run_with_fault(hang, seconds=2), "rank 2 (a=2) is computing", 10)


def test_a_rank_that_is_stopped_is_named_with_what_it_does() -> None:
    check_named(run_with_fault(stop, seconds=2), "rank 2 (a=2) is stopped", 10)


def test_an_interrupted_rank_tells_the_others() -> None:
    check_named(run_with_fault(interrupt), "failed: it was interrupted", 5)


def be_asked_late(mesh: Mesh, after: Fault | None) -> Ended:
    """Rank 1 waits for what the driver asks, which takes longer than a collective may, or never comes."""
    group = joined(mesh, 1)
    began = time.monotonic()
    try:
        if group.rank:
            group.receive(0)
        else:
            time.sleep(2.5)
            if after is not None:
                after()
            group.send(1, b"go on")
    except IrparError as error:
        return error, time.monotonic() - began
    return None, time.monotonic() - began


@pytest.mark.slow
def test_the_driver_may_be_idle_but_not_stopped() -> None:
    for fault in (None, stop):
        with Ranks(2) as ranks:
            ranks.start(be_asked_late, [{"mesh": PAIR, "after": fault}] * 2)
            error, seconds = ranks.answers(20, but=0 if fault else None)[1]
        if fault is None:
            assert error is None
        else:
            assert isinstance(error, PeerError)
            assert "rank 0 (a=0) is stopped" in str(error)
            assert 3 < seconds < patient(10)


def answer_late(mesh: Mesh, is_busy: bool) -> Ended:
    """Rank 0 waits for an answer of rank 1, which computes for longer than a collective may take, or does nothing."""
    group = joined(mesh, 1)
    began = time.monotonic()
    try:
        if group.rank:
            while time.monotonic() < began + 2.5:
                if not is_busy:
                    time.sleep(60)
            group.send(0, b"done")
        else:
            group.receive(1)
    except IrparError as error:
        return error, time.monotonic() - began
    return None, time.monotonic() - began


def test_an_answer_may_take_as_long_as_its_rank_computes() -> None:
    with Ranks(2) as ranks:
        assert ranks.run(answer_late, [{"mesh": PAIR, "is_busy": True}] * 2)[0][0] is None


def test_a_rank_that_does_nothing_is_not_waited_for() -> None:
    with Ranks(2) as ranks:
        ranks.start(answer_late, [{"mesh": PAIR, "is_busy": False}] * 2)
        error, _ = ranks.answers(20, but=1)[0]
    assert "rank 1 (a=1) has done nothing, and not answered, in 1 s" in str(error)


def in_order(mesh: Mesh, order: list[tuple[int, str]], elements: int, layout: SegmentLayout | None = None) -> Ended:
    """Collectives over axes, in an order of the rank's own."""
    group = joined(mesh, 20, layout)
    began = time.monotonic()
    try:
        for id_, axis in order:
            collective = Collective("AllReduce", id_, tuple(map(Axis.parse, axis.split(","))), label=f"op {id_}")
            operand = np.ones(elements, np.float32)
            group.exchange({group.rank: Call(group.rank, mesh.coords(group.rank), collective, operand)})
        group.receive(0 if group.rank else 1)
    except IrparError as error:
        return error, time.monotonic() - began
    finally:
        group.close()
    return None, time.monotonic() - began


def mismatch_of(found: list[Any]) -> MismatchError:
    """The error of a rank that found what was wrong; the others were told. All of it soon."""
    assert all(isinstance(error, MismatchError | PeerError) and seconds < patient(10) for error, seconds in found), (
        found
    )
    return next(error for error, _ in found if isinstance(error, MismatchError))


@pytest.mark.parametrize("elements", [10, 1_000_000])
def test_two_ranks_in_another_order_are_both_named(elements: int) -> None:
    with Ranks(2) as ranks:
        orders = [[(0, "a"), (1, "a")], [(1, "a"), (0, "a")]]
        ranks.start(in_order, [{"mesh": PAIR, "order": order, "elements": elements} for order in orders])
        found = ranks.answers(20)
    error = mismatch_of(found)
    assert "rank 0 (a=0) is at AllReduce id=0 over a" in str(error)
    assert "rank 1 (a=1) is at AllReduce id=1 over a" in str(error)


def test_ranks_that_wait_in_a_circle_are_named_before_the_time_is_over() -> None:
    """No two of them ever meet: each pair has another collective in common."""
    a, b = "a", "b"
    # Ranks are (a, b): 0 (0, 0), 1 (0, 1), 2 (1, 0), 3 (1, 1); the pairs are 01 and 23 over b, 02 and 13 over a.
    orders = [[(0, b), (1, a)], [(2, a), (0, b)], [(1, a), (3, b)], [(3, b), (2, a)]]
    with Ranks(4) as ranks:
        ranks.start(in_order, [{"mesh": SQUARE, "order": order, "elements": 10} for order in orders])
        found = ranks.answers(20)
    error = mismatch_of(found)
    assert "ranks that should meet in it are at different collectives" in str(error)
    assert str(error).count("is at AllReduce") >= 2


@pytest.mark.parametrize("cores", [1, 2, 3, 4])
def test_a_rank_elsewhere_is_named_by_those_that_it_sends_nothing_to(cores: int) -> None:
    """Rank 3 waits for rank 2, which waits for what ranks reduce that rank 3 has not come to."""
    layout = replace(SegmentLayout.of(4), cores=cores)
    orders = [[(0, "a,b")]] * 3 + [[(1, "b"), (0, "a,b")]]
    with Ranks(4) as ranks:
        options = {"mesh": SQUARE, "elements": 50_000, "layout": layout}
        ranks.start(in_order, [{"order": order, **options} for order in orders])
        found = ranks.answers(20)
    assert "ranks that should meet in it are at different collectives" in str(mismatch_of(found))
    # Where several find it at once, one may see another that has left its wait already; that one names itself.
    assert any("rank 3 (a=1, b=1) is at AllReduce id=1 over b" in str(error) for error, _ in found)


def test_a_rank_whose_program_ends_too_soon_is_named() -> None:
    with Ranks(2) as ranks:
        orders: list[Any] = [[(0, "a"), (1, "a")], [(0, "a")]]
        ranks.start(in_order, [{"mesh": PAIR, "order": order, "elements": 10} for order in orders])
        found = ranks.answers(20)
    error = mismatch_of(found)
    assert "collective 1: rank 1 ended without it" in str(error)


def just_join(mesh: Mesh, seconds: float, fault: Fault | None = None, limit: int = 0) -> None:
    """Meet the others, or not."""
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if fault is not None:
        fault()
    joined(mesh, seconds).close()


def join_faults(mesh: Mesh, options: list[dict[str, Any]], seconds: float) -> list[Any]:
    with Ranks(mesh.size) as ranks:
        ranks.start(just_join, [{"mesh": mesh, "seconds": seconds, **each} for each in options])
        found = ranks.answers(20)
    return found


def test_a_rank_that_is_killed_at_the_start_is_named() -> None:
    found = join_faults(LINE, [{}, {}, {"fault": kill}, {}], 2)
    for rank in (0, 1, 3):
        assert isinstance(found[rank], PeerError)
        assert "rank 2 (a=2) did not come in 2 s" in str(found[rank])
        assert found[rank].rank == 2


def test_rank_0_killed_at_the_start_is_named() -> None:
    found = join_faults(PAIR, [{"fault": kill}, {}], 1)
    assert "rank 0 (a=0) did not come in 1 s" in str(found[1])


def test_where_there_is_no_room_all_ranks_say_so() -> None:
    found = join_faults(PAIR, [{"limit": 1 << 20}, {}], 5)
    for each in found:
        assert isinstance(each, IrparError)
        assert "2 ranks need" in str(each)
        assert "MB of shared memory, which the system refuses: File too large" in str(each)
        assert "do: give the machine, or the container (--memory), more memory" in str(each)


def test_two_runs_at_once_do_not_meet() -> None:
    options = [{"mesh": PAIR, "elements": 50_000, "times": 20, "fault": None}] * 2
    with Ranks(2) as first, Ranks(2) as second:
        first.start(reduce_often, options)
        second.start(reduce_often, options)
        assert all(error is None for error, _ in (*first.answers(), *second.answers()))


def test_ranks_of_another_mesh_are_refused() -> None:
    with Ranks(2) as ranks:
        meshes = [PAIR, Mesh({"b": 2})]
        ranks.start(just_join, [{"mesh": mesh, "seconds": 5} for mesh in meshes])
        found = ranks.answers()
    for each in found:
        assert "rank 1 runs on mesh b=2, and rank 0 on mesh a=2: they are not of one run" in str(each)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, "no launcher has made any"),
        (world(0, 3, "run"), "started 3 processes, and mesh a=4 has 4 ranks"),
        (world(0, 4, "run") | {"LOCAL_WORLD_SIZE": "2"}, "has 2 of 4 on this one"),
    ],
)
def test_a_world_that_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], told: str
) -> None:
    for name in world(0, 4, "run"):
        monkeypatch.delenv(name, raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(IrparError, match=told):
        make_group("processes", LINE, 1)


@pytest.mark.parametrize(
    ("group", "variables", "command", "python"),
    [
        (
            "processes",
            {},
            "--group processes needs a process for each rank, and no launcher has made any\n"
            "  do: start them: irpar launch -n 4 run OUT --group processes ... (or torchrun, mpiexec, srun)",
            'group="processes" needs a process for each rank, and no launcher has made any\n'
            "  do: start them: torchrun --nproc-per-node 4 PROGRAM ... (or mpiexec, srun)",
        ),
        (
            "processes",
            world(0, 4, "run") | {"LOCAL_WORLD_SIZE": "2"},
            "do: run with --group mpi; or",
            'do: run with group="mpi"; or',
        ),
    ],
)
def test_messages_are_in_the_words_of_whoever_asked(
    monkeypatch: pytest.MonkeyPatch, group: str, variables: dict[str, str], command: str, python: str
) -> None:
    for name in world(0, 4, "run"):
        monkeypatch.delenv(name, raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(IrparError) as asked, asked_by_command():
        make_group(group, LINE, 1)
    assert command in str(asked.value)
    with pytest.raises(IrparError) as called:
        make_group(group, LINE, 1)
    assert python in str(called.value)
    assert "--group" not in str(called.value)


def test_a_rank_that_comes_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh({"a": 3})
    worlds = []
    for rank in (1, 1, 0):
        for name, text in world(rank, 3, "twice").items():
            monkeypatch.setenv(name, text)
        worlds.append(World.of_ranks("processes", mesh))
    own = threading.local()
    monkeypatch.setattr(World, "of_ranks", lambda *_: own.world)
    errors: list[IrparError] = []

    def come(as_one: World) -> None:
        own.world = as_one
        try:
            make_group("processes", mesh, 1)
        except IrparError as error:
            errors.append(error)

    threads = [threading.Thread(target=come, args=(each,)) for each in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    texts = sorted(str(error).splitlines()[0] for error in errors)
    assert len(texts) == 3
    assert any("rank 1 has come twice" in text for text in texts)
    assert sum("rank 2 (a=2) did not come in 1 s" in text for text in texts) == 2


def test_nobody_else_sees_the_memory() -> None:
    with Ranks(2) as ranks:
        ranks.run(just_join_and_stay, [{"mesh": PAIR}] * 2)
        assert [name for name in os.listdir("/dev/shm") if ranks.run_id in name] == []
        for process in ranks.processes:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            assert "memfd:irpar-segment (deleted)" in maps


def just_join_and_stay(mesh: Mesh) -> None:
    """Meet the others."""
    joined(mesh)
