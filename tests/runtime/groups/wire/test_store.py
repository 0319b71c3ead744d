"""The TCP store: values, waits that end, runs that do not mix, and ranks that die. Ranks are threads, or processes."""

import asyncio
import errno
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from hashlib import sha256

import pytest

from irpar.runtime.errors import PeerError, RunError
from irpar.runtime.groups.wire import store_server, store_wire
from irpar.runtime.groups.wire.store import Store, StoreError
from irpar.runtime.launch.environment import World
from irpar.runtime.launch.rank_process import free_port
from irpar.runtime.launch.token import TokenError
from tests.patience import patient


@pytest.fixture
def port():
    return free_port()


def on_all(size, port, act, **options):
    """What `act(store)` gives on each rank, or the error that it ended with."""

    def run(rank):
        try:
            with Store("127.0.0.1", port, rank, size, **{"timeout": 20, **options}) as store:
                return act(store)
        except RunError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def test_values_of_any_bytes(port):
    values = {"": b"", "id": bytes(range(256)), "großes": b"x" * 3_000_000}

    def act(store):
        if store.rank == 1:
            for key, value in values.items():
                store.set(key, memoryview(value))
        found = {key: store.get(key) for key in values}
        store.barrier()
        return found

    assert on_all(3, port, act) == [values] * 3


def test_get_waits_until_the_value_is_there(port):
    def act(store):
        if store.rank == 0:
            time.sleep(0.2)
            store.set("id", b"new")
        return store.get("id")

    assert on_all(4, port, act) == [b"new"] * 4


def test_no_rank_passes_a_barrier_before_all_are_there(port):
    came, seen = [], []

    def act(store):
        for _ in range(20):
            came.append(store.rank)
            store.barrier()
            seen.append(len(came))
            store.barrier()

    assert on_all(4, port, act) == [None] * 4
    assert seen == [round * 4 for round in range(1, 21) for _ in range(4)]


def test_a_rank_may_start_before_rank_0(port):
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(lambda: Store("127.0.0.1", port, 1, 2, timeout=20))
        time.sleep(0.3)
        with Store("127.0.0.1", port, 0, 2, timeout=20) as first:
            second = early.result()
            first.set("a", b"1")
            assert second.get("a") == b"1"
            second.close()


def test_many_ranks(port):
    def act(store):
        store.set(str(store.rank), b"%d" % store.rank)
        store.barrier()
        return [int(store.get(str(rank))) for rank in range(store.size)]

    assert on_all(32, port, act, timeout=20) == [list(range(32))] * 32


# -- waits that end -----------------------------------------------------------------------------------------------


def test_rank_0_that_never_comes(port):
    with pytest.raises(PeerError) as failure:
        Store("127.0.0.1", port, 1, 2, timeout=0.3)
    assert failure.value.what == f"rank 0 at 127.0.0.1:{port} did not answer in 0.3 s"
    assert "Connection refused" in failure.value.notes[0]
    assert "MASTER_ADDR" in failure.value.do


def test_a_host_that_there_is_not():
    with pytest.raises(PeerError, match=r"rank 0 at no-such-host\.invalid:1 did not answer in 0\.2 s"):
        Store("no-such-host.invalid", 1, 1, 2, timeout=0.2)


def test_a_value_that_never_comes(port):
    with Store("127.0.0.1", port, 0, 2, timeout=20) as store, pytest.raises(PeerError) as failure:
        store.get("id", timeout=0.2)
    assert failure.value.what == "nobody has set 'id' in 0.2 s; not connected: rank 1"
    assert "longer" in failure.value.do


def test_a_barrier_names_who_is_missing_and_can_be_tried_again(port):
    def act(store):
        store.barrier("all are there")
        if store.rank == 2:
            store.get("0 gave up")
            store.get("1 gave up")
        else:
            with pytest.raises(PeerError, match=r"^rank 2 did not come to 'start' in 0\.2 s"):
                store.barrier("start", timeout=0.2)
            store.set(f"{store.rank} gave up", b"")
        store.barrier("start")
        return True

    assert on_all(3, port, act) == [True] * 3


