"""Groups whose processes are joined by connections: here all data goes over them too."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path

import numpy as np
import pytest

from irpar.runtime.errors import MismatchError, PeerError
from irpar.runtime.groups import Call, Collective
from irpar.runtime.groups.wire.connect import ConnectError, connect
from irpar.runtime.groups.wire.control import Control, Frame
from irpar.runtime.groups.wire.sockets import listen_address
from irpar.runtime.launch.environment import World
from irpar.runtime.launch.token import made_token
from irpar.sharding import Axis, Mesh, asked_by_command
from tests.patience import SECONDS, patient
from tests.runtime.groups.collective_cases import cases, check
from tests.runtime.groups.hosts_group import HostsGroup
from tests.runtime.groups.launched_ranks import PROGRAMS, run_ranks, seconds_after_fault
from tests.runtime.groups.mpi_libraries import NAMES, Library, find
from tests.runtime.groups.mpi_libraries import PROGRAMS as MPI_PROGRAMS
from tests.runtime.groups.two_hosts import ADDRESSES, missing, two_hosts
from tests.runtime.groups.wired_threads import controls, run_threads

MESHES = [Mesh({"x": 2}), Mesh({"a": 2, "b": 2})]


def call(mesh: Mesh, rank: int, axis: str, number: int, operand: np.ndarray, kind: str = "AllReduce") -> Call:
    return Call(rank, mesh.coords(rank), Collective(kind, number, (Axis(axis),)), operand)


def hosts(mesh: Mesh, seconds: float = 5.0):
    """Makes the group of a rank, which is closed in the end."""
    joined = controls(mesh.size)
    return lambda rank: closing(HostsGroup(mesh, rank, seconds, joined[rank]))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_all_kinds_and_dtypes(mesh: Mesh) -> None:
    listed = [case for seed in range(3) for case in cases(mesh, seed=seed)]
    make = hosts(mesh)

    def run(rank: int) -> None:
        with make(rank) as group:
            for case in listed:
                check(case, mesh, rank, group.exchange({rank: case.call(mesh, rank)})[rank])

    assert run_threads(mesh.size, run)[1] == {}


def test_large_messages_both_ways() -> None:
    make = hosts(Mesh({"x": 3}))
    sizes = [0, 1, 100, 20_000_000]

    def run(rank: int) -> None:
        with make(rank) as group:
            others = [other for other in range(3) if other != rank]
            for size in sizes:
                for other in others:
                    group.send(other, bytes([rank]) * size)
            for size in sizes:
                for other in others:
                    assert group.receive(other) == bytes([other]) * size

    assert run_threads(3, run)[1] == {}


def test_what_was_sent_before_the_end_arrives() -> None:
    make = hosts(Mesh({"x": 2}))

    def run(rank: int) -> None:
        with make(rank) as group:
            if rank == 0:
                group.send(1, b"x" * 10_000_000)
                group.send(1, b"last")
            else:
                time.sleep(0.2)
                assert len(group.receive(0)) == 10_000_000
                assert group.receive(0) == b"last"
                with pytest.raises(PeerError, match=r"rank 0 \(x=0\) failed: it ended before"):
                    group.receive(0)

    assert run_threads(2, run)[1] == {}


def test_a_rank_that_fails_instead_of_telling_where_it_is_has_failed() -> None:
    """Rank 0 has given up waiting when it learns of it."""
    mesh = Mesh({"x": 2})
    make = hosts(mesh, 0.2)

    def run(rank: int) -> None:
        with make(rank) as group:
            if rank == 0:
                group.exchange({0: call(mesh, 0, "x", 5, np.zeros(3, np.float32))})
            control = group.control
            control._takes[Frame.ASK] = lambda *_: group.abort("the disk is gone")
            assert control.wait(lambda: [] if control.is_broken else [0], patient(10))

    raised = run_threads(2, run)[1]
    assert set(raised) == {0}
    assert str(raised[0]) == "rank 1 (x=1) failed: the disk is gone"


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (("AllReduce", 6, np.zeros(3, np.float32)), "different collectives"),
        (("AllReduce", 5, np.zeros(3, np.float64)), "differ in dtype: f32 and f64"),
        (("Broadcast", 5, np.zeros(3, np.float32)), "different attributes"),
        (("AllReduce", 5, np.zeros(4, np.float32)), "brings 16 bytes, where rank 0 calls for 12"),
    ],
)
def test_ranks_that_do_not_fit_are_stopped_and_both_named(other, what) -> None:
    mesh = Mesh({"x": 2})
    make = hosts(mesh)

    def run(rank: int) -> None:
        kind, number, operand = ("AllReduce", 5, np.zeros(3, np.float32)) if rank == 0 else other
        with make(rank) as group:
            group.exchange({rank: call(mesh, rank, "x", number, operand, kind)})

    raised = run_threads(2, run)[1]
    assert isinstance(raised[0], MismatchError)
    assert isinstance(raised[1], MismatchError)
    text = str(raised[0])
    assert what in text
    assert "rank 0 (x=0) is at AllReduce id=5 over x with f32[3]" in text
    assert f"rank 1 (x=1) is at {other[0]} id={other[1]} over x" in text


def test_another_order_over_another_axis_is_told_at_the_bound() -> None:
    """Nobody meets anybody: each waits for one who waits for another."""
    mesh = Mesh({"a": 2, "b": 2})
    make = hosts(mesh, 0.3)

    def run(rank: int) -> None:
        with make(rank) as group:
            for axis, number in (("b", 1), ("a", 0)) if rank in (0, 3) else (("a", 0), ("b", 1)):
                group.exchange({rank: call(mesh, rank, axis, number, np.ones(1))})

    raised = run_threads(4, run)[1]
    assert set(raised) == {0, 1, 2, 3}
    for error in raised.values():
        assert isinstance(error, PeerError)
        assert "did not come to collective" in str(error)
        assert "AllReduce id=0 over a" in str(error)
        assert "AllReduce id=1 over b" in str(error)


def test_pairs_that_meet_another_way_round_are_told_at_once() -> None:
    mesh = Mesh({"a": 2, "b": 1})
    make = hosts(mesh, 30.0)

    def run(rank: int) -> None:
        collective = Collective("AllReduce", rank, (Axis("a"),) if rank else (Axis("a"), Axis("b")))
        with make(rank) as group:
            group.exchange({rank: Call(rank, mesh.coords(rank), collective, np.ones(1))})

    start = time.monotonic()
    raised = run_threads(2, run)[1]
    assert "id=1 over a " in str(raised[0])
    assert "id=0 over a,b" in str(raised[0])
    assert time.monotonic() - start < patient(5)


@pytest.mark.parametrize(
    ("frame", "is_moving"), [(Frame.DATA, True), (Frame.MESSAGE, True), (Frame.ASK, False), (Frame.HERE, False)]
)
def test_the_clock_begins_again_when_data_comes(frame: Frame, is_moving: bool) -> None:
    """A slow link is no rank that hangs; one that hangs can still be asked, and answer."""
    own, other = socket.socketpair()
    control = Control(0, {1: own})
    body = (5).to_bytes(8, "little") + bytes(1000)
    piece = bytes([frame]) + len(body).to_bytes(8, "little") + body

    def flow() -> None:
        for place in range(0, len(piece), 50):
            time.sleep(0.05)
            other.sendall(piece[place : place + 50])

    thread = threading.Thread(target=flow)
    thread.start()
    peer = control.peers[1]
    assert control.wait(lambda: [] if peer.data or peer.messages else [1], 0.8) is is_moving
    thread.join()
    other.close()
    control.close()


@pytest.mark.parametrize(
    ("who", "more_time"), [(asked_by_command, "--timeout SECONDS"), (nullcontext, "timeout=SECONDS")]
)
def test_a_rank_with_nothing_left_to_do_is_named(
    who: Callable[[], AbstractContextManager[None]], more_time: str
) -> None:
    mesh = Mesh({"x": 2})
    make = hosts(mesh, 0.3)

    def run(rank: int) -> None:
        with make(rank) as group:
            if rank == 0:
                group.exchange({0: call(mesh, 0, "x", 7, np.ones(2))})
            else:
                group.receive(0)

    with who():
        raised = run_threads(2, run)[1]
    assert "rank 1 (x=1) did not come to collective 7 in 0.3 s" in str(raised[0])
    assert str(raised[0]).endswith(f"then give more time: {more_time}")
    assert "rank 1 (x=1) came to no further collective, and waits for rank 0" in str(raised[0])
    assert "rank 1 (x=1) failed: it did not come to collective 7" in str(raised[1])


def test_a_rank_that_never_becomes_ready_is_given_up() -> None:
    mesh = Mesh({"x": 2})
    make = hosts(mesh, 0.02)
    done = threading.Event()

    def run(rank: int) -> None:
        with make(rank) as group:
            if rank == 0:
                try:
                    group.receive(1)
                finally:
                    done.set()
            else:
                done.wait(patient(30))

    error = run_threads(2, run)[1][0]
    assert isinstance(error, PeerError)
    assert "rank 1 (x=1) did not become ready in 0.4 s" in str(error)


def test_inputs_go_on_while_the_driver_computes() -> None:
    """More than connections take at once, and longer than a collective may take; no rank waits for the driver's end."""
    mesh = Mesh({"x": 3})
    within = patient(0.4)
    make = hosts(mesh, within)
    has = {rank: threading.Event() for rank in (1, 2)}

    def run(rank: int) -> None:
        with make(rank) as group:
            if rank == 0:
                for other in has:
                    group.send(other, bytes(60_000_000))
                assert all(event.wait(patient(30)) for event in has.values())
                time.sleep(1.25 * within)
                assert group.receive(1) == b"done"
                assert group.receive(2) == b"done"
            else:
                assert len(group.receive(0)) == 60_000_000
                has[rank].set()
                time.sleep(1.25 * within)
                group.send(0, b"done")

    assert run_threads(3, run)[1] == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "what", "do"),
    [
        pytest.param(
            *("forgets", "its program closed the executor without serving", "call executor.serve() on all ranks but"),
            marks=pytest.mark.slow,
        ),
        ("fails", "the disk is gone", "buy another"),
    ],
)
@pytest.mark.parametrize("group", [pytest.param("hosts", marks=pytest.mark.slow), "processes"])
def test_a_rank_whose_program_does_not_serve_tells_why(group: str, how: str, what: str, do: str) -> None:
    ranks = run_ranks(4, group, "unserved", how)
    for rank in (0, 1, 3):
        assert ranks[rank].code == 1
        assert f"rank 2 (dp=1, tp=0) failed: {what}\n  do: {do}" in ranks[rank].err


