"""What all groups share whose processes run one rank each."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from irpar.ops.collectives.record import Partners
from irpar.sharding import Axis, Mesh

from ..errors import MismatchError, PeerError, more_time
from ..messages import decode, encode
from .base import Array, Call, Collective, difference_of, rank_text
from .results import EXECUTED, execute
from .wire.header import CORRECT_PART, Header, check_headers, expected_bytes, mismatch

Finish = Callable[[], Array]
"""Waits for a collective that has begun, and gives its result."""
ENDED = "its process ended without a word (killed, or out of memory?)"
"""Why a rank failed that others see gone."""
Quick = Callable[[Call], Array | None]
"""Executes a collective that all members have come to before, with the like operands: what is the same each time was
found then. None: something else is under way, and nothing has been done."""
QUICK = "quick"
_AGREEMENT = Collective("AllGather", -1, (), label="what all ranks agree on before they launch a CUDA graph")


@dataclass(eq=False, slots=True)
class Meeting:
    """A collective as one of its members comes to it.

    Attributes:
        call: the member's operand and what it came to.
        members: the ranks of the group, in order of position.
        position: this member's.
        header: what the other members compare with theirs.
        shapes: what operands the members must bring, in order of position.
        expected: bytes of these.
        notes: what the group found out about the collective, for the next time; by what is noted. `QUICK`: a `Quick`.
    """

    call: Call
    members: tuple[int, ...]
    position: int
    header: Header
    shapes: tuple[tuple[int, ...], ...]
    expected: tuple[int, ...]
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def collective(self) -> Collective:
        return self.call.collective

    @property
    def operand(self) -> Array:
        return self.call.operand

    def check(self, headers: list[Header]) -> None:
        """Compare the headers of all members, in order of position, before any data moves.

        Raises:
            MismatchError: they came to different collectives, or brought operands that do not fit.
        """
        check_headers(self.header, self.expected, headers)


_Facts = tuple[tuple[int, ...], int, Header, tuple[tuple[int, ...], ...], tuple[int, ...], dict[str, Any]]
"""All of a meeting but its call."""
_MOST_KNOWN = 10_000
"""Collectives of which a group knows these; a program has fewer."""


def see_late() -> str:
    """What to do about a rank that does not come."""
    return f"see what that rank does; it may hang, or be slow: then {more_time()}"


class SpmdGroup(ABC):
    """One rank of a mesh in a process of its own.

    A subclass moves the data of one collective (`begin`), and messages (`send`, `receive`, `abort`). Every wait of it
    ends after `seconds`, when a peer has died, or when one has aborted, with a `PeerError`. Only the driver may let the
    others wait for a message as long as it likes, while it lives and is not stopped.

    Args:
        mesh: the mesh of all ranks.
        rank: the one of this process.
        seconds: how long a rank waits for others at a collective.
    """

    takes_device_arrays = False

    def __init__(self, mesh: Mesh, rank: int, seconds: float) -> None:
        self.mesh = mesh
        self.rank = rank
        self.ranks = (rank,)
        self.seconds = seconds
        self._members: dict[tuple[Axis, ...], tuple[int, ...]] = {}
        self._started: dict[Call, Finish] = {}
        self.runs = 0
        self._known: dict[int, tuple[Collective, np.dtype[Any], tuple[int, ...], _Facts]] = {}

    @classmethod
    @abstractmethod
    def join(cls, mesh: Mesh, seconds: float) -> Self:
        """Meet the other ranks of this run, which the launcher's environment tells of.

        Raises:
            IrparError: there is no launcher, or not as many ranks as the mesh has, or one did not come.
        """

    @abstractmethod
    def begin(self, meeting: Meeting) -> Finish:
        """Let a collective of two members or more begin; all members begin theirs in the same order.

        Raises:
            MismatchError: see `Meeting.check`; here or when it is finished.
            PeerError: see the class; here or when it is finished.
        """

    @abstractmethod
    def send(self, rank: int, message: bytes) -> None:
        """See `Messenger.send`."""

    @abstractmethod
    def receive(self, rank: int) -> bytes | bytearray | memoryview:
        """See `Messenger.receive`."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """See `Messenger.abort`."""

    @abstractmethod
    def close(self) -> None:
        """See `Group.close`."""

    @abstractmethod
    def post(self, rank: int, channel: int, content: bytes) -> None:
        """Send to a rank, which takes it in the same run by `collect`, in order; does not wait for that.

        Raises:
            PeerError: it is gone, or has not made room in time.
        """

    @abstractmethod
    def collect(self, call: Call, rank: int, channel: int) -> bytes | bytearray | memoryview:
        """What a rank has posted to this one.

        Raises:
            PeerError: see the class.
        """

    def agree(self, choice: int) -> list[int]:
        """See `CapturingGroup.agree`; by what goes from rank to rank."""
        call = Call(self.rank, self.mesh.coords(self.rank), _AGREEMENT, np.asarray(choice, np.int64))
        others = [rank for rank in range(self.mesh.size) if rank != self.rank]
        for rank in others:
            self.post(rank, _AGREEMENT.id, call.operand.tobytes())
        found = {rank: bytes(self.collect(call, rank, _AGREEMENT.id)) for rank in others}
        found[self.rank] = call.operand.tobytes()
        return [int.from_bytes(found[rank], sys.byteorder) for rank in range(self.mesh.size)]

    def begin_run(self) -> None:
        """See `Group.begin_run`."""
        self.runs += 1

    def start(self, call: Call) -> None:
        """See `Group.start`."""
        self._started[call] = self._begin(call)

    def exchange(self, waiting: Mapping[int, Call]) -> dict[int, Array]:
        """See `Group.exchange`."""
        return {self.rank: self._exchange(waiting[self.rank])}

    def _exchange(self, call: Call) -> Array:
        if not self._started:
            collective, operand = call.collective, call.operand
            known = self._known.get(id(collective))
            if known is not None:
                found, dtype, shape, facts = known
                if found is collective and operand.shape == shape and operand.dtype == dtype:
                    quick: Quick | None = facts[-1].get(QUICK)
                    if quick is not None and (result := quick(call)) is not None:
                        return result
        return (self._started.pop(call, None) or self._begin(call))()

    def repeat(self, call: Call) -> Callable[[], Array]:
        """See `RepeatingGroup.repeat`."""
        notes = self._meeting(call).notes

        def run() -> Array:
            if not self._started:
                quick: Quick | None = notes.get(QUICK)
                if quick is not None and (result := quick(call)) is not None:
                    return result
            return self._begin(call)()

        return run

    def members(self, axes: tuple[Axis, ...]) -> tuple[int, ...]:
        """The ranks that differ from this one only in these axes, in order of position."""
        found = self._members.get(axes)
        if found is None:
            found = next(tuple(group) for group in self.mesh.groups(axes) if self.rank in group)
            self._members[axes] = found
        return found

    def _begin(self, call: Call) -> Finish:
        partners = call.collective.partners(self.rank)
        if partners is not None:
            return self._begin_one(call, partners)
        meeting = self._meeting(call)
        if len(meeting.members) > 1:
            return self.begin(meeting)
        try:
            (result,) = execute(call.collective, [call.operand])
        except ValueError as error:
            raise self.mismatch(call, str(error)) from error
        return lambda: result

    def _begin_one(self, call: Call, partners: Partners) -> Finish:
        """Send to others, and take from one."""
        if partners.targets:
            content = encode(call.operand)
            for target in partners.targets:
                self.post(target, partners.channel, content)
        source = partners.source
        if source is None:
            return lambda: call.operand

        def take() -> Array:
            came: Array = np.asarray(decode(self.collect(call, source, partners.channel)))
            if (what := difference_of(came, call)) is not None:
                raise self.mismatch(call, f"{what}; it comes from rank {source}")
            return came

        return take

    def _meeting(self, call: Call) -> Meeting:
        """A meeting; all of it but the operand is found once for each collective of the program, dtype and shape."""
        collective, operand = call.collective, call.operand
        known = self._known.get(id(collective))
        if known is None or known[0] is not collective or known[1:3] != (operand.dtype, operand.shape):
            if len(self._known) > _MOST_KNOWN:
                self.forget_collectives()
            known = self._known[id(collective)] = (collective, operand.dtype, operand.shape, self._facts(call))
        return Meeting(call, *known[3])

    def forget_collectives(self) -> None:
        """Forget what was found out about collectives, and what that holds on to."""
        for *_, facts in self._known.values():
            facts[-1].clear()  # A `Quick` in there holds these notes.
        self._known.clear()

    def _facts(self, call: Call) -> _Facts:
        members = self.members(call.collective.axes)
        position = members.index(self.rank)
        shape = call.operand.shape
        shapes = EXECUTED[call.collective.kind].shapes(call.collective, [shape] * len(members))
        if shapes[position] != shape:
            raise self.mismatch(call, f"operand of {list(shape)}, where {list(shapes[position])} is called for")
        expected = expected_bytes(call, shapes)
        return members, position, Header.of(call, self.mesh), tuple(shapes), tuple(expected), {}

    def mismatch(self, call: Call, what: str) -> MismatchError:
        """The error of a call that cannot be executed, whatever the others bring."""
        return mismatch(call.collective.id, what, [call.describe(self.mesh)], CORRECT_PART)

    def late(self, call: Call, missing: Mapping[int, str]) -> PeerError:
        """The error of a wait that took too long.

        Args:
            call: where this rank waits.
            missing: rank that did not come, to where it is instead; "" where that is not known.
        """
        who = ", ".join(rank_text(self.mesh, rank) for rank in missing)
        first = min(missing)
        known = tuple(where for where in missing.values() if where)
        return PeerError(
            f"{who} did not come to collective {call.collective.id} in {self.seconds:g} s",
            rank=first,
            notes=(call.describe(self.mesh), *known),
            do=see_late(),
        )

    def reason_of_late(self, call: Call, error: PeerError) -> str:
        """What the others are told of the rank that `late` blames."""
        return "\n".join((f"it did not come to collective {call.collective.id} in {self.seconds:g} s", *error.notes))

    def failed(self, rank: int, reason: str) -> PeerError:
        """The error of a rank that said why it failed, or is gone."""
        first, *others = reason.splitlines() or ["it ended without a word"]
        notes = tuple(line.strip() for line in others)
        return PeerError(f"{rank_text(self.mesh, rank)} failed: {first}", rank=rank, notes=notes)