# -- ranks that end -----------------------------------------------------------------------------------------------


CHILD = """
import os, sys, time
from irpar.runtime.groups.wire.store import Store
store = Store("127.0.0.1", int(sys.argv[1]), int(sys.argv[2]), 3, timeout=20)
store.set("here", b"")
print("here", flush=True)
time.sleep(60)
"""


@pytest.fixture
def child(port):
    """A rank of three in a process of its own, connected."""
    started = []

    def start(rank):
        process = subprocess.Popen([sys.executable, "-c", CHILD, str(port), str(rank)], stdout=subprocess.PIPE)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_rank_that_is_killed_ends_all_waits(port, child):
    process = child(2)

    def act(store):
        store.get("here")
        if store.rank == 0:
            threading.Timer(0.2, process.kill).start()
            store.get("never")
        store.barrier()

    start = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        stores = list(pool.map(lambda rank: Store("127.0.0.1", port, rank, 3, timeout=20), range(2)))
        errors = [future.exception() for future in [pool.submit(act, store) for store in stores]]
    assert [error.rank for error in errors] == [2, 2]
    assert [str(error).splitlines()[0] for error in errors] == ["rank 2 ended without leaving the run"] * 2
    assert time.monotonic() - start < patient(10)
    for store in stores:
        with pytest.raises(PeerError, match="rank 2 ended"):
            store.barrier()
    assert stores[1].get("here") == b""
    for store in reversed(stores):
        store.close()


def test_rank_0_that_is_killed(port, child):
    process = child(0)
    with Store("127.0.0.1", port, 1, 3, timeout=20) as store:
        store.get("here")
        threading.Timer(0.2, process.kill).start()
        with pytest.raises(PeerError, match=f"rank 0 at 127.0.0.1:{port}, which holds the store, has ended"):
            store.barrier()
        with pytest.raises(StoreError, match="closed"):
            store.get("here")


def test_rank_0_that_is_stopped(port, child, monkeypatch):
    monkeypatch.setattr("irpar.runtime.groups.wire.store._ANSWER_SECONDS", 0.3)
    process = child(0)
    with Store("127.0.0.1", port, 1, 3, timeout=20) as store:
        store.get("here")
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(PeerError, match=r"does not answer any more[^$]*stopped"):
            store.get("never", timeout=0.2)


def test_an_error_reaches_all_ranks(port):
    def act(store):
        store.barrier("all are there")  # Rank 0 leaves soon after the error; who comes later finds no store.
        if store.rank == 1:
            raise StoreError("the disk is full")
        store.barrier()

    first, second, third = on_all(3, port, act)
    assert second.what == "the disk is full"
    assert first.what == third.what == "rank 1 failed: the disk is full"


def test_a_thread_that_waits_does_not_keep_another_one_from_aborting(port):
    start = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: Store("127.0.0.1", port, rank, 2, timeout=30), range(2))
        waiting = [pool.submit(store.get, "never") for store in (first, second)]
        time.sleep(0.5)
        second.abort("the disk is full")
        errors = [future.exception() for future in waiting]
    assert errors[0].what == "rank 1 ended without leaving the run"
    assert isinstance(errors[1], PeerError)
    assert time.monotonic() - start < patient(10)
    first.close()


def test_a_rank_that_leaves_comes_to_no_barrier(port):
    def act(store):
        if store.rank == 0:
            return store.get("1 is there") + store.get("2 is there")
        store.set(f"{store.rank} is there", b"")
        with pytest.raises(PeerError) as failure:
            store.barrier()
        # Neither leaves before the other one has been told.
        store.set(f"{store.rank} was told", b"")
        store.get("1 was told")
        store.get("2 was told")
        return failure.value.what

    assert on_all(3, port, act) == [b"", *["rank 0 left the run before barrier barrier"] * 2]


# -- runs that do not mix -----------------------------------------------------------------------------------------


