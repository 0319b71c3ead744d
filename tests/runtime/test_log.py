"""The log of executed collectives."""

import json

import numpy as np

from irpar.ops.collectives import KINDS
from irpar.runtime.groups import Call, Collective
from irpar.runtime.groups.results import EXECUTED
from irpar.runtime.instructions import MemoryCopy
from irpar.runtime.log import CollectiveLog, CopyRecord, Record
from irpar.sharding import Axis

PLAN = [
    {"id": 0, "kind": "all_reduce", "dtype": "f32", "bytes": 16, "axes": ["tp"], "times": 1},
    {"id": 1, "kind": "all_gather", "dtype": "bool", "bytes": 3, "axes": ["dp", "tp"], "times": 2},
]

COLLECTIVES = [Collective("AllReduce", 0, (Axis("tp"),)), Collective("AllGather", 1, (Axis("dp"), Axis("tp")))]
DTYPES = [np.float32, np.bool_]


def executed(*sizes: tuple[int, int, int]) -> CollectiveLog:
    """A log of (rank, id, elements)."""
    log = CollectiveLog()
    for rank, number, size in sizes:
        log.add(Call(rank, (rank,), COLLECTIVES[number], np.zeros(size, DTYPES[number])))
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


def test_what_other_processes_logged_is_added_from_text() -> None:
    mine, other = executed((0, 0, 3), (0, 1, 3)), executed((1, 0, 4), (1, 1, 2), (1, 1, 1))
    mine.add_text(1, other.text())
    assert list(mine) == list(executed((0, 0, 3), (0, 1, 3), (1, 0, 4), (1, 1, 2), (1, 1, 1)))


def test_the_text_is_of_this_run_whatever_the_one_before_did() -> None:
    log = CollectiveLog()
    for sizes in ([(0, 0, 3)], [(0, 0, 3)], [(0, 0, 4)], [], [(0, 0, 3), (0, 1, 3)]):
        expected = executed(*sizes)
        log = CollectiveLog(log)
        for rank, number, size in sizes:
            log.add(Call(rank, (rank,), COLLECTIVES[number], np.zeros(size, DTYPES[number])))
            assert json.loads(log.text())[0][-1][3] == size * DTYPES[number]().itemsize
        assert log.text() == expected.text()
        assert list(log) == list(expected)


def test_copies_of_other_processes_are_added_from_text() -> None:
    mine, other = CollectiveLog(), CollectiveLog()
    mine.copies.add(0, MemoryCopy(3, "host", "device"), 12)
    other.copies.add(1, MemoryCopy(3, "host", "device"), 16)
    other.copies.add(1, MemoryCopy(4, "device", "disk"), 8)
    mine.add_text(1, other.text())
    assert list(mine.copies) == [CopyRecord(3, "host", "device", 16), CopyRecord(4, "device", "disk", 8)]
