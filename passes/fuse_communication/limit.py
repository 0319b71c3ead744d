"""Merges that ranks have the memory for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from irpar.analysis.memory.liveness import peak_bytes
from irpar.ir import Module, clone_module
from irpar.pass_manager.memory_limit import above_limit

from .transfers import Bucket

MOST_TRIES = 40
"""Merges of the whole module that are tried; what has not been by then is not done."""

Merges = Sequence[Sequence[Bucket]]
"""Of each graph that all programs have."""
ApplyMerges = Callable[[Module, Merges], bool]
"""Does them; whether there was an order for them in which all ranks come to collectives."""
Some = list[tuple[int, Bucket]]
"""Merges, each with the number of its graph."""


def within_limit(module: Module, found: Merges, apply: ApplyMerges) -> tuple[Merges, tuple[str, ...]]:
    """The merges after which no rank holds more than the memory limit of the module, or than it does without them.

    {a, b, c, d}: all at once; where that is too much, one half, then the other with what is kept of the first, each
    taken apart further where it is too much.

    Returns:
        What is done; notes where that is not all, which say why.
    """
    if module.memory_limit is None or not any(found):
        return found, ()
    most = max(module.memory_limit, peak_bytes(module))
    listed = [(place, bucket) for place, buckets in enumerate(found) for bucket in buckets]
    kept: Some = []
    waiting = [listed]
    left = _Left()
    for _ in range(MOST_TRIES):
        if not waiting:
            break
        some = waiting.pop()
        needed = _needed(module, _placed([*kept, *some], len(found)), apply)
        if needed is not None and needed <= most:
            kept += some
            continue
        halves = [half for half in _halves(some) if half]
        left.add(_saved(some) - sum(map(_saved, halves)), needed)
        waiting += reversed(halves)
    if kept == listed:
        return found, ()
    left.untried = sum(map(_saved, waiting))
    return _placed(kept, len(found)), left.notes(module.memory_limit, bool(kept))


@dataclass
class _Left:
    """What is not merged, in collectives fewer that there would be.

    Attributes:
        above: that ranks have no memory for.
        unordered: that ranks would come to in different orders.
        untried: of which nobody knows.
        needed: what a rank would hold after the first that was above the limit.
    """

    above: int = 0
    unordered: int = 0
    untried: int = 0
    needed: int = 0

    def add(self, count: int, needed: int | None) -> None:
        """Count some, after which a rank would hold so many bytes; None: there is no order for them."""
        if needed is None:
            self.unordered += count
        else:
            self.needed = self.needed or needed
            self.above += count

    def notes(self, limit: int, is_some_kept: bool) -> tuple[str, ...]:
        """A note for each reason."""
        if not (is_some_kept or self.unordered or self.untried):
            return (above_limit(self.needed, limit),)
        told = {
            f"{self.above:,} more would be merged, but for the memory limit of {limit:,} bytes": self.above,
            f"{self.unordered:,} more would be merged, but ranks would come to them in different orders": (
                self.unordered
            ),
            f"{self.untried:,} more may fit the memory limit, but {MOST_TRIES} ways were tried before": self.untried,
        }
        return tuple(note for note, count in told.items() if count)


def _needed(module: Module, merges: Merges, apply: ApplyMerges) -> int | None:
    """What a rank would hold; None where there is no order for them."""
    trial = clone_module(module)
    return peak_bytes(trial) if apply(trial, merges) else None


def _saved(some: Some) -> int:
    """How many collectives fewer there are after merges."""
    return sum(len(bucket.ids) - 1 for _, bucket in some)


def _halves(some: Some) -> list[Some]:
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
