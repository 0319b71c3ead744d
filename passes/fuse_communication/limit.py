"""Merges that ranks have the memory for."""

import math
from collections.abc import Callable, Sequence

from irpar.ir import Module, clone_module
from irpar.pass_manager.memory_limit import peak_bytes

from .transfers import Bucket

MOST_TRIES = 40
"""Merges of the whole module that are tried; what has not been by then is not done."""

Merges = Sequence[Sequence[Bucket]]
"""Of each graph that all programs have."""
Merge = Callable[[Module, Merges], bool]
"""Does them; whether there was an order for them in which all ranks come to collectives."""


def within_limit(module: Module, found: Merges, merge: Merge) -> tuple[Merges, tuple[str, ...]]:
    """The merges after which no rank holds more than the memory limit of the module, or than it does without them.

    {a, b, c, d}: all at once; where that is too much, one half, then the other with what is kept of the first, each
    taken apart further where it is too much.

    Returns:
        What is done; a note where that is not all.
    """
    if module.memory_limit is None or not any(found):
        return found, ()
    most = max(module.memory_limit, peak_bytes(module))
    listed = [(place, bucket) for place, buckets in enumerate(found) for bucket in buckets]
    kept: list[tuple[int, Bucket]] = []
    waiting = [listed]
    tried: list[float] = []
    while waiting and len(tried) < MOST_TRIES:
        some = waiting.pop()
        tried.append(_needed(module, _placed([*kept, *some], len(found)), merge))
        if tried[-1] <= most:
            kept += some
        else:
            waiting += [half for half in reversed(_halves(some)) if half]
    if kept == listed:
        return found, ()
    if not kept:
        note = f"not done: a rank would hold {tried[0]:,} bytes, the memory limit is {module.memory_limit:,}"
        return _placed(kept, len(found)), (note,)
    left = sum(len(bucket.ids) - 1 for _, bucket in listed) - sum(len(bucket.ids) - 1 for _, bucket in kept)
    note = f"{left:,} more would be merged, but for the memory limit of {module.memory_limit:,} bytes"
    return _placed(kept, len(found)), (note,)


def _needed(module: Module, merges: Merges, merge: Merge) -> float:
    """What a rank would hold; infinite where it cannot be."""
    trial = clone_module(module)
    return peak_bytes(trial) if merge(trial, merges) else math.inf


def _halves(some: list[tuple[int, Bucket]]) -> list[list[tuple[int, Bucket]]]:
    """Half of the merges each; of one merge half of its collectives, where each half merges some."""
    middle = len(some) // 2
    if middle:
        return [some[:middle], some[middle:]]
    ((place, bucket),) = some
    middle = len(bucket.ids) // 2
    return [[(place, Bucket(ids))] for ids in (bucket.ids[:middle], bucket.ids[middle:]) if len(ids) > 1]


def _placed(some: Sequence[tuple[int, Bucket]], count: int) -> Merges:
    found: list[list[Bucket]] = [[] for _ in range(count)]
    for place, bucket in some:
        found[place].append(bucket)
    return found
