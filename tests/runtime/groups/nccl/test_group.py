"""The group of GPUs: its logic without one, against calls that are noted; and rendezvous of NCCL alone."""

import importlib.util
import sys
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from irpar.runtime.engines import cuda
from irpar.runtime.errors import RunError
from irpar.runtime.executor import Executor
from irpar.runtime.groups import Call, Collective, ThreadGroup, make_group
from irpar.runtime.groups.nccl import lane as nccl_lane
from irpar.runtime.groups.nccl.devices import NcclDevices
from irpar.runtime.groups.nccl.sharing import check_devices
from irpar.runtime.groups.nccl.transfers import wire_of
from irpar.sharding import Axis, IrparError, Mesh
from tests.budget import budget, every, pairs
from tests.runtime.groups.collective_cases import DTYPES, Case, cases, check, draw
from tests.runtime.groups.fake_cupy import HOLDS, DeviceArray, FakeCupy, Network, Stream
from tests.runtime.groups.nccl_threads import PAIR, call_of, groups, meet, run_pair
from tests.runtime.groups.wired_threads import run_threads
from tests.runtime.programs import MLP, STARTED, mlp_input, mlp_reference, mlp_weights, module

MESHES = [Mesh({"x": 2}), Mesh({"x": 3}), Mesh({"a": 2, "b": 2}), Mesh({"a": 4, "b": 2})]


def of_dtype(case: Case, mesh: Mesh, dtype: str) -> Case:
    """The same with operands of another dtype, and a reduction that it has."""
    random = np.random.default_rng(1)
    operands = tuple(draw(random, operand.shape, dtype) for operand in case.operands)
    reduce = case.collective.reduce
    if dtype == "bool":
        reduce = "and" if reduce in ("min", "prod", "and") else "or"
    elif reduce in ("and", "or"):
        reduce = "sum"
    settings = {name: getattr(case.collective, name) for name in Collective.__dataclass_fields__}
    return Case(Collective(**(settings | {"reduce": reduce})), operands)


def exchange(group, case: Case, mesh: Mesh, rank: int, on_device: bool) -> np.ndarray:
    call = case.call(mesh, rank)
    if not on_device or call.operand.dtype.char not in HOLDS:
        found = group.exchange({rank: call})[rank]
        assert type(found) is np.ndarray
        return found
    placed = Call(rank, call.coords, call.collective, group.cupy.asarray(call.operand))
    found = group.exchange({rank: placed})[rank]
    assert isinstance(found, DeviceArray)
    return group.cupy.asnumpy(found)


@pytest.mark.parametrize(("mesh", "on_device"), pairs(MESHES, [False, True]), ids=str)
def test_all_kinds_like_the_threads_group(mesh: Mesh, on_device: bool) -> None:
    listed = [case for seed in range(budget(2, least=1)) for case in cases(mesh, seed=seed)]
    make = groups(mesh)

    def run(rank: int) -> None:
        with make(rank) as group:
            for case in listed:
                check(case, mesh, rank, exchange(group, case, mesh, rank, on_device))

    assert run_threads(mesh.size, run)[1] == {}


@pytest.mark.parametrize("dtype", every(2, DTYPES))
def test_all_dtypes_like_the_threads_group(dtype: str) -> None:
    mesh = Mesh({"x": 3})
    listed = [of_dtype(case, mesh, dtype) for case in cases(mesh)]
    listed = [case for case in listed if dtype != "str" or case.collective.kind not in ("AllReduce", "ReduceScatter")]
    if dtype == "complex64":  # Only sums are the same in any order of pairs.
        listed = [of_dtype(case, mesh, dtype) for case in listed if case.collective.reduce == "sum"]
    make = groups(mesh)

    def run(rank: int) -> None:
        with make(rank) as group:
            for on_device in (False, True):
                for case in listed:
                    check(case, mesh, rank, exchange(group, case, mesh, rank, on_device))

    assert run_threads(mesh.size, run)[1] == {}


@pytest.mark.parametrize("reduce", ["and", "or"])
def test_integers_are_reduced_bit_by_bit(reduce: str) -> None:
    operands = [np.array([12, 10, -1], np.int32), np.array([10, 5, 7], np.int32)]
    make = groups(PAIR)
    collective = Collective("AllReduce", 0, (Axis("x"),), reduce=reduce)

    def run(rank: int) -> list[int]:
        with make(rank) as group:
            device = group.cupy.asarray(operands[rank])
            return group.exchange({rank: Call(rank, (rank,), collective, device)})[rank].tolist()

    given, raised = run_threads(2, run)
    assert raised == {}
    assert given == [{"and": [8, 0, 7], "or": [14, 15, -1]}[reduce]] * 2


