"""Which elements of a dim that lies in blocks go from which device to which, so that each gets those that it wants."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .blocks import block_sizes, ceil_div

Indices = np.ndarray[Any, np.dtype[np.int64]]

_MOST_KINDS = 8
"""Different rows of devices that others at an edge may follow."""

FILL = -1
"""Stands for an element that is in no source: the first of what every device has beside them. -2 is the second, ..."""


@dataclass(frozen=True, eq=False)
class Round:
    """One permutation: each device sends at most once and receives at most once.

    Attributes:
        pairs: (sender, receiver).
        size: elements along the dim that each sends.
        rows: what each device sends, as places in what it holds (its blocks of all sources, one after the other); None
            for those that do not send.
    """

    pairs: tuple[tuple[int, int], ...]
    size: int
    rows: tuple[Indices | None, ...]


@dataclass(frozen=True, eq=False)
class Exchange:
    """How each device comes to the elements that it wants.

    Attributes:
        rounds: one after the other.
        rows: per device what it wants, as places in what it then has: its own blocks, what came in each round, and last
            what every device has beside: one element to fill with, or those of other sources.
    """

    rounds: tuple[Round, ...]
    rows: tuple[Indices, ...]


def plan_exchange(sources: Sequence[int], wanted: Sequence[Indices], *, zero_fill: bool) -> Exchange:
    """Plan the fewest rounds in which no device sends or receives twice (König, 1916: edge colouring).

    Args:
        sources: sizes of the dim of each source; each lies in ceil-sized blocks over all devices.
        wanted: per device the elements that it wants, numbered through the sources one after the other; negative: FILL,
            and what follows it.
        zero_fill: FILL, which alone is negative, means zero, so that a block that nobody sends will do.
    """
    parts = len(wanted)
    owner, place = _places(sources, parts)
    own = [sum(sizes) for sizes in zip(*(block_sizes(size, parts) for size in sources), strict=True)]
    edges: dict[tuple[int, int], Indices] = {}
    for receiver, ids in enumerate(wanted):
        real = ids[ids >= 0]
        for sender in np.unique(owner[real]):
            if sender != receiver:
                edges[int(sender), receiver] = np.unique(place[real[owner[real] == sender]])
    rounds = _rounds(edges, parts)
    return Exchange(rounds, _rows(wanted, owner, place, own, rounds, edges, zero_fill=zero_fill))


def _places(sources: Sequence[int], parts: int) -> tuple[Indices, Indices]:
    """For each element of the sources who holds it, and where among all that it holds."""
    owners, places = [], []
    before = np.zeros(parts, np.int64)
    for size in sources:
        block = max(1, ceil_div(size, parts))
        ids = np.arange(size)
        owner = ids // block
        owners.append(owner)
        places.append(before[owner] + ids - owner * block)
        before += block_sizes(size, parts)
    return np.concatenate(owners), np.concatenate(places)


def _rounds(edges: dict[tuple[int, int], Indices], parts: int) -> tuple[Round, ...]:
    colours = _coloured(sorted(edges, key=lambda edge: (-len(edges[edge]), edge)), parts)
    found = []
    for colour in range(1 + max(colours.values(), default=-1)):
        pairs = sorted(edge for edge, its in colours.items() if its == colour)
        size = max(len(edges[edge]) for edge in pairs)
        rows: list[Indices | None] = [None] * parts
        for sender, receiver in pairs:
            row = edges[sender, receiver]
            rows[sender] = np.concatenate([row, np.full(size - len(row), row[-1])])
        found.append(Round(tuple(pairs), size, tuple(rows)))
    return tuple(found)


def _coloured(edges: Sequence[tuple[int, int]], parts: int) -> dict[tuple[int, int], int]:
    """A colour for each edge, none twice at a sender or at a receiver; as many as the busiest device has edges."""
    out: list[dict[int, int]] = [{} for _ in range(parts)]
    into: list[dict[int, int]] = [{} for _ in range(parts)]
    for sender, receiver in edges:
        a = next(colour for colour in range(2 * parts) if colour not in out[sender])
        b = next(colour for colour in range(2 * parts) if colour not in into[receiver])
        if a != b and a in into[receiver]:
            _swap(out, into, receiver, a, b)
        out[sender][a], into[receiver][a] = receiver, sender
    return {(sender, receiver): colour for sender, its in enumerate(out) for colour, receiver in its.items()}


def _swap(out: list[dict[int, int]], into: list[dict[int, int]], receiver: int, a: int, b: int) -> None:
    """Swap two colours along the path of edges that begins with `a` at a receiver, which then has no `a`."""
    path: list[tuple[int, int, int]] = []
    at, is_receiver, colour = receiver, True, a
    while colour in (into if is_receiver else out)[at]:
        other = (into if is_receiver else out)[at][colour]
        path.append((other, at, colour) if is_receiver else (at, other, colour))
        at, is_receiver, colour = other, not is_receiver, b if colour == a else a
    for sender, target, its in path:
        del out[sender][its], into[target][its]
    for sender, target, its in path:
        flipped = b if its == a else a
        out[sender][flipped], into[target][flipped] = target, sender


def _rows(
    wanted: Sequence[Indices],
    owner: Indices,
    place: Indices,
    own: Sequence[int],
    rounds: Sequence[Round],
    edges: dict[tuple[int, int], Indices],
    *,
    zero_fill: bool,
) -> tuple[Indices, ...]:
    starts = np.cumsum([0, *(step.size for step in rounds)])
    senders: list[list[tuple[int, int]]] = [[] for _ in wanted]
    for number, step in enumerate(rounds):
        for sender, receiver in step.pairs:
            senders[receiver].append((number, sender))
    found = []
    for receiver, ids in enumerate(wanted):
        row = own[receiver] + starts[-1] + FILL - ids
        owners = np.where(ids >= 0, owner[np.maximum(ids, 0)], -1)
        mine = owners == receiver
        row[mine] = place[ids[mine]]
        for number, sender in senders[receiver]:
            theirs = owners == sender
            came = np.searchsorted(edges[sender, receiver], place[ids[theirs]])
            row[theirs] = own[receiver] + starts[number] + came
        found.append(row)
    if zero_fill:
        _fill_with_nothing(found, wanted, own, rounds, starts)
    return tuple(found)


def _fill_with_nothing(
    rows: list[Indices], wanted: Sequence[Indices], own: Sequence[int], rounds: Sequence[Round], starts: Indices
) -> None:
    """Let devices at an edge take zeros from a round in which nothing comes, where their neighbours take what came.

    Then all have equal rows, and no device needs to know its place.
    """
    got: list[list[int]] = [[] for _ in rows]
    for number, step in enumerate(rounds):
        for _, target in step.pairs:
            got[target].append(number)
    kinds: dict[tuple[int, int], dict[bytes, int]] = {}
    for receiver, row in enumerate(rows):
        alike = kinds.setdefault((own[receiver], len(row)), {})
        if len(alike) < _MOST_KINDS and (wanted[receiver] != FILL).any():
            alike.setdefault(row.tobytes(), receiver)
    originals = {other: rows[other].copy() for alike in kinds.values() for other in alike.values()}
    for receiver, row in enumerate(rows):
        if not (wanted[receiver] == FILL).any():
            continue
        empty = np.ones(own[receiver] + starts[-1] + 1, bool)
        empty[: own[receiver]] = empty[-1] = False
        for number in got[receiver]:
            empty[own[receiver] + starts[number] : own[receiver] + starts[number + 1]] = False
        for other in kinds[own[receiver], len(row)].values():
            borrowed = (wanted[receiver] == FILL) & (wanted[other] != FILL) & empty[originals[other]]
            row[borrowed] = originals[other][borrowed]
