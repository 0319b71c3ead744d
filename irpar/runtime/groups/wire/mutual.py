"""Connections of ranks, each to each, all made at the same time and within one bound.

A rank calls those of lower number and answers those of higher. Both ends prove to know the key of this meeting before
anything else is said (see `proof`):

answerer: GREETING nonce
caller:   nonce, rank, proof        its role, both nonces, its rank and whom it calls
answerer: proof                       or as many zeros, to one that is no rank of this meeting

Nobody waits for anybody in particular: whoever says nothing, or says it byte by byte, keeps no rank out. A rank may
lose its place to such (it was stopped for a while, or many came at once): one whose connection ends before the proof
calls again, as long as there is time.
"""

import selectors
import socket
import struct
import time
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from irpar.runtime.errors import RunError

from .proof import NONCE_BYTES, PROOF_BYTES, is_shown, nonce, proof
from .sockets import addresses_of, set_up

_GREETING = b"irpar-rank/2\n"
_HELLO = struct.Struct(f"!{NONCE_BYTES}sI{PROOF_BYTES}s")
"""Nonce, rank, proof."""
_ABOUT = struct.Struct("!II")
_REFUSAL = bytes(PROOF_BYTES)
_PATIENCE = 5.0
"""Seconds that whoever connects has to show that it is a rank; a rank that was stopped for longer calls again."""
_PAUSE = 0.2
"""Seconds until a rank whose connection has ended calls again."""
_MOST_NEW = 64
"""Beside the ranks, so many may be about to show it; then the one goes that has been at it longest."""

Place = tuple[str, int]
"""Address and port."""
_Steps = Generator[int, bytes, int]
"""Yields how many bytes are to come next, is sent them, and returns the rank at the other end."""


class ConnectError(RunError):
    """Processes that find each other, but cannot connect."""


class _StrangerError(Exception):
    """The other end is none that this rank looks for."""


@dataclass(frozen=True)
class _Called:
    """A rank that this one calls: its number, where it is, and that place in words."""

    rank: int
    family: socket.AddressFamily
    place: Place
    shown: str


@dataclass
class _Talk:
    """A connection whose other end is not known yet.

    Attributes:
        connection: which does not block.
        steps: what is said; begun.
        wanted: bytes that it waits for.
        until: when it is given up.
        called: whom this rank calls; None where it was called.
        told: what has come of them.
    """

    connection: socket.socket
    steps: _Steps
    until: float
    called: _Called | None = None
    wanted: int = 0
    told: bytearray = field(default_factory=bytearray)


