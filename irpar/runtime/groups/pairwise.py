"""Collectives as rounds in which each member of a group sends to each other: for groups that have only that."""

from collections.abc import Sequence

import numpy as np

from irpar.ops.collectives.arrays import is_text
from irpar.ops.collectives.record import Link, Steps, T
from irpar.ops.collectives.rounds import New, run

from ..messages import decode, encode
from .base import Array
from .results import EXECUTED
from .spmd import Meeting


def exchange(meeting: Meeting, link: Link, new: New = np.empty, reducers: int | None = None) -> Steps[Array]:
    """Execute a collective; the first round has begun when the first step ends.

    Args:
        meeting: what the members agree on.
        link: what carries the rounds.
        new: makes arrays of a shape and dtype.
        reducers: see `rounds.run`.

    Raises:
        ValueError: the attributes do not fit the operands.
    """
    if is_text(meeting.operand.dtype):
        return (yield from _texts(meeting, link))
    return (yield from run(EXECUTED[meeting.collective.kind], meeting, link, new, reducers))


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
