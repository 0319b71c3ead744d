"""The same small collectives again and again: right each time, and what differs one time stops the run as the first time."""

from typing import Any

import pytest

from tests.patience import patient

from .launched_ranks import Ended, run_ranks, seconds_after_fault
from .mpi_libraries import PROGRAMS as MPI_PROGRAMS
from .mpi_libraries import find

ROUNDS = "12"
IN_PIECES = "10"
"""The number of an all-reduce of which each of four ranks reduces a piece."""
ELSEWHERE = {
    "id": "rank 1 (a=0, b=1) is at AllReduce id=99 over a with f32[3]",
    "shape": "rank 1 (a=0, b=1) is at AllReduce id=0 over a with f32[5]",
    f"id:{IN_PIECES}": "rank 1 (a=0, b=1) is at AllReduce id=99 over a,b with f32[9001]",
    f"shape:{IN_PIECES}": f"rank 1 (a=0, b=1) is at AllReduce id={IN_PIECES} over a,b with f32[9003]",
}
"""What rank 1 does instead of what the others do, and what they tell of it."""


def elsewhere(quick: str) -> list[Any]:
    """All of `ELSEWHERE`, of which one is quick."""
    slow = pytest.mark.slow
    return [pytest.param(*case, marks=() if case[0] == quick else slow) for case in ELSEWHERE.items()]


def check_all(ended: list[Ended]) -> None:
    for each in ended:
        assert each.code == 0, each.err
        assert "all are right" in each.out


@pytest.mark.slow
@pytest.mark.parametrize("what", ["", "hurried"])
def test_processes(what: str) -> None:
    check_all(run_ranks(4, "processes", "again", ROUNDS, what))


@pytest.mark.parametrize(
    ("what", "told"),
    [
        *elsewhere(quick=f"shape:{IN_PIECES}"),
        *(pytest.param(end, "rank 1 (a=0, b=1) failed", marks=pytest.mark.slow) for end in ("end", f"end:{IN_PIECES}")),
    ],
)
def test_processes_of_which_one_does_something_else(what: str, told: str) -> None:
    ended = run_ranks(4, "processes", "again", ROUNDS, what)
    assert [each.code != 0 for each in ended] == [True] * 4
    for rank in (0, 2, 3):
        assert told in ended[rank].err, ended[rank].err


def run_mpi(*words: str, cores: str = "4", launch: tuple[str, ...] = ()) -> Ended:
    found = find("MPICH")
    if isinstance(found, str):
        pytest.skip(found)
    return found.run(4, MPI_PROGRAMS, "crowded", cores, "again", ROUNDS, *words, launch=launch)


@pytest.mark.slow
@pytest.mark.parametrize("cores", "1234")
def test_mpi(cores: str) -> None:
    ended = run_mpi(cores=cores)
    assert ended.code == 0, ended.err
    assert ended.out.count("all are right") == 4


@pytest.mark.slow
@pytest.mark.parametrize(("what", "told"), ELSEWHERE.items())
@pytest.mark.parametrize("cores", "24")
def test_mpi_where_one_does_something_else(what: str, told: str, cores: str) -> None:
    ended = run_mpi(what, cores=cores)
    assert ended.code != 0
    assert "Traceback" not in ended.err
    assert told in ended.err


@pytest.mark.slow
@pytest.mark.parametrize(("at", "cores"), [("0", "4"), (IN_PIECES, "4"), (IN_PIECES, "2")])
def test_mpi_where_one_ends(at: str, cores: str) -> None:
    check_ended(run_mpi(f"end:{at}", cores=cores))


@pytest.mark.parametrize("at", [pytest.param("0", marks=pytest.mark.slow), IN_PIECES])
def test_mpi_where_one_ends_and_the_launcher_does_not_mind(at: str) -> None:
    """The others see it themselves, whatever they wait for."""
    ended = run_mpi(f"end:{at}", launch=("-disable-auto-cleanup",))
    check_ended(ended)
    assert "rank 1 (a=0, b=1) failed: its process ended without a word" in ended.err


def check_ended(ended: Ended) -> None:
    """All ranks have, in time: long before the 60 s that a collective may take."""
    assert ended.code != 0
    assert "are right" not in ended.out
    assert seconds_after_fault(ended) < patient(12), ended.err
