"""The cheapest path of one problem: A* over states, guided by the bound.

Paths have the normal form of Rink et al. (arXiv 2112.01075): slices, then exchanges at one block size and at most one
permutation, then gathers. A permutation leads only to where gathers lead on to the goal; the other moves are free, so
that uneven blocks, which do not nest everywhere, find their ways too.
"""

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from irpar.sharding import ceil_div

from .bound import Bound
from .prices import Prices
from .problem import Problem
from .space import Counts, Move, Space, State

MOST_STATES = 20_000
"""Above this many states seen the search takes whatever leads on fastest."""
_HASTE = 5


@dataclass(frozen=True)
class Path:
    """What the search found.

    Attributes:
        moves: from the start to the goal.
        cost: by `Prices`.
        peak_bytes: the largest block on the way, both ends included.
    """

    moves: tuple[Move, ...]
    cost: int
    peak_bytes: int


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
        self.closure = space.closure(problem.goal, orders)
        self.orders = orders
        self.wanted = frozenset(problem.goal[1])
        product = math.prod(problem.sizes)
        self.is_even = all(size % product == 0 for size in problem.shape)
        self._bytes: dict[Counts, int] = {}
        self._ends = [self._cuts_on_the_way(dim) for dim in range(len(problem.shape))]

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

    def shortest(self, most_bytes: int, weight: float = 1.0) -> Path | None:
        """The cheapest path over blocks of at most `most_bytes`; None where there is none.

        Args:
            most_bytes: no block on the way may be larger.
            weight: 1.1 is content with 1.1 times the least cost, and looks less far.
        """
        start, goal = self.problem.start, self.problem.goal
        estimate = self._estimate(start, weight)
        if estimate is None:
            return None
        best = {start: 0}
        came: dict[State, tuple[State, Move]] = {}
        order = itertools.count()
        queue = [(estimate, estimate, next(order), start, 0)]
        while queue:
            _, _, _, state, spent = heapq.heappop(queue)
            if spent > best[state]:
                continue
            if state == goal:
                return self._path(came, spent)
            if len(best) > MOST_STATES:
                weight = _HASTE
            for move, cost in self._edges(state, most_bytes):
                after, total = move.after, spent + cost
                if total < best.get(after, total + 1):
                    estimate = self._estimate(after, weight)
                    if estimate is not None:
                        best[after] = total
                        came[after] = state, move
                        heapq.heappush(queue, (total + estimate, estimate, next(order), after, total))
        return None

    def _estimate(self, state: State, weight: float) -> int | None:
        least = self.bound(self.space.counts(state))
        return least if least is None or weight == 1.0 else least * int(weight * 20) // 20

    def _path(self, came: dict[State, tuple[State, Move]], cost: int) -> Path:
        state, moves = self.problem.goal, []
        peak = self.block_bytes(self.space.counts(state))
        while state != self.problem.start:
            state, move = came[state]
            moves.append(move)
            peak = max(peak, self.block_bytes(self.space.counts(state)))
        return Path(tuple(reversed(moves)), cost, peak)

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

    def _edges(self, state: State, most_bytes: int | None) -> Iterator[tuple[Move, int]]:
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
                move = Move("CollectivePermute", moved, (), 0, target)
                yield move, self.prices.of(move.op, moved, 2, size)

    def _candidates(self, state: State) -> Iterator[Move]:
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

    def _is_possible(self, move: Move, before: Counts, after: Counts) -> bool:
        """Whether blocks nest, and no dim is cut so that blocks become uneven on the way only."""
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

    def _cost(self, move: Move, counts: Counts, size: int, size_after: int) -> int:
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
