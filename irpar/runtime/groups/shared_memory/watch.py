"""Why nothing comes: what the ranks of a run know of each other while they wait.

Each rank has a board, where it says what it waits for once that takes long, and a place for the reason of its failure.
Boards are hints, read without any order; no verdict hangs on a single reading of them.
"""

import os
import select
import struct
import time
from collections.abc import Callable, Collection, Iterable, Set
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from irpar.runtime.groups.wire.header import ELSEWHERE, mismatch
from irpar.sharding import IrparError

from ...errors import MismatchError, PeerError
from ..base import Call, rank_text
from ..pulse import ASLEEP_SECONDS
from ..spmd import ENDED, SpmdGroup, see_late
from .joining import Joined
from .segment import FAULT_BYTES
from .system import own_process, process_state, processor_time

TICK = 0.02
"""Seconds that a rank sleeps at most before it looks around."""
_DEADLOCK_AFTER = 0.15
"""Seconds of waiting after which a rank looks whether those that it waits for wait for it."""
_STATE, _VERSION, _TICKS, _SINCE, _PROCESS, _FAILED, _WHEN, _START = range(8)
_AT = 9
"""The word of the collective that a rank waits at: its id and 1; 0 where it waits for something else."""
_FAULT = struct.Struct("<qI")
_STOPPED = {"T": "is stopped (by SIGSTOP, or Ctrl-Z)", "t": "is stopped by a debugger"}


class State(IntEnum):
    """What a rank does, as it says itself."""

    COMPUTING = 0
    WAITING = 1
    RECEIVING = 2
    SENDING = 3
    CLOSED = 4


class _Suspect(NamedTuple):
    """A rank that seems to wait in a circle.

    Attributes:
        version: counts its waits.
        ticks: counts how often it has looked around.
        has_ended: whether it waits for its next run.
        doing: what it does, for people.
    """

    version: int
    ticks: int
    has_ended: bool
    doing: str


@dataclass(eq=False)
class Wait:
    """What a rank waits for.

    Attributes:
        state: what kind of thing.
        is_done: whether it has come.
        missing: the ranks that have not done their part.
        absent: those of them that have not even come: what they have begun they do whatever else they wait for. Also
            those that do their part once others have come, for which they wait.
        call: the collective, where it is one.
        is_bounded: whether it fails after the group's time; else only after as long with all that are missing stopped.
        text: what others are told of it.
        unread: the ranks for which something that was sent waits until they read what came before.
    """

    state: State
    is_done: Callable[[], bool]
    missing: Callable[[], Collection[int]]
    absent: Callable[[], Collection[int]]
    call: Call | None = None
    is_bounded: bool = True
    text: str = ""
    unread: Collection[int] = ()
    began: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)
    looked: float = field(default_factory=time.monotonic)
    is_posted: bool = False
    has_moved: bool = False


