"""What an MPI rank does a step at a time, whenever it calls MPI: collectives, and what comes for it."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from irpar.ops.collectives.record import Steps
from irpar.runtime.groups.base import Array
from irpar.runtime.groups.pairwise import exchange, together
from irpar.runtime.groups.spmd import Meeting
from irpar.runtime.groups.wire.header import CORRECT_PART, Header, check_headers, mismatch

from .parcels import Outgoing, Parcels


class Work:
    """Steps that are asked to go on until they give their result; an error that one raised, all later ones raise too.

    Attributes:
        result: set when it is done.
    """

    result: Array

    def __init__(self, steps: Steps[Array]) -> None:
        self._steps = steps
        self._error: BaseException | None = None
        self.is_done = False

    def advance(self) -> bool:
        """Go on as far as can be; whether that was to the end."""
        if self._error is not None:
            raise self._error
        if not self.is_done:
            try:
                next(self._steps)
            except StopIteration as end:
                self.is_done, self.result = True, end.value
            except BaseException as error:
                self._error = self._told(error)
                raise self._error from error
        return self.is_done

    def _told(self, error: BaseException) -> BaseException:
        """An error of a step, as it is raised."""
        return error


class Exchange(Work):
    """A collective that has begun: its rounds over MPI.

    Args:
        meeting: that.
        parcels: what else the rank sends and receives.
        tag: of its first round.
        reducers: how many members reduce, where not all do.

    Attributes:
        tag: of its first round; those of later rounds have the next.
        awaited: ranks of which something is waited for.
    """

    def __init__(self, meeting: Meeting, parcels: Parcels, tag: int, reducers: int | None = None) -> None:
        super().__init__(exchange(meeting, self, parcels.new, reducers))
        self.meeting = meeting
        self._partners = partners_of(meeting, reducers)
        self.tag = tag
        self.awaited: list[int] = []
        self._parcels = parcels
        self._is_first = True

    def _told(self, error: BaseException) -> BaseException:
        header = self.meeting.header
        return mismatch(header.id, str(error), [header.text], CORRECT_PART) if isinstance(error, ValueError) else error

    def round(self, sends: Sequence[Array | None], receives: Sequence[Array | None]) -> Steps[None]:
        """See `Link.round`; the first one begins with the headers of all members."""
        meeting, is_first = self.meeting, self._is_first
        self._is_first = False
        tag = self.tag if is_first else self.tag + 1
        head = meeting.header.pack() if is_first else b""
        outgoing: dict[int, Outgoing] = {}
        for place in self._partners:
            content = sends[place]
            if is_first or content is not None:
                outgoing[place] = self._parcels.post(meeting.members[place], tag, head, _bytes_of(content))
        come = [place for place in self._partners if is_first or receives[place] is not None]
        self._await(come)
        if is_first:
            yield  # What comes first is for the collectives over these axes that have begun before this one.
        arrivals = yield from together([self._arrival(place, tag, len(head)) for place in come])
        if is_first:
            headers = [Header.unpack(arrival.head) for arrival in arrivals]
            check_headers(meeting.header, [meeting.expected[place] for place in come], headers)
        self._await(come)
        yield from together(
            [self._content(place, arrival, receives[place]) for place, arrival in zip(come, arrivals, strict=True)]
        )
        self._await(outgoing)
        yield from together([self._sent(place, each) for place, each in outgoing.items()])

    def _await(self, places: Iterable[int]) -> None:
        self.awaited = [self.meeting.members[place] for place in places]

    def _arrival(self, place: int, tag: int, head_bytes: int) -> Steps[Any]:
        rank = self.meeting.members[place]
        arrival = yield from self._parcels.arrival(rank, tag, head_bytes)
        self.awaited.remove(rank)
        return arrival

    def _content(self, place: int, arrival: Any, into: Array | None) -> Steps[None]:
        room = _bytes_of(into)
        if arrival.size != room.size:
            raise ValueError(f"rank {arrival.rank} sent {arrival.size:,} bytes, where {room.size:,} are due")
        yield from self._parcels.read(arrival, room)
        self.awaited.remove(arrival.rank)

    def _sent(self, place: int, outgoing: Outgoing) -> Steps[None]:
        while not outgoing.is_done():
            yield
        self.awaited.remove(self.meeting.members[place])


def partners_of(meeting: Meeting, reducers: int | None) -> list[int]:
    """The positions of the members that a member sends to and takes from: where not all reduce, those that do."""
    count, own = len(meeting.members), meeting.position
    reach = count if reducers is None or own < reducers else reducers
    return [place for place in range(reach) if place != own]


def _bytes_of(array: Array | None) -> Array:
    """The bytes of a C-contiguous array, in place; of None, none."""
    return np.empty(0, np.uint8) if array is None else array.reshape(-1).view(np.uint8)
