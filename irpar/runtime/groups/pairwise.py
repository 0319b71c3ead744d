"""Collectives as rounds in which each member of a group sends to each other: for groups that have only that.

Results have the bits of the `threads` group: operands are reduced in order of position. No member sends more than a
ring would, but for small operands (fewer rounds) and the root of a broadcast (twice its operand, instead of once to
each of the others).
"""

import math
from collections.abc import Callable, Generator, Sequence
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np

from ..messages import decode, encode
from ..reduction import reduce_arrays
from .base import Array
from .results import (
    EXECUTED,
    block_bounds,
    check_dim,
    check_root,
    is_text,
    nothing_like,
    own_pieces,
    resized,
    source_of,
)
from .spmd import Meeting

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that goes on, a step each time it is asked for, as far as what has arrived allows."""

SMALL = 1 << 16
"""Bytes that a member may send in one round where two rounds would send less."""


class Link(Protocol):
    """Carries the rounds of one collective."""

    def round(self, sends: Sequence[Array | None], receives: Sequence[Array | None]) -> Steps[None]:
        """Send to each other member, and fill arrays with what each sends; by position, one's own is passed over.

        Args:
            sends: C-contiguous arrays; None: nothing.
            receives: C-contiguous arrays of the sizes that come; None where nothing does.
        """
        ...


def exchange(meeting: Meeting, link: Link) -> Steps[Array]:
    """Execute a collective; the first round has begun when the first step ends.

    Raises:
        ValueError: the attributes do not fit the operands.
    """
    run = _texts if is_text(meeting.operand.dtype) else PAIRWISE[meeting.collective.kind]
    return (yield from run(meeting, link))


def _all_operands(meeting: Meeting, link: Link) -> Steps[list[Array]]:
    """The operands of all members, in order of position."""
    mine = _contiguous(meeting.operand)
    held = [np.empty(shape, mine.dtype) for shape in meeting.shapes]
    held[meeting.position] = mine
    yield from link.round([mine] * len(held), held)
    return held


def _texts(meeting: Meeting, link: Link) -> Steps[Array]:
    """Strings have no fixed size: first how many bytes, then these; every member gets all operands."""
    mine = np.frombuffer(encode(meeting.operand), np.uint8)
    count = len(meeting.members)
    sizes = [np.empty(1, np.int64) for _ in range(count)]
    yield from link.round([np.array([mine.size])] * count, sizes)
    held = [np.empty(int(size[0]) if place != meeting.position else 0, np.uint8) for place, size in enumerate(sizes)]
    yield from link.round([mine] * count, held)
    operands = [
        decode(each.tobytes()) if place != meeting.position else meeting.operand for place, each in enumerate(held)
    ]
    return EXECUTED[meeting.collective.kind].result(meeting.collective, operands, meeting.position)


def _all_reduce(meeting: Meeting, link: Link) -> Steps[Array]:
    """Each member reduces one piece, and sends it to all: what a ring sends, in two rounds."""
    reduction = meeting.collective.reduce
    count, position = len(meeting.members), meeting.position
    mine = _contiguous(meeting.operand)
    if mine.nbytes * (count - 1) <= SMALL:
        operands = yield from _all_operands(meeting, link)
        return reduce_arrays(operands, reduction)
    cut = _cut_flat(mine, count)
    held = [np.empty_like(cut[position]) for _ in range(count)]
    held[position] = cut[position]
    yield from link.round(cut, held)
    whole = np.empty_like(mine)
    pieces = _cut_flat(whole, count)
    pieces[position][...] = reduce_arrays(held, reduction)
    del held
    yield from link.round([pieces[position]] * count, pieces)
    return whole


def _reduce_scatter(meeting: Meeting, link: Link) -> Steps[Array]:
    collective, count, position = meeting.collective, len(meeting.members), meeting.position
    cut = _cut(meeting, collective.dim)
    held = [np.empty_like(cut[position]) for _ in range(count)]
    held[position] = cut[position]
    yield from link.round(cut, held)
    return reduce_arrays(held, collective.reduce)


def _all_gather(meeting: Meeting, link: Link) -> Steps[Array]:
    mine = _contiguous(meeting.operand)
    return (yield from _joined(meeting, link, [mine] * len(meeting.members), meeting.shapes, meeting.collective.dim))


def _all_to_all(meeting: Meeting, link: Link) -> Steps[Array]:
    collective, count = meeting.collective, len(meeting.members)
    dim, position = collective.split_dim, meeting.position
    cut = _cut(meeting, dim)
    shapes = []
    for shape in meeting.shapes:
        bounds = block_bounds(shape[dim], collective.split_sizes, count, dim)
        shapes.append(resized(shape, dim, bounds[position + 1] - bounds[position]))
    return (yield from _joined(meeting, link, cut, shapes, collective.concat_dim))


def _permute(meeting: Meeting, link: Link) -> Steps[Array]:
    collective, count, position = meeting.collective, len(meeting.members), meeting.position
    mine = _contiguous(meeting.operand)
    sources = [source_of(collective, count, place) for place in range(count)]
    source = sources[position]
    receives: list[Array | None] = [None] * count
    if source is not None and source != position:
        receives[source] = np.empty(meeting.shapes[source], mine.dtype)
    yield from link.round([mine if each == position else None for each in sources], receives)
    if source is None:
        return nothing_like(mine)
    return mine if source == position else receives[source]  # type: ignore[return-value]


def _broadcast(meeting: Meeting, link: Link) -> Steps[Array]:
    """Large ones in two rounds: each member gets a piece, and sends it to the others."""
    count, position, root = len(meeting.members), meeting.position, meeting.collective.root
    check_root(meeting.collective, count)
    is_root = position == root
    whole = _contiguous(meeting.operand) if is_root else np.empty_like(meeting.operand, order="C")
    nothing: list[Array | None] = [None] * count
    if whole.nbytes * (count - 1) <= SMALL or count == 2:
        yield from link.round(
            [whole] * count if is_root else nothing,
            [whole if place == root and not is_root else None for place in range(count)],
        )
        return whole
    pieces = _cut_flat(whole, count)
    mine = [pieces[position] if place == root and not is_root else None for place in range(count)]
    yield from link.round(pieces if is_root else nothing, mine)
    # The root has all pieces; its own, the others still want.
    onward = [pieces[position] if place != root else None for place in range(count)]
    yield from link.round(onward, nothing if is_root else pieces)
    return whole


PAIRWISE: dict[str, Callable[[Meeting, Link], Steps[Array]]] = {
    "AllReduce": _all_reduce,
    "AllGather": _all_gather,
    "ReduceScatter": _reduce_scatter,
    "AllToAll": _all_to_all,
    "CollectivePermute": _permute,
    "Broadcast": _broadcast,
}
"""By operator."""


def together(steps: Sequence[Steps[T]]) -> Steps[list[T]]:
    """Several works side by side; what each gives."""
    given: dict[int, T] = {}
    while True:
        for place, each in enumerate(steps):
            if place not in given:
                try:
                    next(each)
                except StopIteration as end:
                    given[place] = end.value
        if len(given) == len(steps):
            return [given[place] for place in range(len(steps))]
        yield


def _contiguous(array: Array) -> Array:
    return np.asarray(array, order="C")  # Unlike np.ascontiguousarray it leaves a scalar a scalar.


def _cut(meeting: Meeting, dim: int) -> list[Array]:
    """The blocks of a dim of this member's operand, one for each member."""
    operands = [meeting.operand] * len(meeting.members)
    return [
        _contiguous(own_pieces(meeting.collective, operands, dim, place)[0]) for place in range(len(meeting.members))
    ]


