"""What a kernel computes again rather than read: a few elementwise steps of what it reads anyway.

forward: h = Mul(x, 0.5); t = Tanh(x) ...; backward reads x, h and t     both are made of x: no kernel writes them
"""

from collections.abc import Sequence

from irpar.ir import Node, Value

from .drafts import Lowered
from .groups import Group

MOST_STEPS = 10
"""Of what takes the place of one operand."""


def copy_cheap_steps(groups: Sequence[Group]) -> None:
    """Let groups compute what others would have to write for them, where they read all that it is made of."""
    owners = {node: group for group in groups for node in group.members}
    for group in groups:
        for value in reversed(group.operands()):
            owner = owners.get(value.node) if value.node is not None else None
            if owner is None or owner is group or value.shape != group.space:
                continue
            found = _steps_of(value, owner, group)
            if found:
                group.copy(found)


def _steps_of(value: Value, owner: Group, group: Group) -> dict[Node, Lowered]:
    """The nodes of one group that make a value of what another reads beside it; empty where it is more than that."""
    known = {*group.operands()} - {value}
    found: dict[Node, Lowered] = {}
    waiting = [value]
    while waiting:
        node = waiting.pop().node
        if node is None or node not in owner.members:
            return {}
        if node in found or node in group.copied:
            continue
        one = found[node] = owner.members[node]
        if one.reduced or one.space != group.space:
            return {}
        waiting += [read for read in one.values() if read not in known]
    return found if sum(len(one.steps) for one in found.values()) <= MOST_STEPS else {}
