"""Any kind as rounds in which each member sends to each other, as its record says what moves and what is reduced.

Results have the bits of the reference: operands are reduced in order of position. No member sends more than a ring
would, but for small operands (fewer rounds) and the root of a broadcast (twice its operand, instead of once to each of
the others).
"""

from typing import Any

import numpy as np

from .arrays import contiguous, cut_flat
from .record import Array, Empty, Execution, Link, Member, Movement, Steps
from .reduced_arrays import reduce_arrays

SMALL = 1 << 16
"""Bytes that a member may send in one round where two rounds would send less."""


def run(execution: Execution, member: Member, link: Link) -> Steps[Array]:
    """What one member does.

    Raises:
        ValueError: the attributes do not fit the operand.
    """
    if execution.exchange is not None:
        return (yield from execution.exchange(member, link))
    if execution.moves is not None:
        return (yield from move(execution.moves(member, empty_like(member)), member, link))
    return (yield from _reduce(execution, member, link))


def empty_like(member: Member) -> Empty:
    """Makes NumPy arrays of the operand's dtype."""
    dtype: np.dtype[Any] = member.operand.dtype
    return lambda shape: np.empty(shape, dtype)


def move(movement: Movement, member: Member, link: Link) -> Steps[Array]:
    """One round; what comes is received in place where that is one piece of memory."""
    count = len(member.shapes)
    sends: list[Array | None] = [None] * count
    for positions, array in movement.sends:
        piece = contiguous(array)
        for position in positions:
            sends[position] = piece
    receives: list[Array | None] = [None] * count
    for position, place in movement.receives:
        receives[position] = place if place.flags.c_contiguous else np.empty(place.shape, place.dtype)
    yield from link.round(sends, receives)
    for position, place in movement.receives:
        came = receives[position]
        if came is not place:
            place[...] = came
    return movement.result


def _reduce(execution: Execution, member: Member, link: Link) -> Steps[Array]:
    """Each member reduces one piece; it keeps it, or sends it to all: what a ring sends, in one round or two."""
    reduction = member.collective.reduce
    count, position = len(member.shapes), member.position
    if execution.reads_all and member.operand.nbytes * (count - 1) <= SMALL:
        operands = yield from _all_operands(member, link)
        return reduce_arrays(operands, reduction)
    assert execution.pieces is not None
    pieces = [contiguous(piece) for piece in execution.pieces(member)]
    held = [np.empty_like(pieces[position]) for _ in range(count)]
    held[position] = pieces[position]
    yield from link.round(pieces, held)
    if not execution.returns_pieces:
        return reduce_arrays(held, reduction)
    whole = np.empty(member.operand.shape, member.operand.dtype)
    places = cut_flat(whole, count)
    places[position][...] = reduce_arrays(held, reduction)
    del held
    yield from link.round([places[position]] * count, places)
    return whole


def _all_operands(member: Member, link: Link) -> Steps[list[Array]]:
    """The operands of all members, in order of position."""
    mine = contiguous(member.operand)
    held = [np.empty(shape, mine.dtype) for shape in member.shapes]
    held[member.position] = mine
    yield from link.round([mine] * len(held), held)
    return held
