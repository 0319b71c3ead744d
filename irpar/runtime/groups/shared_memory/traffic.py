"""What keeps the collectives and messages of one rank moving, whatever it waits for."""

import math
import os
import time
from collections import defaultdict, deque

import numpy as np

from irpar.ops.collectives.arrays import is_text
from irpar.runtime.groups.wire.header import HEADER_BYTES, Header, check_headers, is_agreed

from ...driver import DRIVER
from ..base import Array, Call
from ..results import EXECUTED
from ..spmd import Meeting, SpmdGroup
from .joining import Joined
from .moves import Moves
from .reductions import Reduction
from .slots import Slots
from .streams import Numbers, Streams
from .transfers import Parcel, Transfer, Whole, boxes
from .watch import TICK, State, Wait, Watch

_OFFER, _DATA, _FREE, _MESSAGE, _CHUNK, _POST = range(6)
"""Kinds of records: a rank comes to a collective; a part of an operand lies in a slot; a slot has been read; a message
begins; a part of it lies in a slot; as a message, but for a channel of a run."""
_MOST_WHOLE = 256 << 10
"""Bytes that a rank sends, to all others together, of an operand that goes whole to all members, where every member
needs all of it: with more, parts are quicker."""
_MOST_PARTLY = 48 << 10
"""As `_MOST_WHOLE`, where members need parts of it."""
_Place = tuple[int, int] | None
"""Run and channel of a post; None: it is a message."""
_SPINS = 20
"""How often a rank looks, and gives its core to others, before it sleeps."""
_FLUSH_SECONDS = 5.0
"""Seconds that a rank stays at its end for others to take what it has sent."""


