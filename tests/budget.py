"""How much the random and the brute-force tests try: one share of all their counts.

A thirty-second where nothing is said, as in `make test`; all in `make test-all`; `IRPAR_TEST_BUDGET=10` for a long search.
"""

import math
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import product
from typing import Any, TypeVar

_T = TypeVar("_T")

SHARE = float(os.environ.get("IRPAR_TEST_BUDGET", "0.03125"))
LEAST = 5
"""Of what has so few, all are tried."""


def budget(count: int, least: int = LEAST) -> int:
    """How many of so many examples, seeds or programs a test tries; `least` where it does so for each of many operators."""
    return max(math.ceil(count * SHARE), min(count, least))


def pairs(those: Sequence[Any], others: Sequence[Any]) -> list[tuple[Any, Any]]:
    """All of those with all others; of a smaller share each of those with one of the others, in turn."""
    if SHARE >= 1:
        return list(product(those, others))
    return [(each, others[place % len(others)]) for place, each in enumerate(those)]


def every(step: int, cases: Iterable[_T]) -> list[_T]:
    """All cases; of a smaller share the first, and each so-many-th after it."""
    return list(cases)[:: 1 if SHARE >= 1 else step]


def of_each(kind: Callable[[_T], Hashable], cases: Sequence[_T]) -> list[_T]:
    """All cases; of a smaller share one of each kind: the first of the first kind, the second of the second, in turn."""
    if SHARE >= 1:
        return list(cases)
    kinds: dict[Hashable, list[_T]] = {}
    for case in cases:
        kinds.setdefault(kind(case), []).append(case)
    return [alike[place % len(alike)] for place, alike in enumerate(kinds.values())]