def calls_of(collective: Collective, operands: list[np.ndarray]) -> list[list[tuple]]:
    """The calls that each rank makes."""
    mesh = Mesh({"x": len(operands)})
    make = groups(mesh)

    def run(rank: int) -> list[tuple]:
        with make(rank) as group:
            group.exchange({rank: Call(rank, (rank,), collective, operands[rank])})
            return group.cupy.calls

    given, raised = run_threads(mesh.size, run)
    assert raised == {}
    return given


COPIED = [("record", "compute"), ("wait", "copies", "compute")]
WAITED = [*COPIED, ("record", "compute"), ("wait", "communication", "compute")]
DONE = [("record", "communication")]
ENDED = [("destroy",)]


@pytest.mark.parametrize(
    ("settings", "shapes", "dtype", "expected"),
    [
        ({"kind": "AllReduce"}, [(3, 2)] * 2, np.float32, ("allReduce", 6, "NCCL_FLOAT32", "NCCL_SUM", 2, 0)),
        (
            {"kind": "AllReduce", "reduce": "max"},
            [(4,)] * 2,
            ml_dtypes.bfloat16,
            ("allReduce", 4, "NCCL_BFLOAT16", "NCCL_MAX", 2, 0),
        ),
        ({"kind": "AllReduce", "reduce": "or"}, [(4,)] * 2, np.bool_, ("allReduce", 4, "NCCL_UINT8", "NCCL_MAX", 2, 0)),
        ({"kind": "AllReduce"}, [(4,)] * 2, np.int16, ("allReduce", 4, "NCCL_INT32", "NCCL_SUM", 2, 0)),
        ({"kind": "AllReduce"}, [(4,)] * 2, np.complex64, ("allReduce", 8, "NCCL_FLOAT32", "NCCL_SUM", 2, 0)),
        ({"kind": "AllGather"}, [(3, 2)] * 2, np.float32, ("allGather", 6, "NCCL_UINT32", 2, 0)),
        # Uneven blocks travel as long as the longest.
        ({"kind": "AllGather", "sizes": (3, 1)}, [(3, 2), (1, 2)], np.int16, ("allGather", 12, "NCCL_UINT8", 2, 0)),
        (
            {"kind": "ReduceScatter", "dim": 1, "sizes": (1, 2)},
            [(5, 3)] * 2,
            np.float64,
            ("reduceScatter", 10, "NCCL_FLOAT64", "NCCL_SUM", 2, 0),
        ),
        ({"kind": "Broadcast", "root": 1}, [(3,)] * 2, np.bool_, ("broadcast", 3, "NCCL_UINT8", 1, 2, 0)),
    ],
)
def test_one_call_of_nccl(settings, shapes, dtype, expected) -> None:
    collective = Collective(id=0, axes=(Axis("x"),), **settings)
    made = calls_of(collective, [np.ones(shape, dtype) for shape in shapes])
    assert made[0] == [*WAITED, expected, *DONE, *ENDED]
    assert made[1] == [*WAITED, (*expected[:-1], 1), *DONE, *ENDED]


def test_parts_of_all_to_all_are_sent_as_they_are_and_together() -> None:
    collective = Collective(
        "AllToAll", 0, (Axis("x"),), split_dim=0, concat_dim=1, split_sizes=(2, 0, 3), concat_sizes=(1, 1, 4)
    )
    made = calls_of(collective, [np.ones((5, size), np.float32) for size in (1, 1, 4)])
    sent = [("send", 3, "NCCL_UINT32", 2), ("recv", 8, "NCCL_UINT32", 2)]
    assert made[0] == [
        *WAITED,
        ("groupStart",),
        ("recv", 2, "NCCL_UINT32", 1),
        *sent,
        ("groupEnd",),
        *DONE,
        *ENDED,
    ]
    # Nothing comes to the second, which sends to both others.
    assert made[1][5:7] == [("send", 2, "NCCL_UINT32", 0), ("send", 3, "NCCL_UINT32", 2)]


def test_permute_sends_and_receives_together() -> None:
    collective = Collective("CollectivePermute", 0, (Axis("x"),), pairs=(0, 1, 1, 0, 0, 2))
    made = calls_of(collective, [np.ones(4, np.float32)] * 3)
    assert [call for call in made[0] if call[0] in ("send", "recv")] == [
        ("send", 4, "NCCL_UINT32", 1),
        ("recv", 4, "NCCL_UINT32", 1),
        ("send", 4, "NCCL_UINT32", 2),
    ]
    assert [call for call in made[2] if call[0] in ("send", "recv")] == [("recv", 4, "NCCL_UINT32", 0)]


