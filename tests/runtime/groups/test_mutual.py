"""Connections of ranks that prove to each other who they are; ranks are threads."""

import socket
import struct
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest

from irpar.runtime.groups import mutual
from irpar.runtime.groups.mutual import ConnectError, Mutual
from irpar.runtime.groups.proof import NONCE_BYTES, PROOF_BYTES, key_of, proof
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


def test_a_rank_with_another_key_is_none():
    with listeners(2) as doors, ThreadPoolExecutor(2) as pool:
        first, second = begun(pool, doors, 0, seconds=1.0), begun(pool, doors, 1, key=key_of("another"))
        with pytest.raises(ConnectError, match=r"rank 1 cannot connect to rank 0 at .*: the connection was closed"):
            second.result()
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
            return connection.recv(1)

    with listeners(3) as doors, ThreadPoolExecutor(3) as pool:
        first = begun(pool, doors, 0)
        assert answer(doors[0], (2, 0), "caller") == b""
        assert answer(doors[0], (1, 2), "caller") == b""
        assert answer(doors[0], (1, 0), "answerer") == b""
        others = [begun(pool, doors, rank) for rank in (1, 2)]
        made = [each.result() for each in (first, *others)]
        assert [sorted(connections) for connections in made] == [[1, 2], [0, 2], [0, 1]]
        close(*made)
