"""Byte strings of any size between the ranks of an MPI communicator; no call of it waits."""

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from irpar.ops.collectives.record import Steps
from irpar.runtime.groups.base import Array
from irpar.runtime.groups.recycled import Recycled

INLINE = 1 << 18
"""Bytes of content that travel with the size: to copy so much takes less time than a message of its own, and what goes
in one message can go by a request that is kept."""

CHUNK = 1 << 26
"""Largest message in bytes. Counts of many MPI libraries end at 2^31 - 1; and a wait is bounded by the time since a
message last came to its end, which on a slow network one must do now and then."""

_LOOKS = 32
"""How often in turn MPI is asked for a message that has begun to come: others go on meanwhile only at each of these."""

_SIZE = struct.Struct("<Q")


def beginning(size: int, head: bytes) -> bytes:
    """How a parcel begins whose content has this many bytes; where these are at most `INLINE`, they follow."""
    return _SIZE.pack(size) + head


def _has_ended(request: Any) -> bool:
    """Whether a request has come to its end; MPI moves a little of it at each look."""
    return any(request.Test() for _ in range(_LOOKS))


class Outgoing:
    """A parcel on its way; its buffers live as long as MPI may read them."""

    def __init__(self, requests: list[Any], buffers: tuple[Any, ...]) -> None:
        self._requests = requests
        self._buffers = buffers

    def is_done(self) -> bool:
        """Whether MPI reads the buffers no more."""
        while self._requests and self._requests[-1].Test():
            self._requests.pop()
        return not self._requests


class Arrival:
    """The begin of a parcel that has come.

    Attributes:
        rank, tag: where from.
        head: what its sender put before the content.
        size: bytes of the content.
        inline: the content where it is small.
    """

    def __init__(self, rank: int, tag: int, first: bytes, head_bytes: int) -> None:
        self.rank = rank
        self.tag = tag
        (self.size,) = _SIZE.unpack_from(first)
        rest = memoryview(first)[_SIZE.size :]
        self.head = bytes(rest[:head_bytes])
        self.inline = rest[head_bytes:]


class Parcels:
    """What one rank sends and receives. Parcels of one rank and tag arrive in order.

    Args:
        mpi: the module `mpi4py.MPI`.
        comm: a communicator that nobody else uses.

    Attributes:
        moved: goes up whenever content was sent or came.
        new: makes the arrays of results.
        byte: MPI's type of what is sent.
        status: what the last look for a message found.
        start_all: starts requests that are kept.
    """

    chunk = CHUNK

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self.comm = comm
        self.moved = 0
        self.new = Recycled().empty
        self.byte = mpi.BYTE
        self.status = mpi.Status()
        self.start_all: Callable[[Sequence[Any]], None] = mpi.Prequest.Startall
        self._sending: list[Outgoing] = []
        self._receiving: list[tuple[Any, Any]] = []

    def post(self, rank: int, tag: int, head: bytes, content: Array) -> Outgoing:
        """Send; the content (bytes as uint8) may not be written to until that is done."""
        first = beginning(content.size, head)
        requests = []
        if content.size <= INLINE:
            first += content.tobytes()
        requests.append(self._send(first, rank, tag))
        if content.size > INLINE:
            for start in range(0, content.size, self.chunk):
                requests.append(self._send(content[start : start + self.chunk], rank, tag))
        outgoing = Outgoing(requests, (first, content))
        if not outgoing.is_done():
            self._sending.append(outgoing)
        return outgoing

    def sending(self, request: Any, first: Array) -> Outgoing | None:
        """What is sent by a request; None where MPI has taken it."""
        if request.Test():
            return None
        outgoing = Outgoing([request], (first,))
        self._sending.append(outgoing)
        return outgoing

    def ended(self, requests: Sequence[Any]) -> Steps[None]:
        """Wait until requests that are kept have come to their end; MPI looks for all of them in one call."""
        look = self._mpi.Request.Testsome
        # None: all have.
        while (found := look(requests)) is not None:
            if found:
                self.moved += len(found)
            else:
                yield

    def arrival(self, rank: int, tag: int, head_bytes: int) -> Steps[Arrival]:
        """Wait for the next parcel of a rank and tag."""
        status = self._mpi.Status()
        while (message := self.comm.Improbe(rank, tag, status)) is None:
            yield
        first = bytearray(status.Get_count(self._mpi.BYTE))
        yield from self._received(message.Irecv([first, self._mpi.BYTE]), first)
        return Arrival(rank, tag, bytes(first), head_bytes)

    def read(self, arrival: Arrival, into: Array) -> Steps[None]:
        """Receive the content of a parcel that has arrived, before any other of its rank and tag.

        Args:
            arrival: what `arrival` gave.
            into: uint8, as many as its `size`.
        """
        if arrival.size <= INLINE:
            into[...] = np.frombuffer(arrival.inline, np.uint8)
            return
        requests = []
        for start in range(0, into.size, self.chunk):
            room = into[start : start + self.chunk]
            requests.append((self.comm.Irecv([room, self._mpi.BYTE], arrival.rank, arrival.tag), room))
        for request, room in requests:
            yield from self._received(request, room)

    def any_arrival(self, tag: int) -> tuple[int, bytes] | None:
        """The sender and content of a small parcel of that tag, where one has come."""
        status = self._mpi.Status()
        message = self.comm.Improbe(self._mpi.ANY_SOURCE, tag, status)
        if message is None:
            return None
        first = bytearray(status.Get_count(self._mpi.BYTE))
        message.Recv([first, self._mpi.BYTE])
        arrival = Arrival(status.Get_source(), tag, bytes(first), 0)
        return arrival.rank, bytes(arrival.inline)

    @property
    def is_moving(self) -> bool:
        """Whether something is on its way."""
        return bool(self._receiving or self._sending)

    def sent(self) -> bool:
        """Let what is on its way go on; whether all has been sent."""
        left = [outgoing for outgoing in self._sending if not outgoing.is_done()]
        self.moved += len(self._sending) - len(left)
        self._sending = left
        return not left

    def give_up(self) -> None:
        """Wait no more for the rest of what has begun to come."""
        for request, _ in self._receiving:
            request.Cancel()

    def drain(self) -> bool:
        """Throw away what comes, so that its senders can end; whether nothing is left on its way."""
        self._receiving = [pair for pair in self._receiving if not pair[0].Test()]
        status = self._mpi.Status()
        while (message := self.comm.Improbe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status)) is not None:
            room = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
            self._receiving.append((message.Irecv([room, self._mpi.BYTE]), room))
        return self.sent() and not self._receiving

    def _send(self, data: Any, rank: int, tag: int) -> Any:
        return self.comm.Isend([data, self._mpi.BYTE], rank, tag)

    def _received(self, request: Any, room: Any) -> Steps[None]:
        pair = (request, room)
        self._receiving.append(pair)
        while not _has_ended(request):
            yield
        self._receiving = [each for each in self._receiving if each is not pair]
        self.moved += 1