@pytest.mark.parametrize("group", [pytest.param("hosts", marks=pytest.mark.slow), "processes"])
def test_a_process_that_the_driver_forked_ends_nothing(group: str) -> None:
    ranks = run_ranks(4, group, "forked")
    assert [rank.code for rank in ranks] == [0, 0, 0, 0], [rank.err for rank in ranks]
    assert "the driver went on" in ranks[0].out
    assert "this process was forked from the one that made the executor" in ranks[0].err


@pytest.mark.slow
def test_the_driver_may_be_idle_but_not_stopped() -> None:
    for rank in run_ranks(4, "hosts", "idle", "slow-between"):
        assert rank.code == 0, rank.err
    for rank in run_ranks(4, "hosts", "idle", "stopped-between", seconds=20, hanging=0)[1:]:
        assert rank.code == 1
        assert "rank 0 (dp=0, tp=0) " in rank.err
        assert re.search(rf"gave no sign of life for {SECONDS}\n  it was stopped", rank.err), rank.err


def test_the_reason_of_a_rank_reaches_all_others() -> None:
    mesh = Mesh({"x": 3})
    make = hosts(mesh)

    def run(rank: int) -> None:
        with make(rank) as group:
            if rank == 2:
                group.abort("the disk is gone\n  do: buy another")
            else:
                group.exchange({rank: call(mesh, rank, "x", 0, np.ones(2))})

    raised = run_threads(3, run)[1]
    assert set(raised) == {0, 1}
    for error in raised.values():
        assert isinstance(error, PeerError)
        assert error.rank == 2
        assert str(error) == "rank 2 (x=2) failed: the disk is gone\n  do: buy another"


