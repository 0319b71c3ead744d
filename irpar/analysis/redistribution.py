"""How to get a tensor from one sharding to another at the least cost, by default with the fewest sent bytes.

A shortest path (Dijkstra) over shardings, whose edges are the collectives; compare Rink et al., Memory-efficient array
redistribution through portable collective communication (arXiv 2112.01075).

    [@x, _] -> [_, @y]     AllSlice(y, dim 1) is free and halves what AllGather(x, dim 0) then sends
    [@x, _] -> [_, @x]     AllToAll(x, split 1, concat 0)
    [_, _] partial(x) -> [@x, _]     ReduceScatter(x, dim 0)
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from irpar.ops.collectives import KINDS
from irpar.sharding import (
    Axis,
    IrparError,
    Mesh,
    Reduction,
    Sharding,
    are_disjoint,
    ceil_div,
    common_atoms,
    join_axes,
    minor_gather_is_aligned,
)

from .network import BYTES, Key, Network, add_keys
from .network_algorithms import ring_bytes

MOST_STATES = 5_000
"""Above this many shardings seen (meshes of five axes and more) the search gives up and takes the plain way."""

Dims = tuple[tuple[Axis, ...], ...]
State = tuple[Dims, tuple[Axis, ...]]
"""Axes of each dim, and the partial axes."""


@dataclass(frozen=True)
class Step:
    """One collective (or AllSlice, which sends nothing) and what the tensor's sharding is after it.

    Attributes:
        op: the op type in domain `irpar`.
        axes: the mesh axes it runs over, major first.
        dims: AllGather, AllSlice, ReduceScatter: (dim,); AllToAll: (split dim, concat dim); AllReduce: ().
        after: the sharding after it.
        sent_bytes: bytes that a device sends, by the ring model.
    """

    op: str
    axes: tuple[Axis, ...]
    dims: tuple[int, ...]
    after: Sharding
    sent_bytes: int


@dataclass(frozen=True)
class _Move:
    """An edge; `operand_bytes`: what a device holds before it, of uneven blocks padded."""

    op: str
    axes: tuple[Axis, ...]
    dims: tuple[int, ...]
    state: State
    operand_bytes: int


def plan(
    source: Sharding, target: Sharding, shape: Sequence[int], itemsize_bits: int, network: Network = BYTES
) -> tuple[Step, ...]:
    """The cheapest steps from `source` to `target`.

    Args:
        source: where the tensor is; may be partial.
        target: where it should be; not partial, unless it is so in the same way as the source.
        shape: the whole tensor's.
        itemsize_bits: bits of one element.
        network: what communication costs.

    Raises:
        IrparError: the shardings are of two meshes, or the target is partial over axes that the source is not.
    """
    return _priced(source, target, shape, itemsize_bits, network)[0]


def _priced(
    source: Sharding, target: Sharding, shape: Sequence[int], itemsize_bits: int, network: Network
) -> "tuple[tuple[Step, ...], Key]":
    """The cheapest steps, and what they cost."""
    if source.axes == target.axes and source.partial == target.partial:
        return (), network.nothing
    if source.mesh != target.mesh or set(target.partial) - set(source.partial):
        raise IrparError(
            f"cannot redistribute from {source} to {target}",
            do="redistribute within one mesh, to a sharding that has no partial axes of its own",
        )
    return _plan(source.closed(), target.closed(), tuple(shape), itemsize_bits, network)


def cost(source: Sharding, target: Sharding, shape: Sequence[int], itemsize_bits: int, network: Network = BYTES) -> int:
    """Bytes that a device sends for the cheapest steps; arguments as for `plan`."""
    return sum(step.sent_bytes for step in plan(source, target, shape, itemsize_bits, network))


def price(
    source: Sharding, target: Sharding, shape: Sequence[int], itemsize_bits: int, network: Network = BYTES
) -> Key:
    """What the cheapest steps cost by the network, comparable (`Network.key`); arguments as for `plan`."""
    return _priced(source, target, shape, itemsize_bits, network)[1]


@lru_cache(maxsize=65536)
def _plan(
    source: Sharding, target: Sharding, shape: tuple[int, ...], bits: int, network: Network
) -> tuple[tuple[Step, ...], Key]:
    if _atoms_overlap(source, target):
        # Sub-axes whose cuts do not divide each other (of 6: by 2 and by 3) meet only in the whole tensor.
        whole = Sharding.replicated(source.mesh, source.rank).with_partial(target.partial, target.reduce)
        there, back = _plan(source, whole, shape, bits, network), _plan(whole, target, shape, bits, network)
        return there[0] + back[0], add_keys(there[1], back[1])
    search = _Search(source, target, shape, bits, network)
    steps, total = [], network.nothing
    for move in search.shortest():
        dims, partial = move.state
        after = Sharding.of_axes(
            source.mesh, [join_axes(source.mesh, axes) for axes in dims], join_axes(source.mesh, partial), source.reduce
        )
        steps.append(Step(move.op, join_axes(source.mesh, move.axes), move.dims, after, search.sent_bytes(move)))
        total = add_keys(total, search.key(move))
    return tuple(steps), total


def _atoms_overlap(source: Sharding, target: Sharding) -> bool:
    atoms = common_atoms(source.mesh, (*source.all_axes, *target.all_axes))
    return not are_disjoint(source.mesh, list(dict.fromkeys(atom for run in atoms.values() for atom in run)))


class _Search:
    """One problem: the atoms that axes are made of, the moves, and the search itself."""

    def __init__(self, source: Sharding, target: Sharding, shape: tuple[int, ...], bits: int, network: Network) -> None:
        self.mesh: Mesh = source.mesh
        self.network = network
        self.shape = shape
        self.bits = bits
        atoms = common_atoms(self.mesh, (*source.all_axes, *target.all_axes))

        def refine(axes: Sequence[Axis]) -> tuple[Axis, ...]:
            return tuple(atom for axis in axes for atom in atoms[axis])

        self.start: State = tuple(map(refine, source.axes)), refine(source.partial)
        self.goal: State = tuple(map(refine, target.axes)), refine(target.partial)
        self.reduce: Reduction = source.reduce
        self.wanted = {axis for axes in self.goal[0] for axis in axes}

    def key(self, move: _Move) -> Key:
        """What a move costs."""
        if move.op == "AllSlice":
            return self.network.nothing
        return self.network.key(KINDS[move.op], move.axes, move.operand_bytes, self.mesh)

    def sent_bytes(self, move: _Move) -> int:
        """What a device sends, by the ring model."""
        if move.op == "AllSlice":
            return 0
        return ring_bytes(KINDS[move.op], self.mesh.group_size(move.axes), move.operand_bytes)

    def shortest(self) -> list[_Move]:
        """Dijkstra; among equal costs the first in a fixed order."""
        counter = itertools.count()
        nothing = self.network.nothing
        best: dict[State, Key] = {self.start: nothing}
        came: dict[State, tuple[State, _Move]] = {}
        queue: list[tuple[Key, int, State]] = [(nothing, 0, self.start)]
        while queue:
            spent, _, state = heapq.heappop(queue)
            if state == self.goal:
                return self._path(came, state)
            if spent > best[state]:
                continue
            if len(best) > MOST_STATES:
                return self._direct()
            for move in self._moves(state):
                key = add_keys(spent, self.key(move))
                if move.state not in best or key < best[move.state]:
                    best[move.state] = key
                    came[move.state] = state, move
                    heapq.heappush(queue, (key, next(counter), move.state))
        raise AssertionError("gathering everything and slicing always works")

    def _direct(self) -> list[_Move]:
        """Reduce, gather what differs, slice: right for any pair, but not the cheapest."""
        moves: list[_Move] = []
        dims, partial = self.start
        pending = tuple(axis for axis in partial if axis not in self.goal[1])
        if pending:
            moves.append(_Move("AllReduce", pending, (), (dims, self.goal[1]), self._bytes(dims)))
        for dim, axes in enumerate(dims):
            goal = self.goal[0][dim]
            kept = next(
                n for n in range(len(axes), -1, -1) if axes[:n] == goal[:n] and self._bridges(dim, axes, goal, n)
            )
            if kept < len(axes):
                size = self._bytes(dims)
                dims = _put(dims, dim, axes[:kept])
                moves.append(_Move("AllGather", axes[kept:], (dim,), (dims, self.goal[1]), size))
        for dim, goal in enumerate(self.goal[0]):
            if dims[dim] != goal:
                added = goal[len(dims[dim]) :]
                dims = _put(dims, dim, goal)
                moves.append(_Move("AllSlice", added, (dim,), (dims, self.goal[1]), 0))
        return moves

    def _bridges(self, dim: int, axes: tuple[Axis, ...], goal: tuple[Axis, ...], kept: int) -> bool:
        """Whether a dim can be gathered down to its first `kept` axes, and cut from there to the goal."""
        return self._nests(dim, axes, len(axes) - kept) and self._nests(dim, goal, len(goal) - kept)

    def _path(self, came: dict[State, tuple[State, _Move]], state: State) -> list[_Move]:
        moves = []
        while state != self.start:
            state, move = came[state]
            moves.append(move)
        return moves[::-1]

    def _moves(self, state: State) -> Iterator[_Move]:
        dims, partial = state
        used = {axis for axes in dims for axis in axes} | set(partial)
        yield from self._slices(dims, partial, used)
        yield from self._gathers(dims, partial)
        yield from self._exchanges(dims, partial)
        yield from self._reductions(dims, partial)

    def _slices(self, dims: Dims, partial: tuple[Axis, ...], used: set[Axis]) -> Iterator[_Move]:
        for dim, axes in enumerate(dims):
            goal = self.goal[0][dim]
            if len(axes) < len(goal) and goal[: len(axes)] == axes:
                # The run of wanted axes that nothing holds yet: one slice for all, or for the first of them.
                free = list(itertools.takewhile(lambda axis: axis not in used, goal[len(axes) :]))
                for count in {len(free), min(1, len(free))} - {0}:
                    added = tuple(free[:count])
                    if self._nests(dim, (*axes, *added), count):
                        yield _Move("AllSlice", added, (dim,), (_put(dims, dim, (*axes, *added)), partial), 0)

    def _gathers(self, dims: Dims, partial: tuple[Axis, ...]) -> Iterator[_Move]:
        for dim, axes in enumerate(dims):
            for count in range(1, len(axes) + 1):
                if self._nests(dim, axes, count):
                    state = _put(dims, dim, axes[: len(axes) - count]), partial
                    yield _Move("AllGather", axes[len(axes) - count :], (dim,), state, self._bytes(dims))

    def _exchanges(self, dims: Dims, partial: tuple[Axis, ...]) -> Iterator[_Move]:
        for source, axes in enumerate(dims):
            for count in range(1, len(axes) + 1):
                moved = axes[len(axes) - count :]
                if not self._nests(source, axes, count):
                    continue
                rest = _put(dims, source, axes[: len(axes) - count])
                for target in range(len(dims)):
                    longer = (*dims[target], *moved)
                    if target == source or not self._nests(target, longer, count):
                        continue
                    n = self.mesh.group_size(moved)
                    size = n * self._bytes(dims, {target: n})
                    yield _Move("AllToAll", moved, (target, source), (_put(rest, target, longer), partial), size)

    def _reductions(self, dims: Dims, partial: tuple[Axis, ...]) -> Iterator[_Move]:
        pending = [axis for axis in partial if axis not in self.goal[1]]
        for axes in _subsets(pending):
            rest = tuple(axis for axis in partial if axis not in axes)
            n = self.mesh.group_size(axes)
            yield _Move("AllReduce", axes, (), (dims, rest), self._bytes(dims))
            for dim in range(len(dims)):
                for order in itertools.permutations(axes) if len(axes) <= 3 else (axes,):
                    longer = (*dims[dim], *order)
                    if self.wanted.issuperset(order) and self._nests(dim, longer, len(order)):
                        state = _put(dims, dim, longer), rest
                        yield _Move("ReduceScatter", order, (dim,), state, n * self._bytes(dims, {dim: n}))

    def _nests(self, dim: int, axes: tuple[Axis, ...], count: int) -> bool:
        """Whether blocks over all `axes` lie inside blocks over those before the last `count`."""
        return minor_gather_is_aligned(self.shape[dim], self.mesh, axes, count)

    def _bytes(self, dims: Dims, more_parts: dict[int, int] | None = None) -> int:
        """Bytes of the largest block; `more_parts` cuts further dims."""
        sizes = [
            ceil_div(size, self.mesh.group_size(axes) * (more_parts or {}).get(dim, 1))
            for dim, (size, axes) in enumerate(zip(self.shape, dims, strict=True))
        ]
        return ceil_div(math.prod(sizes) * self.bits, 8)


def _put(dims: Dims, dim: int, axes: tuple[Axis, ...]) -> Dims:
    return (*dims[:dim], axes, *dims[dim + 1 :])


def _subsets(axes: list[Axis]) -> Iterator[tuple[Axis, ...]]:
    """All non-empty subsets of up to 4 axes, largest first; of more, each alone and all together."""
    if len(axes) > 4:
        yield tuple(axes)
        yield from ((axis,) for axis in axes)
        return
    for count in range(len(axes), 0, -1):
        yield from itertools.combinations(axes, count)
