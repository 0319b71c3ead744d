"""The ways in which atoms can shard a tensor, and the collectives that lead from one to another.

Atoms are numbers here, and sizes of dims play no role yet: the moves of a state are made once and serve every problem
with as many dims on atoms of these sizes.
"""

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

MOST_TARGETS = 2000
"""Numbers of blocks up to which more are looked for that a permutation may lead to: dims or atoms are many."""

Dims = tuple[tuple[int, ...], ...]
State = tuple[Dims, tuple[int, ...]]
"""The atoms of each dim, major first, and the partial ones, sorted."""
Counts = tuple[int, ...]
"""Into how many blocks each dim is sharded, and last how many partial values there are."""


class CollectiveStep(NamedTuple):
    """A collective.

    Attributes:
        op: the operator in domain `irpar`.
        atoms: over which it runs, major first; of CollectivePermute those that change their place.
        dims: AllGather, AllSlice, ReduceScatter: (dim,); AllToAll: (split dim, concat dim); else ().
        n: how many devices it joins.
        after: where it leads.
    """

    op: str
    atoms: tuple[int, ...]
    dims: tuple[int, ...]
    n: int
    after: State


class Space:
    """All states of tensors with `rank` dims on atoms of the given sizes."""

    def __init__(self, sizes: tuple[int, ...], rank: int) -> None:
        self.sizes = sizes
        self.rank = rank
        self._counts: dict[State, Counts] = {}
        self._moves: dict[State, tuple[CollectiveStep, ...]] = {}
        self._closures: dict[tuple[State, bool], dict[Counts, tuple[State, ...]]] = {}

    def size(self, atoms: tuple[int, ...]) -> int:
        """How many devices differ along atoms."""
        return math.prod(self.sizes[atom] for atom in atoms)

    def counts(self, state: State) -> Counts:
        """The numbers of blocks and of partial values."""
        known = self._counts.get(state)
        if known is None:
            dims, partial = state
            known = self._counts[state] = (*map(self.size, dims), self.size(partial))
        return known

    def free(self, state: State) -> tuple[int, ...]:
        """The atoms over which a state replicates."""
        dims, partial = state
        used = {atom for atoms in dims for atom in atoms} | set(partial)
        return tuple(atom for atom in range(len(self.sizes)) if atom not in used)

    def moves(self, state: State) -> tuple[CollectiveStep, ...]:
        """What can be done but CollectivePermute: slices, gathers, exchanges, reductions."""
        known = self._moves.get(state)
        if known is None:
            known = self._moves[state] = tuple(self._made(state))
        return known

    def _made(self, state: State) -> Iterator[CollectiveStep]:
        dims, partial = state
        free = self.free(state)
        for dim, atoms in enumerate(dims):
            for atom in free:
                yield self._slice(state, dim, (atom,))
            for count in range(1, len(atoms) + 1):
                kept, moved = atoms[:-count], atoms[-count:]
                n = self.size(moved)
                rest = put(dims, dim, kept)
                yield CollectiveStep("AllGather", moved, (dim,), n, (rest, partial))
                for other in range(self.rank):
                    if other != dim:
                        after = put(rest, other, dims[other] + moved)
                        yield CollectiveStep("AllToAll", moved, (other, dim), n, (after, partial))
        yield from self._reductions(state)

    def _reductions(self, state: State) -> Iterator[CollectiveStep]:
        dims, partial = state
        for atoms in _subsets(partial):
            rest = tuple(atom for atom in partial if atom not in atoms)
            n = self.size(atoms)
            yield CollectiveStep("AllReduce", atoms, (), n, (dims, rest))
            for order in itertools.permutations(atoms) if len(atoms) <= 3 else (atoms,):
                for dim in range(self.rank):
                    yield CollectiveStep("ReduceScatter", order, (dim,), n, (put(dims, dim, dims[dim] + order), rest))

    def _slice(self, state: State, dim: int, atoms: tuple[int, ...]) -> CollectiveStep:
        dims, partial = state
        return CollectiveStep("AllSlice", atoms, (dim,), self.size(atoms), (put(dims, dim, dims[dim] + atoms), partial))

    def slice_to(self, state: State, goal: State) -> Iterator[CollectiveStep]:
        """A dim cut in one go as the goal has it: uneven blocks may not lie inside those of fewer axes."""
        dims, _ = state
        free = self.free(state)
        for dim, (atoms, wanted) in enumerate(zip(dims, goal[0], strict=True)):
            added = wanted[len(atoms) :]
            if len(added) > 1 and wanted[: len(atoms)] == atoms and set(added) <= set(free):
                yield self._slice(state, dim, added)

    def make_partial(self, state: State, goal: State) -> Iterator[CollectiveStep]:
        """A full value as one of several partial ones: free."""
        dims, partial = state
        free = self.free(state)
        added = tuple(atom for atom in goal[1] if atom in free)
        if added:
            yield CollectiveStep("MakePartial", added, (), self.size(added), (dims, tuple(sorted((*partial, *added)))))

    def closure(self, goal: State, every_order: bool) -> dict[Counts, tuple[State, ...]]:
        """Where a permutation may lead: what becomes the goal by gathers alone, or by exchanges and gathers.

        By counts: one state for each, or of those that gathers alone bring to the goal, all.
        """
        known = self._closures.get((goal, every_order))
        if known is None:
            found: dict[Counts, tuple[State, ...]] = {}
            for shares in ((), *_subsets(goal[1])):
                whole = goal[0], tuple(atom for atom in goal[1] if atom not in shares)  # MakePartial leads back.
                for state in self._cut_further(whole, every_order):
                    counts = self.counts(state)
                    if counts not in found or (every_order and state not in found[counts]):
                        found[counts] = (*found.get(counts, ()), state)
            self._exchange_back(found)
            known = self._closures[goal, every_order] = found
        return known

    def _cut_further(self, goal: State, every_order: bool) -> Iterator[State]:
        """The goal and, of the states that gathers bring there, one for each number of blocks; free atoms in order."""
        free = self.free(goal)
        for order in itertools.permutations(free) if every_order and len(free) <= 3 else (free,):
            found = {self.counts(goal): goal}
            for atom in order:
                for state in list(found.values()):
                    for dim in range(self.rank):
                        after = put(state[0], dim, (*state[0][dim], atom)), state[1]
                        found.setdefault(self.counts(after), after)
            yield from found.values()

    def _exchange_back(self, found: dict[Counts, tuple[State, ...]]) -> None:
        """Add what an AllToAll, which leads back as well as forth, brings to one of these, for counts that lack one."""
        queue = [states[0] for states in found.values()]
        for state in queue:
            if len(found) > MOST_TARGETS:
                return
            for move in self.moves(state):
                if move.op == "AllToAll" and self.counts(move.after) not in found:
                    found[self.counts(move.after)] = (move.after,)
                    queue.append(move.after)

    def moved(self, before: State, after: State) -> tuple[int, ...]:
        """The atoms over which blocks move in a permutation."""
        old, new = self._places(before), self._places(after)
        return tuple(atom for atom in range(len(self.sizes)) if old.get(atom) != new.get(atom))

    def _places(self, state: State) -> dict[int, tuple[int, int]]:
        places = {}
        for dim, atoms in (*enumerate(state[0]), (-1, state[1])):
            stride = 1
            for atom in reversed(atoms):
                places[atom] = dim, stride
                stride *= self.sizes[atom]
        return places


@lru_cache(maxsize=64)
def space_of(sizes: tuple[int, ...], rank: int) -> Space:
    """The space of that name, made once."""
    return Space(sizes, rank)


def put(dims: Dims, dim: int, atoms: tuple[int, ...]) -> Dims:
    """The dims with other atoms on one of them."""
    return (*dims[:dim], atoms, *dims[dim + 1 :])


@lru_cache(maxsize=4096)
def prime_factors(number: int) -> tuple[int, ...]:
    """The prime factors, the smallest first: of 12 they are 2, 2, 3."""
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor = factor + 1 if factor * factor <= number else max(number, 2)
    return tuple(found)


def _subsets(atoms: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All non-empty subsets of up to 4 atoms, largest first; of more, all together and each alone."""
    if len(atoms) > 4:
        yield atoms
        yield from ((atom,) for atom in atoms)
        return
    for count in range(len(atoms), 0, -1):
        yield from itertools.combinations(atoms, count)
