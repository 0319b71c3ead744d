"""What a planner of memory takes and gives: when things are held, and where they lie."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

ALIGNMENT = 64
"""Bytes of a cache line, which no two values share."""

K = TypeVar("K", bound=Hashable)
Ints = np.ndarray[Any, "np.dtype[np.int64]"]


class Lifetime(NamedTuple, Generic[K]):
    """When something must be held.

    Attributes:
        key: what.
        nbytes: how large it is.
        first, last: the steps through which it is held, both included.
    """

    key: K
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Offsets(Generic[K]):
    """Where everything lies in a block.

    Attributes:
        offsets: bytes from the start of the block.
        nbytes: size of the block.
    """

    offsets: dict[K, int]
    nbytes: int


def offsets_of(held: Sequence[Lifetime[K]], begins: Iterable[int]) -> Offsets[K]:
    """A block in which each lies where it is said to begin."""
    found = {one.key: begin for one, begin in zip(held, begins, strict=True)}
    return Offsets(found, max((found[one.key] + one.nbytes for one in held), default=0))


def aligned(nbytes: int, alignment: int) -> int:
    """What a size takes in a block whose offsets are multiples of `alignment`."""
    return -(-nbytes // alignment) * alignment


def most_held(held: Iterable[Lifetime[K]], alignment: int = ALIGNMENT) -> int:
    """The most bytes that are held at once, which no block is smaller than."""
    changes: dict[int, int] = {}
    for one in held:
        size = aligned(one.nbytes, alignment)
        changes[one.first] = changes.get(one.first, 0) + size
        changes[one.last + 1] = changes.get(one.last + 1, 0) - size
    return max(accumulate(changes[step] for step in sorted(changes)), default=0)


@dataclass(frozen=True, slots=True)
class Rectangles:
    """What has bytes, as arrays: a rectangle each, steps long and bytes high, of which the offset is to be found.

    Attributes:
        first, last: the steps through which each is held, both included.
        size: bytes, aligned.
    """

    first: Ints
    last: Ints
    size: Ints

    @classmethod
    def of(cls, held: Sequence[Lifetime[Any]], alignment: int) -> "Rectangles":
        """Those of a sequence; nothing in it may be empty."""
        rows = [(one.first, one.last, aligned(one.nbytes, alignment)) for one in held]
        return cls(*np.array(rows, np.int64).reshape(-1, 3).T)

    def __len__(self) -> int:
        return len(self.size)

    @property
    def steps(self) -> Ints:
        """How long each is held."""
        return self.last - self.first + 1

    def top(self, begins: Ints) -> int:
        """The end of a block in which they begin there."""
        return int((begins + self.size).max(initial=0))
