"""In which waves collectives go, so that few have to be sent one by one.

c0 over q; c1, c2, c3 over p; c2 reads what c0 gives        by depth: {c0}, {c1, c3}, {c2}; in two waves: {c0},
                                                            {c1, c2, c3}

Those of one wave are alike and do not depend on each other. How few waves there can be is a shortest common
supersequence of what depends on each other, which is NP-hard (Räihä and Ukkonen, 1981). A* (Hart, Nilsson and Raphael,
1968) finds it: a state is what has been sent, a step sends all of one kind that are ready (to send more never takes
more steps later). What is left takes at least the most of each kind that follow one another.
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MOST_STATES = 5000
"""That are looked at; then each step is the one after which the least is left, from the best of them on, or from the
start. Those of one depth go together where that takes fewer waves."""
MOST_MARKS = 2_000_000
"""Marks of what has been sent, a mark for each collective in each state: of 1,000 collectives 2,000 states."""


@dataclass(frozen=True)
class _State:
    """What has been sent.

    Attributes:
        sent: a bit for each collective.
        ready: the collectives that can be sent next.
        steps: the kinds that were sent, last first, with what came before.
        count: of steps.
        least: how many more there are at least.
    """

    sent: int
    ready: tuple[int, ...]
    steps: "tuple[tuple[int, ...], _State] | None"
    count: int
    least: int

    @property
    def order(self) -> tuple[int, int]:
        """The fewest steps first, and of those what is nearest to the end."""
        return self.count + self.least, -self.count


def waves_of(kinds: Mapping[int, Hashable], before: Mapping[int, Collection[int]]) -> dict[int, int]:
    """The wave of each collective, such that there are few waves.

    Args:
        kinds: of each collective, by number: equal for those that can be sent together; in an order in which each
            stands behind what it depends on.
        before: the collectives that each depends on.

    Returns:
        Number to wave. As few waves as there can be, where no more than `MOST_STATES` states had to be looked at.
    """
    numbers = list(kinds)
    place = {number: index for index, number in enumerate(numbers)}
    search = _Search([kinds[number] for number in numbers], [[place[each] for each in before[n]] for n in numbers])
    return {numbers[index]: wave for wave, sent in enumerate(search.run()) for index in sent}


class _Search:
    """One search."""

    def __init__(self, kinds: Sequence[Hashable], before: Sequence[Sequence[int]]) -> None:
        self.kinds = kinds
        self.all = (1 << len(kinds)) - 1
        self.before = [sum(1 << other for other in set(others)) for others in before]
        self.after: list[list[int]] = [[] for _ in kinds]
        for number, others in enumerate(before):
            for other in set(others):
                self.after[other].append(number)
        members: defaultdict[Hashable, list[int]] = defaultdict(list)
        for number, kind in enumerate(kinds):
            members[kind].append(number)
        several = [kind for kind, found in members.items() if len(found) > 1]
        column = {kind: index for index, kind in enumerate(several)}
        self.alone = sum(1 << found[0] for found in members.values() if len(found) == 1)
        self.chains = np.zeros((len(kinds), len(several)), np.int64)
        """Of each collective and kind, the most that follow one another from it on, itself included."""
        for number in reversed(range(len(kinds))):
            for other in self.after[number]:
                np.maximum(self.chains[number], self.chains[other], out=self.chains[number])
            if kinds[number] in column:
                self.chains[number, column[kinds[number]]] += 1

    def run(self) -> list[tuple[int, ...]]:
        """What is sent in each wave."""
        ready = tuple(number for number, others in enumerate(self.before) if not others)
        start = _State(0, ready, None, 0, self._least(0, ready))
        waiting = [(start.order, 0, start)]
        seen = {0: 0}
        pushed = 0
        for _ in range(min(MOST_STATES, MOST_MARKS // max(1, len(self.kinds)))):
            _, _, state = heapq.heappop(waiting)
            if state.sent == self.all:
                return _steps(state)
            for follower in self._followers(state):
                if follower.count < seen.get(follower.sent, follower.count + 1):
                    seen[follower.sent] = follower.count
                    pushed += 1
                    heapq.heappush(waiting, (follower.order, pushed, follower))
        return min(self._on_from(waiting[0][2]), self._on_from(start), self._by_depth(), key=len)

    def _on_from(self, state: _State) -> list[tuple[int, ...]]:
        """The steps to a state, and on from there, each the one after which the least is left."""
        while state.sent != self.all:
            state = min(self._followers(state), key=lambda each: (each.least, -each.sent.bit_count()))
        return _steps(state)

    def _by_depth(self) -> list[tuple[int, ...]]:
        """Those of one kind and depth together: a way that takes no search."""
        depths = [0] * len(self.kinds)
        found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        first = {kind: number for number, kind in reversed(list(enumerate(self.kinds)))}
        for number, kind in enumerate(self.kinds):
            for other in self.after[number]:
                depths[other] = max(depths[other], depths[number] + 1)
            found[depths[number], first[kind]].append(number)
        return [tuple(found[key]) for key in sorted(found)]

    def _followers(self, state: _State) -> list[_State]:
        """The states one step on: all that is ready of one kind is sent."""
        ready: defaultdict[Hashable, list[int]] = defaultdict(list)
        for number in state.ready:
            ready[self.kinds[number]].append(number)
        return [self._after(state, tuple(numbers)) for numbers in ready.values()]

    def _after(self, state: _State, numbers: tuple[int, ...]) -> _State:
        sent = state.sent | sum(1 << number for number in numbers)
        left = dict.fromkeys(number for number in state.ready if not sent >> number & 1)
        missing = self.all & ~sent
        for number in numbers:
            left.update((other, None) for other in self.after[number] if not self.before[other] & missing)
        ready = tuple(left)
        return _State(sent, ready, (numbers, state), state.count + 1, self._least(sent, ready))

    def _least(self, sent: int, ready: Sequence[int]) -> int:
        """How many steps there are at least: of each kind the most that follow one another."""
        alone = (self.alone & ~sent).bit_count()
        return alone + (int(self.chains[list(ready)].max(axis=0).sum()) if ready else 0)


def _steps(state: _State) -> list[tuple[int, ...]]:
    found = []
    while state.steps is not None:
        numbers, state = state.steps
        found.append(numbers)
    return found[::-1]
