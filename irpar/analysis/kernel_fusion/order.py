"""Kernels that go through elements in the order in which these lie, and leave it to views what order they are read in.

    %t = Transpose(%x) {perm=[0, 2, 1]}                  %f = irpar.Fused(%x)
    %y = irpar.Fused(%t)                      ->         %y = Transpose(%f) {perm=[0, 2, 1]}

So is written what was read, in pieces that lie together, and who reads %y finds its elements as those of %t.
"""

from typing import NamedTuple

from irpar.ir import Value

from .attention_values import permutation
from .groups import Group


class Turned(NamedTuple):
    """An operand of a group that is another value with its dims in another order.

    Attributes:
        operand: it.
        source: the other value.
        order: where the dims come from.
        version: of the operator set that says so.
    """

    operand: Value
    source: Value
    order: tuple[int, ...]
    version: int


def turned(group: Group) -> Turned | None:
    """The only operand of an elementwise group that is not a scalar, if its last dim is another one where it lies."""
    stretch, results = group.stretch, group.results()
    if group.reduced or any(value in stretch.kept or value in stretch.over for value in results):
        return None
    if any(step.operator.kind != "elementwise" for step in group.expression().steps):
        return None
    wide = [value for value in group.operands() if any(size != 1 for size in value.shape)]
    if len(wide) != 1 or any(value.shape != group.space for value in (*wide, *results)):
        return None
    (operand,) = wide
    node = operand.node
    if node is None or node.identity != ("", "Transpose") or node not in stretch.places or node in stretch.taken:
        return None  # Of what is taken only results are there.
    source, order = node.operand(0), permutation(node)
    if source is None or order is None or order[-1] == len(order) - 1:
        return None
    return Turned(operand, source, order, node.version)
