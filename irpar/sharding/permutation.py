"""Which device must send its block to which, where two shardings cut a tensor into the same blocks."""

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache

from irpar.errors import ShardingError

from .axes import common_atoms, join_axes
from .blocks import local_shape
from .mesh import Axis, Mesh
from .sharding import Sharding

Pairs = tuple[int, ...]
"""Positions in a group: who sends and who receives, in turn (s0, t0, s1, t1, ...); whoever keeps its block too."""

_Holding = tuple[tuple[int, ...], int]
"""What a device holds: the number of its block in each dim, and which of the partial values."""


@lru_cache(maxsize=4096)
def permutation(before: Sharding, after: Sharding) -> tuple[tuple[Axis, ...], Pairs]:
    """The axes over which blocks must move to get from one sharding to another, and from where to where.

    Where several devices hold a block, one that needs it later keeps it.

        [@x, @y] -> [@y, @x] on x=2, y=2: axes x, y; 0 -> 0, 1 -> 2, 2 -> 1, 3 -> 3

    Args:
        before, after: of one mesh, with equally many blocks in each dim, and equally many partial values.

    Raises:
        ShardingError: they cut the tensor in other numbers of blocks.
    """
    axes = _moved_axes(before, after)
    holders: dict[_Holding, list[int]] = {}
    readers: dict[_Holding, list[int]] = {}
    for position, coords in enumerate(_members(before.mesh, axes)):
        holders.setdefault(_holding(before, coords), []).append(position)
        readers.setdefault(_holding(after, coords), []).append(position)
    sources: dict[int, int] = {}
    for held, wanting in readers.items():
        having = holders.get(held, [])
        if len(having) != len(wanting):
            raise ShardingError(
                f"{before} and {after} do not split a tensor into the same blocks",
                do="gather or slice first, so that every dim has as many blocks as before",
            )
        free = iter([position for position in having if position not in wanting])
        sources.update((position, position if position in having else next(free)) for position in wanting)
    pairs = sorted((source, target) for target, source in sources.items())
    return axes, tuple(itertools.chain.from_iterable(pairs))


def is_permutation(before: Sharding, after: Sharding, axes: Sequence[Axis], pairs: Sequence[int]) -> bool:
    """Whether sending blocks within the groups over `axes` by `pairs` brings a tensor from one sharding to another."""
    mesh = before.mesh
    if mesh != after.mesh or len(pairs) % 2:
        return False
    moved = _moved_axes(before, after)
    atoms = common_atoms(mesh, (*moved, *axes))
    if not {atom for axis in moved for atom in atoms[axis]} <= {atom for axis in axes for atom in atoms[axis]}:
        return False
    coords = list(_members(mesh, axes))
    received: dict[_Holding, tuple[int, ...]] = {}
    for source, target in zip(pairs[::2], pairs[1::2], strict=True):
        blocks, partial = _holding(before, coords[source])
        needed, share = _holding(after, coords[target])
        # Copies of one partial value must come from copies of one partial value.
        if blocks != needed or received.setdefault((needed, share), (partial,)) != (partial,):
            return False
    shares = {(blocks, partial) for (blocks, _), (partial,) in received.items()}
    return len(shares) == len(received) and sorted(pairs[1::2]) == list(range(len(coords)))


def permuted_shapes(sharding: Sharding, shape: Sequence[int], axes: Sequence[Axis], coords: Sequence[int]) -> list[int]:
    """The shapes of the blocks that the members of the group around `coords` hold, one after the other."""
    return [size for member in _members(sharding.mesh, axes, coords) for size in local_shape(sharding, shape, member)]


def _moved_axes(before: Sharding, after: Sharding) -> tuple[Axis, ...]:
    """The axes that play another role: of another dim, at another place in it, partial or of none."""
    old, new = _roles(before, after), _roles(after, before)
    moved = [axis for axis in {**old, **new} if old.get(axis) != new.get(axis)]
    names = before.mesh.axis_names
    return join_axes(before.mesh, sorted(moved, key=lambda axis: (names.index(axis.name), axis.pre)))


def _roles(sharding: Sharding, other: Sharding) -> dict[Axis, tuple[int, int]]:
    """Each axis's dim (-1: partial), and how many blocks of that dim one step along the axis skips."""
    mesh = sharding.mesh
    atoms = common_atoms(mesh, (*sharding.all_axes, *other.all_axes))
    found: dict[Axis, tuple[int, int]] = {}
    for dim, axes in (*enumerate(sharding.axes), (-1, sharding.partial)):
        stride = 1
        for atom in reversed([atom for axis in axes for atom in atoms[axis]]):
            found[atom] = dim, stride
            stride *= mesh.axis_size(atom)
    return found


def _members(mesh: Mesh, axes: Sequence[Axis], around: Sequence[int] | None = None) -> Iterator[tuple[int, ...]]:
    """The coordinates of the members of the group over `axes` around a device, in order of position."""
    start = list(around or (0,) * len(mesh.axes))
    steps = []
    for axis in axes:
        place = mesh.axis_names.index(axis.name)
        size = mesh.axis_size(axis)
        minor = mesh.axes[axis.name] // (axis.pre * size)
        start[place] -= start[place] // minor % size * minor
        steps.append((place, minor, size))
    for digits in itertools.product(*(range(size) for _, _, size in steps)):
        coords = list(start)
        for (place, minor, _), digit in zip(steps, digits, strict=True):
            coords[place] += digit * minor
        yield tuple(coords)


def _holding(sharding: Sharding, coords: Sequence[int]) -> _Holding:
    mesh = sharding.mesh
    return tuple(mesh.position(coords, axes) for axes in sharding.axes), mesh.position(coords, sharding.partial)