def _cut_flat(array: Array, count: int) -> list[Array]:
    """Views of the elements in order, in `count` pieces of about the same size."""
    flat = array.reshape(-1)
    bounds = [flat.size * place // count for place in range(count + 1)]
    return [flat[start:end] for start, end in pairwise(bounds)]


def _joined(
    meeting: Meeting, link: Link, sends: Sequence[Array], shapes: Sequence[tuple[int, ...]], dim: int
) -> Steps[Array]:
    """One round; what comes, with one's own piece, is concatenated along a dim."""
    dtype: np.dtype[Any] = meeting.operand.dtype
    check_dim(meeting.collective, dim, len(shapes[0]))
    if math.prod(shapes[0][:dim]) != 1:
        pieces = [np.empty(shape, dtype) for shape in shapes]
        pieces[meeting.position] = sends[meeting.position]
        yield from link.round(sends, pieces)
        return np.concatenate(pieces, axis=dim)
    # The pieces lie one after the other in the result: they are received in place.
    size = sum(shape[dim] for shape in shapes)
    whole = np.empty(resized(shapes[0], dim, size), dtype)
    flat, pieces, start = whole.reshape(-1), [], 0
    for shape in shapes:
        pieces.append(flat[start : start + math.prod(shape)])
        start += math.prod(shape)
    pieces[meeting.position][...] = sends[meeting.position].reshape(-1)
    yield from link.round(sends, pieces)
    return whole
