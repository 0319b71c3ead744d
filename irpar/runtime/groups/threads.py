"""All ranks in one process: collectives are array operations over lists of per-rank operands.

A result that is equal on all members of a group is one array, which they share; nobody writes to operands but who gave
them, over state when its own program has read it: what is handed over as it is, is copied.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Self

from irpar.ops.collectives.record import Partners
from irpar.sharding import Axis, Mesh

from ..errors import MismatchError
from .base import Array, Call, difference_of
from .results import EXECUTED, execute
from .wire.header import CORRECT_PART, ELSEWHERE, ONE_PARTITION, mismatch

_MOST_KNOWN = 100_000
"""Meetings that a group remembers to be right; a program has fewer."""


class _Meeting:
    """What the members of a group came to a collective with when that was right.

    Attributes:
        members: their ranks in order of position.
    """

    def __init__(self, members: list[int], calls: Sequence[Call]) -> None:
        self.members = members
        self._brought = [(call.rank, call.collective, call.operand.dtype, call.operand.shape) for call in calls]
        self._kept: list[Call] = []

    def calls(self, waiting: Mapping[int, Call]) -> list[Call] | None:
        """The members' calls, where all have come with the like again."""
        kept = self._kept
        if kept and all(waiting.get(call.rank) is call for call in kept):
            return kept
        found = []
        for rank, collective, dtype, shape in self._brought:
            call = waiting.get(rank)
            if call is None or call.collective is not collective:
                return None
            operand = call.operand
            if operand.dtype != dtype or operand.shape != shape:
                return None
            found.append(call)
        # Those that come again, whose operands stay where they are; others would be held with theirs.
        self._kept = found if found[0].into is not None else []
        return found


class _Posts(threading.local):
    """What ranks have sent to ranks in the run of a thread: runs beside each other take nothing of each other."""

    def __init__(self) -> None:
        self.calls: defaultdict[tuple[int, int, int], deque[Call]] = defaultdict(deque)
        """By source, target and channel."""


