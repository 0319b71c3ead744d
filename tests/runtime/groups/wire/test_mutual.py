"""Connections of ranks that prove to each other who they are; ranks are threads."""

import select
import socket
import struct
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest

from irpar.runtime.groups.wire import mutual
from irpar.runtime.groups.wire.mutual import ConnectError, Mutual
from irpar.runtime.groups.wire.proof import NONCE_BYTES, PROOF_BYTES, key_of, proof
from tests.patience import patient

KEY = key_of("the secret of a run")


@contextmanager
def listeners(size):
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(size)]


def begun(pool, doors, rank, *, key=KEY, seconds=20.0, places=None) -> Future:
    """A rank that connects to all others."""
    found = {lower: doors[lower].getsockname() for lower in range(rank)} if places is None else places
    made = Mutual(rank, len(doors), doors[rank], key, time.monotonic() + seconds)
    return pool.submit(made.connect, found)


def close(*made):
    for connections in made:
        for connection in connections.values():
            connection.close()


def test_all_ranks_connect_to_all():
    with listeners(12) as doors, ThreadPoolExecutor(12) as pool:
        made = [each.result() for each in [begun(pool, doors, rank) for rank in reversed(range(12))]][::-1]
        for rank, connections in enumerate(made):
            assert set(connections) == set(range(12)) - {rank}
            for other, connection in connections.items():
                connection.setblocking(True)
                connection.sendall(bytes([rank, other]))
        for rank, connections in enumerate(made):
            for other, connection in connections.items():
                assert connection.recv(2) == bytes([other, rank])
        close(*made)


