"""What a collective gives each member of its group, from the operands of all of them: arrays in, arrays out."""

from collections.abc import Mapping, Sequence

from irpar.ops.collectives import COLLECTIVES
from irpar.ops.collectives.record import Execution

from .base import Array, Collective

EXECUTED: Mapping[str, Execution] = {name: op.execution for name, op in COLLECTIVES.items() if op.execution is not None}
"""By operator."""


def execute(collective: Collective, operands: Sequence[Array]) -> list[Array]:
    """What all members get, in order of position; what all get alike is one array.

    Raises:
        ValueError: the attributes do not fit the operands.
    """
    kind = EXECUTED[collective.kind]
    if kind.is_shared:
        return [kind.result(collective, operands, 0)] * len(operands)
    return [kind.result(collective, operands, position) for position in range(len(operands))]