def test_nothing_is_asked_of_nccl_where_nothing_moves() -> None:
    collective = Collective("AllGather", 0, (Axis("x"),))
    assert calls_of(collective, [np.ones((0, 3), np.float32)] * 2) == [[], []]


def test_groups_of_members_have_one_communicator_each() -> None:
    mesh = Mesh({"a": 2, "b": 2})
    make = groups(mesh)

    def run(rank: int) -> int:
        with make(rank) as group:
            for number, axes in enumerate((["b"], ["a"], ["b"], ["a", "b"], ["a", "b"], ["b"])):
                collective = Collective("AllReduce", number, tuple(map(Axis, axes)))
                group.exchange({rank: Call(rank, mesh.coords(rank), collective, np.ones(2))})
        return sum(call == ("destroy",) for call in group.cupy.calls)

    given, raised = run_threads(4, run)
    assert raised == {}
    assert given == [3] * 4


def test_the_stream_that_computes_an_operand_is_waited_for() -> None:
    make = groups(PAIR)

    def run(rank: int) -> list[tuple]:
        with make(rank) as group:
            operand = group.cupy.asarray(np.ones(3, np.float32))
            with Stream(group.cupy, "the caller's"):
                group.exchange({rank: Call(rank, (rank,), Collective("AllReduce", 0, (Axis("x"),)), operand)})
            return group.cupy.calls

    given, raised = run_threads(2, run)
    assert raised == {}
    assert given[0][:2] == [("record", "the caller's"), ("wait", "communication", "the caller's")]
    assert given[0][2][0] == "allReduce"


def test_started_collectives_are_enqueued_at_once() -> None:
    make = groups(PAIR)
    listed = [case for case in cases(PAIR) if case.collective.kind == "AllReduce"][:3]

    def run(rank: int) -> None:
        with make(rank) as group:
            calls = [case.call(PAIR, rank) for case in listed]
            for call in calls:
                group.start(call)
            assert sum(call[0] == "allReduce" for call in group.cupy.calls) == 3
            for case, call in reversed(list(zip(listed, calls, strict=True))):
                check(case, PAIR, rank, group.exchange({rank: call})[rank])

    assert run_threads(2, run)[1] == {}


@pytest.mark.parametrize("on_device", [False, True])
def test_a_rank_alone_asks_nobody(on_device: bool) -> None:
    mesh = Mesh({"x": 1})
    with groups(mesh)(0) as group:
        for case in cases(mesh):
            check(case, mesh, 0, exchange(group, case, mesh, 0, on_device))
        assert {call[0] for call in group.cupy.calls} <= {"record", "wait"}


def test_sums_of_bools_are_refused() -> None:
    with pytest.raises(ValueError, match="tensors of bool have no reduction 'sum'"):
        wire_of(Collective("AllReduce", 0, ()), np.dtype(bool))


def run_program(text: str, inputs: dict[str, np.ndarray], **resources: np.ndarray):
    """What a program gives, with each rank in an executor of its own, and the calls that each made."""
    loaded = module(text, **resources)
    make = groups(loaded.mesh)
    made: dict[int, list[tuple]] = {}

    def run(rank: int):
        with make(rank) as group, Executor(loaded, loaded.mesh, engine="numpy", group=group) as executor:
            made[rank] = group.cupy.calls
            if not executor.is_driver:
                return executor.serve()
            executor.run(inputs)
            return executor.run(inputs)

    given, raised = run_threads(loaded.mesh.size, run)
    assert raised == {}
    return given[0], made


def test_a_program() -> None:
    given, made = run_program(MLP, mlp_input(), **mlp_weights())
    np.testing.assert_allclose(given["y"], mlp_reference(mlp_input()["x"], mlp_weights()), rtol=1e-5)
    for calls in made.values():
        assert [call[0] for call in calls].count("allReduce") == 2
        assert calls[-1] == ("destroy",)


def test_a_program_that_starts_and_waits() -> None:
    inputs = {"a": np.arange(4, dtype=np.float32), "b": np.ones(4, np.float32)}
    given, made = run_program(STARTED, inputs)
    np.testing.assert_array_equal(given["y"], [2, 4])
    np.testing.assert_allclose(given["z"], np.exp([-1, -1, -1, -1]), rtol=1e-6)
    for calls in made.values():
        assert [call[0] for call in calls if call[0].startswith("all")] == ["allReduce", "allGather"] * 2


# -- in CUDA graphs ---------------------------------------------------------------------------------------------------