class Traffic:
    """One rank's side of all that moves.

    Args:
        group: the group of the rank.
        joined: what it shares with the others.
    """

    def __init__(self, group: SpmdGroup, joined: Joined) -> None:
        self._group = group
        self._rank = group.rank
        self._segment = segment = joined.segment
        self.watch = Watch(group, joined)
        self._streams = Streams(segment, group.rank)
        self._slots = Slots(segment, group.rank)
        peers = [rank for rank in range(segment.layout.count) if rank != group.rank]
        self._begun = dict.fromkeys(peers, 0)
        self._came = dict.fromkeys(peers, 0)
        self._underway: dict[tuple[int, int], Transfer] = {}
        self._numbers: dict[Transfer, dict[int, int]] = {}
        self._early: dict[tuple[int, int], bytes] = {}
        self._sending: list[Transfer] = []
        self._kept: dict[tuple[Transfer, int, int, int], int] = {}
        self._inbox: dict[int, deque[bytes | bytearray]] = {peer: deque() for peer in peers}
        self._posted: defaultdict[tuple[int, int, int], deque[bytes | bytearray]] = defaultdict(deque)
        self._coming: dict[int, tuple[bytearray, _Place]] = {}
        self._came_bytes: dict[int, int] = {}

    # -- collectives --------------------------------------------------------------------------------------------

    def begin(self, meeting: Meeting) -> Transfer:
        """Come to a collective: tell the other members, and send what there is room for.

        The rest goes whenever this rank waits for something, at the latest when it finishes this collective; while it
        computes nothing goes.

        The n-th collective that two ranks have in common is the n-th on both; headers tell whether it is the same.

        Raises:
            ValueError: the collective's attributes do not fit the operand.
            MismatchError: another member came to something else.
        """
        made = _transfer(meeting, self._streams.longest - HEADER_BYTES - 1, self._segment.layout.slot)
        offer = made.header + made.offer()
        numbers = self._numbers[made] = {}
        for peer in made.peers:
            number = numbers[peer] = self._begun[peer]
            self._begun[peer] = number + 1
            self._underway[peer, number] = made
            self._streams.send(peer, _OFFER, 0, (0, 0, 0), offer)
        for peer, number in numbers.items():
            early = self._early.pop((peer, number), None)
            if early is not None:
                self._meet(made, peer, memoryview(early))
        self._sending.append(made)
        self._move()
        return made

    def finish(self, made: Transfer) -> Array:
        """Wait for the result of a collective, and until the others have what they need of this rank for it.

        Raises:
            ValueError: the operands have none.
            MismatchError: another member came to something else.
            PeerError: a rank failed, or one did not come in time.
        """
        if not self._spin(made):
            self._wait(Wait(State.WAITING, lambda: made.is_done, made.missing, lambda: made.absent, made.meeting.call))
        for place in self._numbers.pop(made).items():
            del self._underway[place]
        return made.result()

    def _spin(self, made: Transfer) -> bool:
        """Look for the result a few times; whether it is there."""
        for _ in range(_SPINS):
            if made.is_done and self._streams.is_flushed:
                return True
            os.sched_yield()
            self._move()
        return False

    def _meet(self, made: Transfer, peer: int, offered: memoryview) -> None:
        """A member has come: check that it is at the same collective."""
        meeting = made.meeting
        nbytes = meeting.expected[meeting.members.index(peer)]
        if not is_agreed(meeting.header, nbytes, offered):
            check_headers(meeting.header, [nbytes], [Header.unpack(bytes(offered[:HEADER_BYTES]))])
        made.came(peer, offered[HEADER_BYTES:])

    # -- messages -----------------------------------------------------------------------------------------------

    def send(self, peer: int, message: bytes) -> None:
        """See `Messenger.send`."""
        self._send(peer, _MESSAGE, (len(message), 0, 0), message, f"a message of {len(message):,} bytes")

    def post(self, peer: int, run: int, channel: int, content: bytes) -> None:
        """See `SpmdGroup.post`."""
        self._send(peer, _POST, (len(content), run, channel), content, f"{len(content):,} bytes on channel {channel}")

    def _send(self, peer: int, kind: int, numbers: Numbers, message: bytes, text: str) -> None:
        """Send bytes; those of one peer in one piece, one after the other."""
        is_short = len(message) <= self._streams.longest
        self._streams.send(peer, kind, is_short, numbers, message if is_short else b"")
        self.watch.check_faults()
        wait = Wait(State.SENDING, lambda: is_short or self._slots.is_free, lambda: (peer,), lambda: (peer,))
        wait.text = f"sending {text} to rank {peer}"
        self._wait(wait)
        if not is_short:
            data = np.frombuffer(message, np.uint8)
            for place in boxes(data.shape, self._segment.layout.slot):
                self._wait(wait)
                part = data[place]
                slot = self._slots.put(part, 1)
                self._streams.send(peer, _CHUNK, 0, (slot, part.size, 0))
            self._wait(wait)

    def receive(self, peer: int) -> bytes | bytearray:
        """See `Messenger.receive`."""
        inbox = self._inbox[peer]
        # The driver may be idle between two runs for as long as it likes.
        is_bounded = peer != DRIVER
        wait = Wait(State.RECEIVING, lambda: bool(inbox), lambda: (peer,), lambda: (peer,), is_bounded=is_bounded)
        self._wait(wait)
        return inbox.popleft()

    def collect(self, call: Call, peer: int, run: int, channel: int) -> bytes | bytearray:
        """See `SpmdGroup.collect`."""
        posted = self._posted[peer, run, channel]
        self._wait(Wait(State.WAITING, lambda: bool(posted), lambda: (peer,), lambda: (peer,), call))
        content = posted.popleft()
        if not posted:
            del self._posted[peer, run, channel]
        return content

    def close(self) -> None:
        """Leave, once the others find what was sent to them."""
        until = time.monotonic() + min(_FLUSH_SECONDS, self._group.seconds)
        try:
            while not self._streams.is_flushed and time.monotonic() < until:
                self._move()
                self.watch.check_faults()
                self._streams.sleep(TICK)
        finally:
            self.watch.leave()

    # -- what moves them ----------------------------------------------------------------------------------------

    def _wait(self, wait: Wait) -> None:
        """Keep everything moving until something is there, and all that this rank has sent is where others find it.

        What waits for room would not move while this rank computes, and others would wait for it.

        Raises:
            PeerError: it will not come.
            MismatchError: ranks do not fit together.
        """
        spins = 0
        while not (wait.is_done() and self._streams.is_flushed):
            if self._move():
                spins, wait.has_moved = 0, True
            elif spins < _SPINS:
                spins += 1
                os.sched_yield()
            else:
                self._streams.quiet()
                if not self._move():
                    self._streams.sleep(TICK)
                    if not self._move():
                        wait.unread = self._streams.full
                        self.watch.look(wait)
                        self._streams.forget(self.watch.gone)
        self.watch.done(wait)

    def _move(self) -> bool:
        """Take what has come, and send what can be sent; whether anything came or went."""
        moved = self._streams.poll(self._deliver)
        if self._sending:
            for made in self._sending:
                while (parcel := made.parcel()) is not None and self._ship(made, parcel):
                    made.sent()
                    moved = True
            self._sending = [made for made in self._sending if not made.is_sent]
        return moved

    def _ship(self, made: Transfer, parcel: Parcel) -> bool:
        """Send a part; False where there is no room for it."""
        found = self._slots.find(made, parcel.is_held)
        if found is None:
            return False
        slot, is_held = found
        nbytes = self._slots.fill(slot, parcel.source, len(parcel.targets))
        numbers = self._numbers[made]
        for target in parcel.targets:
            told = (numbers[target], parcel.part, slot << 32 | nbytes)
            self._streams.send(target, _DATA, parcel.way << 1 | is_held, told)
        return True

    def _deliver(self, peer: int, kind: int, flag: int, numbers: Numbers, payload: memoryview) -> None:
        _TAKE[kind](self, peer, flag, numbers, payload)

    def _take_offer(self, peer: int, flag: int, numbers: Numbers, payload: memoryview) -> None:
        number = self._came[peer]
        self._came[peer] = number + 1
        made = self._underway.get((peer, number))
        if made is None:
            self._early[peer, number] = bytes(payload)
        else:
            self._meet(made, peer, payload)

    def _take_data(self, peer: int, flag: int, numbers: Numbers, payload: memoryview) -> None:
        number, part, where = numbers
        slot, nbytes = where >> 32, where & 0xFFFFFFFF
        made = self._underway[peer, number]
        way, is_held = flag >> 1, bool(flag & 1)
        data = self._segment.slot(peer, slot, np.dtype(np.uint8), nbytes)
        if made.take(peer, way, part, data, is_held):
            self._kept[made, peer, way, part] = slot
        else:
            self._streams.send(peer, _FREE, 0, (slot, 0, 0))
        for rank, held_way, held_part in made.released():
            self._streams.send(rank, _FREE, 0, (self._kept.pop((made, rank, held_way, held_part)), 0, 0))

    def _take_free(self, peer: int, flag: int, numbers: Numbers, payload: memoryview) -> None:
        self._slots.free(numbers[0])

    def _take_message(self, peer: int, flag: int, numbers: Numbers, payload: memoryview) -> None:
        self._take_bytes(peer, flag, numbers[0], payload, None)

    def _take_post(self, peer: int, flag: int, numbers: Numbers, payload: memoryview) -> None:
        self._take_bytes(peer, flag, numbers[0], payload, numbers[1:])

    def _take_bytes(self, peer: int, flag: int, size: int, payload: memoryview, place: "_Place") -> None:
        if flag:
            self._keep(peer, place, bytes(payload))
        else:
            self._coming[peer], self._came_bytes[peer] = (bytearray(size), place), 0

    def _keep(self, peer: int, place: "_Place", content: bytes | bytearray) -> None:
        """All of a message or a post has come."""
        (self._inbox[peer] if place is None else self._posted[peer, *place]).append(content)

    def _take_chunk(self, peer: int, flag: int, numbers: Numbers, payload: memoryview) -> None:
        slot, nbytes, _ = numbers
        (coming, place), first = self._coming[peer], self._came_bytes[peer]
        coming[first : first + nbytes] = self._segment.slot(peer, slot, np.dtype(np.uint8), nbytes).data
        self._came_bytes[peer] = first + nbytes
        self._streams.send(peer, _FREE, 0, (slot, 0, 0))
        if first + nbytes == len(coming):
            del self._coming[peer]
            self._keep(peer, place, coming)


_TAKE = (
    *(Traffic._take_offer, Traffic._take_data, Traffic._take_free),
    *(Traffic._take_message, Traffic._take_chunk, Traffic._take_post),
)
"""What takes each kind of record."""


def _transfer(meeting: Meeting, room: int, slot: int) -> Transfer:
    """The transfer of a collective.

    Args:
        meeting: what the members agree on.
        room: bytes of an operand that can be sent with the header.
        slot: bytes of a part.

    Raises:
        ValueError: the attributes do not fit the operand.
    """
    operand = meeting.operand
    longest = max(map(math.prod, meeting.shapes)) * operand.itemsize
    # Whole they go to each member; in parts a rank sends less than two of them, whatever the number of members.
    execution = EXECUTED[meeting.collective.kind]
    most = (_MOST_WHOLE if execution.reads_all else _MOST_PARTLY) // (len(meeting.members) - 1)
    is_short = longest <= min(room, most)
    if is_text(operand.dtype) or is_short:
        return Whole(meeting, room, slot)
    return (Moves if execution.pieces is None else Reduction)(meeting, slot, execution)
