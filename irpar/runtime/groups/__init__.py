"""Process groups: how data moves between ranks. `threads` keeps all ranks in one process."""

from collections.abc import Callable

from irpar.sharding import IrparError, Mesh

from .base import Array, Call, Collective, Group, rank_text
from .threads import ThreadGroup

__all__ = ["GROUPS", "Array", "Call", "Collective", "Group", "ThreadGroup", "make_group", "rank_text"]

GROUPS: dict[str, Callable[[Mesh], Group]] = {"threads": ThreadGroup}
"""Name to what makes the group of a mesh."""


def make_group(name: str, mesh: Mesh) -> Group:
    """The group of that name.

    Raises:
        IrparError: there is none.
    """
    if name not in GROUPS:
        raise IrparError(f'there is no process group "{name}"', do=f"use one of {', '.join(GROUPS)}")
    return GROUPS[name](mesh)