def test_attributes_that_fit_nothing_are_told_by_all() -> None:
    mesh = Mesh({"x": 2})
    make = hosts(mesh)

    def run(rank: int) -> None:
        collective = Collective("ReduceScatter", 0, (Axis("x"),), sizes=(1, 1))
        with make(rank) as group:
            group.exchange({rank: Call(rank, (rank,), collective, np.ones(3))})

    raised = run_threads(2, run)[1]
    for error in raised.values():
        assert isinstance(error, MismatchError)
        assert "block sizes [1, 1] do not fit dim 0 of size 3" in str(error)


def test_started_collectives_wait_in_any_order() -> None:
    mesh = Mesh({"x": 3})
    make = hosts(mesh)
    listed = list(cases(mesh))

    def run(rank: int) -> None:
        with make(rank) as group:
            calls = [case.call(mesh, rank) for case in listed]
            for each in calls:
                group.start(each)
            for number in np.random.default_rng(rank).permutation(len(listed)):
                check(listed[number], mesh, rank, group.exchange({rank: calls[number]})[rank])

    assert run_threads(3, run)[1] == {}


# -- connecting -----------------------------------------------------------------------------------------------------


class Board:
    """Where threads tell each other what they are."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)
        self.told = [b""] * count

    def gather(self, rank: int):
        def all_gather(mine: bytes) -> list[bytes]:
            self.told[rank] = mine
            self.barrier.wait(patient(10))
            found = list(self.told)
            self.barrier.wait(patient(10))
            return found

        return all_gather


def world(rank: int, size: int, **more) -> World:
    return World(rank, size, local_rank=rank, local_size=size, master_addr="127.0.0.1", **more)


def test_ranks_connect_and_know_each_other() -> None:
    board = Board(4)

    def run(rank: int):
        control, about = connect(world(rank, 4), board.gather(rank), {"colour": rank * 10}, 5.0)
        group = HostsGroup(Mesh({"x": 4}), rank, 5.0, control)
        total = group.exchange({rank: call(group.mesh, rank, "x", 0, np.full(2, rank))})[rank]
        group.close()
        return about, total.tolist()

    given, raised = run_threads(4, run)
    assert raised == {}
    assert given == [([{"colour": rank * 10} for rank in range(4)], [6, 6])] * 4


def test_strangers_are_turned_away() -> None:
    board = Board(2)
    told = threading.Event()

    def gather_and_intrude(rank: int):
        plain = board.gather(rank)

        def gather(mine: bytes) -> list[bytes]:
            found = plain(mine)
            if rank == 1 and b'"port"' in mine:
                card = json.loads(found[0])
                for greeting in (b"", b"x" * 24, b"GET / HTTP/1.1\r\n\r\n" * 3):
                    with socket.create_connection((card["host"], card["port"])) as intruder:
                        intruder.sendall(greeting)
                told.set()
            return found

        return gather

    def run(rank: int) -> int:
        control, _ = connect(world(rank, 2), gather_and_intrude(rank), {}, 10.0)
        control.close()
        return len(control.peers)

    given, raised = run_threads(2, run)
    assert raised == {}
    assert given == [1, 1]
    assert told.is_set()


def test_the_address_to_listen_at_is_of_rank_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRPAR_LISTEN", " 127.0.0.2 ")
    assert [listen_address(rank, "gateway.example") for rank in range(2)] == ["127.0.0.2", "gateway.example"]
    assert listen_address(0, "127.0.0.1") == "127.0.0.1"
    monkeypatch.setenv("IRPAR_LISTEN", " ")
    assert listen_address(0, "gateway.example") == "gateway.example"


@pytest.mark.parametrize(
    ("said", "told"), [(" 127.0.0.2 ", ["gateway.example", "127.0.0.1"]), (" ", ["127.0.0.1"] * 2)]
)
def test_ranks_tell_an_address_at_which_they_listen(
    said: str, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is behind a gateway, whose name others use: it alone listens elsewhere than it says."""
    monkeypatch.setenv("IRPAR_LISTEN", said)
    reached = ["gateway.example" if said.strip() else "127.0.0.1", "127.0.0.1"]
    monkeypatch.setattr("irpar.runtime.groups.wire.connect._own_host", lambda world, _: reached[world.rank])
    for rank in range(2):
        cards = []

        def note(mine: bytes, cards: list = cards) -> list[bytes]:
            cards.append(json.loads(mine))
            raise InterruptedError

        with pytest.raises(InterruptedError):
            connect(world(rank, 2), note, {}, 5.0)
        assert cards[0]["host"] == told[rank]


