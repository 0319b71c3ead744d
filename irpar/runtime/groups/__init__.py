"""Process groups: how data moves between ranks. `threads` keeps all ranks in one process."""

from dataclasses import KW_ONLY, dataclass

from irpar.process import import_native
from irpar.runtime.launch.environment import TIMEOUT, checked_timeout
from irpar.sharding import IrparError, Mesh

from .base import Array, Call, Collective, Group, Messenger, rank_text
from .threads import ThreadGroup

__all__ = [
    "GROUPS",
    "TIMEOUT",
    "Array",
    "Call",
    "Collective",
    "Group",
    "GroupKind",
    "Messenger",
    "ThreadGroup",
    "checked_timeout",
    "make_group",
    "rank_text",
]


@dataclass(frozen=True)
class GroupKind:
    """A kind of process group.

    Attributes:
        place: its module in here and its class there, as `module:Class`; loaded when asked for.
        in_one_process: one process runs all ranks.
        is_launched: `irpar run` starts its ranks by itself where nobody has.
        over_mpi: its ranks meet in an MPI job.
    """

    place: str
    _: KW_ONLY
    in_one_process: bool = False
    is_launched: bool = False
    over_mpi: bool = False


GROUPS: dict[str, GroupKind] = {
    "threads": GroupKind("threads:ThreadGroup", in_one_process=True),
    "processes": GroupKind("processes:ProcessGroup", is_launched=True),
    "mpi": GroupKind("mpi.group:MpiGroup", over_mpi=True),
    "nccl": GroupKind("nccl.group:Nccl"),
}
"""By the name that users give."""


def make_group(name: str, mesh: Mesh, timeout: float | None = None) -> Group:
    """Join the group of that name: meet the other processes of this run, where there are any.

    Args:
        name: one of `GROUPS`.
        mesh: the mesh of all ranks.
        timeout: seconds that a rank waits for others; None: IRPAR_TIMEOUT of the environment, or `TIMEOUT`.

    Raises:
        IrparError: there is no such group, or the others cannot be met.
    """
    if name not in GROUPS:
        raise IrparError(f'there is no process group "{name}"', do=f"use one of {', '.join(GROUPS)}")
    module, _, kind = GROUPS[name].place.partition(":")
    group: Group = getattr(import_native(f"{__package__}.{module}"), kind).join(mesh, checked_timeout(timeout))
    return group
