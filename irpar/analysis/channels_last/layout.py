"""The two orders of an image's dims: (batch, channels, places...), as ONNX has them, and (batch, places..., channels).

[8, 64, 56, 56] is [8, 56, 56, 64] with its channels last: perm [0, 2, 3, 1] makes it so, [0, 3, 1, 2] turns it back.
"""

from collections.abc import Sequence
from math import prod
from typing import TypeVar

Dim = TypeVar("Dim")
LEAST_RANK, MOST_RANK = 3, 5


def to_last(rank: int) -> tuple[int, ...]:
    """The permutation that puts channels last."""
    return (0, *range(2, rank), 1)


def to_first(rank: int) -> tuple[int, ...]:
    """The permutation that puts them back."""
    return (0, rank - 1, *range(1, rank - 1))


def last(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """What lists something for each dim, with channels last."""
    return (shape[0], *shape[2:], shape[1])


def axis_last(axis: int, rank: int) -> int:
    """Where a dim lies with channels last."""
    return to_last(rank).index(axis % rank)


def lies_alike(shape: Sequence[int]) -> bool:
    """Whether the elements lie in one order with channels first and last, so that turning them moves nothing."""
    return shape[1] == 1 or prod(shape[2:]) == 1
