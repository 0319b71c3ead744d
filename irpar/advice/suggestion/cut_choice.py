"""Which of several things that exclude each other are together worth most: an independent set of greatest weight.

Exact for what models give: many layers, each with a few choices, beside one shared choice (the width of the residual
stream) that excludes them all. Trees are folded from their leaves; what is left is searched, up to a bound.
"""

from collections.abc import Collection, Mapping

MOST_LOOKED_AT = 100_000
"""Numbers in all branches of the search; above it the rest is decided greedily."""
MOST_DEPTH = 64
"""Branches inside each other."""


def heaviest(weights: Mapping[int, float], conflicts: Mapping[int, Collection[int]]) -> set[int]:
    """The numbers that are chosen.

    Args:
        weights: number to what it is worth; those that are worth nothing are never chosen.
        conflicts: number to those that it excludes; in both directions.
    """
    kept = {number: weight for number, weight in sorted(weights.items()) if weight > 0}
    search = _Search({number: {other for other in conflicts[number] if other in kept} for number in kept})
    return search.best(kept, 0)


class _Search:
    """Folds leaves, then branches on the number that excludes most; parts that do not touch are decided apart."""

    def __init__(self, conflicts: Mapping[int, set[int]]) -> None:
        self.conflicts = conflicts
        self.looked_at = 0

    def best(self, weights: Mapping[int, float], depth: int) -> set[int]:
        """The best choice among the numbers that have a weight."""
        left = dict(weights)
        folded = self._fold(left)
        chosen: set[int] = set()
        for part in self._parts(left):
            chosen |= self._branch({number: left[number] for number in part}, depth)
        for leaf, stem in reversed(folded):
            if stem is None or stem not in chosen:
                chosen.add(leaf)
        return chosen

    def _fold(self, left: dict[int, float]) -> list[tuple[int, int | None]]:
        """Take away numbers that exclude at most one other, which is then worth less by what they are worth.

        a (3) - b (5) - c (4)      a goes: b is worth 2; c is worth more: b goes, and a is chosen with c

        Returns:
            In order, who went, and unless which other is chosen it is chosen itself; None: it is chosen in any case.
        """
        beside = {number: {other for other in self.conflicts[number] if other in left} for number in left}
        waiting = [number for number in left if len(beside[number]) <= 1]
        folded: list[tuple[int, int | None]] = []

        def remove(number: int) -> None:
            del left[number]
            for other in sorted(beside.pop(number)):
                beside[other].discard(number)
                if len(beside[other]) <= 1:
                    waiting.append(other)

        while waiting:
            leaf = waiting.pop()
            if leaf not in left:
                continue
            stem = next(iter(beside[leaf]), None)
            if stem is None or left[leaf] >= left[stem]:
                folded.append((leaf, None))
                if stem is not None:
                    remove(stem)
            else:
                folded.append((leaf, stem))
                left[stem] -= left[leaf]
            remove(leaf)
        return folded

    def _branch(self, weights: Mapping[int, float], depth: int) -> set[int]:
        self.looked_at += len(weights)
        if self.looked_at > MOST_LOOKED_AT or depth > MOST_DEPTH:
            return self._greedy(weights)
        hub = max(sorted(weights), key=lambda number: sum(other in weights for other in self.conflicts[number]))
        without = self.best({number: weight for number, weight in weights.items() if number != hub}, depth + 1)
        excluded = self.conflicts[hub] | {hub}
        rest = {number: weight for number, weight in weights.items() if number not in excluded}
        if weights[hub] + sum(rest.values()) <= _total(weights, without):
            return without
        with_hub = {hub} | self.best(rest, depth + 1)
        return with_hub if _total(weights, with_hub) > _total(weights, without) else without

    def _greedy(self, weights: Mapping[int, float]) -> set[int]:
        """The one that is worth most beside what it excludes, again and again."""

        def ratio(number: int) -> float:
            lost = sum(weights[other] for other in sorted(self.conflicts[number]) if other in weights)
            return weights[number] / lost if lost else float("inf")

        chosen: set[int] = set()
        left = set(weights)
        for number in sorted(weights, key=lambda number: (-ratio(number), number)):
            if number in left:
                chosen.add(number)
                left -= self.conflicts[number] | {number}
        return chosen

    def _parts(self, weights: Mapping[int, float]) -> list[list[int]]:
        """The numbers that hang together by conflicts."""
        parts: list[list[int]] = []
        seen: set[int] = set()
        for start in weights:
            if start in seen:
                continue
            seen.add(start)
            part, waiting = [start], [start]
            while waiting:
                for other in self.conflicts[waiting.pop()]:
                    if other in weights and other not in seen:
                        seen.add(other)
                        part.append(other)
                        waiting.append(other)
            parts.append(sorted(part))
        return parts


def _total(weights: Mapping[int, float], numbers: set[int]) -> float:
    """Summed in one order, so that equal choices are equal."""
    return sum(weights[number] for number in sorted(numbers))
