"""Connections between the processes of a run, for what they compare, tell and ask each other beside their data.

Every process is connected to every other. Nothing runs behind the caller's back but the driver's signs of life: frames
come in and go out while something is waited for. So a process that computes answers nobody, and one that waits learns
at once that another failed, or is gone.

Frames of one pair arrive in the order of sending. A pair of ranks comes to the collectives that it shares in one order,
so that the next header of a peer is that of the collective where this rank is, or the ranks do not fit together.
"""

import selectors
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum

_HEAD = struct.Struct("<BQ")
_NUMBER = struct.Struct("<q")
_PLACE = struct.Struct("<qq")
_SECONDS = struct.Struct("<d")
_PUSH_SECONDS = 0.1
_READ_BYTES = 1 << 20
_LINGER_SECONDS = 5.0
"""How long a process that ends waits for the others to have read what it sent, at most."""
_PARTING_SECONDS = 0.2
"""How much later than the end of one process the word of another may come that tells why."""


class Frame(IntEnum):
    """What a frame holds."""

    HEADER = 1  # of a collective, as `Header.pack` gives it
    DATA = 2  # a number that names it, then bytes
    MESSAGE = 3  # bytes for `receive`
    FAILED = 4  # a rank, then why it failed
    ASK = 5  # where are you?
    HERE = 6  # the answer, as text
    BYE = 7  # the sender ends, and nothing is wrong with it
    ALIVE = 8  # a sign of life, with the seconds until the next one
    POST = 9  # a run and a channel, then bytes for `collect`


_BULK = (Frame.DATA, Frame.MESSAGE, Frame.POST)
"""Frames that may take long to come. Others come from a rank that hangs too: it answers, or is asked."""
NOBODY = -1
"""Instead of a rank, where the run failed and none is to blame."""


class LostError(Exception):
    """A rank failed, or is gone.

    Attributes:
        rank: that rank; `NOBODY` where it is not known which.
        reason: what it said, or another of it; empty where nobody said anything.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank = rank
        self.reason = reason


class Peer:
    """The connection to the process of one rank.

    Attributes:
        rank: that rank.
        headers: of collectives, in order.
        data: number to bytes.
        messages: in order.
        posted: run and channel to bytes, in order.
        here: its answer to the last question where it is; None before it comes.
        met: how many headers have been taken; both ends count alike.
        moved: bytes of data and messages that have come.
        signs: how many signs of life have come.
        interval: seconds in which it gives one.
        has_left: it said that it ends.
        is_gone: the connection has ended.
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.rank = rank
        self.connection = connection
        self.headers: deque[bytes] = deque()
        self.data: dict[int, bytearray] = {}
        self.messages: deque[bytes] = deque()
        self.posted: defaultdict[tuple[int, int], deque[bytearray]] = defaultdict(deque)
        self.here: str | None = None
        self.met = 0
        self.moved = 0
        self.signs = 0
        self.interval = 0.0
        self.has_left = False
        self.is_gone = False
        self._outbox: deque[memoryview] = deque()
        self._sending = threading.RLock()  # Signs of life are sent by another thread.
        self._head = bytearray(_HEAD.size)
        self._body: bytearray | None = None
        self._filled = 0

    @property
    def has_more_to_send(self) -> bool:
        """Whether something waits until the peer reads."""
        return bool(self._outbox) and not self.is_gone

    def send(self, frame: Frame, *pieces: bytes | bytearray | memoryview) -> None:
        """Put a frame on its way; what the connection does not take now goes with the next `flush`."""
        length = sum(map(len, pieces))
        with self._sending:
            self._outbox.append(memoryview(b"".join((_HEAD.pack(frame, length), *pieces))))
            self.flush()

    def send_data(self, number: int, data: bytes) -> None:
        """Send bytes that the other end waits for under the same number."""
        self.send(Frame.DATA, _NUMBER.pack(number), data)

    def post(self, run: int, channel: int, content: bytes) -> None:
        """Send bytes that the other end takes by run and channel."""
        self.send(Frame.POST, _PLACE.pack(run, channel), content)

    def flush(self) -> None:
        """Send as much as the connection takes."""
        with self._sending:
            while self._outbox and not self.is_gone:
                try:
                    sent = self.connection.send(self._outbox[0])
                except (BlockingIOError, InterruptedError):
                    return
                except OSError:
                    self._outbox.clear()
                    return  # What it still said can be read; reading tells that it is gone.
                if sent == len(self._outbox[0]):
                    self._outbox.popleft()
                else:
                    self._outbox[0] = self._outbox[0][sent:]

    def read(self) -> Iterator[tuple[Frame, bytearray]]:
        """The frames that have come."""
        while not self.is_gone:
            into = self._head if self._body is None else self._body
            try:
                count = self.connection.recv_into(memoryview(into)[self._filled :][:_READ_BYTES])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                count = 0
            if count == 0:
                self.is_gone = True
                return
            self._filled += count
            if self._body is not None and self._head[0] in _BULK:
                self.moved += count
            if self._filled < len(into):
                continue
            if self._body is None:
                self._body, self._filled = bytearray(_HEAD.unpack(self._head)[1]), 0
                if self._body:
                    continue
            kind, body = Frame(_HEAD.unpack(self._head)[0]), self._body
            self._body, self._filled = None, 0
            yield kind, body


