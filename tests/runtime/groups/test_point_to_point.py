"""Send and Recv in every group: random pairs, and what happens where one end is missing."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irpar.ir import verify
from irpar.output.plan_entries import collective_entries
from irpar.runtime.errors import MismatchError, PeerError
from irpar.runtime.executor import Executor
from irpar.runtime.groups import Call, Collective, ThreadGroup
from irpar.runtime.groups.shared_memory.segment import SegmentLayout
from irpar.runtime.groups.wire.control import Control
from irpar.sharding import Mesh
from tests.budget import budget
from tests.patience import patient, slowness
from tests.runtime.programs import module

from .hosts_group import HostsGroup
from .nccl_threads import groups
from .pair_cases import check_taken, exchange_pairs, pair_cases
from .process_ranks import Ranks, joined
from .spmd_threads import run_ranks
from .wired_threads import controls, run_threads

LINE = Mesh({"x": 3})
TINY = SegmentLayout(3, ring=4096, slot=64, slots=4, pooled=1, cores=2)
"""Almost everything goes in parts, and slots are scarce."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as started:
        yield started


@st.composite
def meshes(draw: Any) -> Mesh:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda sizes: 1 < np.prod(sizes) <= 12))
    return Mesh({f"a{place}": size for place, size in enumerate(sizes)})


@settings(max_examples=budget(300), deadline=None)
@given(meshes(), st.integers(0, 1 << 20))
def test_random_pairs_over_random_meshes_in_threads(mesh: Mesh, seed: int) -> None:
    group = ThreadGroup(mesh)
    group.begin_run()
    some = list(pair_cases(mesh, 3, seed))
    for case in some:
        group.exchange(dict(enumerate(case.sends)))
    for case in some:
        found = group.exchange(dict(enumerate(case.takes)))
        for rank, expected in enumerate(case.expected):
            check_taken(found[rank], expected)


def pairs_of_rank(mesh: Mesh, seed: int, rows: int, layout: SegmentLayout | None = None) -> int:
    group = joined(mesh, layout=layout)
    return exchange_pairs(group, group.rank, mesh, 12, seed, rows)


@pytest.mark.parametrize("layout", [None, TINY])
@pytest.mark.parametrize(("seed", "rows"), [(0, 3), (1, 40), (2, 3)])
def test_random_pairs_in_processes(ranks: Ranks, seed: int, rows: int, layout: SegmentLayout | None) -> None:
    options = {"mesh": LINE, "seed": seed, "rows": rows, "layout": layout}
    assert ranks.run(pairs_of_rank, [options] * 3) == [12] * 3


def test_large_tensors_in_a_circle_of_processes(ranks: Ranks) -> None:
    """All send before anyone takes, more than there are slots for."""
    assert ranks.run(pairs_of_rank, [{"mesh": LINE, "seed": 5, "rows": 1500}] * 3) == [12] * 3


def test_random_pairs_over_connections() -> None:
    joined_ranks = controls(3)

    def run(rank: int) -> int:
        group = HostsGroup(LINE, rank, patient(10), joined_ranks[rank])
        try:
            return exchange_pairs(group, rank, LINE, 12, seed=3, rows=50)
        finally:
            group.close()

    assert run_threads(3, run) == ([12] * 3, {})


def test_random_pairs_between_devices() -> None:
    make = groups(LINE, seconds=patient(10))

    def run(rank: int) -> int:
        with make(rank) as group:
            return exchange_pairs(group, rank, LINE, 12, seed=4)

    assert run_threads(3, run) == ([12] * 3, {})


# -- what goes wrong --------------------------------------------------------------------------------------------------


def take(rank: int, shape: tuple[int, ...] = (2,), number: int = 1) -> Call:
    """What rank 0 sends to rank 1."""
    called = Collective("Recv", number, (), pairs=(0, 1), channel=0, dtype="f32", shape=shape)
    return Call(rank, LINE.coords(rank), called, called.blank())


