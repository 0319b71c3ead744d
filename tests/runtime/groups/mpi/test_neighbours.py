"""Which ranks of an MPI job see each other's processes end, and how many cores they share; without MPI."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("mpi4py")

from irpar.runtime.groups.mpi.neighbours import Neighbours, _Place

OWN = _Place.own()


def test_those_on_one_host_share_its_cores() -> None:
    places = [replace(OWN, cores=(0, 1)), replace(OWN, cores=(1, 2))]
    assert Neighbours(places, 0).cores() == 3
    assert Neighbours([*places, replace(OWN, host="another")], 0).cores() is None
    assert Neighbours([*places, replace(OWN, host="")], 0).cores() is None


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the system tells of no other processes")
def test_a_rank_whose_process_ends_is_seen_on_its_host() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        there = replace(OWN, process=process.pid)
        other_host, other_container = replace(there, host="another"), replace(there, processes="another")
        neighbours = Neighbours([OWN, there, other_host, other_container, OWN], 0)
        assert not neighbours.ended()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert neighbours.ended() == {1}  # Though nobody has waited for it.
        assert neighbours.ended() == {1}
    assert Neighbours([OWN, there], 0).ended() == {1}
    assert not Neighbours([OWN, replace(there, host="")], 0).ended()
