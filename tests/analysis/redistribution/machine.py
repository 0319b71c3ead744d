"""All devices of a mesh as the leading dims of one numpy array: a collective is a transposition of it.

    [2, 4, 64, 8]   on dp=2, tp=4: device dims dp and tp, and the blocks f32[64, 8] behind them

Blocks must be even. Written from what the collectives mean, not from irpar's runtime.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from irpar.analysis.redistribution import Step
from irpar.sharding import Axis, Mesh, Sharding, common_atoms

Array = np.ndarray[Any, Any]


def prime_parts(name: str, size: int) -> list[Axis]:
    """A mesh axis as sub-axes of prime size; of 12: 2, 2 and 3."""
    parts, before = [], 1
    while before < size:
        factor = next(n for n in range(2, size + 1) if size // before % n == 0)
        parts.append(Axis(name) if factor == size else Axis(name, before, factor))
        before *= factor
    return parts


class Machine:
    """The devices of a mesh, told apart by sub-axes of prime size."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.atoms = [part for name, size in mesh.axes.items() for part in prime_parts(name, size)]
        self.sizes = [mesh.axis_size(atom) for atom in self.atoms]
        self.count = len(self.atoms)
        self._runs: dict[tuple[Axis, ...], list[int]] = {}

    def places(self, axes: Iterable[Axis]) -> list[int]:
        """The device dims that axes are made of, major first."""
        axes = tuple(axes)
        if axes not in self._runs:
            runs = common_atoms(self.mesh, (*self.atoms, *axes))
            self._runs[axes] = [self.atoms.index(atom) for axis in axes for atom in runs[axis]]
        return self._runs[axes]

    def distribute(self, whole: Array, sharding: Sharding) -> Array:
        """What the devices hold; partial values are shares that differ from device to device."""
        held = np.broadcast_to(whole, (*self.sizes, *whole.shape))
        for dim, axes in enumerate(sharding.axes):
            held = self._own(held, self.places(axes), dim)
        partial = self.places(sharding.partial)
        count = math.prod(self.sizes[place] for place in partial)
        if count > 1:
            shape = [self.sizes[place] if place in partial else 1 for place in range(self.count)]
            order = np.argsort(np.argsort(partial))
            shares = (np.arange(count) + 1.0).reshape([self.sizes[place] for place in partial])
            shares = shares.transpose(np.argsort(order)).reshape(*shape, *[1] * whole.ndim)
            held = held * shares * (2 / (count * (count + 1)))
        return held

    def reduced(self, held: Array, partial: Sequence[Axis]) -> Array:
        """The sum over partial axes, on all of their devices."""
        places = tuple(self.places(partial))
        return np.broadcast_to(held.sum(places, keepdims=True), held.shape) if places else held

    def block_bytes(self, held: Array) -> int:
        """Bytes of what a device holds, of elements of 4 bytes."""
        return math.prod(held.shape[self.count :]) * 4

    def run(self, step: Step, held: Array) -> tuple[Array, int]:
        """One step: what the devices hold after it, and how many bytes each sends, of elements of 4 bytes."""
        places = self.places(step.axes)
        n = math.prod(self.sizes[place] for place in places)
        size = self.block_bytes(held)
        match step.op:
            case "AllSlice":
                return self._own(held, places, step.dims[0]), 0
            case "AllGather":
                return self._gathered(held, places, step.dims[0]), (n - 1) * size
            case "AllToAll":
                split, concat = step.dims
                return self._exchanged(held, places, split, concat), (n - 1) * size // n
            case "AllReduce":
                return self.reduced(held, step.axes), 2 * (n - 1) * size // n
            case "ReduceScatter":
                return self._own(self.reduced(held, step.axes), places, step.dims[0]), (n - 1) * size // n
            case "MakePartial":
                return self._first_only(held, places), 0
            case "CollectivePermute":
                return self._permuted(held, places, step.pairs), size
        raise AssertionError(step.op)

    def _split(self, held: Array, dim: int, sizes: Sequence[int]) -> Array:
        """A dim of the blocks as dims of the given sizes, and one for the rest."""
        place = self.count + dim
        rest = held.shape[place] // math.prod(sizes)
        return held.reshape(*held.shape[:place], *sizes, rest, *held.shape[place + 1 :])

    def _own(self, held: Array, places: Sequence[int], dim: int) -> Array:
        """Each device's block of a dim cut over device dims: where its coordinate is that of the block."""
        held = self._split(held, dim, [self.sizes[place] for place in places])
        for place in places:
            held = np.moveaxis(np.diagonal(held, axis1=place, axis2=self.count + dim), -1, place)
        return held

    def _gathered(self, held: Array, places: Sequence[int], dim: int) -> Array:
        shape = list(held.shape)
        moved = np.moveaxis(held, places, range(self.count + dim - len(places), self.count + dim))
        rest = [size for place, size in enumerate(shape[: self.count]) if place not in places]
        n = math.prod(self.sizes[place] for place in places)
        blocks = shape[self.count :]
        blocks[dim] *= n
        # After moveaxis the device dims that are gathered stand before the blocks' dim, but after the blocks before it.
        joined = moved.reshape(*rest, *blocks)
        return np.broadcast_to(np.expand_dims(joined, sorted(places)), (*self.sizes, *blocks))

    def _exchanged(self, held: Array, places: Sequence[int], split: int, concat: int) -> Array:
        """The pieces of the split dim become device dims, and the device dims go to the front of the concat dim."""
        sizes = [self.sizes[place] for place in places]
        held = self._split(held, split, sizes)
        first = self.count + split
        shift = len(places) if concat > split else 0
        order = list(range(held.ndim))
        for index, place in enumerate(places):
            order[place] = first + index
        pieces = range(first, first + len(places))
        rest = [axis for axis in order[self.count :] if axis not in pieces]
        at = rest.index(self.count + concat + shift)
        order = [*order[: self.count], *rest[:at], *places, *rest[at:]]
        moved = held.transpose(order)
        shape = list(moved.shape[: self.count + at])
        joined = math.prod(moved.shape[self.count + at : self.count + at + len(places) + 1])
        return moved.reshape(*shape, joined, *moved.shape[self.count + at + len(places) + 1 :])

    def _first_only(self, held: Array, places: Sequence[int]) -> Array:
        made = np.zeros_like(held)
        first = tuple(0 if place in places else slice(None) for place in range(self.count))
        made[first] = held[first]
        return made

    def _permuted(self, held: Array, places: Sequence[int], pairs: Sequence[int]) -> Array:
        sizes = [self.sizes[place] for place in places]
        front = np.moveaxis(held, places, range(len(places)))
        flat = front.reshape(math.prod(sizes), *front.shape[len(places) :])
        received = np.zeros_like(flat)
        received[list(pairs[1::2])] = flat[list(pairs[::2])]
        return np.moveaxis(received.reshape(front.shape), range(len(places)), places)


def shardings(mesh: Mesh, atoms: Sequence[Axis], rank: int, with_partial: bool = False) -> list[Sharding]:
    """Every way to shard a tensor over atoms, all of them or some; `with_partial`: or to hold shares of it."""
    found = []
    for places in itertools.product(range(-2 if with_partial else -1, rank), repeat=len(atoms)):
        of_dim = [[atom for atom, place in zip(atoms, places, strict=True) if place == dim] for dim in range(rank)]
        partial = [atom for atom, place in zip(atoms, places, strict=True) if place == -2]
        for dims in itertools.product(*map(itertools.permutations, of_dim)):
            found.append(Sharding.of_axes(mesh, dims, partial))
    return found
