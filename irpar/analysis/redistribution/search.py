"""The cheapest path of one problem: A* over states, guided by the bound.

Paths have the normal form of Rink et al. (arXiv 2112.01075): slices, then exchanges at one block size and at most one
permutation, then gathers. A permutation leads only to where gathers lead on to the goal; the other moves are free, so
that uneven blocks, which do not nest everywhere, find their ways too.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from irpar.sharding import ceil_div

from .bound import Bound
from .prices import Prices
from .problem import Problem
from .space import CollectiveStep, Counts, Space, State, put

_HASTE = 5
"""The weight of what remains, where too many states were seen: what leads on fastest is taken."""


@dataclass(frozen=True)
class Effort:
    """How hard to search.

    Attributes:
        weight: 1.1 is content with 1.1 times the least cost, and looks less far.
        states: after as many states seen, the search takes what leads on fastest.
    """

    weight: float
    states: int


@dataclass(frozen=True)
class Path:
    """What the search found.

    Attributes:
        moves: from the start to the goal.
        cost: by `Prices`.
        peak_bytes: the largest block on the way, both ends included.
    """

    moves: tuple[CollectiveStep, ...]
    cost: int
    peak_bytes: int


class _Whole(NamedTuple):
    """A path to the goal: what it costs, a state on it that the search has come to, and the moves from there."""

    cost: int
    state: State
    moves: tuple[CollectiveStep, ...]


class Search:
    """One problem on atoms of one granularity.

    Args:
        problem: what to solve.
        space: of its atoms.
        prices: what collectives cost.
        bound: the least cost from any counts to the goal.
        orders: whether a permutation tries all orders of the atoms that it brings in (networks tell them apart).
    """

    def __init__(self, problem: Problem, space: Space, prices: Prices, bound: Bound, orders: bool) -> None:
        self.problem = problem
        self.space = space
        self.prices = prices
        self.bound = bound
        self.orders = orders
        self.wanted = frozenset(problem.goal[1])
        product = math.prod(problem.sizes)
        self.is_even = all(size % product == 0 for size in problem.shape)
        self._bytes: dict[Counts, int] = {}
        self._ends = [self._cuts_on_the_way(dim) for dim in range(len(problem.shape))]

    @cached_property
    def closure(self) -> Mapping[Counts, tuple[State, ...]]:
        """Where a permutation may lead: many searches only tell their bound."""
        return self.space.closure(self.problem.goal, self.orders)

    def _cuts_on_the_way(self, dim: int) -> frozenset[int]:
        """The numbers of blocks that the ends cut a dim into, by all their axes or the first of them."""
        cuts = {1}
        for dims, _ in (self.problem.start, self.problem.goal):
            cuts.update(self.space.size(dims[dim][:count]) for count in range(len(dims[dim]) + 1))
        return frozenset(cuts)

    def block_bytes(self, counts: Counts) -> int:
        """Bytes of the largest block."""
        known = self._bytes.get(counts)
        if known is None:
            sizes = map(ceil_div, self.problem.shape, counts)
            known = self._bytes[counts] = ceil_div(math.prod(sizes) * self.problem.bits, 8)
        return known

    @property
    def ends_bytes(self) -> int:
        """The larger block of the two ends."""
        return max(self.block_bytes(self.space.counts(end)) for end in (self.problem.start, self.problem.goal))

    @property
    def least(self) -> int:
        """No path costs less."""
        least = self.bound(self.space.counts(self.problem.start))
        assert least is not None, "gathering and slicing lead anywhere"
        return least

    def shortest(self, most_bytes: int, effort: Effort, below: int | None = None) -> Path | None:
        """The cheapest path over blocks of at most `most_bytes`; None where none costs less than `below`."""
        start, weight = self.problem.start, effort.weight
        if start == self.problem.goal:
            return self._path({}, _Whole(0, start, ()))
        best = {start: 0}
        came: dict[State, tuple[State, CollectiveStep]] = {}
        whole = None if below is None else _Whole(below, start, ())
        order = itertools.count()
        queue = [(self.least, self.least, next(order), start, 0)]
        while queue:
            priority, least, _, state, spent = heapq.heappop(queue)
            if whole is not None and (len(best) > 2 * effort.states or (priority >= whole.cost and weight < _HASTE)):
                break
            if spent > best[state] or (whole is not None and spent + least >= whole.cost):
                continue
            if len(best) > effort.states and weight < _HASTE:
                weight = _HASTE
                queue = [(g + least * _HASTE, least, n, waiting, g) for _, least, n, waiting, g in queue]
                heapq.heapify(queue)
            for move, cost in self._edges(state, most_bytes):
                after, total = move.after, spent + cost
                if total < best.get(after, total + 1):
                    remaining = self.bound(self.space.counts(after))
                    if remaining is None or (whole is not None and total + remaining >= whole.cost):
                        continue
                    best[after] = total
                    came[after] = state, move
                    priority = total + weighed(remaining, weight)
                    heapq.heappush(queue, (priority, remaining, next(order), after, total))
                    whole = self._better(whole, state, move, total)
        return self._path(came, whole) if whole is not None and whole.moves else None

    def _better(self, whole: _Whole | None, state: State, move: CollectiveStep, total: int) -> _Whole | None:
        """The cheaper of what is known and a move that ends in the goal, or permutes to where gathers lead there."""
        if move.after == self.problem.goal:
            found = _Whole(total, state, (move,))
        elif move.op == "CollectivePermute":
            rest = self._gathers_to_goal(move.after)
            if rest is None:
                return whole
            found = _Whole(total + rest[0], state, (move, *rest[1]))
        else:
            return whole
        return found if whole is None or found.cost < whole.cost else whole

    def _gathers_to_goal(self, state: State) -> tuple[int, tuple[CollectiveStep, ...]] | None:
        """The cheapest gathers that lead from a state to the goal, if they do, and what they cost."""
        goal, partial = self.problem.goal
        extra = [dim for dim, atoms in enumerate(state[0]) if atoms != goal[dim]]
        if partial != state[1] or any(state[0][dim][: len(goal[dim])] != goal[dim] for dim in extra):
            return None
        best: tuple[int, tuple[CollectiveStep, ...]] | None = None
        for dims in itertools.permutations(extra):
            cost, moves, now = 0, list[CollectiveStep](), state
            for dim in dims:
                gathered = now[0][dim][len(goal[dim]) :]
                after = put(now[0], dim, goal[dim]), partial
                move = CollectiveStep("AllGather", gathered, (dim,), self.space.size(gathered), after)
                before = self.space.counts(now)
                if not self.is_even and not self._is_possible(move, before, self.space.counts(after)):
                    break
                cost += self._cost(move, before, self.block_bytes(before), 0)
                moves.append(move)
                now = after
            if now == self.problem.goal and (best is None or cost < best[0]):
                best = cost, tuple(moves)
        return best

    def _path(self, came: dict[State, tuple[State, CollectiveStep]], whole: _Whole) -> Path:
        moves, state = list(reversed(whole.moves)), whole.state
        while state != self.problem.start:
            state, move = came[state]
            moves.append(move)
        states = (self.problem.start, *(move.after for move in moves))
        peak = max(self.block_bytes(self.space.counts(state)) for state in states)
        return Path(tuple(reversed(moves)), whole.cost, peak)

    def least_peak(self) -> int:
        """The least that the largest block on any path can be."""
        start = self.problem.start
        queue = [(self.ends_bytes, 0, start)]
        best = {start: self.ends_bytes}
        order = itertools.count(1)
        while queue:
            peak, _, state = heapq.heappop(queue)
            if state == self.problem.goal:
                return peak
            if peak > best[state]:
                continue
            for move, _ in self._edges(state, None):
                after = max(peak, self.block_bytes(self.space.counts(move.after)))
                if after < best.get(move.after, after + 1):
                    best[move.after] = after
                    heapq.heappush(queue, (after, next(order), move.after))
        raise AssertionError("reducing, gathering everything and slicing always works")

    # -- moves -----------------------------------------------------------------------------------------------------

    def _edges(self, state: State, most_bytes: int | None) -> Iterator[tuple[CollectiveStep, int]]:
        """The moves that can be made from a state, and what they cost."""
        counts = self.space.counts(state)
        size = self.block_bytes(counts)
        for move in self._candidates(state):
            after = self.space.counts(move.after)
            size_after = self.block_bytes(after)
            if most_bytes is not None and size_after > most_bytes:
                continue
            if not self.is_even and not self._is_possible(move, counts, after):
                continue
            yield move, self._cost(move, counts, size, size_after)
        for target in self.closure.get(counts, ()):
            if target != state:
                moved = self.space.moved(state, target) if self.orders else ()
                move = CollectiveStep("CollectivePermute", moved, (), 0, target)
                yield move, self.prices.of(move.op, moved, 2, size)

    def _candidates(self, state: State) -> Iterator[CollectiveStep]:
        moves = self.space.moves(state)
        if not state[1]:
            yield from moves
        else:
            for move in moves:
                if move.op not in ("AllReduce", "ReduceScatter") or self.wanted.isdisjoint(move.atoms):
                    yield move
        if not self.is_even:
            yield from self.space.slice_to(state, self.problem.goal)
        if self.wanted:
            yield from self.space.make_partial(state, self.problem.goal)

    def _is_possible(self, move: CollectiveStep, before: Counts, after: Counts) -> bool:
        """Whether blocks nest, and no dim is sharded so that blocks become uneven on the way only."""
        for dim in move.dims:
            if after[dim] > before[dim]:
                size, cut = self.problem.shape[dim], after[dim]
                if size % cut and cut not in self._ends[dim]:
                    return False
            if not self._nests(dim, max(before[dim], after[dim]), min(before[dim], after[dim])):
                return False
        return True

    def _nests(self, dim: int, whole: int, major: int) -> bool:
        """Whether `whole` blocks of a dim lie inside `major` ones."""
        size = self.problem.shape[dim]
        return major == 1 or ceil_div(size, major) == ceil_div(size, whole) * (whole // major)

    def _cost(self, move: CollectiveStep, counts: Counts, size: int, size_after: int) -> int:
        match move.op:
            case "AllSlice" | "MakePartial":
                return 0
            case "ReduceScatter":
                size = move.n * size_after
            case "AllToAll":
                dim = move.dims[0]
                if not self.is_even:
                    finer = (*counts[:dim], counts[dim] * move.n, *counts[dim + 1 :])
                    size = move.n * self.block_bytes(finer)
        return self.prices.of(move.op, move.atoms, move.n, size)


def weighed(cost: int, weight: float) -> int:
    """A cost times a weight, in steps of a twentieth: costs are too large for floating point."""
    return cost if weight == 1.0 else cost * int(weight * 20) // 20
