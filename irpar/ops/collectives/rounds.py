"""What the kinds have in common where they are executed as rounds in which each member sends to each other.

Results have the bits of the reference: operands are reduced in order of position. No member sends more than a ring
would, but for small operands (fewer rounds) and the root of a broadcast (twice its operand, instead of once to each of
the others).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .arrays import check_dim, contiguous, own_pieces, resized
from .record import Array, Link, Member, Sizes, Steps

SMALL = 1 << 16
"""Bytes that a member may send in one round where two rounds would send less."""


def all_operands(member: Member, link: Link) -> Steps[list[Array]]:
    """The operands of all members, in order of position."""
    mine = contiguous(member.operand)
    held = [np.empty(shape, mine.dtype) for shape in member.shapes]
    held[member.position] = mine
    yield from link.round([mine] * len(held), held)
    return held


def cut(member: Member, dim: int, sizes: Sequence[int] | None) -> list[Array]:
    """The blocks of a dim of this member's operand, one for each member.

    Raises:
        ValueError: the operand has no such dim or blocks.
    """
    count = len(member.shapes)
    operands = [member.operand] * count
    return [contiguous(own_pieces(member.collective, operands, dim, sizes, place)[0]) for place in range(count)]


def joined(member: Member, link: Link, sends: Sequence[Array], shapes: Sequence[Sizes], dim: int) -> Steps[Array]:
    """One round; what comes, with one's own piece, is concatenated along a dim.

    Raises:
        ValueError: there is no such dim.
    """
    dtype: np.dtype[Any] = member.operand.dtype
    check_dim(member.collective, dim, len(shapes[0]))
    if math.prod(shapes[0][:dim]) != 1:
        pieces = [np.empty(shape, dtype) for shape in shapes]
        pieces[member.position] = sends[member.position]
        yield from link.round(sends, pieces)
        return np.concatenate(pieces, axis=dim)
    # The pieces lie one after the other in the result: they are received in place.
    size = sum(shape[dim] for shape in shapes)
    whole = np.empty(resized(shapes[0], dim, size), dtype)
    flat, pieces, start = whole.reshape(-1), [], 0
    for shape in shapes:
        pieces.append(flat[start : start + math.prod(shape)])
        start += math.prod(shape)
    pieces[member.position][...] = sends[member.position].reshape(-1)
    yield from link.round(sends, pieces)
    return whole