def test_a_rank_of_another_run_is_sent_away_and_the_run_goes_on(port):
    def act(store):
        if store.rank == 1:
            with pytest.raises(StoreError, match="is that of another run") as failure:
                Store("127.0.0.1", port, 1, 2, run_id="other", timeout=20)
            assert "IRPAR_RUN_ID" in failure.value.do
        store.barrier()
        return True

    assert on_all(2, port, act, run_id="this") == [True, True]


def test_a_run_id_that_is_a_secret_is_not_shown(port):
    secret = "0123456789abcdef"
    with Store("127.0.0.1", port, 0, 2, run_id="other", timeout=20), pytest.raises(StoreError) as failure:
        Store("127.0.0.1", port, 1, 2, run_id=secret, timeout=20)
    assert secret not in str(failure.value)


def test_a_store_that_does_not_know_the_run_id_is_not_believed():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend():
            connection, _ = server.accept()
            with connection:
                connection.sendall(store_wire.GREETING + bytes(store_wire.NONCE_BYTES))
                connection.recv(store_wire.HELLO.size, socket.MSG_WAITALL)
                connection.sendall(store_wire.REPLY.pack(store_wire.Answer.OK, store_wire.PROOF_BYTES) + bytes(32))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(StoreError, match="is that of another run"):
            Store("127.0.0.1", server.getsockname()[1], 1, 2, run_id="this", timeout=20)
        thread.join()


@pytest.mark.parametrize("told", [struct.pack("!BQ", 4, 2**62), struct.pack("!BQ", 99, 0), struct.pack("!BQ", 0, 0)])
def test_a_store_that_answers_nonsense(told):
    def pretend(server):
        connection, _ = server.accept()
        with connection:
            connection.sendall(store_wire.GREETING + bytes(store_wire.NONCE_BYTES))
            connection.recv(store_wire.HELLO.size, socket.MSG_WAITALL)
            connection.sendall(told)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        pretending = pool.submit(pretend, server)
        with pytest.raises(StoreError, match=r"is not irpar's store|is that of another run"):
            Store("127.0.0.1", server.getsockname()[1], 1, 2, run_id="this", timeout=20)
        pretending.result()


@pytest.mark.parametrize("answer", [store_wire.Answer.OTHER_RUN, store_wire.Answer.FAILED])
def test_an_answer_that_is_none_to_a_request(port, answer, monkeypatch):
    """It came in the midst of a run, and without the rank and the text that it should have."""

    async def answer_so(*_):
        return answer, b""

    with Store("127.0.0.1", port, 0, 1, timeout=20) as store:
        monkeypatch.setitem(store_server._ACTIONS, store_wire.Ask.GET, answer_so)
        with pytest.raises(StoreError, match="is not irpar's store"):
            store.get("a")


def test_a_port_in_use(port):
    with socket.create_server(("127.0.0.1", port)), pytest.raises(StoreError) as failure:
        Store("127.0.0.1", port, 0, 2, timeout=20)
    assert failure.value.what == f"port {port} of this host is in use"
    assert "IRPAR_STORE_PORT" in failure.value.do


@pytest.mark.parametrize("name", ["start_server", "Runner"])
def test_a_store_that_cannot_serve(port, name, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio, name, fail)
    with pytest.raises(StoreError, match=r"rank 0 cannot serve the store: .*Too many open files"):
        Store("127.0.0.1", port, 0, 2, timeout=20)
    socket.create_server(("127.0.0.1", port)).close()  # It has let go of it.


@pytest.mark.parametrize(
    ("told", "seconds", "expected"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\nand so on, and so on", 30, "is not irpar's store"),
        (b"", 0.5, r"did not answer in 0.5 s[^$]*not answer as irpar's store does"),
    ],
)
def test_something_else_answers(told, seconds, expected):
    asked = threading.Event()

    def answer(server):
        connection, _ = server.accept()
        with connection:
            connection.sendall(told)
            asked.wait()

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        answering = pool.submit(answer, server)
        with pytest.raises(RunError, match=expected):
            Store("127.0.0.1", server.getsockname()[1], 1, 2, timeout=seconds)
        asked.set()
        answering.result()


