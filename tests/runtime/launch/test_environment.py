"""Which rank a process is, from the variables of each launcher; and variables that cannot be."""

import pytest

from irpar.runtime.launch.environment import LAUNCHERS, World, WorldError, threads_of_rank

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-1@1",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
BATCH = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
SLURM = BATCH | {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "8",
}
IRPAR = TORCHRUN | {"IRPAR_LAUNCHER": "12", "IRPAR_RUN_ID": "12-ab"}
ALL = {"irpar launch": IRPAR, "torchrun": TORCHRUN, "Open MPI": OPEN_MPI, "MPICH": MPICH, "Slurm": SLURM}
RUN_IDS = {"irpar launch": "12-ab", "torchrun": "job-2", "Open MPI": "prterun-1@1", "MPICH": "", "Slurm": "77-3"}


def test_every_launcher_is_tested():
    assert list(ALL) == [launcher.name for launcher in LAUNCHERS]


@pytest.mark.parametrize("name", ALL)
def test_each_launcher(name):
    world = World.of_environment(ALL[name])
    assert world is not None
    assert (world.rank, world.size, world.local_rank, world.local_size) == (5, 8, 1, 4)
    assert (world.launcher, world.run_id) == (name, RUN_IDS[name])
    assert str(world) == f"rank 5 of 8, started by {name}"


@pytest.mark.parametrize(
    "environ", [{}, {"RANK": "", "WORLD_SIZE": " "}, BATCH, {"MASTER_ADDR": "x", "LOCAL_RANK": "1"}]
)
def test_no_launcher(environ):
    assert World.of_environment(environ) is None


def test_the_environment_of_the_process_is_the_default(monkeypatch):
    for variables in ALL.values():
        for name in variables:
            monkeypatch.delenv(name, raising=False)
    assert World.of_environment() is None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert World.of_environment() == World(0, 1, 0, 1, "torchrun", "127.0.0.1")


@pytest.mark.parametrize("first", range(len(ALL)))
def test_the_innermost_launcher_counts(first):
    environ = {}
    for variables in reversed(list(ALL.values())[first:]):
        environ |= variables
    world = World.of_environment(environ)
    assert world is not None
    assert world.launcher == list(ALL)[first]


@pytest.mark.parametrize(
    ("tasks", "node", "expected"),
    [
        ("2(x3),1", "2", 2),
        ("2(x3),1", "3", 1),
        ("3,1", "0", 3),
        ("3,1", "7", None),
        ("many", "0", None),
        ("", "0", None),
    ],
)
def test_tasks_of_this_host_under_slurm(tasks, node, expected):
    world = World.of_environment(SLURM | {"SLURM_TASKS_PER_NODE": tasks, "SLURM_NODEID": node, "SLURM_LOCALID": "0"})
    assert world is not None
    assert world.local_size == expected


def test_a_step_of_slurm_may_be_smaller_than_its_job():
    world = World.of_environment(SLURM | {"SLURM_STEP_NUM_TASKS": "6"})
    assert world is not None
    assert world.size == 6


def test_one_process_for_each_host_where_nothing_is_said_of_hosts():
    world = World.of_environment({"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "master", "MASTER_PORT": "1"})
    assert world == World(3, 4, 0, 1, "torchrun", "master", 1, 1)


def test_the_number_of_ranks_of_this_host_may_stay_unknown():
    world = World.of_environment({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"})
    assert world == World(3, 4, 3, None, "torchrun")


def test_rank_0_is_here_where_all_ranks_are():
    world = World.of_environment(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"})
    assert world is not None
    assert world.master_addr == "127.0.0.1"
    other = World.of_environment(OPEN_MPI)
    assert other is not None
    assert other.master_addr is None


@pytest.mark.parametrize(
    ("extra", "port"),
    [
        ({}, 29500),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, 29500),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, 29501),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "IRPAR_STORE_PORT": "7"}, 7),
        ({"MASTER_PORT": ""}, None),
    ],
)
def test_the_port_of_the_store(extra, port):
    world = World.of_environment(TORCHRUN | extra)
    assert world is not None
    assert world.store_port == port


NONSENSE = {
    "RANK=5 is set, and WORLD_SIZE is not": {"RANK": "5"},
    "WORLD_SIZE=4 is set, and RANK is not": {"WORLD_SIZE": "4"},
    "PMI_RANK=1 is set, and PMI_SIZE is not": {"PMI_RANK": "1"},
    "OMPI_COMM_WORLD_SIZE=1 is set, and OMPI_COMM_WORLD_RANK is not": {"OMPI_COMM_WORLD_SIZE": "1"},
    "SLURM_STEP_ID=3 is set, and SLURM_PROCID is not": SLURM | {"SLURM_PROCID": ""},
    "RANK=8 with WORLD_SIZE=8": TORCHRUN | {"RANK": "8"},
    "RANK=0 with WORLD_SIZE=0": TORCHRUN | {"RANK": "0", "WORLD_SIZE": "0"},
    'RANK="-1" is no number': TORCHRUN | {"RANK": "-1"},
    'WORLD_SIZE="four" is no number': TORCHRUN | {"WORLD_SIZE": "four"},
    'WORLD_SIZE="²" is no number': TORCHRUN | {"WORLD_SIZE": "²"},
    'WORLD_SIZE="99999999999" is no number': TORCHRUN | {"WORLD_SIZE": "99999999999"},
    'LOCAL_RANK="x" is no number': TORCHRUN | {"LOCAL_RANK": "x"},
    "LOCAL_RANK=4 with LOCAL_WORLD_SIZE=4": TORCHRUN | {"LOCAL_RANK": "4"},
    "LOCAL_WORLD_SIZE=9 with WORLD_SIZE=8: more ranks on this host": TORCHRUN | {"LOCAL_WORLD_SIZE": "9"},
    "LOCAL_RANK=4 with WORLD_SIZE=2": {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "4"},
    "MASTER_PORT=0 is no TCP port": TORCHRUN | {"MASTER_PORT": "0"},
    "MASTER_PORT=65536 is no TCP port": TORCHRUN | {"MASTER_PORT": "65536"},
    'IRPAR_STORE_PORT="a" is no number': TORCHRUN | {"IRPAR_STORE_PORT": "a"},
    "there is no port after it": TORCHRUN | {"MASTER_PORT": "65535", "TORCHELASTIC_USE_AGENT_STORE": "True"},
}


@pytest.mark.parametrize("told", NONSENSE)
def test_nonsense_is_told(told):
    with pytest.raises(WorldError) as failure:
        World.of_environment(NONSENSE[told])
    assert told in failure.value.what
    assert failure.value.do


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({}, 12),
        ({"OMP_NUM_THREADS": "3,2"}, 3),
        ({"OMP_NUM_THREADS": "many"}, 12),
        (MPICH, 3),
        (MPICH | {"OMP_NUM_THREADS": "5"}, 5),
        (MPICH | {"MPI_LOCALNRANKS": "8"}, 1),
        (TORCHRUN | {"WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "50"}, 1),
    ],
)
def test_ranks_of_a_host_share_its_cores(monkeypatch, variables, threads):
    for name in {name for each in ALL.values() for name in each} | {"OMP_NUM_THREADS"}:
        monkeypatch.delenv(name, raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(12))
    assert threads_of_rank() == threads
