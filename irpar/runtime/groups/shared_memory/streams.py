"""Streams of records from one rank to another: a ring for each two ranks and direction.

A record is a head and a payload. Its sender writes it, posts the semaphore of the ring (see `semaphores`), and rings
the bell of the receiver where that says that it sleeps. What the receiver has read it tells with the records that it
sends back, so that the sender knows what room there is; where it sends none, a record of its own tells it, for which
there is always room. What finds no room in the ring waits in a list of the sender: sending never blocks.
"""

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from .segment import Segment

_HEAD = struct.Struct("<HHIqqqq")
_ALIGN = 64
_RESERVE = 1024
"""Bytes of a ring that only credits may use: at most a few are underway, one for each eighth of the other ring."""
BARE = 64
"""Bytes of a ring that a record without a payload takes: wherever it begins, it ends before the ring does."""
_SKIP = 0xFFFF
_CREDIT = 0xFFFE
_ASLEEP = 8
"""The word of a rank's board that says that it sleeps, or is about to."""

T = TypeVar("T")
Record = tuple[int, int, int, int, int, int, int]
"""Kind, flag, bytes of the payload, three numbers, and the bytes that its sender has read of what this rank sent."""
Numbers = tuple[int, int, int]
"""What a kind of record tells, beside its payload."""
Payload = tuple[bytes | memoryview, ...]
"""Bytes in pieces, which may not change until they are written."""
Take = Callable[[T, int, int, Numbers, memoryview], None]
"""Takes a record that came, for its first argument: the rank that sent it, its flag, numbers and payload, which is gone
afterwards."""