def send(rank: int) -> Call:
    return Call(rank, LINE.coords(rank), Collective("Send", 0, (), pairs=(0, 1)), np.ones(2, np.float32))


def test_what_nobody_sends_is_told_at_once_in_threads() -> None:
    with pytest.raises(MismatchError, match="rank 0 has sent nothing to rank 1 on channel 0: it ended"):
        ThreadGroup(LINE).exchange({1: take(1)})
    called = Collective("Recv", 2, (), pairs=(1, 0), channel=0, dtype="f32", shape=(2,))
    both = {0: Call(0, LINE.coords(0), called, called.blank()), 1: take(1)}
    with pytest.raises(MismatchError, match="rank 0 has sent nothing to rank 1 on channel 0: it waits itself"):
        ThreadGroup(LINE).exchange(both)


def test_another_shape_is_refused_in_threads() -> None:
    group = ThreadGroup(LINE)
    assert group.exchange({0: send(0)})
    with pytest.raises(MismatchError, match=r"f32\[2\] was sent, where rank 1 takes f32\[3\]"):
        group.exchange({1: take(1, (3,))})


def test_what_an_earlier_run_sent_is_not_taken() -> None:
    group = ThreadGroup(LINE)
    group.exchange({0: send(0)})
    group.begin_run()
    with pytest.raises(MismatchError, match="has sent nothing"):
        group.exchange({1: take(1)})


def test_runs_beside_each_other_take_nothing_of_each_other() -> None:
    group = ThreadGroup(LINE)
    group.begin_run()
    group.exchange({0: send(0)})

    def other_run() -> None:
        group.begin_run()
        group.exchange({1: take(1)})

    with ThreadPoolExecutor(1) as pool, pytest.raises(MismatchError, match="has sent nothing"):
        pool.submit(other_run).result()
    assert group.exchange({1: take(1)})


def test_runs_beside_each_other_have_a_log_each() -> None:
    loaded = module(LOOP)
    with Executor(loaded, loaded.mesh, engine="numpy", group="threads") as executor, ThreadPoolExecutor(4) as pool:

        def work(number: int) -> bool:
            a = np.array([number, -number], np.float32)
            return all(executor.run({"a": a})["y"].tolist() == [-8 * number, 8 * number] for _ in range(20))

        assert all(pool.map(work, range(1, 9)))
        assert not executor.log.differences(collective_entries(loaded, loaded.mesh))


def taking(what: str, bound: float) -> tuple[BaseException | None, float]:
    """Rank 1 takes what rank 0 does not send, or sends otherwise; the error, and after how many seconds.

    The ranks wait for each other for `bound` seconds.
    """
    began = time.monotonic()
    mesh = Mesh({"y": 3}) if what == "nothing" else Mesh({"z": 3})
    group = joined(mesh, bound)
    group.begin_run()
    try:
        if group.rank == 0 and what == "another shape":
            group.exchange({0: send(0)})
        if group.rank == 1:
            group.exchange({1: take(1, (3,))})
        time.sleep(1.5 * bound)
    except (PeerError, MismatchError) as error:
        return error, time.monotonic() - began
    return None, time.monotonic() - began


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("nothing", "rank 0 (y=0) did not come to collective 1 in {bound:g} s"),
        ("another shape", "f32[2] was sent, where rank 1 takes f32[3]"),
    ],
)
def test_processes_say_what_is_missing_in_time(what: str, text: str) -> None:
    bound = slowness()
    with Ranks(3) as started:
        error, seconds = started.run(taking, [{"what": what, "bound": bound}] * 3)[1]
    assert text.format(bound=bound) in str(error)
    assert seconds < patient(5)


def test_connections_say_what_is_missing_in_time() -> None:
    joined_ranks: list[Control] = controls(3)

    def run(rank: int) -> None:
        group = HostsGroup(LINE, rank, 0.3, joined_ranks[rank])
        try:
            if rank == 1:
                group.exchange({1: take(1)})
            time.sleep(1.0)
        finally:
            group.close()

    _, raised = run_threads(3, run)
    assert "did not come to collective 1 in 0.3 s" in str(raised[1])