def test_a_rank_that_is_started_twice(port):
    with (
        Store("127.0.0.1", port, 0, 2, timeout=20),
        Store("127.0.0.1", port, 1, 2, timeout=20),
        pytest.raises(StoreError, match="two processes that were started as rank 1"),
    ):
        Store("127.0.0.1", port, 1, 2, timeout=20)


@pytest.mark.parametrize("ended", [ConnectionResetError, asyncio.CancelledError])
def test_a_rank_that_is_lost_while_it_is_let_in_comes_again(port, ended, monkeypatch):
    send, lost = store_server._send, []

    async def send_with_a_loss(writer, reply):
        if not lost and reply[0] is store_wire.Answer.OK:
            lost.append(reply)
            raise ended
        await send(writer, reply)

    with Store("127.0.0.1", port, 0, 2, timeout=patient(20)) as first:
        monkeypatch.setattr(store_server, "_send", send_with_a_loss)
        with Store("127.0.0.1", port, 1, 2, timeout=patient(20)) as second:
            second.set("a", b"1")
            assert first.get("a") == b"1"
    assert len(lost) == 1


def test_ranks_that_were_started_with_another_size(port):
    with (
        Store("127.0.0.1", port, 0, 2, timeout=20),
        pytest.raises(StoreError, match="rank 1 was started as one of 3, rank 0 as one of 2"),
    ):
        Store("127.0.0.1", port, 1, 3, timeout=20)


@pytest.mark.parametrize(
    "noise", [b"", b"GET / HTTP/1.0\r\n\r\n" * 100, random.Random(7).randbytes(2000)], ids=["nothing", "HTTP", "noise"]
)
def test_strangers_do_not_disturb(port, noise):
    with Store("127.0.0.1", port, 0, 2, timeout=20) as first:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(noise)
        with Store("127.0.0.1", port, 1, 2, timeout=20) as second:
            second.set("a", b"1")
            assert first.get("a") == b"1"
            first.set("b", b"2")


def test_a_request_that_is_too_large(port):
    with Store("127.0.0.1", port, 0, 1) as store:
        with pytest.raises(StoreError, match="too large"):
            store.set("k" * 2000, b"")
        store.set("k", b"fine")
        assert store.get("k") == b"fine"


# -- from a launcher's environment --------------------------------------------------------------------------------


def test_of_world(port):
    def run(rank):
        with Store.of_world(World(rank, 2, master_addr="127.0.0.1", store_port=port, run_id="a"), timeout=20) as store:
            store.barrier()
            return True

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [True, True]


def test_a_world_that_does_not_know_rank_0():
    with pytest.raises(StoreError, match=r"^MASTER_ADDR and MASTER_PORT not set: rank 3 does not know"):
        Store.of_world(World(3, 4, launcher="Slurm"))


def test_the_loopback_serves_this_host_alone(port):
    with Store("127.0.0.1", port, 0, 1):
        listening = subprocess.run(["cat", "/proc/net/tcp"], capture_output=True, text=True, check=True).stdout
    rows = re.findall(rf"^ *\d+: ([0-9A-F]+):{port:04X} 0+:0000 0A", listening, re.MULTILINE)
    assert rows == ["0100007F"]


def test_another_name_of_the_same_address_reaches_it(port):
    with Store("127.0.0.1", port, 0, 2, timeout=20) as first:
        with Store("localhost", port, 1, 2, timeout=20) as second:
            second.set("a", b"1")
        assert first.get("a") == b"1"


# -- the secret of a run ------------------------------------------------------------------------------------------

SECRET = "correct horse battery staple"


def test_ranks_that_know_the_secret_meet(port):
    assert on_all(2, port, lambda store: store.barrier(), token=SECRET) == [None, None]


