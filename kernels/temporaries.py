"""Temporaries: what kernels on a processor allocate themselves while they compute, as so many arrays like others."""

from collections.abc import Mapping, Sequence
from typing import Any

from .operands import compute_dtype
from .registry import ScratchBytes, Shaped

_LEAST_ITEMSIZE = 4
"""Bytes of an element of a temporary: small floats are computed as float32, flags count as what they choose between."""


def arrays_like(*operands: float, results: float = 0) -> ScratchBytes:
    """A bound of so many arrays like each operand, and like all results together.

    The last number holds for all operands that follow. Elements are as large as the largest of any operand or result.
    """
    last = operands[-1] if operands else 0

    def temporary_bytes(given: Sequence[Shaped | None], made: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
        known = [one for one in (*given, *made) if one is not None]
        itemsize = max([_LEAST_ITEMSIZE, *(one.dtype.itemsize for one in known)])
        counts = [*operands, *[last] * (len(given) - len(operands))]
        elements = sum(count * one.elements for count, one in zip(counts, given, strict=False) if one is not None)
        return int(elements + results * sum(one.elements for one in made)) * itemsize

    return temporary_bytes


def copies_of_strided(*places: int) -> ScratchBytes:
    """A bound of copies of the operands at some places, of those that do not lie in one piece."""

    def temporary_bytes(given: Sequence[Shaped | None], made: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
        read = (given[place] for place in places if place < len(given))
        return sum(one.elements * one.dtype.itemsize for one in read if one is not None and one.is_strided)

    return temporary_bytes


def together(*bounds: ScratchBytes) -> ScratchBytes:
    """The sum of several bounds."""

    def temporary_bytes(given: Sequence[Shaped | None], made: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
        return sum(bound(given, made, attributes) for bound in bounds)

    return temporary_bytes


def widened(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """A bound of what is computed in a wider dtype than it has: all operands and results, and rounded results."""
    made = sum(one.elements * one.dtype.itemsize for one in results if _is_small(one))
    known = (one for one in (*operands, *results) if one is not None and _is_small(one))
    return made + sum(one.elements * compute_dtype(one.dtype).itemsize for one in known)


def rounded(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """A bound of results of small floats that are computed elsewhere than where they go, one after the other."""
    return max((one.elements * one.dtype.itemsize for one in results if _is_small(one)), default=0)


def _is_small(one: Shaped) -> bool:
    """Whether an array is computed in a wider dtype."""
    return compute_dtype(one.dtype) != one.dtype
