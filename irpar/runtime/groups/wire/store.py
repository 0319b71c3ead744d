"""A small store over TCP, by which the ranks of a run find each other: rank 0 serves, all connect.

    with Store.of_world(world) as store:
        if world.rank == 0:
            store.set("nccl id", get_unique_id())
        unique_id = store.get("nccl id")
        store.barrier("ready")

Values are bytes. Every wait has a bound; where a rank ends or fails, all that wait are told which. Who connects must
know the run's secret (see `token`) and its id, which both sides prove and neither sends, so that nobody else joins and
two runs at once do not mix. Where other hosts reach it, it does not serve without a secret. Values are not encrypted: a
store belongs inside a cluster.

Why no library: PyTorch's TCPStore comes with all of PyTorch, CuPy's is part of its communicator (no run id, no word
about who died), etcd and Redis are servers that somebody would have to run, and multiprocessing's managers unpickle
what comes from the network.
"""

import errno
import socket
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from irpar.runtime.errors import PeerError, RunError
from irpar.runtime.groups import TIMEOUT
from irpar.runtime.launch.environment import World
from irpar.runtime.launch.token import no_token, token_of_environment

from .proof import NONCE_BYTES, is_shown, key_of, nonce
from .sockets import LISTEN, addresses_of, listen, listen_address, names_loopback, set_up
from .store_server import StoreServer
from .store_wire import (
    GREETING,
    HELLO,
    MOST_BYTES,
    MOST_KEY_BYTES,
    RANK,
    REPLY,
    REQUEST,
    Answer,
    Ask,
    StoreError,
    proof_of_rank,
)

_TRY_SECONDS = 5.0
"""One attempt to connect takes no longer: the next may reach a host that has come up since."""
_ANSWER_SECONDS = 10.0
"""How much later than promised the answer may come."""
_BUSY_SECONDS = 0.2
"""How long whoever aborts lets another thread go on waiting."""
_LINGER_SECONDS = 10.0
"""How long rank 0 waits for the others to leave, at most."""


