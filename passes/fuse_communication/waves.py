"""In which waves collectives go, so that few have to be sent one by one.

c0 over q; c1, c2, c3 over p; c2 reads what c0 gives        by depth: {c0}, {c1, c3}, {c2}; in two waves: {c0},
                                                            {c1, c2, c3}

Those of one wave are alike and do not depend on each other. How few waves there can be is a shortest common
supersequence of what depends on each other, which is NP-hard (Räihä and Ukkonen, 1981). A* (Hart, Nilsson and Raphael,
1968) finds it: a state is what has been sent, a step sends all of one kind that are ready (to send more never takes
more steps later). What is left takes at least the most of each kind that follow one another. A kind of which all that
is left is ready goes at once, since it takes a step in any case, and so does the only kind that is ready: what merges
with nothing takes no search.
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

MOST_STATES = 5000
"""That are looked at; then each step is the one after which the least is left, from the best of them on, or from the
start. Those of one depth, or those of the kind of which the fewest are not ready yet, go together where that takes
fewer waves."""
MOST_WORK = 20_000_000
"""Numbers that are read for the states of a search, and for each way on from one without it: the collectives for each
step, and for each state the kinds of those that are ready. Of 1,000 collectives some 10,000 states."""


@dataclass(frozen=True)
class _Steps:
    """What was sent in a step, and what came before."""

    last: tuple[int, ...]
    before: "_Steps | None"


@dataclass(frozen=True)
class _State:
    """What has been sent.

    Attributes:
        sent: a bit for each collective.
        ready: of each kind the collectives that can be sent next.
        steps: the last one, with those before.
        count: of steps.
        least: how many more there are at least.
    """

    sent: int
    ready: Mapping[int, Sequence[int]]
    steps: _Steps | None
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
        numbered = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        self.kinds = [numbered[kind] for kind in kinds]
        self.all = (1 << len(kinds)) - 1
        self.before = [sum(1 << other for other in set(others)) for others in before]
        self.after: list[list[int]] = [[] for _ in kinds]
        for number, others in enumerate(before):
            for other in set(others):
                self.after[other].append(number)
        self.members = [0] * len(numbered)
        """Of each kind a bit for each collective."""
        for number, kind in enumerate(self.kinds):
            self.members[kind] |= 1 << number
        self.alone = sum(members for members in self.members if members.bit_count() == 1)
        self.several = [kind for kind, members in enumerate(self.members) if members.bit_count() > 1]
        self.states = 0
        """That were made."""
        self.work = 0
        """Numbers that were read."""

    @cached_property
    def chains(self) -> np.ndarray:
        """Of each collective and each kind of several, the most that follow one another from it on, it included."""
        column = {kind: index for index, kind in enumerate(self.several)}
        chains = np.zeros((len(self.kinds), len(column)), np.int32)
        for number in reversed(range(len(self.kinds))):
            for other in self.after[number]:
                np.maximum(chains[number], chains[other], out=chains[number])
            if self.kinds[number] in column:
                chains[number, column[self.kinds[number]]] += 1
        return chains

    def run(self) -> list[tuple[int, ...]]:
        """What is sent in each wave."""
        front = _Front(self)
        front.settle()
        if front.sent == self.all or len(self.kinds) * len(self.several) > MOST_WORK:
            return min(self._by_depth(), self._by_readiness(front), key=len)
        start = self._state(front)
        found, best = self._shortest(start)
        if found is not None:
            return found
        ways = [self._on_from(best), self._on_from(start), self._by_depth(), self._by_readiness(front)]
        return min((way for way in ways if way is not None), key=len)

    def _shortest(self, start: _State) -> tuple[list[tuple[int, ...]] | None, _State]:
        """The fewest steps, or none where that takes too long; the state that is left to go on from."""
        self.work = 0
        waiting = [(start.order, 0, start)]
        seen = {start.sent: start.count}
        state = start
        for _ in range(MOST_STATES):
            _, _, state = heapq.heappop(waiting)
            if state.sent == self.all:
                return _listed(state.steps), state
            for follower in self._followers(state):
                if follower.count < seen.get(follower.sent, follower.count + 1):
                    seen[follower.sent] = follower.count
                    heapq.heappush(waiting, (follower.order, self.states, follower))
            if self.work > MOST_WORK:
                break
        return None, waiting[0][2] if waiting else state

    def _on_from(self, state: _State) -> list[tuple[int, ...]] | None:
        """The steps to a state and on, each the one after which the least is left; none where that takes long."""
        self.work = 0
        while state.sent != self.all:
            state = min(self._followers(state), key=lambda each: (each.least, -each.sent.bit_count()))
            if self.work > MOST_WORK:
                return None
        return _listed(state.steps)

    def _by_depth(self) -> list[tuple[int, ...]]:
        """Those of one kind and depth together: a way that takes no search."""
        depths = [0] * len(self.kinds)
        found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for number, kind in enumerate(self.kinds):
            for other in self.after[number]:
                depths[other] = max(depths[other], depths[number] + 1)
            found[depths[number], kind].append(number)
        return [tuple(found[key]) for key in sorted(found)]

    def _by_readiness(self, front: "_Front") -> list[tuple[int, ...]]:
        """On from there, each time all of the kind of which the fewest are not ready: another way without a search."""
        while front.ready:
            front.send(min(front.ready, key=front.missing))
            front.settle()
        return _listed(front.steps)

    def _followers(self, state: _State) -> Iterator[_State]:
        """The states one step on, all that is ready of one kind is sent; the first few where it takes too long."""
        for kind in state.ready:
            front = _Front(self, state)
            front.send(kind)
            front.settle()
            yield self._state(front)
            if self.work > MOST_WORK:
                break

    def _state(self, front: "_Front") -> _State:
        """Where a front is, with how many steps there are at least: of each kind the most that follow one another."""
        ready = [number for numbers in front.ready.values() for number in numbers]
        least = (self.alone & ~front.sent).bit_count()
        if ready:
            least += int(self.chains[ready].max(axis=0).sum())
        self.states += 1
        self.work += len(self.kinds) + len(ready) * len(self.several)
        return _State(front.sent, front.ready, front.steps, front.count, least)


class _Front:
    """What has been sent, and what can be next, while steps are taken.

    Attributes:
        sent, ready, steps, count: as those of a state.
    """

    def __init__(self, search: _Search, state: _State | None = None) -> None:
        self.search = search
        self.sent = state.sent if state else 0
        self.ready = {kind: [*numbers] for kind, numbers in state.ready.items()} if state else {}
        self.steps = state.steps if state else None
        self.count = state.count if state else 0
        self._whole: list[tuple[int, int]] = []
        """The kinds of which all that is left is ready, by their first collective."""
        if state is None:
            self._add(number for number, others in enumerate(search.before) if not others)

    def missing(self, kind: int) -> int:
        """How many of a kind are not ready yet."""
        return (self.search.members[kind] & ~self.sent).bit_count() - len(self.ready[kind])

    def send(self, kind: int) -> None:
        """Send all that are ready of a kind."""
        self.search.work += len(self.search.kinds)
        numbers = self.ready.pop(kind)
        self.steps = _Steps(tuple(numbers), self.steps)
        self.count += 1
        self.sent |= sum(1 << number for number in numbers)
        missing = self.search.all & ~self.sent
        behind = dict.fromkeys(other for number in numbers for other in self.search.after[number])
        self._add(other for other in behind if not self.search.before[other] & missing)

    def settle(self) -> None:
        """Send what may go at once whatever comes next: kinds that are ready as a whole, or nothing else is."""
        while self._whole or len(self.ready) == 1:
            self.send(heapq.heappop(self._whole)[1] if self._whole else next(iter(self.ready)))

    def _add(self, numbers: Iterable[int]) -> None:
        kinds: dict[int, None] = {}
        for number in numbers:
            kind = self.search.kinds[number]
            kinds[kind] = None
            self.ready.setdefault(kind, []).append(number)
        for kind in kinds:
            if not self.missing(kind):
                heapq.heappush(self._whole, (self.ready[kind][0], kind))


def _listed(steps: _Steps | None) -> list[tuple[int, ...]]:
    """What was sent in each step, first first."""
    found: list[tuple[int, ...]] = []
    while steps is not None:
        found.append(steps.last)
        steps = steps.before
    return found[::-1]
