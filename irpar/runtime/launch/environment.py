"""Which rank this process is: read from the environment that a launcher made.

Launchers in order of precedence, the first whose marks are set counts, since the innermost launcher is meant:
`irpar launch`, torchrun (and whatever sets `RANK` and `WORLD_SIZE` as it does: Kubernetes' PyTorchJob, a user's hand),
Open MPI, MPICH and its relatives, Slurm's srun. A batch script of Slurm is no rank: it has `SLURM_PROCID` and
`SLURM_NTASKS` too, but only what srun starts has `SLURM_STEP_ID`.

Variables that are set to nothing count as not set.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from irpar.process import cores
from irpar.sharding import IrparError, Mesh, option, spelled

TIMEOUT = 60.0
"""Seconds that a rank waits for others at a collective, where neither the caller nor IRPAR_TIMEOUT says."""

_LONGEST = 1e7
"""Seconds, about four months: a bound."""
_MOST_PORT = 65535


class WorldError(IrparError):
    """Variables of a launcher that contradict each other or are no numbers, or processes that are not those needed."""


@dataclass(frozen=True)
class Launcher:
    """The variables of a launcher; of several names the first that is set counts.

    Attributes:
        name: what messages call it.
        marks: variables of which one is enough to tell that the launcher started this process.
        rank, size: among all processes; both must be there.
        local_rank, local_size: among the processes of this host.
        tasks_per_node, node: ranks of each host as "2(x3),1" and the position of this host, where there is no
            `local_size`.
        run: what together names the run, so that two runs at once do not mix.
    """

    name: str
    marks: tuple[str, ...]
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...] = ()
    tasks_per_node: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    run: tuple[str, ...] = ()


IRPAR_LAUNCH = "irpar launch"
"""What messages call irpar's own launcher."""
MPI_LAUNCHERS = ("Open MPI", "MPICH")
LAUNCHER_MARK = "IRPAR_LAUNCHER"
"""Set by `irpar launch` in the environment of each rank, to its own process id."""
RUN_ID = "IRPAR_RUN_ID"
"""Names the run; set by `irpar launch`, or by hand where the ranks have another launcher."""
ERROR_FILE = "IRPAR_ERROR_FILE"
"""Where a command of irpar writes its error under `irpar launch`, which tells it once for all ranks."""
PEER_FAILED = 75
"""The exit code of a rank under `irpar launch` that ended because of another one: that other one is to be told of."""