@pytest.mark.parametrize("other", ["", "another secret of length"])
def test_who_does_not_know_the_secret_is_sent_away(port, other):
    def act(store):
        if store.rank == 1:
            with pytest.raises(StoreError, match="another run, or has another secret") as failure:
                Store("127.0.0.1", port, 1, 2, token=other, timeout=20)
            assert SECRET not in str(failure.value)
            assert "IRPAR_TOKEN" in failure.value.do
        store.barrier()
        return True

    assert on_all(2, port, act, token=SECRET) == [True, True]


@pytest.fixture
def outside(monkeypatch):
    """The loopback counts as an address that other hosts reach."""
    monkeypatch.setattr("irpar.runtime.groups.wire.store.names_loopback", lambda _: False)


def test_where_other_hosts_reach_the_store_a_secret_is_needed(port, outside):
    for rank in range(2):
        with pytest.raises(TokenError, match="which other hosts reach, and share no secret") as failure:
            Store("127.0.0.1", port, rank, 2, timeout=20)
        assert "IRPAR_TOKEN=$(openssl rand -hex 32)" in failure.value.do
    assert on_all(2, port, lambda store: store.barrier(), token=SECRET) == [None, None]


def test_the_secret_is_never_sent(port):
    """What passes between a store and its client, read on the way."""
    passed = bytearray()

    def relay(door):
        connection, _ = door.accept()
        with connection, socket.create_connection(("127.0.0.1", port)) as onward, ThreadPoolExecutor(1) as pool:
            back = pool.submit(copy, onward, connection)
            copy(connection, onward)
            back.result()

    def copy(source, target):
        while data := source.recv(4096):
            passed.extend(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as door, ThreadPoolExecutor(1) as pool:
        relaying = pool.submit(relay, door)
        known = {"token": SECRET, "run_id": "this", "timeout": 20}
        with (
            Store("127.0.0.1", port, 0, 2, **known),
            Store("127.0.0.1", door.getsockname()[1], 1, 2, **known) as second,
        ):
            second.set("a", b"value")
        relaying.result()
    assert b"value" in passed
    assert SECRET.encode() not in passed
    assert sha256(SECRET.encode()).digest() not in passed


def test_an_address_of_another_host(port):
    with pytest.raises(StoreError, match=r"198\.51\.100\.7 is no address of this host, where rank 0 is") as failure:
        Store("198.51.100.7", port, 0, 2, token=SECRET, timeout=20)
    assert "IRPAR_LISTEN" in failure.value.do


def test_peers_that_drip_bytes_or_say_nothing_keep_no_rank_out(port, monkeypatch):
    monkeypatch.setattr("irpar.runtime.groups.wire.store_server._MOST_NEW", 8)
    with Store("127.0.0.1", port, 0, 2, timeout=20) as first, ExitStack() as stack:
        # More than may be about to say who they are: the first ones go.
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(30)]
        for each in silent:
            with suppress(OSError):
                each.sendall(b"i")
        with Store("127.0.0.1", port, 1, 2, timeout=20) as second:
            second.set("a", b"1")
        assert first.get("a") == b"1"
        start = time.monotonic()
    assert time.monotonic() - start < patient(8)  # Nobody waits for those who never were ranks.


def test_nothing_is_left_running(port):
    before = set(threading.enumerate())  # Some of an earlier test may end meanwhile.
    for _ in range(3):
        on_all(2, port, lambda store: store.barrier())
    assert set(threading.enumerate()) <= before


def test_a_barrier_that_the_others_gave_up(port):
    def act(store):
        if store.rank == 1:
            store.get("gave up")
            with pytest.raises(PeerError, match=r"^rank 0 did not come to 'start' in 0\.1 s"):
                store.barrier("start", timeout=0.1)
        else:
            with pytest.raises(PeerError, match=r"^rank 1 did not come"):
                store.barrier("start", timeout=0.1)
            store.set("gave up", b"")
        store.barrier("end")

    assert on_all(2, port, act) == [None, None]