def test_a_rank_that_does_not_connect_is_named() -> None:
    board = Board(2)

    def run(rank: int) -> None:
        if rank == 1:
            gather = board.gather(1)
            gather(json.dumps({"name": socket.gethostname(), "address": ""}).encode())
            gather(json.dumps({"host": "127.0.0.1", "port": 1, "nonce": "", "about": {}}).encode())
        else:
            connect(world(0, 2), board.gather(0), {}, 0.5)

    raised = run_threads(2, run)[1]
    assert isinstance(raised[0], ConnectError)
    assert "rank 1 did not connect" in str(raised[0])


# -- processes ------------------------------------------------------------------------------------------------------


def test_processes_run_a_program() -> None:
    driver, *others = run_ranks(4, "hosts", "mlp")
    assert (driver.code, driver.out) == (0, "the numbers are right\n"), driver.err
    assert [(rank.code, rank.out, rank.err) for rank in others] == [(0, "", "")] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("kill-before", "rank 2 (dp=1, tp=0) failed: it ended without a word"),
        ("kill-begun", "rank 2 (dp=1, tp=0) failed: it ended without a word"),
        ("exit-met", "rank 2 (dp=1, tp=0) failed: it ended without a word"),
        ("fail-before", "rank 2 (dp=1, tp=0) failed: the disk is gone"),
        ("fail-begun", "rank 2 (dp=1, tp=0) failed: the disk is gone"),
    ],
)
def test_a_process_that_fails_ends_all(fault: str, told: str) -> None:
    ranks = run_ranks(4, "hosts", "mlp", fault)
    assert 0 < seconds_after_fault(*ranks) < patient(10)
    assert all(rank.code for rank in ranks)
    for rank in (0, 1, 3):
        assert told in ranks[rank].err
        assert "Traceback" not in ranks[rank].err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("hang-before", "rank 2 (dp=1, tp=0) did not come to collective 0 in 1 s"),
        # Its data has gone out; only its answer is missing.
        ("hang-begun", "rank 2 (dp=1, tp=0) failed: it did not answer in 1 s"),
    ],
)
def test_a_process_that_hangs_ends_all_others(fault: str, told: str) -> None:
    ranks = run_ranks(4, "hosts", "mlp", fault, "1", hanging=2)
    assert any(told in rank.err for rank in ranks), ranks
    assert [ranks[rank].code for rank in (0, 1, 3)] == [1] * 3