_TORCH_NAMES = (("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))

LAUNCHERS = (
    Launcher(IRPAR_LAUNCH, (LAUNCHER_MARK,), *_TORCH_NAMES),
    Launcher(
        "torchrun", ("RANK", "WORLD_SIZE"), *_TORCH_NAMES, run=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    ),
    Launcher(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        run=("PMIX_NAMESPACE",),
    ),
    Launcher(
        "MPICH",
        ("PMI_RANK", "PMI_SIZE"),
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    Launcher(
        "Slurm",
        ("SLURM_STEP_ID", "SLURM_STEPID"),
        ("SLURM_PROCID",),
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_LOCALID",),
        tasks_per_node=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        node=("SLURM_NODEID",),
        run=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)
"""In order of precedence."""


@dataclass(frozen=True)
class World:
    """This process among all that run one program.

    Attributes:
        rank: of this process, 0 .. size - 1.
        size: processes of the run. A world of one may be a launcher that started one process, such as the shell of
            `srun --pty bash`.
        local_rank: among the processes of this host; 0 where the launcher does not tell.
        local_size: processes of this host; None where the launcher does not tell. One that tells neither number
            (Kubernetes' PyTorchJob) has one process for each host.
        launcher: who started it, for messages.
        master_addr: the host of rank 0: `MASTER_ADDR`, or this host where all ranks are on it; None where not known.
        master_port: `MASTER_PORT`; None where not set.
        store_port: where rank 0 has its store: `IRPAR_STORE_PORT`, else `MASTER_PORT`; where torchrun itself listens
            there (it then sets `TORCHELASTIC_USE_AGENT_STORE=True`), the port after it. None where not known.
        run_id: names the run: `IRPAR_RUN_ID`, or what the launcher calls it; empty where there is nothing.
    """

    rank: int
    size: int
    local_rank: int = 0
    local_size: int | None = None
    launcher: str = ""
    master_addr: str | None = None
    master_port: int | None = None
    store_port: int | None = None
    run_id: str = ""

    @classmethod
    def of_environment(cls, environ: Mapping[str, str] | None = None) -> "World | None":
        """The world that a launcher put this process into; None where there was none.

        Args:
            environ: None: that of the process.

        Raises:
            WorldError: what the launcher set cannot be.
        """
        variables = _Variables(os.environ if environ is None else environ)
        launcher = next((each for each in LAUNCHERS if variables.first(each.marks)), None)
        if launcher is None:
            return None
        rank, size = variables.needed(launcher.rank, launcher), variables.needed(launcher.size, launcher)
        _check_below(rank, launcher.rank[0], size, launcher.size[0])
        local_rank, local_size = _local(variables, launcher, size)
        address = variables.first(("MASTER_ADDR",))
        return cls(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            launcher=launcher.name,
            master_addr=(address and address[1]) or ("127.0.0.1" if local_size == size else None),
            master_port=variables.port("MASTER_PORT"),
            store_port=_store_port(variables),
            run_id=_run_id(variables, launcher),
        )

    @classmethod
    def of_ranks(cls, group: str, mesh: Mesh) -> "World":
        """The world of a process group in which each rank of a mesh has its own process.

        Raises:
            WorldError: no launcher has made a process for each rank, or what it set cannot be.
        """
        world = cls.of_environment()
        if world is None:
            raise no_launcher(group, mesh.size)
        if world.size != mesh.size:
            raise WorldError(
                f"{world.launcher} started {world.size} processes, and mesh {mesh} has {mesh.size} ranks",
                do=f"start {mesh.size} processes, or partition the model for {world.size} devices",
            )
        return world

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}, started by {self.launcher or 'hand'}"


def threads_of_rank() -> int:
    """How many threads a rank in a process of its own computes with.

    What OMP_NUM_THREADS says, which `irpar launch` and torchrun set; else its share of the cores of this host.
    """
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if said.isascii() and said.isdecimal() and int(said) > 0:
        return int(said)
    world = World.of_environment()
    return max(1, cores() // ((world and world.local_size) or 1))


def no_launcher(group: str, count: int | str = "RANKS") -> WorldError:
    """The error of a process group that needs more processes than this one.

    Args:
        group: its name.
        count: of processes that it needs.
    """
    return WorldError(
        f"{option('group', group)} needs a process for each rank, and no launcher has made any",
        do=f"start them: {start_ranks(group, count)}",
    )


def start_ranks(group: str, count: int | str) -> str:
    """How to start the processes of a process group, as whoever asked would: see `no_launcher`."""
    if group == "mpi":
        return f"mpiexec -n {count} " + spelled("irpar run OUT --group mpi ...", "python PROGRAM ...")
    return spelled(
        f"irpar launch -n {count} run OUT --group {group} ... (or torchrun, mpiexec, srun)",
        f"torchrun --nproc-per-node {count} PROGRAM ... (or mpiexec, srun)",
    )


class _Variables:
    """The environment, read with messages that name the variable."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def first(self, names: tuple[str, ...]) -> tuple[str, str] | None:
        """Name and text of the first variable that is set."""
        return next(((name, text) for name in names if (text := self._environ.get(name, "").strip())), None)

    def number(self, names: tuple[str, ...]) -> int | None:
        """The number of the first variable that is set."""
        found = self.first(names)
        if found is None:
            return None
        name, text = found
        if not (text.isascii() and text.isdecimal()) or len(text) > 9:
            raise WorldError(
                f'{name}="{text}" is no number', do=f"set {name} to a number from 0 up, or let the launcher set it"
            )
        return int(text)

    def needed(self, names: tuple[str, ...], launcher: Launcher) -> int:
        """As `number`, of a variable that must be there."""
        number = self.number(names)
        if number is not None:
            return number
        mark = self.first(launcher.marks)
        assert mark is not None
        raise WorldError(
            f"{mark[0]}={mark[1]} is set, and {names[0]} is not",
            where=f"variables of {launcher.name}",
            do=f"set both, or none: unset {mark[0]}",
        )

    def port(self, name: str) -> int | None:
        """The number of a TCP port."""
        number = self.number((name,))
        if number is not None and not 0 < number <= _MOST_PORT:
            raise WorldError(f"{name}={number} is no TCP port", do=f"set {name} to a port from 1 to {_MOST_PORT}")
        return number


def _check_below(number: int, name: str, bound: int, bound_name: str) -> None:
    if number >= bound:
        raise WorldError(
            f"{name}={number} with {bound_name}={bound}: ranks go from 0 to {bound_name} - 1",
            do=f"give each process its own {name} below {bound_name}",
        )


def _local(variables: _Variables, launcher: Launcher, size: int) -> tuple[int, int | None]:
    """Rank and number of ranks on this host."""
    rank, count = variables.number(launcher.local_rank), variables.number(launcher.local_size)
    if count is None:
        count = _tasks_here(variables, launcher)
    if rank is None and count is None:
        return 0, 1
    rank = rank or 0
    name = launcher.local_rank[0]
    if count is not None:
        of = (launcher.local_size or launcher.tasks_per_node)[0]
        _check_below(rank, name, count, of)
        if count > size:
            raise WorldError(
                f"{of}={count} with {launcher.size[0]}={size}: more ranks on this host than there are",
                do=f"set {of} to the number of ranks on this host",
            )
    else:
        _check_below(rank, name, size, launcher.size[0])
    return rank, count


def _tasks_here(variables: _Variables, launcher: Launcher) -> int | None:
    """The entry of this host in "2(x3),1"; None where that is not what stands there."""
    text, node = variables.first(launcher.tasks_per_node), variables.number(launcher.node)
    if text is None or node is None:
        return None
    for part in text[1].split(","):
        found = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part)
        if found is None:
            return None
        node -= int(found[2] or 1)
        if node < 0:
            return int(found[1])
    return None


def _store_port(variables: _Variables) -> int | None:
    chosen, master = variables.port("IRPAR_STORE_PORT"), variables.port("MASTER_PORT")
    if chosen is not None or master is None:
        return chosen
    agent = variables.first(("TORCHELASTIC_USE_AGENT_STORE",))
    if agent is None or agent[1].lower() != "true":
        return master
    if master == _MOST_PORT:
        raise WorldError(
            f"torchrun has MASTER_PORT={master}, and there is no port after it for irpar's store",
            do="set IRPAR_STORE_PORT, on all ranks, to a port that is free on the host of rank 0",
        )
    return master + 1


def _run_id(variables: _Variables, launcher: Launcher) -> str:
    named = variables.first((RUN_ID,))
    if named is not None:
        return named[1]
    found = (variables.first((name,)) for name in launcher.run)
    return "-".join(entry[1] for entry in found if entry is not None)


def checked_timeout(timeout: float | None) -> float:
    """The bound of a wait.

    Raises:
        IrparError: it is no positive number.
    """
    if timeout is not None:
        given, value = "the time-out", timeout
    else:
        given, text = "IRPAR_TIMEOUT", os.environ.get("IRPAR_TIMEOUT", "") or str(TIMEOUT)
        try:
            value = float(text)
        except ValueError:
            raise IrparError(f'IRPAR_TIMEOUT is "{text}", not a number', do="give seconds, such as 60") from None
    if not 0 < value <= _LONGEST:
        raise IrparError(f"{given} is {value:g} s", do=f"give seconds from above 0 to {_LONGEST:,.0f}, such as 60")
    return value
