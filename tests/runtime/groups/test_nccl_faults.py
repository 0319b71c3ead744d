"""The group of GPUs without one: ranks that fail, hang or went elsewhere, and what NCCL does then."""

import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from irpar.runtime.errors import MismatchError, PeerError, RunError
from tests.patience import patient

from .fake_cupy import Network
from .nccl_threads import call_of, meet, run_pair


@pytest.fixture
def network() -> Network:
    """One on which a first collective ends, and no other."""
    made = Network()
    made.stuck_from = 1
    return made


def test_what_does_not_end_is_aborted_at_the_bound(network: Network) -> None:
    def meet_twice(group: Any, rank: int) -> None:
        meet(group, rank)
        meet(group, rank, 1)

    found = run_pair(meet_twice, 0.3, network)
    assert set(found.raised) == {0, 1}
    for error in found.raised.values():
        assert not isinstance(error, PeerError)  # Nobody is to blame.
        assert str(error).startswith("collective 1 did not end in 0.3 s, though all its ranks came to it")
    for calls in found.calls.values():
        assert calls.count(("abort",)) == 1
        assert ("destroy",) not in calls


def test_a_rank_that_fails_while_data_moves_frees_the_others(network: Network) -> None:
    def fail_in_the_second(group: Any, rank: int) -> None:
        meet(group, rank)
        call = call_of(rank, 1)
        group.start(call)
        if rank == 1:
            group.abort("the disk is gone")
        else:
            group.exchange({rank: call})

    start = time.monotonic()
    found = run_pair(fail_in_the_second, 30.0, network)
    assert time.monotonic() - start < patient(5)
    assert str(found.raised[0]) == "rank 1 (x=1) failed: the disk is gone"
    assert ("abort",) in found.calls[0]
    assert ("abort",) in found.calls[1]


def test_errors_of_nccl_are_told(network: Network) -> None:
    def meet_an_error(group: Any, rank: int) -> None:
        meet(group, rank)
        network.error = "NCCL_ERROR_SYSTEM_ERROR: unhandled system error"
        meet(group, rank, 1)

    raised = run_pair(meet_an_error, network=network).raised
    told = [str(error) for error in raised.values() if not isinstance(error, PeerError)]
    assert told
    assert "device 0 failed in a collective: NCCL_ERROR_SYSTEM_ERROR: unhandled system error" in told[0]
    assert "is at AllReduce id=1 over x with f32[3]" in told[0]


def test_a_peer_that_died_is_named_before_what_nccl_says_of_it(network: Network) -> None:
    def die_in_the_second(group: Any, rank: int) -> None:
        meet(group, rank)
        group.start(call_of(rank, 1))
        if rank == 1:
            for peer in group.control.peers.values():
                peer.connection.shutdown(socket.SHUT_RDWR)  # As the system does it for a process that dies.
            return
        network.error = "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error"
        meet(group, rank, 1)

    raised = run_pair(die_in_the_second, network=network).raised
    assert str(raised[0]) == "rank 1 (x=1) failed: it ended without a word"


def test_ranks_that_do_not_fit_move_nothing() -> None:
    found = run_pair(lambda group, rank: meet(group, rank, kind="AllGather" if rank else "AllReduce"))
    assert set(found.raised) == {0, 1}
    assert all(isinstance(error, MismatchError) for error in found.raised.values())
    assert found.calls == {0: [], 1: []}


def test_a_rank_that_never_connects_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for all ranks of a communicator; here one never makes its own."""
    monkeypatch.setattr("irpar.runtime.groups.nccl.group._CONNECT_SECONDS", 0.1)
    release = threading.Event()

    def hang(*_: object) -> None:
        release.wait(5)
        raise KeyboardInterrupt

    def never_connect(group: Any, rank: int) -> None:
        if rank == 1:
            group._connect = hang
        try:
            meet(group, rank)
        finally:
            release.set()

    error = run_pair(never_connect, 0.3).raised[0]
    assert isinstance(error, PeerError)
    assert str(error).startswith("rank 1 (x=1) did not connect with NCCL for collective 0 in 0.3 s")
    assert "rank 1 (x=1) gives no answer" in str(error)


def test_nobody_is_to_blame_where_nccl_does_not_connect_who_all_came() -> None:
    release = threading.Event()

    def connect_too_late(group: Any, rank: int) -> None:
        def wait(*_: object) -> None:
            release.wait(5)
            raise RuntimeError("NCCL_ERROR_REMOTE_ERROR")

        group.cupy.cuda.nccl.NcclCommunicator = wait
        try:
            meet(group, rank)
        finally:
            release.set()

    raised = run_pair(connect_too_late, 0.3).raised
    assert set(raised) == {0, 1}
    for error in raised.values():
        assert not isinstance(error, PeerError)
        assert str(error).startswith("NCCL did not connect the ranks of collective 0 in 0.3 s, though all came to it")


def test_what_nccl_still_connects_for_a_run_that_failed_is_waited_for_and_aborted() -> None:
    connects = threading.Event()

    def fail_while_it_connects(group: Any, rank: int) -> None:
        def slow(*_: object) -> Any:
            connects.set()
            time.sleep(0.3)
            return SimpleNamespace(abort=lambda: group.cupy.calls.append(("abort", "late")))

        def fail(*_: object) -> None:
            connects.wait(5)
            group.abort("the disk is gone")
            raise RunError("the disk is gone", do="")

        if rank == 0:
            group.cupy.cuda.nccl.NcclCommunicator = slow
        else:
            group._connect = fail
        meet(group, rank)

    found = run_pair(fail_while_it_connects, 5.0)
    assert str(found.raised[0]) == "rank 1 (x=1) failed: the disk is gone"
    assert found.calls[0] == [("abort", "late")]


def test_a_member_that_went_on_is_told_of_and_not_blamed() -> None:
    """Rank 0 waits in collective 1, rank 1 in the next one, for its own reasons."""

    def go_on(group: Any, rank: int) -> RunError | None:
        meetings = [group._meeting(call_of(rank, number)) for number in (1, 2)]
        group.control.where = meetings[rank].header.text
        if rank == 0:
            stuck: RunError = group._stuck(meetings[0])
            return stuck
        group.control.learns_of_failure(5.0)
        with pytest.raises(RunError, match="collective 1 did not end in"):
            group.receive(0)
        return None

    found = run_pair(go_on, 0.3)
    assert found.raised == {}
    assert "rank 1 (x=1) is at AllReduce id=2 over x" in str(found.given[0])
    assert not isinstance(found.given[0], PeerError)