# -- processes that meet over MPI -----------------------------------------------------------------------------------


@pytest.fixture(params=NAMES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    found = find(request.param)
    if isinstance(found, str):
        pytest.skip(found)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.mark.slow
def test_ranks_of_mpiexec_find_each_other_without_an_address(library: Library) -> None:
    ended = library.run(2, PROGRAMS, "hosts", "collectives", "x=2", "0:3")
    assert ended.code == 0, ended.err
    assert ended.out.count("collectives are right") == 2


def test_ranks_of_mpiexec_meet_again(library: Library) -> None:
    ended = library.run(2, PROGRAMS, "hosts", "twice")
    assert (ended.code, ended.err) == (0, ""), ended
    assert ended.out.count("met twice") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("fail-before", "rank 2 (dp=1, tp=0) failed: the disk is gone"),
        ("exit-before", ""),  # mpiexec ends all at once.
        ("hang-before", "rank 2 (dp=1, tp=0) did not come to collective 0 in 2 s"),
    ],
)
def test_ranks_of_mpiexec_end_when_one_fails(library: Library, fault: str, told: str) -> None:
    ended = library.run(4, PROGRAMS, "hosts", "mlp", fault, "2", seconds=60)
    assert ended.code != 0
    assert told in ended.err
    assert 0 < seconds_after_fault(ended) < patient(20)