@contextmanager
def dripping(place, count):
    """Strangers that send a byte now and then, and never enough."""
    over = threading.Event()
    with ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(place)) for _ in range(count)]

        def drip():
            while not over.wait(0.05):
                for each in connections:
                    with suppress(OSError):
                        each.send(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def test_strangers_that_drip_keep_no_rank_out():
    with listeners(3) as doors, ThreadPoolExecutor(3) as pool, dripping(doors[0].getsockname(), 12):
        made = [each.result() for each in [begun(pool, doors, rank) for rank in range(3)]]
        assert [sorted(connections) for connections in made] == [[1, 2], [0, 2], [0, 1]]
        close(*made)


def test_strangers_that_drip_do_not_stretch_the_bound():
    with listeners(2) as doors, ThreadPoolExecutor(1) as pool, dripping(doors[0].getsockname(), 12):
        start = time.monotonic()
        with pytest.raises(ConnectError, match="rank 1 did not connect"):
            begun(pool, doors, 0, seconds=1.0).result()
        assert time.monotonic() - start < patient(5)


def test_more_strangers_than_may_wait(monkeypatch):
    monkeypatch.setattr(mutual, "_MOST_NEW", 4)
    with listeners(2) as doors, ThreadPoolExecutor(2) as pool, dripping(doors[0].getsockname(), 40):
        made = [each.result() for each in [begun(pool, doors, rank) for rank in range(2)]]
        assert [sorted(connections) for connections in made] == [[1], [0]]
        close(*made)


def test_a_rank_that_is_stopped_for_longer_than_others_wait_calls_again(monkeypatch):
    monkeypatch.setattr(mutual, "_PATIENCE", 0.2)
    calls = []

    class Stopped(Mutual):
        """Comes to nothing after its first call, until the other rank has given up that connection."""

        def _call(self, called):
            super()._call(called)
            calls.append(called.rank)
            if len(calls) == 1:
                (connection,) = self._talks
                given_up = select.poll()
                given_up.register(connection, select.POLLRDHUP)
                assert given_up.poll(patient(10) * 1000)

    with listeners(2) as doors, ThreadPoolExecutor(2) as pool:
        first = begun(pool, doors, 0, seconds=patient(20))
        stopped = Stopped(1, 2, doors[1], KEY, time.monotonic() + patient(20))
        made = [stopped.connect({0: doors[0].getsockname()}), first.result()]
        assert [sorted(connections) for connections in made] == [[0], [1]]
        assert len(calls) > 1
        close(*made)


def test_a_flood_that_takes_the_place_of_a_rank_does_not_keep_it_out(monkeypatch):
    """So many strangers between what a rank hears and what it says that its connection goes: it calls again."""
    monkeypatch.setattr(mutual, "_MOST_NEW", 4)
    flooded = []

    def proof_after_flood(*about):
        if not flooded:
            with ExitStack() as stack:
                for _ in range(30):
                    flooded.append(stack.enter_context(socket.create_connection(doors[0].getsockname())))
                for each in flooded[:10]:  # So many have had its place since.
                    with suppress(ConnectionResetError):
                        each.recv(100)
        return proof(*about)

    with listeners(2) as doors, ThreadPoolExecutor(2) as pool:
        first = begun(pool, doors, 0)
        monkeypatch.setattr(mutual, "proof", proof_after_flood)
        second = begun(pool, doors, 1)
        made = [first.result(), second.result()]
        assert [sorted(connections) for connections in made] == [[1], [0]]
        assert len(flooded) == 30
        close(*made)


def test_connections_that_are_all_closed_end_at_the_bound():
    with listeners(2) as doors, ThreadPoolExecutor(1) as pool:
        calling = begun(pool, doors, 1, seconds=0.7)
        for _ in range(2):
            doors[0].accept()[0].close()
        over = threading.Event()

        def turn_away():
            doors[0].settimeout(0.05)
            while not over.is_set():
                with suppress(TimeoutError):
                    doors[0].accept()[0].close()

        thread = threading.Thread(target=turn_away)
        thread.start()
        try:
            with pytest.raises(ConnectError, match=r"rank 1 cannot connect to rank 0 at .*: .*closed") as told:
                calling.result()
            assert "who else connects to that port" in told.value.do
        finally:
            over.set()
            thread.join()


def test_a_rank_that_has_not_heard_the_proof_may_call_again():
    with listeners(3) as doors, ThreadPoolExecutor(3) as pool:
        zero = Mutual(0, 3, doors[0], KEY, time.monotonic() + patient(20))
        first = pool.submit(zero.connect, {})
        with socket.create_connection(doors[0].getsockname()) as lost:
            told = lost.recv(13 + NONCE_BYTES, socket.MSG_WAITALL)
            own = bytes(NONCE_BYTES)
            about = struct.pack("!II", 1, 0)
            lost.sendall(struct.pack("!16sI32s", own, 1, proof(KEY, "caller", told[13:] + own, about)))
            assert lost.recv(PROOF_BYTES, socket.MSG_WAITALL) == proof(KEY, "answerer", told[13:] + own, about)
        while 1 not in zero._made:
            time.sleep(0.01)
        before = zero._made[1]
        second = begun(pool, doors, 1, seconds=patient(20))
        while zero._made[1] is before:
            time.sleep(0.01)
        made = [each.result() for each in (first, second, begun(pool, doors, 2, seconds=patient(20)))]
        assert [sorted(connections) for connections in made] == [[1, 2], [0, 2], [0, 1]]
        made[1][0].setblocking(True)
        made[0][1].setblocking(True)
        made[1][0].sendall(b"x")
        assert made[0][1].recv(1) == b"x"
        close(*made)


def test_a_rank_with_another_key_is_none():
    with listeners(2) as doors, ThreadPoolExecutor(2) as pool:
        first, second = begun(pool, doors, 0, seconds=1.0), begun(pool, doors, 1, key=key_of("another"))
        with pytest.raises(
            ConnectError, match=r"rank 1 cannot connect to rank 0 at .*: .* no rank of this run"
        ) as told:
            second.result()
        assert "the same IRPAR_TOKEN" in told.value.do
        with pytest.raises(ConnectError, match="rank 1 did not connect"):
            first.result()


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3, "no rank of irpar"),
        (b"irpar-rank/2\n" + bytes(NONCE_BYTES + PROOF_BYTES), "no rank of this run"),
        (b"", "it did not answer in time"),
    ],
)
def test_something_else_answers(says, told):
    with listeners(2) as doors, ThreadPoolExecutor(2) as pool:
        calling = begun(pool, doors, 1, seconds=20.0 if says else 0.5)
        connection, _ = doors[0].accept()
        with connection:
            connection.sendall(says)
            with pytest.raises(ConnectError, match=f"rank 1 cannot connect to rank 0 at .*: .*{told}"):
                calling.result()


def test_nobody_listens_any_more():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        place = gone.getsockname()
    with (
        listeners(2) as doors,
        ThreadPoolExecutor(1) as pool,
        pytest.raises(ConnectError, match=r"cannot connect to rank 0 at .*Connection refused"),
    ):
        begun(pool, doors, 1, places={0: place}).result()


def test_a_proof_for_one_rank_is_none_for_another():
    """Who passes on what a rank says to another one, or as another one, is turned away."""

    def answer(door, shown_for, role):
        with socket.create_connection(door.getsockname()) as connection:
            told = connection.recv(13 + NONCE_BYTES, socket.MSG_WAITALL)
            own = bytes(NONCE_BYTES)
            shown = proof(KEY, role, told[13:] + own, struct.pack("!II", *shown_for))
            connection.sendall(struct.pack("!16sI32s", own, 1, shown))
            return connection.recv(PROOF_BYTES, socket.MSG_WAITALL)

    with listeners(3) as doors, ThreadPoolExecutor(3) as pool:
        first = begun(pool, doors, 0)
        assert answer(doors[0], (2, 0), "caller") == bytes(PROOF_BYTES)
        assert answer(doors[0], (1, 2), "caller") == bytes(PROOF_BYTES)
        assert answer(doors[0], (1, 0), "answerer") == bytes(PROOF_BYTES)
        others = [begun(pool, doors, rank) for rank in (1, 2)]
        made = [each.result() for each in (first, *others)]
        assert [sorted(connections) for connections in made] == [[1, 2], [0, 2], [0, 1]]
        close(*made)
