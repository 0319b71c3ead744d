"""The log of executed collectives."""

import numpy as np

from irpar.ops.collectives import KINDS
from irpar.runtime.groups import Call, Collective
from irpar.runtime.groups.results import EXECUTED
from irpar.runtime.log import CollectiveLog, Record
from irpar.sharding import Axis

PLAN = [
    {"id": 0, "kind": "all_reduce", "dtype": "f32", "bytes": 16, "axes": ["tp"], "times": 1},
    {"id": 1, "kind": "all_gather", "dtype": "bool", "bytes": 3, "axes": ["dp", "tp"], "times": 2},
]


def executed(*sizes: tuple[int, int, int]) -> CollectiveLog:
    """A log of (rank, id, elements)."""
    log = CollectiveLog()
    kinds = {0: ("AllReduce", (Axis("tp"),), np.float32), 1: ("AllGather", (Axis("dp"), Axis("tp")), np.bool_)}
    for rank, number, size in sizes:
        kind, axes, dtype = kinds[number]
        log.add(Call(rank, (rank,), Collective(kind, number, axes), np.zeros(size, dtype)))
    return log


def test_ranks_of_one_collective_make_one_record_with_the_largest_operand() -> None:
    log = executed((0, 0, 3), (1, 0, 4), (0, 1, 3), (0, 1, 3), (1, 1, 2), (1, 1, 1))
    assert list(log) == [
        Record(0, "all_reduce", "f32", 16, ("tp",)),
        Record(1, "all_gather", "bool", 3, ("dp", "tp")),
        Record(1, "all_gather", "bool", 3, ("dp", "tp")),
    ]
    assert log.differences(PLAN) == []


def test_differences_are_told() -> None:
    log = executed((0, 0, 5), (0, 1, 3))
    first, second = log.differences(PLAN)
    assert "collective id=0" in first
    assert "20" in first
    assert second == "all_gather id=1 was executed 1 times, the plan has 2"
    assert executed((0, 0, 4)).differences([]) == ["all_reduce id=0 was executed but is not in the plan"]


def test_every_kind_is_called_as_the_plan_calls_it() -> None:
    log = CollectiveLog()
    for number, kind in enumerate(EXECUTED):
        log.add(Call(0, (0,), Collective(kind, number, (Axis("tp"),)), np.zeros(4, np.float32)))
    assert [record.kind for record in log] == [KINDS[kind] for kind in EXECUTED]
    assert KINDS["CollectivePermute"] == "permute"