class Mutual:
    """The connections of one rank, while they are being made.

    Args:
        rank: of this process.
        size: ranks of the run.
        listener: where those of higher number connect.
        key: that only ranks of this meeting know.
        deadline: by the monotonic clock.
    """

    def __init__(self, rank: int, size: int, listener: socket.socket, key: bytes, deadline: float) -> None:
        self._rank = rank
        self._size = size
        self._listener = listener
        self._key = key
        self._deadline = deadline
        self._made: dict[int, socket.socket] = {}
        self._talks: dict[socket.socket, _Talk] = {}
        self._again: dict[_Called, tuple[float, Exception]] = {}  # When, and what ended the last call.
        self._selector = selectors.DefaultSelector()

    def connect(self, places: Mapping[int, Place]) -> dict[int, socket.socket]:
        """Connections to all other ranks.

        Args:
            places: of the ranks below this one.

        Raises:
            ConnectError: naming the first rank with which there is none in time.
        """
        # A name may take long to be found: before anybody waits for what this rank says.
        lower = [self._found(rank, place) for rank, place in places.items()]
        with self._selector:
            try:
                self._listener.setblocking(False)
                self._selector.register(self._listener, selectors.EVENT_READ)
                for called in lower:
                    self._call(called)
                while len(self._made) < self._size - 1:
                    self._wait()
            except BaseException:
                for connection in self._made.values():
                    connection.close()
                raise
            finally:
                for talk in list(self._talks.values()):
                    self._hang_up(talk)
        return self._made

    # -- inside ---------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Take what comes next."""
        now = time.monotonic()
        if now >= self._deadline:
            raise self._late()
        for talk in [talk for talk in self._talks.values() if talk.called is None and now >= talk.until]:
            self._hang_up(talk)
        for called in [called for called, (when, _) in self._again.items() if now >= when]:
            del self._again[called]
            self._call(called)
        bounds = [talk.until for talk in self._talks.values()] + [when for when, _ in self._again.values()]
        for key, _ in self._selector.select(min([*bounds, self._deadline]) - now):
            if key.fileobj is self._listener:
                self._answer()
            elif (talk := self._talks.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                self._hear(talk)

    def _found(self, rank: int, place: Place) -> _Called:
        host, port = place
        try:
            family, address = addresses_of(host)[0]
        except OSError as error:
            raise self._unreached(rank, f"{host}:{port}", error) from error
        return _Called(rank, family, (address, port), f"{host}:{port}")

    def _call(self, called: _Called) -> None:
        try:
            connection = socket.socket(called.family, socket.SOCK_STREAM)
            self._begin(_Talk(connection, self._caller(connection, called.rank), self._deadline, called))
            connection.setblocking(False)
            with suppress(BlockingIOError):
                connection.connect(called.place)
        except OSError as error:
            raise self._unreached(called.rank, called.shown, error) from error

    def _answer(self) -> None:
        """Let one more show who it is."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # It has gone again.
        new = [talk for talk in self._talks.values() if talk.called is None]
        if len(new) >= _MOST_NEW + self._size:
            self._hang_up(new[0])
        connection.setblocking(False)
        until = min(time.monotonic() + _PATIENCE, self._deadline)
        self._begin(_Talk(connection, self._answerer(connection), until))

    def _begin(self, talk: _Talk) -> None:
        self._talks[talk.connection] = talk
        self._selector.register(talk.connection, selectors.EVENT_READ)
        try:
            talk.wanted = next(talk.steps)
        except OSError:
            self._hang_up(talk)

    def _hear(self, talk: _Talk) -> None:
        """Take what has come, as much as the next step needs."""
        try:
            part = talk.connection.recv(talk.wanted - len(talk.told))
            if not part:
                raise ConnectionResetError(0, "the connection was closed")
            talk.told += part
            if len(talk.told) == talk.wanted:
                told, talk.told = bytes(talk.told), bytearray()
                talk.wanted = talk.steps.send(told)
        except (BlockingIOError, InterruptedError):
            return
        except StopIteration as stop:
            del self._talks[talk.connection]
            self._selector.unregister(talk.connection)
            set_up(talk.connection)
            if (lost := self._made.get(stop.value)) is not None:
                lost.close()  # That rank calls again: it has not heard the proof.
            self._made[stop.value] = talk.connection
        except (OSError, _StrangerError) as error:
            self._hang_up(talk)
            if talk.called is None:
                return
            if not isinstance(error, (ConnectionResetError, BrokenPipeError)):
                raise self._unreached(talk.called.rank, talk.called.shown, error) from error
            self._again[talk.called] = time.monotonic() + _PAUSE, error

    def _hang_up(self, talk: _Talk) -> None:
        del self._talks[talk.connection]
        self._selector.unregister(talk.connection)
        talk.connection.close()

    def _caller(self, connection: socket.socket, rank: int) -> _Steps:
        told = yield len(_GREETING) + NONCE_BYTES
        if not told.startswith(_GREETING):
            raise _StrangerError("what answers there is no rank of irpar")
        own = nonce()
        nonces, about = told[len(_GREETING) :] + own, _ABOUT.pack(self._rank, rank)
        connection.send(_HELLO.pack(own, self._rank, proof(self._key, "caller", nonces, about)))
        shown = yield PROOF_BYTES
        if not is_shown(proof(self._key, "answerer", nonces, about), shown):
            raise _StrangerError("what answers there is no rank of this run")
        return rank

    def _answerer(self, connection: socket.socket) -> _Steps:
        own = nonce()
        connection.send(_GREETING + own)
        other, rank, shown = _HELLO.unpack((yield _HELLO.size))
        nonces, about = own + other, _ABOUT.pack(rank, self._rank)
        if not is_shown(proof(self._key, "caller", nonces, about), shown):
            connection.send(_REFUSAL)
            raise _StrangerError
        if not self._rank < rank < self._size:
            raise _StrangerError
        connection.send(proof(self._key, "answerer", nonces, about))
        return int(rank)

    def _late(self) -> ConnectError:
        for called, (_, ended) in self._again.items():
            return self._unreached(called.rank, called.shown, ended)
        for talk in self._talks.values():
            if talk.called is not None:
                silent = TimeoutError("it did not answer in time")
                return self._unreached(talk.called.rank, talk.called.shown, silent)
        missing = next(rank for rank in range(self._rank + 1, self._size) if rank not in self._made)
        host, port = self._listener.getsockname()[:2]
        return ConnectError(
            f"rank {missing} did not connect",
            notes=(f"it was to connect to {host}, port {port}, of {socket.gethostname()}",),
            do="see what that rank does; let the hosts of all ranks reach each other on all TCP ports",
        )

    def _unreached(self, rank: int, place: str, error: Exception) -> ConnectError:
        do = "let the hosts of all ranks reach each other on all TCP ports; MASTER_ADDR is how they reach rank 0"
        if isinstance(error, _StrangerError):
            do = "let that address lead to the host of that rank alone, and start all ranks with the same IRPAR_TOKEN"
        elif isinstance(error, (ConnectionResetError, BrokenPipeError)):
            do = "see what that rank does, and who else connects to that port"
        return ConnectError(
            f"rank {self._rank} cannot connect to rank {rank} at {place}: {getattr(error, 'strerror', '') or error}",
            do=do,
        )
