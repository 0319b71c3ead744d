"""What a collective gives each member of its group, from the operands of all of them: arrays in, arrays out."""

from collections.abc import Mapping, Sequence

from irpar.ops.collectives import COLLECTIVES
from irpar.ops.collectives.record import Execution
from irpar.ops.collectives.reduced_arrays import reduce_arrays

from .base import Array, Collective

EXECUTED: Mapping[str, Execution] = {name: op.execution for name, op in COLLECTIVES.items() if op.execution is not None}
"""By operator."""


def execute(collective: Collective, operands: Sequence[Array], into: Array | None = None) -> list[Array]:
    """What all members get, in order of position; what all get alike is one array.

    Args:
        collective: that.
        operands: of the members.
        into: where what all get may be written.

    Raises:
        ValueError: the attributes do not fit the operands.
    """
    kind = EXECUTED[collective.kind]
    if kind.returns_pieces and into is not None:
        return [reduce_arrays(operands, collective.reduce, into)] * len(operands)
    if kind.is_shared:
        return [kind.result(collective, operands, 0)] * len(operands)
    return [kind.result(collective, operands, position) for position in range(len(operands))]
