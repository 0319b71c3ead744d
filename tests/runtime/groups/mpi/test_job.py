"""How ranks of an MPI job end, on a stand-in for MPI: what comes when cannot be had from a real one."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mpi4py")

from irpar.runtime.groups.mpi.job import _CAME, _CLEAN, Job


class Bell:
    """Rank 1 of 2, whose messages come while it looks for others."""

    rank, size = 1, 2

    def __init__(self, coming: list[int]) -> None:
        self.coming = coming
        self.sent: list[int] = []

    def Improbe(self, source: int, tag: int, status: Any = None) -> Any:  # noqa: N802
        if tag in self.coming and self.has_looked:
            self.coming.remove(tag)
            return SimpleNamespace(Recv=lambda _: None)
        self.has_looked = True
        return None

    def Isend(self, _: Any, rank: int, tag: int) -> Any:  # noqa: N802
        assert rank == 0
        self.sent.append(tag)
        return SimpleNamespace(Test=lambda: True)

    has_looked = False


def test_what_comes_between_two_looks_is_no_sign_that_the_driver_is_gone() -> None:
    mpi = SimpleNamespace(BYTE=None, ANY_SOURCE=-1, Status=lambda: SimpleNamespace(Get_source=lambda: 0))
    job = Job.__new__(Job)
    job.mpi, job._bell, job.seconds, job.has_failed, job.closed = mpi, Bell([_CAME, _CLEAN]), 5.0, False, {}
    job._signs, job._interval, job._sending, job._asked, job._has_answered = 0, 0.0, [], 0.0, True
    assert job._all_leave()
    assert job._bell.sent == [_CAME, _CLEAN]
