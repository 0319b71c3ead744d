"""What ranks of one run have in common, and those of others have not."""

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from irpar.runtime.errors import PeerError
from irpar.runtime.groups.shared_memory import joining
from irpar.runtime.groups.shared_memory.joining import Joined, _Host, _run_key, _visit
from irpar.runtime.groups.shared_memory.system import (
    own_process,
    parent_of,
    process_state,
    processor_time,
    start_of,
)
from irpar.runtime.launch.environment import World
from irpar.sharding import Mesh
from tests.patience import patient

PAIR = Mesh({"a": 2})
WORLD = World(0, 4, launcher="torchrun", run_id="none-0", master_port=29500)


def test_ranks_of_one_run_have_one_key() -> None:
    assert _run_key(WORLD) == _run_key(replace(WORLD, rank=3, local_rank=3))


def test_other_runs_have_other_keys() -> None:
    others = [
        replace(WORLD, run_id="none-1"),
        replace(WORLD, master_port=29501),
        replace(WORLD, size=8),
        World(0, 4, launcher="MPICH"),
        World(0, 4, launcher="irpar launch", run_id="x"),
    ]
    assert len({_run_key(world) for world in [WORLD, *others]}) == 1 + len(others)


def test_where_nothing_names_the_run_the_process_does_that_started_the_ranks(monkeypatch) -> None:
    monkeypatch.delenv("PMI_RANK", raising=False)
    key = _run_key(World(0, 4, launcher="MPICH"))
    assert f" {os.getppid()} {start_of(os.getppid())}" in key


def test_what_the_system_tells_of_a_process() -> None:
    assert parent_of(os.getpid()) == os.getppid()
    assert process_state(os.getpid()) == "R"
    until = time.process_time() + 0.05
    before = processor_time(os.getpid())
    while time.process_time() < until:
        pass
    after = processor_time(os.getpid())
    assert before is not None
    assert after is not None
    assert after > before


def test_of_a_process_that_is_not_there_nothing_is_told() -> None:
    gone = sys.maxsize
    assert (process_state(gone), processor_time(gone), parent_of(gone)) == ("", None, 0)


def test_a_process_is_known_by_its_number_and_its_start() -> None:
    process, start = own_process()
    assert (process, start) == (os.getpid(), start_of(os.getpid()))
    assert process_state(process, start) == "R"
    assert process_state(process, start + 1) == ""
    assert processor_time(process, start + 1) is None


@pytest.fixture
def meeting() -> Iterator[Callable[[float], tuple[str, "Future[Joined]"]]]:
    """Lets rank 0 of two wait for so many seconds; gives the name that it waits at, and what it gets."""
    with ThreadPoolExecutor(1) as pool:

        def begin(seconds: float) -> tuple[str, "Future[Joined]"]:
            name = f"\0irpar-test-{secrets.token_hex(8)}"
            return name, pool.submit(_Host(PAIR, name, time.monotonic() + seconds, seconds).meet)

        yield begin


def stranger(name: str, says: bytes = b"") -> socket.socket:
    """Somebody who comes to a meeting, once there is one, and says something."""
    until = time.monotonic() + patient(10)
    while True:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(10)
        try:
            connection.connect(name)
        except ConnectionRefusedError:
            connection.close()
            assert time.monotonic() < until
            time.sleep(0.01)
        else:
            connection.sendall(says)
            return connection


def check_meets(name: str, host: "Future[Joined]") -> None:
    """Rank 1 comes, and both have what they need."""
    world = World(1, 2, launcher="torchrun")
    for joined in (_visit(PAIR, world, name, time.monotonic() + patient(10), 10), host.result(patient(10))):
        for end in (joined.own, *joined.others.values()):
            os.close(end)


@pytest.mark.parametrize(
    "says",
    [b"", b"[1, ", b"[" * 60_000 + b"\n", b"[" * 70_000, b"7\n", b'[true, "a=2"]\n', b'[1.0, "a=2"]\n', b"\xff\n"],
)
def test_somebody_else_holds_nobody_up(meeting: Any, says: bytes) -> None:
    name, host = meeting(10)
    with stranger(name, says), stranger(name, says):
        began = time.monotonic()
        check_meets(name, host)
    assert time.monotonic() - began < patient(4)


def test_who_says_nothing_is_sent_away(meeting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_PATIENCE", 0.1)
    monkeypatch.setattr(joining, "_MOST_NEW", 1)
    name, host = meeting(10)
    with stranger(name) as first, stranger(name, b"[1, ") as second:
        assert first.recv(1) == b""
        check_meets(name, host)
        assert second.recv(1) == b""


@pytest.mark.parametrize("says", [b"[" * 60_000, b"[]", b"7", b"rubbish"])
def test_where_somebody_else_answers_no_rank_is_met(says: bytes) -> None:
    name = f"\0irpar-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as server, ThreadPoolExecutor(1) as pool:
        server.bind(name)
        server.listen()
        met = pool.submit(_visit, PAIR, World(1, 2, launcher="torchrun"), name, time.monotonic() + 10, 10)
        connection = server.accept()[0]
        with connection:
            connection.sendall(says)
            assert isinstance(met.exception(10), PeerError)