class Graph:
    """A graph that notes among the calls of a device when it is let go."""

    def __init__(self, group: Any) -> None:
        self.calls = group.cupy.calls

    def let_go(self) -> None:
        self.calls.append(("let go",))


def test_what_is_captured_forks_from_the_current_stream_and_joins_it() -> None:
    listed = [case for case in cases(PAIR) if case.operands[0].dtype == np.float32]

    def work(group: Any, rank: int) -> None:
        group.exchange({rank: call_of(rank)})
        for case in listed:
            call = case.call(PAIR, rank)
            if not group.can_capture(call.collective, call.operand.dtype) or not call.operand.size:
                continue
            on_device = Call(rank, call.coords, call.collective, group.cupy.asarray(call.operand))
            del group.cupy.calls[:]
            check(case, PAIR, rank, group.cupy.asnumpy(group.captured_result(group.capture(on_device))))
            waits = [named for named in group.cupy.calls if named[0] == "wait"]
            assert waits == [("wait", "communication", "compute"), ("wait", "compute", "communication")]

    assert run_pair(work).raised == {}


def test_ranks_meet_before_they_capture() -> None:
    def work(group: Any, rank: int) -> None:
        with pytest.raises(RunError, match="AllReduce id=0 over x cannot be captured before its ranks have met"):
            group.capture(call_of(rank))

    assert run_pair(work).raised == {}


def test_ranks_tell_each_other_what_they_chose() -> None:
    outcome = run_pair(lambda group, rank: [group.agree(2**40 + rank), group.agree(rank)])
    assert list(outcome.given) == [[[2**40, 2**40 + 1], [0, 1]]] * 2


def test_graphs_are_let_go_before_communicators_end() -> None:
    kept = []

    def work(group: Any, rank: int) -> None:
        meet(group, rank)
        kept.append(Graph(group))
        group.add_graph(kept[-1])
        group.watch(group.lane.stream, 0.0)

    outcome = run_pair(work)
    assert outcome.raised == {}
    for calls in outcome.calls.values():
        assert calls[-2:] == [("let go",), ("destroy",)]


def test_a_graph_that_does_not_end() -> None:
    kept = []

    def work(group: Any, rank: int) -> None:
        meet(group, rank)
        kept.append(Graph(group))
        group.add_graph(kept[-1])
        group.cupy.is_stuck = True
        group.watch(group.lane.stream, 0.1 + 5 * rank)

    outcome = run_pair(work, seconds=0.2)
    for rank in range(2):  # The first to give up tells the other.
        what = outcome.raised[rank].what  # type: ignore[attr-defined]
        assert what == "a CUDA graph with collectives did not end in 0.3 s, though all ranks launched it"
        assert [call for call in outcome.calls[rank] if call[0] in ("let go", "abort")] == [("abort",), ("let go",)]


# -- all in one process -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES[1:], ids=str)
def test_a_device_for_each_rank_in_one_process(mesh: Mesh) -> None:
    cupy = FakeCupy(Network(), devices=mesh.size)
    with closing(NcclDevices.on_devices(mesh, 5.0, cupy)) as group:
        assert group.ranks == tuple(range(mesh.size))
        for case in cases(mesh):
            calls = {rank: case.call(mesh, rank) for rank in range(mesh.size)}
            for rank, result in group.exchange(calls).items():
                check(case, mesh, rank, result)
            if case.operands[0].dtype.char in HOLDS:
                for rank, call in calls.items():
                    with cupy.cuda.Device(rank):
                        calls[rank] = Call(rank, call.coords, call.collective, cupy.asarray(call.operand))
                for rank, result in group.exchange(calls).items():
                    assert result.device_id == rank
                    check(case, mesh, rank, cupy.asnumpy(result))
    starts = cupy.calls.count(("groupStart",))
    assert starts == cupy.calls.count(("groupEnd",)) > 0
    assert ("destroy",) in cupy.calls


def test_too_few_devices_in_one_process() -> None:
    with pytest.raises(IrparError, match="has 4 ranks, and this process sees 2 GPUs") as caught:
        NcclDevices.on_devices(Mesh({"x": 4}), 5.0, FakeCupy(Network(), devices=2))
    assert "torchrun --nproc-per-node 4" in str(caught.value)


def test_what_does_not_end_in_one_process() -> None:
    network = Network()
    cupy = FakeCupy(network, devices=2)
    with closing(NcclDevices.on_devices(PAIR, 0.2, cupy)) as group:
        network.stuck_from = 0
        collective = Collective("AllReduce", 3, (Axis("x"),))
        calls = {rank: Call(rank, (rank,), collective, np.ones(3)) for rank in range(2)}
        with pytest.raises(RunError, match=r"collective 3 did not end in 0\.2 s"):
            group.exchange(calls)
    assert cupy.calls.count(("abort",)) == 2