@pytest.mark.slow
def test_a_rank_of_mpiexec_that_does_not_come_to_connect(library: Library) -> None:
    """It has come to MPI, which waits for it without a bound by itself."""
    ended = library.run(3, MPI_PROGRAMS, "absent", "2", seconds=30)
    assert ended.code != 0
    assert "not all 3 ranks of the MPI job came" in ended.err


@pytest.mark.slow
def test_two_hosts_that_share_nothing_but_a_network(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    with two_hosts(tmp_path) as hosts:
        places = [(address, hosts.enter) for address in ADDRESSES]
        for rank in run_ranks(4, "hosts", "collectives", "a=2,b=2", "0-1:3", hosts=places, token=made_token()):
            assert rank.code == 0, rank.err
            assert rank.out.endswith("collectives are right\n")
        assert hosts.received() > 100_000
        ranks = run_ranks(4, "hosts", "mlp", "kill-before", hosts=places, token=made_token())
        for number in (0, 1, 3):
            assert "rank 2 (dp=1, tp=0) failed: it ended without a word" in ranks[number].err


_LISTENING = """
import sys
from irpar.runtime.groups.wire.sockets import listen
print(*(listen(name, 0, 2).getsockname()[0] for name in sys.argv[1:]))
"""


def test_hosts_that_share_no_secret_do_not_meet_and_each_listens_at_one_address(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    with two_hosts(tmp_path) as hosts:
        places = [(address, hosts.enter) for address in ADDRESSES]
        for rank in run_ranks(2, "hosts", "collectives", "x=2", "0:1", hosts=places):
            assert rank.code != 0
            assert f"the ranks meet at {ADDRESSES[0]}:" in rank.err
            assert "which other hosts reach, and share no secret" in rank.err
        names = ("localhost", ADDRESSES[0])
        inside = ["ip", "netns", "exec", hosts.names[0], sys.executable, "-c", _LISTENING, *names]
        shown = subprocess.run(inside, capture_output=True, text=True, check=True).stdout
        assert shown.split() == ["127.0.0.1", ADDRESSES[0]]
        elsewhere = subprocess.run([*inside[:-2], ADDRESSES[1]], capture_output=True, text=True)
        assert "Cannot assign requested address" in elsewhere.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_process_that_ends_before_it_meets_the_others(how: str) -> None:
    first, second, third = ranks = run_ranks(3, "hosts", "start", how, "3", "2")
    assert 0 < seconds_after_fault(*ranks) < patient(15)
    assert third.code in (-9, 7)
    for rank in (first, second):
        assert rank.code == 1
        assert "rank 2" in rank.err
        assert "Traceback" not in rank.err
