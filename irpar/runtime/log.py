"""The log of executed collectives, and its comparison with the plan."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from irpar.ir import dtype_of_numpy
from irpar.ops.collectives import KINDS

from .groups.base import Call, Collective
from .instructions import MemoryCopy


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


class CopyRecord(NamedTuple):
    """One executed copy between memories.

    Attributes:
        id: the copy's id in the program.
        source, target: the memories.
        bytes: the largest over the ranks.
    """

    id: int
    source: str
    target: str
    bytes: int


Kept = TypeVar("Kept", Record, CopyRecord)


class _Joined(Generic[Kept]):
    """What ranks executed, in order: the same of several ranks is one record, with the most bytes of them.

    Attributes:
        records: those.
    """

    def __init__(self) -> None:
        self.records: list[Kept] = []
        self._times: dict[tuple[int, int], int] = {}
        self._places: dict[tuple[int, int], int] = {}

    def add(self, rank: int, record: Kept) -> None:
        """Join what a rank executed with what others did."""
        time = self._times.get((rank, record.id), 0)
        self._times[rank, record.id] = time + 1
        place = self._places.get((record.id, time))
        if place is None:
            self._places[record.id, time] = len(self.records)
            self.records.append(record)
        elif record.bytes > self.records[place].bytes:
            self.records[place] = self.records[place]._replace(bytes=record.bytes)


class CopyLog:
    """Copies between memories in order of execution; the same of several ranks make one record together."""

    def __init__(self) -> None:
        self._joined = _Joined[CopyRecord]()
        self._lock = threading.Lock()  # Ranks of one process copy at the same time.

    def add(self, rank: int, copy: MemoryCopy, size: int) -> None:
        """Note that a rank copied so many bytes."""
        self.add_record(rank, CopyRecord(copy.id, copy.source, copy.target, size))

    def add_record(self, rank: int, record: CopyRecord) -> None:
        """Note a copy of a rank."""
        with self._lock:
            self._joined.add(rank, record)

    def __iter__(self) -> Iterator[CopyRecord]:
        return iter(self._joined.records)

    def __len__(self) -> int:
        return len(self._joined.records)

    @property
    def copied_bytes(self) -> int:
        """Of all of them."""
        return sum(record.bytes for record in self._joined.records)

    def differences(self, plan: Sequence[Mapping[str, Any]]) -> list[str]:
        """How the log differs from the `copies` of plan.json, a line each; empty where they agree."""
        planned = {entry["id"]: CopyRecord(entry["id"], entry["from"], entry["to"], entry["bytes"]) for entry in plan}
        found = []
        counts: dict[int, int] = {}
        for record in self._joined.records:
            counts[record.id] = counts.get(record.id, 0) + 1
            expected = planned.get(record.id)
            if expected is None:
                found.append(f"copy id={record.id} was executed but is not in the plan")
            elif expected != record:
                found.append(f"copy id={record.id}: the plan has {expected[1:]}, executed was {record[1:]}")
        for entry in plan:
            times, done = entry["times"], counts.get(entry["id"], 0)
            if times is not None and times != done:
                found.append(f"copy id={entry['id']} was executed {done} times, the plan has {times}")
        return found


Entry = tuple[int, Collective, np.dtype[Any], int]
"""A rank, what it took part in, and its operand's dtype and elements: all that ranks which run have time to note."""


class CollectiveLog:
    """Records in order of execution; the groups of one collective make one record together.

    Args:
        before: the log of the run before, where there was one: most runs do what the one before did.

    Attributes:
        copies: of the same run, between memories of a rank.
    """

    def __init__(self, before: "CollectiveLog | None" = None) -> None:
        self._entries: list[Entry] = []
        self._told_by: list[tuple[int, list[list[Any]]]] = []
        self._joined = _Joined[Record]()
        self._recorded = 0
        self._told: tuple[list[Entry], str] = before._told if before is not None else ([], "[]")
        self.copies = CopyLog()

    def add(self, call: Call) -> None:
        """Note that a rank took part in a collective."""
        operand = call.operand
        self._entries.append((call.rank, call.collective, operand.dtype, operand.size))

    def add_again(self, entries: Sequence[Entry]) -> None:
        """Note what was noted before, and done again."""
        self._entries += entries

    def text(self) -> str:
        """What this process has logged, as another one's log takes it (`add_text`)."""
        if self._told[0] != self._entries:
            self._told = list(self._entries), json.dumps([_record(entry) for entry in self._entries])
        return f"[{self._told[1]}, {json.dumps(list(self.copies))}]"

    def add_text(self, rank: int, text: str) -> None:
        """Add what another process logged of a rank."""
        collectives, copies = json.loads(text)
        self._told_by.append((rank, collectives))
        for id_, source, target, size in copies:
            self.copies.add_record(rank, CopyRecord(id_, source, target, size))

    def _settled(self) -> list[Record]:
        """The records, those of all that was added."""
        for entry in self._entries[self._recorded :]:
            self._joined.add(entry[0], _record(entry))
        self._recorded = len(self._entries)
        told, self._told_by = self._told_by, []
        for rank, records in told:
            for id_, kind, dtype, size, axes in records:
                self._joined.add(rank, Record(id_, kind, dtype, size, tuple(axes)))
        return self._joined.records

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


def _record(entry: Entry) -> Record:
    _, collective, found, size = entry
    dtype = dtype_of_numpy(found)
    axes = tuple(map(str, collective.axes))
    return Record(collective.id, KINDS[collective.kind], str(dtype), dtype.nbytes(size), axes)