class Watch:
    """One rank's view of the others.

    Args:
        group: makes the errors.
        joined: what is shared.
    """

    def __init__(self, group: SpmdGroup, joined: Joined) -> None:
        self._group = group
        self._segment = segment = joined.segment
        self._rank = rank = group.rank
        self._boards = [segment.board(each) for each in range(segment.layout.count)]
        self._words, self._mask, self._text = self._boards[rank]
        self._words[_PROCESS], self._words[_START] = own_process()
        self._ranks = {end: other for other, end in joined.others.items()}
        self._poll = select.poll()
        for end in self._ranks:
            self._poll.register(end, select.POLLIN)
        self._own = joined.own
        self._gone: set[int] = set()
        self._suspects: dict[int, _Suspect] = {}
        self._looked = 0.0
        self._life: list[tuple[int, int, float]] = []

    @property
    def gone(self) -> Set[int]:
        """The ranks that have been seen to be gone."""
        return self._gone

    # -- this rank ----------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """This rank ends as it should; the others find it gone."""
        self._words[_STATE] = State.CLOSED
        for end in (*self._ranks, self._own):
            os.close(end)
        self._ranks.clear()

    def tell(self, rank: int, error: IrparError | None, reason: str = "") -> None:
        """Tell the others why this rank fails, the first time that this is called.

        Args:
            rank: whose failure it is.
            error: what they are to raise; None: this rank failed, for a reason.
            reason: that reason.
        """
        if self._words[_FAILED]:
            return
        parts = [reason] if error is None else [error.what, error.do, error.where, *error.notes]
        place = self._segment.fault(self._rank)
        text = "\0".join(part.replace("\0", " ") for part in parts).encode()[: FAULT_BYTES - _FAULT.size]
        _FAULT.pack_into(place, 0, rank, len(text))
        place[_FAULT.size : _FAULT.size + len(text)] = text
        token = self._segment.fault_token(self._rank)
        for _ in self._boards:
            token.post()
        self._words[_WHEN] = time.monotonic_ns()
        self._words[_FAILED] = 2 if error is None else 1
        for other in range(len(self._boards)):
            self._segment.bell(other).post()

    def done(self, wait: Wait) -> None:
        """What this rank waited for has come."""
        if wait.is_posted:
            self._words[_STATE] = State.COMPUTING
            self._words[_VERSION] += 1

    def waiting_at(self, id_: int, ranks: Iterable[int]) -> set[int]:
        """Those of some ranks that say that they wait at a collective."""
        boards = ((rank, self._boards[rank][0]) for rank in ranks)
        return {rank for rank, words in boards if words[_STATE] == State.WAITING and words[_AT] == id_ + 1}

    # -- the others ---------------------------------------------------------------------------------------------

    def look(self, wait: Wait) -> None:
        """See why what this rank waits for does not come; it has just found that nothing has.

        Raises:
            PeerError: another rank failed, is gone, or is too late.
            MismatchError: ranks wait for each other at different collectives.
        """
        self.check_faults()
        self._check_gone(wait)
        now = time.monotonic()
        if now - wait.looked > ASLEEP_SECONDS:
            wait.moved += now - wait.looked
        wait.looked = now
        if wait.has_moved:
            wait.has_moved, wait.moved = False, now
        self._post(wait, now)
        is_long = now - wait.began > _DEADLOCK_AFTER and now - self._looked > _DEADLOCK_AFTER / 2
        if is_long and wait.call is not None:
            self._looked = now
            self._check_deadlock(wait, wait.call)
        if wait.state == State.RECEIVING:
            self._check_life(wait, now)
        if now - wait.moved > self._group.seconds:
            raise self._late(wait)

    def check_faults(self) -> None:
        """See whether another rank has failed.

        Raises:
            PeerError: the first that did, and why.
        """
        failed = [
            (words[_WHEN], rank)
            for rank, (words, _, _) in enumerate(self._boards)
            if words[_FAILED] and rank != self._rank
        ]
        for _, rank in sorted(failed):
            # The token orders the text; where it is not here yet, it is the next time.
            if self._segment.fault_token(rank).take():
                raise self._fault(rank)

    def _fault(self, rank: int) -> PeerError:
        place = self._segment.fault(rank)
        culprit, length = _FAULT.unpack_from(place)
        parts = bytes(place[_FAULT.size : _FAULT.size + length]).decode(errors="ignore").split("\0")
        if self._boards[rank][0][_FAILED] == 2:
            return self._group.failed(culprit, parts[0])
        what, do, where, *notes = (*parts, "", "")[: max(3, len(parts))]
        return PeerError(what, rank=culprit, where=where, notes=tuple(notes), do=do)

    def _check_gone(self, wait: Wait) -> None:
        """See whether a rank has ended that should not have."""
        before = frozenset(self._gone)
        for end, _ in self._poll.poll(0):
            self._poll.unregister(end)
            self._gone.add(self._ranks[end])
        if not self._gone:
            return
        self.check_faults()
        died = [rank for rank in self._gone if self._boards[rank][0][_STATE] != State.CLOSED]
        if died:
            raise self._group.failed(min(died), ENDED)
        # All that a rank sent before it ended has been read, once it was gone before the last poll.
        left = sorted(before & set(wait.missing()))
        if left:
            raise self._group.failed(left[0], self._without(wait))

    @staticmethod
    def _without(wait: Wait) -> str:
        return "it ended" if wait.call is None else f"it ended without collective {wait.call.collective.id}"

    def _post(self, wait: Wait, now: float) -> None:
        """Say on the board what this rank waits for, now that it takes long."""
        if now - wait.began < TICK:
            return
        absent = wait.absent()
        for rank in range(len(self._boards)):
            self._mask[rank] = rank in absent
        if not wait.is_posted:
            wait.is_posted = True
            text = (wait.call.describe(self._group.mesh) if wait.call is not None else wait.text).encode()
            text = text[: len(self._text)]
            self._text[:] = text.ljust(len(self._text), b"\0")
            self._words[_SINCE] = time.monotonic_ns()
            self._words[_AT] = 0 if wait.call is None else wait.call.collective.id + 1
            self._words[_VERSION] += 1
            self._words[_STATE] = wait.state
        self._words[_TICKS] += 1

    def _check_deadlock(self, wait: Wait, call: Call) -> None:
        """See whether the ranks that this one waits for wait, over others perhaps, for this one.

        A rank that says that it waits may have been given what it waits for since. So one that is suspected must have
        looked twice more, in the same wait, with nothing left unread, before that is believed.
        """
        cycle = self._cycle(wait)
        if not cycle:
            self._suspects = {}
            return
        seen = {rank: self._suspect(rank) for rank in cycle}
        for rank, now in seen.items():
            before = self._suspects.get(rank)
            if before is None or before.version != now.version:
                self._suspects = seen
                return
            if now.ticks < before.ticks + 2:
                return
        # What was seen first: by now another rank may have found the same, and ended.
        raise self._deadlock(call, {rank: self._suspects[rank] for rank in cycle[1:]})

    def _suspect(self, rank: int) -> _Suspect:
        words, _, _ = self._boards[rank]
        return _Suspect(
            version=words[_VERSION],
            ticks=words[_TICKS],
            has_ended=words[_STATE] == State.RECEIVING and rank != 0,
            doing=self._doing(rank),
        )

    def _check_life(self, wait: Wait, now: float) -> None:
        """Ranks that are asked for an answer may compute as long as they like; those that do nothing hang.

        Where nothing was asked for they may also do nothing, and only one that is stopped will never come.
        """
        if now - self._looked < 0.25 * min(self._group.seconds, 4):
            return
        self._looked = now
        life = []
        for rank in wait.missing():
            words, _, _ = self._boards[rank]
            used = processor_time(words[_PROCESS], words[_START])
            life.append((words[_VERSION], words[_TICKS], now if used is None else used))
        may_idle = not wait.is_bounded and any(self._state(rank) != "T" for rank in wait.missing())
        if life != self._life or may_idle:
            self._life = life
            wait.moved = now

    def _cycle(self, wait: Wait) -> list[int]:
        """A way from this rank back to it, along what ranks wait for; this one first. Empty where there is none."""
        ways: list[list[int]] = [[self._rank]]
        seen: set[int] = set()
        while ways:
            way = ways.pop()
            last = way[-1]
            words, mask, _ = self._boards[last]
            if last != self._rank and words[_STATE] not in (State.WAITING, State.RECEIVING):
                continue
            if any(self._segment.token(source, last).value for source in range(len(self._boards)) if source != last):
                continue
            absent = wait.absent() if last == self._rank else [rank for rank, is_in in enumerate(mask) if is_in]
            if last != self._rank and self._rank in absent:
                return way
            for rank in absent:
                if rank not in seen:
                    seen.add(rank)
                    ways.append([*way, rank])
        return []

    def _deadlock(self, call: Call, others: dict[int, _Suspect]) -> MismatchError:
        lines = [call.describe(self._group.mesh), *(other.doing for other in others.values())]
        ended = [rank for rank, other in others.items() if other.has_ended]
        what = ELSEWHERE
        if ended:
            what = f"rank {ended[0]} ended without it"
        return mismatch(call.collective.id, what, lines)

    def _late(self, wait: Wait) -> PeerError:
        missing = sorted({*wait.missing(), *wait.unread})
        if wait.call is not None:
            late = self._late_at(wait.call, missing)
            return self._group.late(wait.call, {rank: self._chain(rank) for rank in late})
        who = rank_text(self._group.mesh, missing[0])
        what = "did not take a message" if wait.state == State.SENDING else "has done nothing, and not answered,"
        return PeerError(
            f"{who} {what} in {self._group.seconds:g} s",
            rank=missing[0],
            notes=(self._chain(missing[0]),),
            do=see_late(),
        )

    def _late_at(self, call: Call, missing: list[int]) -> list[int]:
        """Of ranks that do not do their part, those that are late: not who has come, and waits for these itself."""
        late, seen, left = set(), {self._rank}, list(missing)
        while left:
            rank = left.pop()
            if rank in seen:
                continue
            seen.add(rank)
            if self.waiting_at(call.collective.id, [rank]):
                left += [other for other, is_in in enumerate(self._boards[rank][1]) if is_in]
            else:
                late.add(rank)
        return sorted(late) or missing

    def _chain(self, rank: int) -> str:
        """What a rank does; where it waits for others itself, what these do."""
        told, seen = [], {self._rank}
        while rank not in seen:
            seen.add(rank)
            told.append(self._doing(rank))
            words, mask, _ = self._boards[rank]
            waits = words[_STATE] in (State.WAITING, State.SENDING)
            rank = (
                next((other for other, is_in in enumerate(mask) if is_in and other not in seen), rank)
                if waits
                else rank
            )
        return "; it waits: ".join(told)

    def _state(self, rank: int) -> str:
        """What the system says that a rank's process does; empty where it cannot be seen."""
        words, _, _ = self._boards[rank]
        return process_state(words[_PROCESS], words[_START])

    def _doing(self, rank: int) -> str:
        words, _, text = self._boards[rank]
        who = rank_text(self._group.mesh, rank)
        stopped = _STOPPED.get(self._state(rank))
        if stopped is not None:
            return f"{who} {stopped}"
        match words[_STATE]:
            case State.WAITING | State.SENDING:
                return bytes(text).rstrip(b"\0").decode(errors="ignore")
            case State.RECEIVING:
                return (
                    f"{who} has no collective left: it waits for the next run" if rank else f"{who} waits for results"
                )
            case State.CLOSED:
                return f"{who} has ended"
        return f"{who} is computing"
