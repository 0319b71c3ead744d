"""What keeps the collectives and messages of one rank moving, whatever it waits for."""

import math
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from irpar.ops.collectives.arrays import is_text
from irpar.runtime.groups.wire.header import HEADER_BYTES, Header, check_headers

from ...driver import DRIVER
from ..base import Array, Call
from ..recycled import Recycled
from ..results import EXECUTED
from ..spmd import Meeting, Quick, SpmdGroup
from .joining import Joined
from .moves import Moves
from .prompt import Prompts
from .quick import NOWHERE, OFFER, QuickPrompt
from .quick_reduction import PIECE, QuickReduction
from .reductions import Reduction
from .rooted import QuickRooted, Rooted, Roots
from .slots import IN_SLOT, TO_FREE, Slots
from .streams import Lane, Numbers, Streams
from .transfers import Parcel, Shipment, Texts, Transfer, boxes
from .watch import TICK, State, Wait, Watch

_DATA, _FREE, _MESSAGE, _CHUNK, _POST = range(1, 6)
"""Kinds of records, beside `OFFER` and `PIECE`: a part of an operand lies in a slot; a slot has been read; a message
begins; a part of it lies in a slot; as a message, but for a channel of a run."""
_MOST_WHOLE = 256 << 10
"""Bytes that a rank sends, to all others together, of an operand that goes whole to all members, where every member
needs all of it: with more, parts are quicker."""
_MOST_PARTLY = 48 << 10
"""As `_MOST_WHOLE`, where members need parts of it."""
_Place = tuple[int, int] | None
"""Run and channel of a post; None: it is a message."""
_BUSY_SPINS = 8
"""How often a rank looks before it gives its core to others, where each has one of its own."""
_QUICK_SPINS = 60
"""The same for what a `QuickPrompt` waits for: a look takes a tenth of the time, and members come within 10 us of each
other where they compute little."""
_SPINS = 3000
"""How often a rank looks at a ring, and gives its core to others, before it sleeps: for about 2 ms, since one that
sleeps on a core of its own takes 50 us and more to wake."""
_FEW_SPINS = 2
"""The same where ranks are more than cores."""
_SOON = 5e-3
"""Seconds that a rank sleeps for a record of one other rank, whatever else comes; afterwards all that comes moves."""
_SOON_CROWDED = 2e-2
"""The same where ranks are more than cores: others compute before the one that is waited for can."""
_FLUSH_SECONDS = 5.0
"""Seconds that a rank stays at its end for others to take what it has sent."""