def room_of(length: int) -> int:
    """Bytes of a ring that a record with a payload of this many takes."""
    return -(-(_HEAD.size + length) // _ALIGN) * _ALIGN


class Lane:
    """The two rings between this rank and another.

    Attributes:
        has_none: whether no record has come; otherwise takes its token.
        comes: waits some seconds for a record, and takes its token; whether one came.
        written: bytes that this rank has written, records that wait for room apart.
        freed: bytes of these that the other is known to have read.
        most: by how many bytes more than `freed` may be written where there is to be room for a `BARE` record.
        begun: collectives that this rank has come to with the other.
        came: those that the other has come to.
    """

    __slots__ = (
        *("_credited", "_in", "_out", "_post", "_ring", "_taken", "_words", "backlog", "begun", "came", "comes"),
        *("freed", "has_none", "most", "peer", "size", "written"),
    )

    def __init__(self, segment: Segment, rank: int, peer: int) -> None:
        self.peer = peer
        self.size = segment.layout.ring
        self._out, self._in = segment.ring(rank, peer), segment.ring(peer, rank)
        self._post, self._ring = segment.token(rank, peer).post, segment.bell(peer).post
        self._words = segment.board(peer)[0]
        token = segment.token(peer, rank)
        self.has_none, self.comes = token.refuses, token.wait
        self.written = self.freed = self._taken = self._credited = 0
        self.most = self.size - _RESERVE - BARE
        self.begun = self.came = 0
        self.backlog: deque[tuple[int, int, Numbers, Payload]] = deque()

    def tell(self, kind: int, flag: int, first: int, second: int, third: int) -> None:
        """Write a `BARE` record, for which there is room."""
        written, taken = self.written, self._taken
        _HEAD.pack_into(self._out, written % self.size, kind, flag, 0, first, second, third, taken)
        self.written, self._credited = written + BARE, taken
        self._post()
        if self._words[_ASLEEP]:
            self._ring()

    def put(self, kind: int, flag: int, numbers: Numbers, payload: Payload, reserve: int = _RESERVE) -> bool:
        """Write a record; False where there is no room."""
        length = sum(map(len, payload))
        return self.put_sized(kind, flag, numbers, payload, length, room_of(length), reserve)

    def has_room(self, need: int) -> bool:
        """Whether a record that takes so many bytes can be written now."""
        start = self.written % self.size
        skip = self.size - start if start + need > self.size else 0
        return self.written + skip + need - self.freed <= self.size - _RESERVE

    def put_sized(
        self, kind: int, flag: int, numbers: Numbers, payload: Payload, length: int, need: int, reserve: int = _RESERVE
    ) -> bool:
        """As `put`, a payload of so many bytes, in so many of the ring."""
        start = self.written % self.size
        skip = self.size - start if start + need > self.size else 0
        if self.written + skip + need - self.freed > self.size - reserve:
            return False
        if skip:
            _HEAD.pack_into(self._out, start, _SKIP, 0, 0, 0, 0, 0, 0)
            start = 0
        _HEAD.pack_into(self._out, start, kind, flag, length, *numbers, self._taken)
        start += _HEAD.size
        for piece in payload:
            self._out[start : (start := start + len(piece))] = piece
        self.written += skip + need
        self._credited = self._taken
        self._post()
        if self._words[_ASLEEP]:
            self._ring()
        return True

    def read(self, takes: Sequence[Take[T]], taker: T) -> None:
        """Read the record whose token was taken."""
        start = self._taken % self.size
        kind, flag, length, first, second, third, credit = _HEAD.unpack_from(self._in, start)
        if kind == _SKIP:
            self._taken += self.size - start
            start = 0
            kind, flag, length, first, second, third, credit = _HEAD.unpack_from(self._in, start)
        self.freed = credit
        if kind != _CREDIT:
            begin = start + _HEAD.size
            takes[kind](taker, self.peer, flag, (first, second, third), self._in[begin : begin + length])
        self.free(room_of(length))

    def look(self) -> Record:
        """The record whose token was taken; it is to be `read`, or where it is `BARE` to be freed."""
        found: Record = _HEAD.unpack_from(self._in, self._taken % self.size)
        if found[0] == _SKIP:
            self._taken += self.size - self._taken % self.size
            found = _HEAD.unpack_from(self._in, 0)
        return found

    def payload(self, length: int) -> memoryview:
        """So many bytes of the payload of the record that was looked at; they lie where they are until it is freed."""
        start = self._taken % self.size + _HEAD.size
        return self._in[start : start + length]

    def free(self, need: int) -> None:
        """A record that takes so many bytes has been read: from here on its sender may be told."""
        self._taken += need
        # Early enough for the longest record, which may leave as much as its length empty at the end.
        if self._taken - self._credited > self.size // 8:
            self.put(_CREDIT, 0, (0, 0, 0), (), 0)

    def flush(self) -> None:
        """Write what waits for room."""
        while self.backlog and self.put(*self.backlog[0]):
            self.backlog.popleft()


class Streams:
    """What a rank sends to the others, and what they send to it.

    Args:
        segment: where the rings are.
        rank: this rank.

    Attributes:
        waiting: the rings for which something waits for room.
    """

    def __init__(self, segment: Segment, rank: int) -> None:
        self._segment = segment
        self._lanes = {peer: Lane(segment, rank, peer) for peer in range(segment.layout.count) if peer != rank}
        self._coming = [(lane.has_none, lane) for lane in self._lanes.values()]
        self._bell = segment.bell(rank)
        self._words = segment.board(rank)[0]
        self.waiting: set[Lane] = set()

    def lane(self, peer: int) -> Lane:
        """The rings between this rank and another."""
        return self._lanes[peer]

    @property
    def longest(self) -> int:
        """Bytes that the payload of a record may have."""
        return self._segment.layout.longest

    def send(self, peer: int, kind: int, flag: int, numbers: Numbers, *payload: bytes | memoryview) -> None:
        """Send a record."""
        lane = self._lanes[peer]
        if lane.backlog or not lane.put(kind, flag, numbers, payload):
            lane.backlog.append((kind, flag, numbers, payload))
            self.waiting.add(lane)

    def poll(self, takes: Sequence[Take[T]], taker: T) -> bool:
        """Let all that has come be taken, and write what waited for room; whether anything came.

        Args:
            takes: what takes records, by kind.
            taker: for whom.
        """
        moved = False
        for has_none, lane in self._coming:
            while not has_none():
                moved = True
                lane.read(takes, taker)
        if self.waiting:
            for lane in self.waiting:
                lane.flush()
            self.waiting = {lane for lane in self.waiting if lane.backlog}
        return moved

    def lanes(self, peers: Iterable[int]) -> list[Lane]:
        """The rings between this rank and each of some others."""
        return [self._lanes[peer] for peer in peers]

    @property
    def is_flushed(self) -> bool:
        """Whether all that was sent is where the others find it."""
        return not self.waiting

    @property
    def full(self) -> list[int]:
        """The ranks for which something waits for room."""
        return [lane.peer for lane in self.waiting]

    def forget(self, peers: Iterable[int]) -> None:
        """These ranks read nothing any more."""
        for peer in peers:
            self.waiting.discard(self._lanes[peer])
            self._lanes[peer].backlog.clear()

    def quiet(self) -> None:
        """Say that this rank sleeps, and forget how often its bell rang: what comes after this wakes `sleep`.

        The post orders what is said before the look at what came that follows. Should a processor order it otherwise,
        as aarch64's may, a bell is missed now and then, and `sleep` lasts to its end.
        """
        self._words[_ASLEEP] = 1
        self._bell.post()
        while self._bell.take():
            pass

    def stir(self) -> None:
        """Sleep not after all."""
        self._words[_ASLEEP] = 0

    def sleep(self, seconds: float) -> None:
        """Sleep until something comes, for some seconds at most."""
        self._bell.wait(seconds)
        self._words[_ASLEEP] = 0
