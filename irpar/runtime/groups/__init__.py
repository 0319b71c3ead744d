"""Process groups: how data moves between ranks. `threads` keeps all ranks in one process."""

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
    "Messenger",
    "ThreadGroup",
    "checked_timeout",
    "make_group",
    "rank_text",
]

GROUPS: dict[str, str] = {
    "threads": "threads:ThreadGroup",
    "processes": "processes:ProcessGroup",
    "mpi": "mpi.group:MpiGroup",
    "nccl": "nccl.group:Nccl",
}
"""Name to module and class; loaded when asked for."""


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
    module, _, kind = GROUPS[name].partition(":")
    group: Group = getattr(import_native(f"{__package__}.{module}"), kind).join(mesh, checked_timeout(timeout))
    return group