class Control:
    """This process's connections to all others.

    Args:
        rank: of this process.
        connections: rank to connection, of every other rank.

    Attributes:
        rank: of this process.
        peers: by rank.
        where: what this rank answers when another asks where it is.
        failure: the first rank that failed, and why ("" where it is gone without a word).
        is_broken: a rank failed, as far as the others were told or this one has noticed.
        is_open: it has not been closed.
    """

    def __init__(self, rank: int, connections: Mapping[int, socket.socket]) -> None:
        self.rank = rank
        self.peers = {peer: Peer(peer, connection) for peer, connection in connections.items()}
        self.where = ""
        self.failure: tuple[int, str] | None = None
        self._selector = selectors.DefaultSelector()
        self._has_left = False
        self.is_broken = False
        self.is_open = True
        for peer in self.peers.values():
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._takes: dict[Frame, Callable[[Peer, bytearray], None]] = {
            Frame.HEADER: lambda peer, body: peer.headers.append(bytes(body)),
            Frame.DATA: self._take_data,
            Frame.POST: self._take_post,
            Frame.MESSAGE: lambda peer, body: peer.messages.append(bytes(body)),
            Frame.FAILED: self._take_failed,
            Frame.ASK: lambda peer, _: peer.send(Frame.HERE, self.where.encode()),
            Frame.HERE: self._take_here,
            Frame.BYE: self._take_bye,
            Frame.ALIVE: self._take_alive,
        }

    @property
    def has_more_to_send(self) -> bool:
        """Whether something waits until a peer reads."""
        return any(peer.has_more_to_send for peer in self.peers.values())

    def beat(self, interval: float) -> bool:
        """Give a sign of life, of which the next one comes in so many seconds, and send on what waits; in any thread.

        Returns:
            Whether more waits.
        """
        self._push()
        for peer in self.peers.values():
            if not peer.has_more_to_send:
                peer.send(Frame.ALIVE, _SECONDS.pack(interval))
        return self.has_more_to_send

    def tell_failed(self, rank: int, reason: str) -> None:
        """Tell all others that a rank failed, or the run without one that is to blame (`NOBODY`)."""
        body = _NUMBER.pack(rank) + reason.encode(errors="replace")
        for peer in self.peers.values():
            peer.send(Frame.FAILED, body)
        self.is_broken = True
        self._flush(2.0)

    def pump(self, seconds: float = 0.0) -> None:
        """Take and send what can be; waits so long for it at most."""
        for peer in self.peers.values():
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.has_more_to_send else 0)
            if not peer.is_gone and self._selector.get_key(peer.connection).events != wanted:
                self._selector.modify(peer.connection, wanted, peer)
        for key, mask in self._selector.select(seconds):
            peer = key.data
            if mask & selectors.EVENT_WRITE:
                peer.flush()
            if mask & selectors.EVENT_READ:
                for frame, body in peer.read():
                    self._takes[frame](peer, body)
                if peer.is_gone:
                    self._selector.unregister(peer.connection)
                    if not peer.has_left and self.failure is None:
                        self._fail(peer.rank, "")

    def check(self, needed: Iterable[int] = ()) -> None:
        """Return at once where nothing is known to be wrong.

        Args:
            needed: ranks that must still be there.

        Raises:
            LostError: a rank failed, is gone without a word, or is one of those needed and has ended.
        """
        left = next((rank for rank in needed if self.peers[rank].has_left), None)
        if left is not None:
            self.learns_of_failure(_PARTING_SECONDS)
        if self.failure is not None:
            raise LostError(*self.failure)
        if left is not None:
            raise LostError(left, "it ended before")

    def learns_of_failure(self, seconds: float) -> bool:
        """Whether some rank is known to have failed, at the latest after so long."""
        self._pump_for(seconds, lambda: self.failure is not None)
        return self.failure is not None

    def wait(self, missing: Callable[[], Sequence[int]], seconds: float | None) -> bool:
        """Wait until nothing is missing of any rank.

        Args:
            missing: ranks of which something is.
            seconds: the bound, from when bytes last came from one of these; None: none.

        Returns:
            False where the bound was reached.

        Raises:
            LostError: as `check`, of the ranks of which something is missing.
        """
        last = time.monotonic()
        moved: dict[int, int] = {}
        self.pump()
        while ranks := missing():
            self.check(ranks)
            now = time.monotonic()
            for rank in ranks:
                if self.peers[rank].moved != moved.setdefault(rank, self.peers[rank].moved):
                    moved[rank], last = self.peers[rank].moved, now
            left = 1.0 if seconds is None else last + seconds - now
            if left <= 0:
                return False
            self.pump(min(left, 1.0))
        return True

    def ask(self, ranks: Iterable[int], seconds: float) -> dict[int, str]:
        """Where ranks are, as far as they answer in time: one that computes does not."""
        asked = [self.peers[rank] for rank in ranks]
        for peer in asked:
            peer.here = None
            peer.send(Frame.ASK)
        self._pump_for(seconds, lambda: all(peer.here is not None or peer.is_gone for peer in asked))
        return {peer.rank: peer.here for peer in asked if peer.here is not None}

    def leave(self) -> None:
        """Tell the others that this rank ends, and wait a little until they end too."""
        if not self._has_left:
            self._has_left = True
            for peer in self.peers.values():
                peer.send(Frame.BYE)
        self._pump_for(self._linger(), lambda: all(peer.has_left or peer.is_gone for peer in self.peers.values()))

    def close(self) -> None:
        """End; waits a little until the others have read what was sent."""
        if not self.is_open:
            return
        self.is_open = False
        self.leave()
        self._flush(_LINGER_SECONDS)
        for peer in self.peers.values():
            with suppress(OSError):
                peer.connection.shutdown(socket.SHUT_WR)
        # A connection that is closed with something unread in it takes from the other end what it has not read.
        self._pump_for(self._linger(), lambda: all(peer.is_gone for peer in self.peers.values()))
        self._selector.close()
        for peer in self.peers.values():
            peer.connection.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _linger(self) -> float:
        return _PARTING_SECONDS if self.is_broken else _LINGER_SECONDS

    def _flush(self, seconds: float) -> None:
        self._pump_for(seconds, lambda: not self.has_more_to_send)

    def _push(self) -> None:
        """Send on what waits, for a while."""
        deadline = time.monotonic() + _PUSH_SECONDS
        with selectors.DefaultSelector() as selector:
            waiting = [peer for peer in self.peers.values() if peer.has_more_to_send]
            for peer in waiting:
                selector.register(peer.connection, selectors.EVENT_WRITE, peer)
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    key.data.flush()
                    if not key.data.has_more_to_send:
                        selector.unregister(key.fileobj)

    def _pump_for(self, seconds: float, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not until() and (left := deadline - time.monotonic()) > 0:
            self.pump(min(left, 0.1))

    def _fail(self, rank: int, reason: str) -> None:
        self.failure = rank, reason
        self.is_broken = True

    def _take_data(self, peer: Peer, body: bytearray) -> None:
        (number,) = _NUMBER.unpack_from(body)
        peer.data[number] = body[_NUMBER.size :]

    def _take_post(self, peer: Peer, body: bytearray) -> None:
        peer.posted[_PLACE.unpack_from(body)].append(body[_PLACE.size :])  # type: ignore[index]

    def _take_failed(self, peer: Peer, body: bytearray) -> None:
        (rank,) = _NUMBER.unpack_from(body)
        if self.failure is None or not self.failure[1]:
            self._fail(rank, body[_NUMBER.size :].decode(errors="replace"))
        peer.has_left = True

    def _take_here(self, peer: Peer, body: bytearray) -> None:
        peer.here = body.decode(errors="replace")

    def _take_bye(self, peer: Peer, _: bytearray) -> None:
        peer.has_left = True

    def _take_alive(self, peer: Peer, body: bytearray) -> None:
        peer.signs += 1
        (peer.interval,) = _SECONDS.unpack(body)