class Traffic:
    """One rank's side of all that moves.

    Args:
        group: the group of the rank.
        joined: what it shares with the others.

    Attributes:
        rank: that rank.
        watch: its view of the others.
        early: offers of collectives that this rank has not come to, by rank and number: the slot of the operand, and
            what was offered.
        slept_for: the other rank that this one has slept for since `look_first_at_last`.
    """

    def __init__(self, group: SpmdGroup, joined: Joined) -> None:
        self._group = group
        self.rank = group.rank
        self._segment = segment = joined.segment
        self.watch = Watch(group, joined)
        self._streams = Streams(segment, group.rank)
        self._slots = Slots(segment, group.rank)
        peers = [rank for rank in range(segment.layout.count) if rank != group.rank]
        self._awaited: dict[tuple[int, int], Transfer] = {}
        self._underway: dict[tuple[int, int], Shipment] = {}
        self._numbers: dict[Shipment, dict[int, int]] = {}
        self.early: dict[tuple[int, int], tuple[int, bytes]] = {}
        self._sending: list[Shipment] = []
        self._unoffered: list[Transfer] = []
        self._kept: dict[tuple[Transfer, int, int, int], int] = {}
        self._pooled: dict[Shipment, int] = {}
        self._new = Recycled().empty
        has_cores = segment.layout.count <= segment.layout.cores
        self._is_crowded = not has_cores
        self._busy_spins, self._spins = (_BUSY_SPINS, _SPINS // max(1, len(peers))) if has_cores else (0, _FEW_SPINS)
        self._quick_spins, self._quick_yields = (_QUICK_SPINS, _SPINS) if has_cores else (0, 0)
        self._soon = _SOON if has_cores else _SOON_CROWDED
        self.slept_for: Lane | None = None
        self._inbox: dict[int, deque[bytes | memoryview]] = {peer: deque() for peer in peers}
        self._posted: defaultdict[tuple[int, int, int], deque[bytes | memoryview]] = defaultdict(deque)
        self._coming: dict[int, tuple[Array, _Place]] = {}
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
        make: Callable[[Meeting], Transfer] | None = meeting.notes.get("transfer")
        if make is None:
            make = meeting.notes["transfer"] = self._maker(meeting)
            meeting.notes["agreed"] = {}  # Headers of others that have been compared with this rank's.
        made = make(meeting)
        shipment = made if isinstance(made, Shipment) else None
        numbers = {}
        for peer in made.peers:
            lane = self._streams.lane(peer)
            number = numbers[peer] = lane.begun
            lane.begun += 1
            if shipment is not None:
                self._underway[peer, number] = shipment
        if shipment is not None:
            self._numbers[shipment] = numbers
        self.offer(made)
        self.await_rest(made)
        self._move()
        return made

    def quick(self, begun: Transfer, finish: Callable[[Callable[[], Transfer]], Array]) -> Quick | None:
        """What executes a collective that has begun, from the next time on; None where its operand is large."""
        prompts = begun.meeting.notes["transfer"]
        operand = begun.meeting.operand
        if isinstance(prompts, Prompts) and HEADER_BYTES + operand.nbytes <= self._segment.layout.slot:
            kind = QuickRooted if isinstance(prompts, Roots) else QuickPrompt
            return kind(self, self._streams, self._segment, self._slots, begun.meeting, prompts, finish).execute
        if isinstance(begun, Reduction) and begun.is_poolable and begun.is_read_twice:
            return QuickReduction(self, self._streams, self._segment, self._slots, begun, self._new, finish).execute
        return None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way: what came first of others is for what this rank begins next, or is `early`.

        What is quick relies on it: it takes records from rings by itself.
        """
        return not (self._awaited or self._underway or self._sending or self._unoffered or self._streams.waiting)

    def _maker(self, meeting: Meeting) -> Callable[[Meeting], Transfer]:
        """What makes the transfers of a collective."""
        operand, slot = meeting.operand, self._segment.layout.slot
        execution = EXECUTED[meeting.collective.kind]
        room = self._streams.longest - HEADER_BYTES
        if is_text(operand.dtype):
            return lambda meeting: Texts(meeting, room, slot)
        if self._is_crowded and Roots.fit(meeting, slot):
            return Roots(meeting, self._new)
        # Whole they go to each member; in parts a rank sends less than two of them, whatever the number of members.
        most = (_MOST_WHOLE if execution.reads_all else _MOST_PARTLY) // (len(meeting.members) - 1)
        if max(map(math.prod, meeting.shapes)) * operand.itemsize <= min(room, most):
            return Prompts(meeting, self._new)
        if execution.pieces is None:
            return lambda meeting: Moves(meeting, slot, execution)
        cores = self._segment.layout.cores
        return lambda meeting: Reduction(meeting, slot, execution, self._new, cores)

    def finish(self, made: Transfer) -> Array:
        """Wait for the result of a collective, and until the others have what they need of this rank for it.

        Raises:
            ValueError: the operands have none.
            MismatchError: another member came to something else.
            PeerError: a rank failed, or one did not come in time.
        """
        if not self._spin(made):
            call = made.meeting.call

            def absent() -> set[int]:
                return made.absent | self.watch.waiting_at(call.collective.id, made.held_up())

            self._wait(Wait(State.WAITING, lambda: self._is_done(made), made.missing, absent, call))
        if isinstance(made, Shipment):
            for place in self._numbers.pop(made).items():
                del self._underway[place]
            slot = self._pooled.pop(made, None)
            if slot is not None:
                self._slots.free_when_read(slot, self._streams.lanes(made.peers))
        return made.result()

    def _is_done(self, made: Transfer) -> bool:
        """Whether the result is there, and all that the others need of this rank for it is sent."""
        return made.is_done and made not in self._unoffered

    def _spin(self, made: Transfer) -> bool:
        """Look for the result a few times; whether it is there."""
        for spins in range(self._busy_spins + self._spins):
            if self._is_done(made) and self._streams.is_flushed:
                return True
            if spins >= self._busy_spins:
                os.sched_yield()
            self._move()
        return False

    def has_come(self, lane: Lane) -> bool:
        """Wait a little for a record, and take its token."""
        has_none = lane.has_none
        if not has_none():
            return True
        for _ in range(self._quick_spins):
            if not has_none():
                return True
        for _ in range(self._quick_yields):
            os.sched_yield()
            if not has_none():
                return True
        self.slept_for = lane
        return lane.comes(self._soon)

    def look_first_at_last(self, peers: list[Any]) -> None:
        """Put the member that this rank slept for, if it did, in front of the others.

        Where ranks take turns on cores the one that comes last is the same again: once it has come all have, and a rank
        sleeps once.

        Args:
            peers: lanes of members, each with what else is known of it.
        """
        lane, self.slept_for = self.slept_for, None
        if lane is not None:
            place = next((place for place, peer in enumerate(peers) if peer[0] is lane), 0)
            peers.insert(0, peers.pop(place))

    def take_up(self, made: Reduction, slot: int, numbers: dict[int, int]) -> None:
        """What was begun without this goes on as all else does.

        Args:
            made: that.
            slot: where the operand lies.
            numbers: which collective with each of the others it is.
        """
        self._numbers[made], self._pooled[made] = numbers, slot
        for place in numbers.items():
            self._underway[place] = made
        if not made.is_sent:
            self._sending.append(made)

    def await_rest(self, made: Transfer) -> None:
        """Some have still to come to the collective that this rank came to last with them, or came before it.

        Raises:
            MismatchError: one came to something else.
        """
        for peer in tuple(made.absent):
            place = peer, self._streams.lane(peer).begun - 1
            early = self.early.pop(place, None)
            if early is None:
                self._awaited[place] = made
            else:
                self.meet(made, peer, early[0], memoryview(early[1]))

    def offer(self, made: Transfer) -> None:
        """Tell the others that this rank has come: at once, or once all that was begun with them before is offered."""
        self._unoffered.append(made)
        self._offer_all()

    def _offer_all(self) -> bool:
        """Offer what can be offered; whether anything was. What stays is awaited, or awaits a slot."""
        held_up: set[int] = set()
        left = []
        for made in self._unoffered:
            if not held_up.isdisjoint(made.peers) or not self._is_offered(made):
                held_up.update(made.peers)
                left.append(made)
        has_offered = len(left) < len(self._unoffered)
        self._unoffered = left
        return has_offered

    def _is_offered(self, made: Transfer) -> bool:
        """Offer it, if that can be done."""
        if isinstance(made, Rooted):
            return made.is_sent or self._has_laid(made)
        told = (self._pool(made), 0, 0) if isinstance(made, Reduction) else (NOWHERE, 0, 0)
        offer = made.offer()
        for peer in made.peers:
            self._streams.send(peer, OFFER, 0, told, *offer)
        if isinstance(made, Shipment):
            self._sending.append(made)
        return True

    def _has_laid(self, made: Rooted) -> bool:
        """Lay what a member has for the others into a slot, and tell them.

        Those who read it tell so at once: what is free only with what they tell next may never be.
        """
        content = made.content()
        found = None if content is None else self._slots.find(made, False)
        if content is None or found is None:
            return False
        slot, peers = found[0], tuple(made.peers)
        nbytes = self._slots.lay(slot, made.known.header, content, len(peers))
        for peer in peers:
            self._streams.send(peer, OFFER, IN_SLOT | TO_FREE, (slot << 32 | nbytes, *made.known.mark))
        made.is_sent = True
        return True

    def read(self, lane: Lane) -> None:
        """Take the record whose token was taken."""
        lane.read(_TAKE, self)

    def _pool(self, made: Reduction) -> int:
        """Lay an operand into a slot, if one is free: which."""
        slot = self._slots.find_pooled() if made.is_poolable else None
        if slot is None:
            return NOWHERE
        operand = made.meeting.operand
        made.pool(self._segment.slot(self.rank, slot, operand.dtype, operand.size))
        if made.is_read_twice:
            self._pooled[made] = slot
        else:
            self._slots.lend(slot, len(made.peers))
        return slot

    def meet(self, made: Transfer, peer: int, slot: int, offered: memoryview) -> None:
        """A member has come: check that it is at the same collective; its operand may lie in a slot."""
        meeting = made.meeting
        header, agreed = bytes(offered[:HEADER_BYTES]), meeting.notes["agreed"]
        if header != agreed.get(peer):
            nbytes = meeting.expected[meeting.members.index(peer)]
            check_headers(meeting.header, [nbytes], [Header.unpack(header)])
            agreed[peer] = header
        made.came(peer, offered)
        if slot != NOWHERE:
            assert isinstance(made, Reduction)
            if not made.reduces:
                return
            place = made.place_of(self.rank)
            data = self._segment.slot(peer, slot, np.dtype(np.uint8), place.stop)[place]
            is_kept = made.take(peer, 0, 0, data, True)
            if not made.is_read_twice:
                self._keep_slot((made, peer, 0, 0), slot, is_kept)
            self._release(made)

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

    def receive(self, peer: int) -> bytes | memoryview:
        """See `Messenger.receive`."""
        inbox = self._inbox[peer]
        # The driver may be idle between two runs for as long as it likes.
        is_bounded = peer != DRIVER
        wait = Wait(State.RECEIVING, lambda: bool(inbox), lambda: (peer,), lambda: (peer,), is_bounded=is_bounded)
        self._wait(wait)
        return inbox.popleft()

    def collect(self, call: Call, peer: int, run: int, channel: int) -> bytes | memoryview:
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
                self._streams.quiet()
                self._move()
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
            elif spins < self._spins:
                spins += 1
                os.sched_yield()
            else:
                self._streams.quiet()
                if self._move():
                    self._streams.stir()
                else:
                    self._streams.sleep(TICK)
                    if not self._move():
                        wait.unread = self._streams.full
                        self.watch.look(wait)
                        self._streams.forget(self.watch.gone)
        self.watch.done(wait)

    def _move(self) -> bool:
        """Take what has come, and send what can be sent; whether anything came or went."""
        moved = self._streams.poll(_TAKE, self)
        if self._unoffered and self._offer_all():
            moved = True
        if self._sending:
            for made in self._sending:
                while (parcel := made.parcel()) is not None and self._ship(made, parcel):
                    made.sent()
                    moved = True
            self._sending = [made for made in self._sending if not made.is_sent]
        return moved

    def _ship(self, made: Shipment, parcel: Parcel) -> bool:
        """Send a part; False where there is no room for it."""
        if parcel.into is not None:
            parcel.into[...] = parcel.source
            numbers, slot = self._numbers[made], self._pooled[made]
            for target in parcel.targets:
                self._streams.send(target, PIECE, 0, (numbers[target], slot, 0))
            return True
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

    def _take_offer(self, peer: int, flag: int, numbers: Numbers, payload: memoryview) -> None:
        if flag & IN_SLOT:
            self._slots.note_kept(peer, flag)
            slot, nbytes = numbers[0] >> 32, numbers[0] & 0xFFFFFFFF
            payload = self._segment.slot(peer, slot, np.dtype(np.uint8), nbytes).data
            numbers = NOWHERE, 0, 0
            if flag & TO_FREE:
                payload = memoryview(bytes(payload))
                self._streams.send(peer, _FREE, 0, (slot, 0, 0))
        lane = self._streams.lane(peer)
        number = lane.came
        lane.came += 1
        made = self._awaited.pop((peer, number), None)
        if made is None:
            self.early[peer, number] = numbers[0], bytes(payload)
        else:
            self.meet(made, peer, numbers[0], payload)

    def _take_data(self, peer: int, flag: int, numbers: Numbers, payload: memoryview) -> None:
        number, part, where = numbers
        slot, nbytes = where >> 32, where & 0xFFFFFFFF
        made = self._underway[peer, number]
        way, is_held = flag >> 1, bool(flag & 1)
        data = self._segment.slot(peer, slot, np.dtype(np.uint8), nbytes)
        self._keep_slot((made, peer, way, part), slot, made.take(peer, way, part, data, is_held))
        self._release(made)

    def _take_piece(self, peer: int, flag: int, numbers: Numbers, payload: memoryview) -> None:
        number, slot, _ = numbers
        made = self._underway[peer, number]
        assert isinstance(made, Reduction)
        place = made.place_of(peer)
        made.take(peer, 1, 0, self._segment.slot(peer, slot, np.dtype(np.uint8), place.stop)[place], False)

    def _keep_slot(self, what: tuple[Transfer, int, int, int], slot: int, is_kept: bool) -> None:
        """A slot with a rank's part of a transfer has been read, or is kept until it is released."""
        if is_kept:
            self._kept[what] = slot
        else:
            self._streams.send(what[1], _FREE, 0, (slot, 0, 0))

    def _release(self, made: Shipment) -> None:
        for rank, way, part in made.released():
            slot = self._kept.pop((made, rank, way, part), None)
            if slot is not None:
                self._streams.send(rank, _FREE, 0, (slot, 0, 0))

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
            self._coming[peer], self._came_bytes[peer] = (self._new((size,), np.dtype(np.uint8)), place), 0

    def _keep(self, peer: int, place: "_Place", content: bytes | memoryview) -> None:
        """All of a message or a post has come."""
        (self._inbox[peer] if place is None else self._posted[peer, *place]).append(content)

    def _take_chunk(self, peer: int, flag: int, numbers: Numbers, payload: memoryview) -> None:
        slot, nbytes, _ = numbers
        (coming, place), first = self._coming[peer], self._came_bytes[peer]
        coming[first : first + nbytes] = self._segment.slot(peer, slot, np.dtype(np.uint8), nbytes)
        self._came_bytes[peer] = first + nbytes
        self._streams.send(peer, _FREE, 0, (slot, 0, 0))
        if first + nbytes == len(coming):
            del self._coming[peer]
            self._keep(peer, place, coming.data)


_TAKE = (
    *(Traffic._take_offer, Traffic._take_data, Traffic._take_free),
    *(Traffic._take_message, Traffic._take_chunk, Traffic._take_post, Traffic._take_piece),
)
"""What takes each kind of record."""