class ThreadGroup:
    """The ranks of a mesh, all in this process, in lockstep; several threads may each run a program."""

    takes_device_arrays = False

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.ranks = tuple(range(mesh.size))
        self._groups: dict[tuple[Axis, ...], dict[int, list[int]]] = {}
        self._posted = _Posts()
        self._meetings: dict[tuple[int, int], _Meeting] = {}
        """By collective and the first member that comes."""

    @classmethod
    def join(cls, mesh: Mesh, seconds: float) -> Self:
        """All ranks are here; they never wait for each other."""
        return cls(mesh)

    def begin_run(self) -> None:
        """See `Group.begin_run`."""
        self._posted.calls.clear()

    def start(self, call: Call) -> None:
        """Nothing can move before the others have come too; see `Group.start`."""

    def exchange(self, waiting: Mapping[int, Call]) -> dict[int, Array]:
        """Execute the collectives whose groups are complete; see `Group.exchange`."""
        done: dict[int, Array] = {}
        for rank, call in waiting.items():
            if rank in done:
                continue
            meeting = self._meetings.get((id(call.collective), rank))
            calls = None if meeting is None else meeting.calls(waiting)
            if meeting is None or calls is None:
                partners = call.collective.partners(rank)
                if partners is not None:
                    if (result := self._exchange_one(call, partners)) is not None:
                        done[rank] = result
                    continue
                members = self._members(call.collective.axes, rank)
                calls = [waiting[member] for member in members if member in waiting]
                if len(calls) < len(members) or any(other.collective.id != call.collective.id for other in calls):
                    continue  # Some member is at another collective first; it may come to this one later.
                self._check(calls)
                meeting = self._remember(call, members, calls)
            try:
                results = self.execute(calls)
            except ValueError as error:
                raise self._mismatch(str(error), calls, CORRECT_PART) from error
            done.update(zip(meeting.members, results, strict=True))
        if not done and waiting:
            raise self._stuck(waiting)
        return done

    def _remember(self, first: Call, members: list[int], calls: Sequence[Call]) -> _Meeting:
        if len(self._meetings) > _MOST_KNOWN:
            self._meetings.clear()
        made = self._meetings[id(first.collective), first.rank] = _Meeting(members, calls)
        return made

    def _exchange_one(self, call: Call, partners: Partners) -> Array | None:
        """What a rank gets that sends to others or takes from one; None where nothing has been sent to it yet."""
        for target in partners.targets:
            self._posted.calls[call.rank, target, partners.channel].append(call)
        if partners.source is None:
            return call.operand
        posted = self._posted.calls[partners.source, call.rank, partners.channel]
        if not posted:
            return None
        sender = posted.popleft()
        if (what := difference_of(sender.operand, call)) is not None:
            raise self._mismatch(what, [call, sender], CORRECT_PART)
        return self.hand_over(sender, call)

    def hand_over(self, sender: Call, receiver: Call) -> Array:
        """What one rank has sent, where the other takes it: a copy, for the sender may write over it, as over state."""
        return sender.operand.copy()

    def execute(self, calls: Sequence[Call]) -> list[Array]:
        """The results of one collective, from the calls of the members of one group in order of position."""
        first = calls[0]
        results = execute(first.collective, [call.operand for call in calls], first.into)
        if not EXECUTED[first.collective.kind].gives_operands:
            return results
        copies = {id(result): result.copy() for result in results}  # As in `hand_over`.
        return [copies[id(result)] for result in results]

    def close(self) -> None:
        """Nothing is held."""

    def _members(self, axes: tuple[Axis, ...], rank: int) -> list[int]:
        groups = self._groups.get(axes)
        if groups is None:
            groups = {member: group for group in self.mesh.groups(axes) for member in group}
            self._groups[axes] = groups
        return groups[rank]

    def _check(self, calls: Sequence[Call]) -> None:
        first = calls[0]
        for other in calls[1:]:
            if other.collective != first.collective:
                raise self._mismatch("one collective has different attributes on different ranks", [first, other])
            if other.operand.dtype != first.operand.dtype or other.operand.ndim != first.operand.ndim:
                raise self._mismatch("operands of one collective differ in dtype or rank", [first, other])
        kind = first.collective.kind
        expected = EXECUTED[kind].shapes(first.collective, [call.operand.shape for call in calls])
        for call, shape in zip(calls, expected, strict=True):
            if call.operand.shape != shape:
                what = f"operand of {list(call.operand.shape)}, where the other ranks call for {list(shape)}"
                raise self._mismatch(what, [call, *(other for other in calls if other is not call)])

    def _mismatch(self, what: str, calls: Sequence[Call], do: str = ONE_PARTITION) -> MismatchError:
        return mismatch(calls[0].collective.id, what, [call.describe(self.mesh) for call in calls], do)

    def _stuck(self, waiting: Mapping[int, Call]) -> MismatchError:
        """Nobody can go on: name a group whose members came to different collectives, or ended before this one."""
        first = min(waiting.values(), key=lambda call: (call.collective.id, call.rank))
        partners = first.collective.partners(first.rank)
        if partners is not None:
            source = waiting.get(partners.source) if partners.source is not None else None
            why = "it ended" if source is None else "it waits itself"
            what = f"rank {partners.source} has sent nothing to rank {first.rank} on channel {partners.channel}: {why}"
            return self._mismatch(what, [first, *([] if source is None else [source])])
        members = self._members(first.collective.axes, first.rank)
        others = [waiting[member] for member in members if member in waiting and member != first.rank]
        gone = [member for member in members if member not in waiting]
        what = ELSEWHERE
        if gone:
            what = f"rank{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))} ended without it"
        others.sort(key=lambda call: call.collective == first.collective)
        return self._mismatch(what, [first, *others])
