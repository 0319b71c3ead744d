"""Any kind as rounds in which each member sends to each other, as its record says what moves and what is reduced.

Results have the bits of the reference: operands are reduced in order of position. No member sends more than a ring
would, but for small operands (fewer rounds) and the root of a broadcast (twice its operand, instead of once to each of
the others).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .arrays import contiguous, cut_flat
from .record import Array, Empty, Execution, Link, Member, Movement, Sizes, Steps
from .reduced_arrays import reduce_arrays

New = Callable[[Sizes, np.dtype[Any]], Array]
"""Makes an array of a shape and dtype."""

SMALL = 1 << 16
"""Bytes that a member may send in one round where two rounds would send less."""


def run(
    execution: Execution, member: Member, link: Link, new: New = np.empty, reducers: int | None = None
) -> Steps[Array]:
    """What one member does.

    Args:
        execution: how the kind is executed.
        member: what the member brings.
        link: what carries the rounds.
        new: makes arrays of a shape and dtype.
        reducers: how many members reduce a piece each of what all are to have, the first ones; None: all.

    Raises:
        ValueError: the attributes do not fit the operand.
    """
    if execution.exchange is not None:
        return (yield from execution.exchange(member, link))
    if execution.moves is not None:
        return (yield from move(execution.moves(member, empty_like(member, new)), member, link))
    return (yield from _reduce(execution, member, link, new, reducers))


def empty_like(member: Member, new: New = np.empty) -> Empty:
    """Makes NumPy arrays of the operand's dtype."""
    dtype: np.dtype[Any] = member.operand.dtype
    return lambda shape: new(shape, dtype)


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


def _reduce(execution: Execution, member: Member, link: Link, new: New, reducers: int | None) -> Steps[Array]:
    """Each member reduces one piece; it keeps it, or sends it to all: what a ring sends, in one round or two."""
    reduction = member.collective.reduce
    count, position = len(member.shapes), member.position
    if is_one_round(execution, member):
        operands = yield from _all_operands(member, link, new)
        # In place of an operand that came: of the first two, since later ones are still to be read.
        return reduce_arrays(operands, reduction, operands[1 if position == 0 else 0])
    if not execution.returns_pieces:
        assert execution.pieces is not None
        pieces = [contiguous(piece) for piece in execution.pieces(member)]
        own = pieces[position]
        held = [own if place == position else new(own.shape, own.dtype) for place in range(count)]
        yield from link.round(pieces, held)
        return reduce_arrays(held, reduction)
    pieces = cut_for(contiguous(member.operand), count, reducers or count)
    own = pieces[position]
    whole = new(member.operand.shape, member.operand.dtype)
    places = cut_for(whole, count, reducers or count)
    # What comes first lies where the results of the others will come.
    held = [place[: own.size] if place.size >= own.size else new(own.shape, own.dtype) for place in places]
    held[position] = own
    yield from link.round(pieces, held)
    reduce_arrays(held, reduction, places[position])
    own_to_all = [places[position] if own.size else None] * count
    yield from link.round(own_to_all, [place if place.size else None for place in places])
    return whole


def cut_for(array: Array, count: int, reducers: int) -> list[Array]:
    """Views of what each of `count` members reduces of an array: pieces of about the same size, or nothing."""
    return cut_flat(array, reducers) + [array.reshape(-1)[:0]] * (count - reducers)


def is_one_round(execution: Execution, member: Member) -> bool:
    """Whether each member sends its operand to each other, and reduces all of them by itself."""
    is_reduced = execution.exchange is None and execution.moves is None and execution.reads_all
    # Of two, each sends as much either way.
    count = len(member.shapes)
    return is_reduced and (count == 2 or member.operand.nbytes * (count - 1) <= SMALL)


def _all_operands(member: Member, link: Link, new: New) -> Steps[list[Array]]:
    """The operands of all members, in order of position."""
    mine = contiguous(member.operand)
    held = [mine if place == member.position else new(shape, mine.dtype) for place, shape in enumerate(member.shapes)]
    yield from link.round([mine] * len(held), held)
    return held
