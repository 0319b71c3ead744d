"""The log of executed collectives, and its comparison with the plan."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from irpar.ir import dtype_of_numpy
from irpar.ops.collectives import KINDS

from .groups.base import Call, Collective


class Record(NamedTuple):
    """One executed collective.

    Attributes:
        id: the collective's id in the program.
        kind: as in plan.json, e.g. `all_reduce`.
        dtype: element type, e.g. `f32`.
        bytes: bytes of the local operand, the largest over the ranks.
        axes: mesh axes that it joins, major first.
    """

    id: int
    kind: str
    dtype: str
    bytes: int
    axes: tuple[str, ...]


class CollectiveLog:
    """Records in order of execution; the groups of one collective make one record together."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, Collective, np.dtype[Any], int]] = []
        """What was added and is no record yet: ranks that run have no time for it."""
        self._records: list[Record] = []
        self._times: dict[tuple[int, int], int] = {}
        self._places: dict[tuple[int, int], int] = {}

    def add(self, call: Call) -> None:
        """Note that a rank took part in a collective."""
        operand = call.operand
        self._calls.append((call.rank, call.collective, operand.dtype, operand.size))

    def _settled(self) -> list[Record]:
        """The records, those of all that was added."""
        calls, self._calls = self._calls, []
        for rank, collective, found, size in calls:
            dtype = dtype_of_numpy(found)
            axes = tuple(map(str, collective.axes))
            self._add(rank, Record(collective.id, KINDS[collective.kind], str(dtype), dtype.nbytes(size), axes))
        return self._records

    def _add(self, rank: int, record: Record) -> None:
        time = self._times.get((rank, record.id), 0)
        self._times[rank, record.id] = time + 1
        place = self._places.get((record.id, time))
        if place is None:
            self._places[record.id, time] = len(self._records)
            self._records.append(record)
        elif record.bytes > self._records[place].bytes:
            self._records[place] = self._records[place]._replace(bytes=record.bytes)

    def extend(self, rank: int, records: Iterable[Sequence[Any]]) -> None:
        """Add what another process logged of a rank; as an iteration over its log gave it."""
        self._settled()
        for id_, kind, dtype, size, axes in records:
            self._add(rank, Record(id_, kind, dtype, size, tuple(axes)))

    def __iter__(self) -> Iterator[Record]:
        return iter(self._settled())

    def __len__(self) -> int:
        return len(self._settled())

    def __getitem__(self, index: int) -> Record:
        return self._settled()[index]

    def differences(self, plan: Sequence[Mapping[str, Any]]) -> list[str]:
        """How the log differs from the `collectives` of plan.json, a line each; empty where they agree."""
        found = []
        counts: dict[int, int] = {}
        planned = {entry["id"]: entry for entry in plan}
        for record in self._settled():
            counts[record.id] = counts.get(record.id, 0) + 1
            entry = planned.get(record.id)
            if entry is None:
                found.append(f"{record.kind} id={record.id} was executed but is not in the plan")
                continue
            expected = Record(record.id, entry["kind"], entry["dtype"], entry["bytes"], tuple(entry["axes"]))
            if expected != record:
                found.append(f"collective id={record.id}: the plan has {expected[1:]}, executed was {record[1:]}")
        for entry in plan:
            times, done = entry["times"], counts.get(entry["id"], 0)
            if times is not None and times != done:
                found.append(f"{entry['kind']} id={entry['id']} was executed {done} times, the plan has {times}")
        return found
