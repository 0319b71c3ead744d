"""The group of GPUs without one: ranks that fail, hang or went elsewhere, and what NCCL does then."""

import socket
import threading
import time

import numpy as np
import pytest

from irpar.runtime.errors import MismatchError, PeerError, RunError
from irpar.runtime.groups import Call, Collective
from irpar.sharding import Axis

from .fake_cupy import Network
from .test_nccl import PAIR, groups, meet
from .wired_threads import run_threads


def test_what_does_not_end_is_aborted_at_the_bound() -> None:
    network = Network()
    network.stuck_from = 1
    make = groups(PAIR, network, 0.3)
    made = {}

    def run(rank: int) -> None:
        with make(rank) as group:
            made[rank] = group.cupy.calls
            meet(group, rank)
            meet(group, rank, 1)

    raised = run_threads(2, run)[1]
    assert set(raised) == {0, 1}
    for error in raised.values():
        assert not isinstance(error, PeerError)  # Nobody is to blame.
        assert str(error).startswith("collective 1 did not end in 0.3 s, though all its ranks came to it")
    for calls in made.values():
        assert calls.count(("abort",)) == 1
        assert ("destroy",) not in calls


def test_a_rank_that_fails_while_data_moves_frees_the_others() -> None:
    network = Network()
    network.stuck_from = 1
    make = groups(PAIR, network, 30.0)
    made = {}

    def run(rank: int) -> None:
        with make(rank) as group:
            made[rank] = group.cupy.calls
            meet(group, rank)
            call = Call(rank, (rank,), Collective("AllReduce", 1, (Axis("x"),)), np.ones(3))
            group.start(call)
            if rank == 1:
                group.abort("the disk is gone")
            else:
                group.exchange({rank: call})

    start = time.monotonic()
    raised = run_threads(2, run)[1]
    assert time.monotonic() - start < 5
    assert str(raised[0]) == "rank 1 (x=1) failed: the disk is gone"
    assert ("abort",) in made[0]
    assert ("abort",) in made[1]


def test_errors_of_nccl_are_told() -> None:
    network = Network()
    network.stuck_from = 1
    make = groups(PAIR, network, 5.0)

    def run(rank: int) -> None:
        with make(rank) as group:
            meet(group, rank)
            network.error = "NCCL_ERROR_SYSTEM_ERROR: unhandled system error"
            meet(group, rank, 1)

    raised = run_threads(2, run)[1]
    told = [str(error) for error in raised.values() if not isinstance(error, PeerError)]
    assert told
    assert "device 0 failed in a collective: NCCL_ERROR_SYSTEM_ERROR: unhandled system error" in told[0]
    assert "is at AllReduce id=1 over x with f32[3]" in told[0]


def test_a_peer_that_died_is_named_before_what_nccl_says_of_it() -> None:
    network = Network()
    network.stuck_from = 1
    make = groups(PAIR, network, 5.0)

    def run(rank: int) -> None:
        with make(rank) as group:
            meet(group, rank)
            group.start(Call(rank, (rank,), Collective("AllReduce", 1, (Axis("x"),)), np.ones(3)))
            if rank == 1:
                for peer in group.control.peers.values():
                    peer.connection.shutdown(socket.SHUT_RDWR)  # As the system does it for a process that dies.
                return
            network.error = "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error"
            meet(group, rank, 1)

    raised = run_threads(2, run)[1]
    assert str(raised[0]) == "rank 1 (x=1) failed: it ended without a word"


def test_ranks_that_do_not_fit_move_nothing() -> None:
    make = groups(PAIR)
    made = {}

    def run(rank: int) -> None:
        with make(rank) as group:
            made[rank] = group.cupy.calls
            meet(group, rank, kind="AllGather" if rank else "AllReduce")

    raised = run_threads(2, run)[1]
    assert all(isinstance(error, MismatchError) for error in raised.values())
    assert made == {0: [], 1: []}


def test_a_rank_that_never_connects_is_not_waited_for_without_end() -> None:
    """NCCL waits for all ranks of a communicator; here one never makes its own."""
    make = groups(PAIR, seconds=0.3)
    release = threading.Event()

    def hang(*_: object) -> None:
        release.wait(5)
        raise KeyboardInterrupt

    def run(rank: int) -> None:
        with make(rank) as group:
            if rank == 1:
                group._connect = hang
            try:
                meet(group, rank)
            finally:
                release.set()

    raised = run_threads(2, run)[1]
    assert isinstance(raised[0], PeerError)
    assert str(raised[0]).startswith("rank 1 (x=1) did not connect with NCCL for collective 0 in 0.3 s")
    assert "rank 1 (x=1) gives no answer" in str(raised[0])


def test_nobody_is_to_blame_where_nccl_does_not_connect_who_all_came() -> None:
    make = groups(PAIR, seconds=0.3)
    release = threading.Event()

    def run(rank: int) -> None:
        with make(rank) as group:
            group.cupy.cuda.nccl.NcclCommunicator = lambda *_: release.wait(5)
            meet(group, rank)

    raised = run_threads(2, run)[1]
    release.set()
    for error in raised.values():
        assert not isinstance(error, PeerError)
        assert str(error).startswith("NCCL did not connect the ranks of collective 0 in 0.3 s, though all came to it")


def test_a_member_that_went_on_is_told_of_and_not_blamed() -> None:
    """Rank 0 waits in collective 1, rank 1 in the next one, for its own reasons."""
    make = groups(PAIR, seconds=0.3)

    def run(rank: int) -> RunError | None:
        with make(rank) as group:
            calls = [
                Call(rank, (rank,), Collective("AllReduce", number, (Axis("x"),)), np.ones(3)) for number in (1, 2)
            ]
            meetings = [group._meeting(call) for call in calls]
            group.control.where = meetings[rank].header.text
            if rank == 0:
                return group._stuck(meetings[0])
            group.control.learns_of_failure(5.0)
            with pytest.raises(RunError, match="collective 1 did not end in"):
                group.receive(0)
            return None

    given, raised = run_threads(2, run)
    assert raised == {}
    assert "rank 1 (x=1) is at AllReduce id=2 over x" in str(given[0])
    assert not isinstance(given[0], PeerError)
