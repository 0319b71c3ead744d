"""Process groups: how data moves between ranks. `threads` keeps all ranks in one process."""

import os

from irpar.process import import_native
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
    "make_group",
    "rank_text",
]

GROUPS: dict[str, str] = {
    "threads": "threads:ThreadGroup",
    "processes": "processes:ProcessGroup",
    "mpi": "mpi:MpiGroup",
    "nccl": "nccl:Nccl",
}
"""Name to module and class; loaded when asked for."""

TIMEOUT = 60.0
"""Seconds that a rank waits for others at a collective, where neither the caller nor IRPAR_TIMEOUT says."""

_LONGEST = 1e7
"""Seconds, about four months: a bound."""


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