class Store:
    """One rank's connection to the store; in rank 0 also the store itself.

    One thread asks at a time; others wait for it.

    Args:
        host: where rank 0 is.
        port: where it listens.
        rank: of this process.
        size: ranks of the run.
        run_id: names the run, equal on all ranks.
        token: the secret of the run, equal on all ranks; empty where there is none.
        timeout: seconds that a wait takes at most, unless it says otherwise.

    Attributes:
        rank, size: as given.
        timeout: as given.

    Raises:
        StoreError: another run or something else answers, the port is in use, or this rank is there already.
        PeerError: rank 0 cannot be reached in time.
        TokenError: other hosts reach the store, and there is no secret.
    """

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        size: int,
        *,
        run_id: str = "",
        token: str = "",
        timeout: float = TIMEOUT,
    ) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._place = f"{host}:{port}"
        self._lock = threading.Lock()
        self._run_id, self._has_token = run_id, bool(token)
        self._key = key_of(token, run_id)
        self._server = None
        self._socket: socket.socket | None = None
        places = []
        if rank == 0:
            listener = self._listen(host, port)
            places = [listener.getsockname()[:2]]
            self._server = StoreServer(listener, size, self._key)
        try:
            self._socket = self._connect(places, host, port)
        except BaseException:
            self._stop(0.0)
            raise

    @classmethod
    def of_world(cls, world: World, timeout: float = TIMEOUT) -> "Store":
        """The store of the run that a launcher started.

        Raises:
            StoreError: it is not known where rank 0 is, and as above.
            PeerError: as above.
            TokenError: as above; or the secret of the environment is none.
        """
        missing = [
            name
            for name, value in (("MASTER_ADDR", world.master_addr), ("MASTER_PORT", world.store_port))
            if value is None
        ]
        if missing:
            raise StoreError(
                f"{' and '.join(missing)} not set: rank {world.rank} does not know where rank 0 is",
                where=f"started by {world.launcher or 'hand'}",
                do="set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a port that is free there, on all ranks",
            )
        assert world.master_addr is not None
        assert world.store_port is not None
        return cls(
            # What only ranks of this host reach, no other host can.
            "127.0.0.1" if world.local_size == world.size else world.master_addr,
            world.store_port,
            world.rank,
            world.size,
            run_id=world.run_id,
            token=token_of_environment(),
            timeout=timeout,
        )

    def set(self, key: str, value: bytes | bytearray | memoryview) -> None:
        """Give a key its value; one that was there before is replaced.

        Raises:
            StoreError: the value is too large.
            PeerError: rank 0 is gone.
        """
        self._request(Ask.SET, key, bytes(value), self.timeout)

    def get(self, key: str, timeout: float | None = None) -> bytes:
        """The value of a key, as soon as some rank has set it.

        Raises:
            StoreError: it does not come in time, though all ranks are there.
            PeerError: it does not come in time, a rank ended or failed meanwhile, or rank 0 is gone.
        """
        return self._request(Ask.GET, key, b"", self._seconds(timeout))

    def barrier(self, name: str = "barrier", timeout: float | None = None) -> None:
        """Wait until all ranks are here; a name may be used again.

        Raises:
            PeerError: some do not come in time, a rank ended, failed or left meanwhile, or rank 0 is gone.
        """
        self._request(Ask.BARRIER, name, b"", self._seconds(timeout))

    def abort(self, reason: str) -> None:
        """Leave, and tell all ranks why: what they wait for, now and later, ends with it. Never raises.

        Where another thread waits for an answer, that ends too, and the others learn only that this rank ended.
        """
        connection = self._socket
        if self._lock.acquire(timeout=_BUSY_SECONDS):
            self._lock.release()
        elif connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with suppress(RunError):
            self._request(Ask.ABORT, "", reason.encode(errors="replace")[:MOST_BYTES], self.timeout)
        self._stop(1.0)

    def close(self) -> None:
        """Leave. Rank 0 waits until the others have left, some seconds at most; a barrier before it is good manners."""
        if self._socket is not None:
            with suppress(RunError):
                self._request(Ask.LEAVE, "", b"", self.timeout)
        self._stop(min(_LINGER_SECONDS, self.timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort(str(error) or type(error).__name__)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else timeout

    def _stop(self, linger: float) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._server is not None:
            self._server.close(linger)
            self._server = None

    def _request(self, what: Ask, key: str, value: bytes, seconds: float) -> bytes:
        """Ask, and wait for the answer."""
        name = key.encode(errors="surrogateescape")
        if len(name) > MOST_KEY_BYTES or len(value) > MOST_BYTES:
            raise StoreError(
                f"a key of {len(name)} bytes with a value of {len(value)} bytes is too large for the store",
                do=f"send it through the group: keys have up to {MOST_KEY_BYTES} bytes, values up to {MOST_BYTES}",
            )
        with self._lock:
            if self._socket is None:
                raise StoreError(f"the store of rank {self.rank} is closed", do="use it before it is closed")
            try:
                self._socket.settimeout(seconds + _ANSWER_SECONDS)
                self._socket.sendall(REQUEST.pack(what, len(name), seconds, len(value)) + name + value)
                deadline = time.monotonic() + seconds + _ANSWER_SECONDS
                answer, told = _reply(self._socket, deadline)
            except (OSError, EOFError, ValueError) as error:
                self._socket.close()
                self._socket = None
                raise self._lost(error) from error
            except BaseException:
                # Interrupted between question and answer: the next answer would be that of this question.
                self._socket.close()
                self._socket = None
                raise
        if answer is Answer.OK:
            return told
        if answer not in _DO or len(told) < RANK.size:
            raise self._stranger()
        (rank,), text = RANK.unpack_from(told), told[RANK.size :].decode(errors="replace")
        if rank >= 0:
            raise PeerError(text, rank=rank, where=f"rank {self.rank} waited", do=_DO[answer])
        raise StoreError(text, where=f"rank {self.rank} waited", do=_DO[answer])

    def _lost(self, error: Exception) -> PeerError:
        if isinstance(error, TimeoutError):
            return PeerError(
                f"rank 0 at {self._place} does not answer any more",
                rank=0,
                do="look whether its process is stopped, and whether its host can be reached",
            )
        return PeerError(
            f"rank 0 at {self._place}, which holds the store, has ended",
            rank=0,
            notes=(f"rank {self.rank} lost the connection: {_reason(error)}",),
            do="see what rank 0 says",
        )

    def _listen(self, host: str, port: int) -> socket.socket:
        """See `listen`.

        Raises:
            StoreError: the port is in use, or may not be used; or the address is none of this host.
            TokenError: see `Store`.
        """
        try:
            listener = listen(listen_address(self.rank, host), port, self.size)
        except OSError as error:
            raise _not_listening(host, port, error) from error
        try:
            self._check_token(listener.getsockname()[0])
        except BaseException:
            listener.close()
            raise
        return listener

    def _check_token(self, address: str) -> None:
        if not self._has_token and not names_loopback(address):
            raise no_token(self._place)

    def _connect(self, places: list[tuple[str, int]], host: str, port: int) -> socket.socket:
        """Connect, however long rank 0 takes to start, up to the time-out.

        Args:
            places: address and port, where they are known.
            host, port: else.
        """
        deadline = time.monotonic() + self.timeout
        pause = 0.01
        while True:
            connection: socket.socket | None = None
            try:
                found = places or [(each, port) for _, each in addresses_of(host)]
                for address, _ in found:
                    self._check_token(address)
                connection = _connected(found, deadline)
                set_up(connection)
                self._greet(connection, deadline)
                return connection
            except (OSError, EOFError) as error:
                if connection is not None:
                    connection.close()
                if time.monotonic() + pause >= deadline:
                    raise self._unreached(error, connection is not None) from error
            except BaseException:
                if connection is not None:
                    connection.close()
                raise
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def _unreached(self, error: Exception, is_connected: bool) -> PeerError:
        note = f"the last try: {_reason(error)}"
        if is_connected:
            note = f"something accepts connections there, and does not answer as irpar's store does ({_reason(error)})"
        return PeerError(
            f"rank 0 at {self._place} did not answer in {self.timeout:g} s",
            rank=0,
            notes=(f"rank {self.rank} waited for it; {note}",),
            do="look whether rank 0 was started, MASTER_ADDR is its host, and its port is open to this host",
        )

    def _greet(self, connection: socket.socket, deadline: float) -> None:
        """Prove each other to know the run."""
        told = _read(connection, len(GREETING) + NONCE_BYTES, deadline)
        if not told.startswith(GREETING):
            raise self._stranger()
        own = nonce()
        nonces = told[len(GREETING) :] + own
        shown = proof_of_rank(self._key, "client", nonces, self.rank, self.size)
        connection.sendall(HELLO.pack(GREETING, own, self.rank, self.size, shown))
        try:
            answer, value = _reply(connection, deadline)
        except ValueError:
            raise self._stranger() from None
        if answer is Answer.REFUSED:
            text = value[RANK.size :].decode(errors="replace")
            raise StoreError(text, where=f"rank 0 at {self._place}", do=_DO[answer])
        expected = proof_of_rank(self._key, "server", nonces, self.rank, self.size)
        if answer is not Answer.OK or not is_shown(expected, value):
            raise StoreError(
                f"the store at {self._place} is that of another run, or has another secret",
                notes=(f"here it is called {_shown(self._run_id)}, and has {'a' if self._has_token else 'no'} secret",),
                do="give each run its own MASTER_PORT, and all ranks of a run one IRPAR_TOKEN and one IRPAR_RUN_ID",
            )

    def _stranger(self) -> StoreError:
        return StoreError(
            f"what answers at {self._place} is not irpar's store",
            do="set MASTER_PORT, or IRPAR_STORE_PORT, to a port that nothing else uses, on all ranks",
        )


_DO = {
    Answer.TIMED_OUT: "look what the missing rank does; a longer time-out waits longer",
    Answer.FAILED: "see what that rank says",
    Answer.REFUSED: "start each rank once, all with the same number of ranks, and each run with its own MASTER_PORT",
}


def _shown(run_id: str) -> str:
    """Enough of a run id to tell it from others, and not the secret."""
    return f"{run_id[:6]}..." if len(run_id) > 8 else repr(run_id)


def _reason(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "the connection was closed"
    if isinstance(error, TimeoutError):
        return "no answer"
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def _reply(connection: socket.socket, deadline: float) -> tuple[Answer, bytes]:
    answer, size = REPLY.unpack(_read(connection, REPLY.size, deadline))
    if size > MOST_BYTES:
        raise ValueError("an answer that the store never gives")
    return Answer(answer), _read(connection, size, deadline)


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    """So many bytes.

    Raises:
        EOFError: the connection ended before.
        OSError: also where it takes too long.
    """
    data = bytearray(size)
    view = memoryview(data)
    while view:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        count = connection.recv_into(view)
        if count == 0:
            raise EOFError
        view = view[count:]
    return bytes(data)


def _connected(places: list[tuple[str, int]], deadline: float) -> socket.socket:
    """A connection to the first of these addresses that takes one.

    Raises:
        OSError: none does.
    """
    refused: OSError = OSError(errno.EADDRNOTAVAIL, "the name has no address")
    for place in places:
        left = max(deadline - time.monotonic(), 0.01)
        try:
            return socket.create_connection(place, min(left, _TRY_SECONDS))
        except OSError as error:
            refused = error
    raise refused


def _not_listening(host: str, port: int, error: OSError) -> StoreError:
    """Why rank 0 has no store."""
    do = "set MASTER_PORT, or IRPAR_STORE_PORT, to a port that is free here, on all ranks"
    if error.errno == errno.EADDRINUSE:
        what = f"port {port} of this host is in use"
    elif error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        what = f"{host} is no address of this host, where rank 0 is: {_reason(error)}"
        do = (
            f"set MASTER_ADDR, on all ranks, to an address of the host of rank 0; where others reach it by that of a "
            f"gateway, {LISTEN} on rank 0 to the address at which it listens"
        )
    else:
        what = f"cannot listen on port {port}: {_reason(error)}"
    return StoreError(what, where="rank 0 has the store, at which all ranks meet", do=do)
