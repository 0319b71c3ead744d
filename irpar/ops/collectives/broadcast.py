"""Broadcast: every member gets the operand of one."""

from collections.abc import Sequence

import numpy as np

from .arrays import contiguous, cut_flat, equal_shapes
from .local import elements_of_operand, shape_kept
from .record import (
    Array,
    CollectiveOp,
    Empty,
    Execution,
    Link,
    Member,
    Movement,
    Settings,
    Share,
    Steps,
    Volume,
)
from .record import rounds as message_rounds
from .rounds import SMALL, empty_like, move
from .states import unchanged


def _share(n: int) -> Share:
    return Share(1, 1)


def _direct(n: int, size: float) -> Volume:
    """The root sends the operand to each other device."""
    return Volume(n - 1, (n - 1) * size)


def _tree(n: int, size: float) -> Volume:
    """The binomial tree: whoever has it sends it on (Thakur et al.)."""
    return Volume(message_rounds(n), message_rounds(n) * size)


def _ring(n: int, size: float) -> Volume:
    """A binomial scatter and the ring's all-gather (van de Geijn; Thakur et al., Chan et al.)."""
    return Volume(message_rounds(n) + n - 1, 2 * (n - 1) / n * size)


def check_root(collective: Settings, count: int) -> None:
    """Refuse a root that a group of so many members does not have.

    Raises:
        ValueError: it is none of them.
    """
    if not 0 <= collective.root < count:
        raise ValueError(f"root {collective.root} is not in a group of {count}")


def _result(collective: Settings, operands: Sequence[Array], _: int) -> Array:
    check_root(collective, len(operands))
    return operands[collective.root]


def _moves(member: Member, empty: Empty) -> Movement:
    own, count, root = member.position, len(member.shapes), member.collective.root
    check_root(member.collective, count)
    if own == root:
        return Movement(member.operand, [([each for each in range(count) if each != own], member.operand)], [])
    result = empty(member.operand.shape)
    return Movement(result, [], [(root, result)])


def _exchange(member: Member, link: Link) -> Steps[Array]:
    """Large ones in two rounds: each member gets a piece, and sends it to the others."""
    count, position, root = len(member.shapes), member.position, member.collective.root
    check_root(member.collective, count)
    is_root = position == root
    if member.operand.nbytes * (count - 1) <= SMALL or count == 2:
        return (yield from move(_moves(member, empty_like(member)), member, link))
    whole = contiguous(member.operand) if is_root else np.empty_like(member.operand, order="C")
    nothing: list[Array | None] = [None] * count
    pieces = cut_flat(whole, count)
    mine = [pieces[position] if place == root and not is_root else None for place in range(count)]
    yield from link.round(pieces if is_root else nothing, mine)
    # The root has all pieces; its own, the others still want.
    onward = [pieces[position] if place != root else None for place in range(count)]
    yield from link.round(onward, nothing if is_root else pieces)
    return whole


RECORD = CollectiveOp(
    "broadcast",
    "All get the tensor of the root.",
    shape=shape_kept,
    after=unchanged,
    elements=elements_of_operand,
    share=_share,
    algorithms={"ring": _ring, "tree": _tree, "direct": _direct},
    execution=Execution(_result, equal_shapes, is_shared=True, gives_operands=True, moves=_moves, exchange=_exchange),
    others=("root",),
)