# -- what must be there ---------------------------------------------------------------------------------------------


def about(device: str, host_id: str = "", nccl: int = 22809, shares: bool = False, captures: bool = False):
    facts = {"host": "node1", "host_id": host_id, "nccl": nccl, "shares": shares, "captures": captures}
    return {"device": device, **facts}


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([about("a"), about("b")], None),
        ([about("a"), about("b"), about("a")], r"ranks 0 and 2 have one GPU of node1, which NCCL 2\.28\.9 refuses"),
        ([about("a", "h0"), about("a", "h1")], None),
        ([about("a", "h0"), about("a", "h0")], "ranks 0 and 1"),
        ([about("a", "h0"), about("a")], "ranks 0 and 1"),
        ([about("a", nccl=23002, shares=True)] * 2, None),
        ([about("a", nccl=22900, shares=True)] * 2, "ranks 0 and 1"),
        ([about("a", captures=True), about("b")], "ranks 0 and 1 differ in IRPAR_CAPTURE_COLLECTIVES"),
        ([about("a"), about("b", nccl=23002)], r"rank 0 has NCCL 2\.28\.9, and rank 1 has NCCL 2\.30\.2"),
    ],
)
def test_which_ranks_can_have_which_devices(ranks, message) -> None:
    if message is None:
        check_devices(ranks)
    else:
        with pytest.raises(IrparError, match=message):
            check_devices(ranks)


def test_without_cupy(monkeypatch) -> None:
    monkeypatch.setattr(cuda, "find_spec", lambda name: None)
    with pytest.raises(IrparError, match="the group nccl needs CuPy, which is not installed") as caught:
        make_group("nccl", PAIR)
    assert "pip install 'irpar[cuda13]'" in str(caught.value)
    assert 'use engine="ort" with group="processes" or group="mpi"' in str(caught.value)


def install(monkeypatch, cupy: FakeCupy, nccl: object) -> None:
    """Let CuPy be there, and this for its NCCL."""
    monkeypatch.setattr(nccl_lane, "import_cupy", lambda who, instead: cupy)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", nccl)


@pytest.mark.parametrize("nccl", [None, SimpleNamespace(available=False)])
def test_without_nccl(nccl, monkeypatch) -> None:
    install(monkeypatch, FakeCupy(Network()), nccl)
    with pytest.raises(IrparError, match="needs NCCL, which CuPy does not find") as caught:
        make_group("nccl", PAIR)
    assert "pip install 'irpar[cuda13]'" in str(caught.value)


def test_a_launcher_that_started_one_process(monkeypatch) -> None:
    cupy = FakeCupy(Network(), devices=2)
    install(monkeypatch, cupy, cupy.cuda.nccl)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with closing(make_group("nccl", PAIR)) as group:
        assert group.ranks == (0, 1)


def test_another_number_of_processes(monkeypatch) -> None:
    cupy = FakeCupy(Network())
    install(monkeypatch, cupy, cupy.cuda.nccl)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(IrparError, match="torchrun started 3 processes, and mesh x=2 has 2 ranks"):
        make_group("nccl", PAIR)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_unique_ids_of_nccl_itself() -> None:
    nccl = pytest.importorskip("cupy.cuda.nccl")
    if not nccl.available:
        pytest.skip("NCCL is not installed")
    one, two = nccl.get_unique_id(), nccl.get_unique_id()
    assert len(one) == len(two) == 128
    assert one != two
    make = groups(PAIR)
    told = {}

    def run(rank: int) -> None:
        with make(rank) as group:
            group.cupy.cuda.nccl.get_unique_id = nccl.get_unique_id
            connect = group._connect

            def note(meeting, unique_id):
                told[rank] = unique_id
                return connect(meeting, unique_id)

            group._connect = note
            meet(group, rank)

    assert run_threads(2, run)[1] == {}
    assert told[0] == told[1]
    assert len(told[0]) == 128


def test_the_threads_group_is_what_results_are_compared_with() -> None:
    """The cases move something, and reduce something: else all of the above would show little."""
    for mesh in MESHES[:2]:
        for case in cases(mesh):
            calls = {rank: case.call(mesh, rank) for rank in range(mesh.size)}
            results = ThreadGroup(mesh).exchange(calls)
            if case.collective.kind == "AllReduce" and case.operands[0].size > 1:
                assert any(results[0].tobytes() != operand.tobytes() for operand in case.operands)