# -- programs ---------------------------------------------------------------------------------------------------------

STAGES = """
    mesh @m = ["x"=2]
    graph local @first(%a: f32[4] of [4]) -> (%y) opset 21 ranks [0] {
      %b = Neg(%a) : f32[4] of [4]
      irpar.Send(%b) {channel=3, pairs=[0, 1], id=0}
      %y = irpar.Recv() {channel=4, pairs=[1, 0], dtype="f32", shape=[2], id=3} : f32[2] of [2]
    }
    graph local @second(%a: f32[4] of [4]) -> (%y) opset 21 ranks [1] {
      %b = irpar.Recv() {channel=3, pairs=[0, 1], dtype="f32", shape=[4], id=1} : f32[4] of [4]
      %c, %d = Split(%b) {axis=0, num_outputs=2} : f32[2] of [2], f32[2] of [2]
      %y = Add(%c, %d) : f32[2] of [2]
      irpar.Send(%y) {channel=4, pairs=[1, 0], id=2}
    }
"""
"""Two programs, of which one computes what the other then has."""
KINDS = ["send", "recv", "send", "recv"]


def check_stages(executor: Executor) -> None:
    for factor in (1, 2):
        found = executor.run({"a": factor * np.arange(4, dtype=np.float32)}, check_replicas=True)
        assert found["y"].tolist() == [-2 * factor, -4 * factor]
        records = sorted(executor.log)
        assert [(record.kind, record.bytes) for record in records] == list(zip(KINDS, [16, 16, 8, 8], strict=True))


def test_programs_of_two_stages_in_threads() -> None:
    loaded = module(STAGES)
    with Executor(loaded, loaded.mesh, engine="numpy", group="threads") as executor:
        check_stages(executor)


def test_programs_of_two_stages_with_a_driver() -> None:
    loaded = module(STAGES)
    _, raised = run_ranks(
        loaded.mesh, lambda group: Executor(loaded, loaded.mesh, engine="numpy", group=group), check_stages
    )
    assert raised == {}


LOOP = """
    mesh @m = ["x"=2]
    graph local @g(%a: f32[1] of [2@x]) -> (%y) opset 21 ranks [0, 1] {
      %n = constant : i64[] of [] whole 3
      %y = Loop(%n, _, %a) {body=graph @body(%i: i64[] of [], %c: bool[] of [], %v: f32[1] of [2@x]) -> (%c, %s) {
        irpar.Send(%v) {channel=0, pairs=[0, 1, 1, 0], id=0}
        %r = irpar.Recv() {channel=0, pairs=[0, 1, 1, 0], dtype="f32", shape=[1], id=1} : f32[1] of [2@x]
        %s = Add(%r, %r) : f32[1] of [2@x]
      }} : f32[1] of [2@x]
    }
"""
"""The ranks change what they have in each trip, and double it."""


@pytest.mark.parametrize("engine", ["numpy", "ort"])
def test_a_channel_in_a_loop_and_the_log_against_the_plan(engine: Literal["numpy", "ort"]) -> None:
    loaded = module(LOOP)
    verify(loaded)
    entries = collective_entries(loaded, loaded.mesh)
    assert [(entry["kind"], entry["times"], entry["sent_bytes"]) for entry in entries] == [
        ("send", 3, 4),
        ("recv", 3, 0),
    ]

    def check(executor: Executor) -> None:
        assert executor.run({"a": np.array([1, 2], np.float32)})["y"].tolist() == [16, 8]
        assert executor.log.differences(entries) == []

    with Executor(loaded, loaded.mesh, engine=engine, group="threads") as executor:
        check(executor)
    _, raised = run_ranks(loaded.mesh, lambda group: Executor(loaded, loaded.mesh, engine=engine, group=group), check)
    assert raised == {}
