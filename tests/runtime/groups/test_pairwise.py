"""Collectives as rounds of messages, all ranks in one thread: results, and what is sent."""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Self

import numpy as np
import pytest

from irpar.ops.collectives import KINDS, POINT_TO_POINT
from irpar.ops.collectives.record import Steps
from irpar.ops.collectives.rounds import SMALL
from irpar.runtime.groups import Call, Collective
from irpar.runtime.groups.pairwise import exchange
from irpar.runtime.groups.results import EXECUTED
from irpar.runtime.groups.spmd import Finish, Meeting, SpmdGroup
from irpar.sharding import Axis, Mesh
from tests.budget import pairs

from .collective_cases import cases, check


class Wire:
    """What is on its way, and how many bytes each rank has sent to others."""

    def __init__(self) -> None:
        self.boxes: defaultdict[tuple[int, int], deque[np.ndarray]] = defaultdict(deque)
        self.sent: defaultdict[int, int] = defaultdict(int)


class Rounds:
    """The rounds of one rank over a wire; ranks are told apart by position."""

    def __init__(self, wire: Wire, meeting: Meeting) -> None:
        self.wire, self.meeting = wire, meeting

    def round(self, sends: Sequence[np.ndarray | None], receives: Sequence[np.ndarray | None]) -> Steps[None]:
        mine = self.meeting.members[self.meeting.position]
        for member, array in zip(self.meeting.members, sends, strict=True):
            if member != mine and array is not None:
                assert array.flags.c_contiguous
                self.wire.boxes[mine, member].append(array.copy())
                self.wire.sent[mine] += array.nbytes
        for member, into in zip(self.meeting.members, receives, strict=True):
            if member == mine or into is None:
                continue
            assert into.flags.c_contiguous
            while not self.wire.boxes[member, mine]:
                yield
            came = self.wire.boxes[member, mine].popleft()
            assert came.nbytes == into.nbytes
            into.reshape(-1).view(np.uint8)[...] = came.reshape(-1).view(np.uint8)
        yield


class Rank(SpmdGroup):
    """Keeps the meeting that it comes to."""

    meeting: Meeting

    @classmethod
    def join(cls, mesh: Mesh, seconds: float) -> Self:
        raise NotImplementedError

    def begin(self, meeting: Meeting) -> Finish:
        self.meeting = meeting
        return lambda: np.empty(0)

    def send(self, rank: int, message: bytes) -> None: ...

    def receive(self, rank: int) -> bytes:
        raise NotImplementedError

    def post(self, rank: int, channel: int, content: bytes) -> None: ...

    def collect(self, call: Call, rank: int, channel: int) -> bytes:
        raise NotImplementedError

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...


def run(mesh: Mesh, calls: dict[int, Call], reducers: int | None = None) -> tuple[dict[int, np.ndarray], Wire]:
    """What all ranks get, one going a step after the other, and what was sent."""
    wire = Wire()
    works = {}
    for rank, call in calls.items():
        group = Rank(mesh, rank, 1.0)
        group.start(call)
        works[rank] = exchange(group.meeting, Rounds(wire, group.meeting), reducers=reducers)
    results: dict[int, np.ndarray] = {}
    for _ in range(100):
        for rank, work in works.items():
            if rank not in results:
                try:
                    next(work)
                except StopIteration as end:
                    results[rank] = end.value
    assert results.keys() == calls.keys()
    assert not any(wire.boxes.values())
    return results, wire


@pytest.mark.parametrize(
    ("draw", "mesh"), pairs([(3, 0), (3, 1), (3, 2), (9000, 3)], [{"x": 3}, {"a": 4, "b": 2}, {"x": 2}]), ids=str
)
def test_all_kinds_have_the_bits_of_threads(draw: tuple[int, int], mesh: dict[str, int]) -> None:
    (rows, seed), made = draw, Mesh(mesh)
    for case in cases(made, rows=rows, seed=seed):
        results, _ = run(made, {rank: case.call(made, rank) for rank in range(made.size)})
        for rank, result in results.items():
            check(case, made, rank, result)


@pytest.mark.parametrize("reducers", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 3))])
def test_few_members_reduce_to_the_same_bits(reducers: int) -> None:
    mesh = Mesh({"x": 4})
    for case in cases(mesh, rows=9000, seed=4):
        results, _ = run(mesh, {rank: case.call(mesh, rank) for rank in range(4)}, reducers)
        for rank, result in results.items():
            check(case, mesh, rank, result)


def test_members_that_do_not_reduce_have_to_do_with_those_alone_that_do() -> None:
    mesh, operand = Mesh({"x": 4}), np.ones(SMALL, np.float32)
    collective = Collective("AllReduce", 0, (Axis("x"),))
    _, wire = run(mesh, {rank: Call(rank, (rank,), collective, operand) for rank in range(4)}, 2)
    assert wire.sent == {rank: operand.nbytes * (0.5 + 1.5 if rank < 2 else 1) for rank in range(4)}
    assert {pair for pair in wire.boxes if wire.boxes[pair]} == set()


def test_all_kinds_are_here() -> None:
    assert KINDS.keys() - POINT_TO_POINT == EXECUTED.keys()


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("kind", "settings", "shares"),
    [
        ("AllReduce", {}, lambda n: 2 * (n - 1) / n),
        ("ReduceScatter", {"dim": 1}, lambda n: (n - 1) / n),
        ("AllGather", {"dim": 0}, lambda n: n - 1),
        ("AllToAll", {"split_dim": 0, "concat_dim": 1}, lambda n: (n - 1) / n),
        ("CollectivePermute", {"pairs": (0, 1, 1, 0)}, lambda n: 1),
        ("Broadcast", {"root": 1}, lambda n: 2 * (n - 1) / n),
    ],
)
def test_large_operands_send_what_a_ring_does(kind: str, settings: dict, shares, count: int) -> None:
    mesh = Mesh({"x": count})
    operand = np.ones((24, SMALL // 8 * 3), np.float32)
    collective = Collective(kind, 0, (Axis("x"),), **settings)
    _, wire = run(mesh, {rank: Call(rank, (rank,), collective, operand) for rank in range(count)})
    assert max(wire.sent.values()) == pytest.approx(shares(count) * operand.nbytes, rel=1e-3)


def test_every_collective_has_a_case() -> None:
    found = {case.collective.kind for case in cases(Mesh({"x": 2}))}
    assert found == KINDS.keys() - POINT_TO_POINT
