"""Axes from device lists: which mesh axes cut a tensor whose blocks lie on named devices."""

import math
from collections.abc import Iterator, Mapping, Sequence

from .mesh import Axis, Mesh

Blocks = Sequence[Sequence[int]]
"""Rank by rank, per dim the number of the block that it holds, from 0."""


def axes_of_blocks(mesh: Mesh, blocks: Blocks, counts: Sequence[int]) -> list[tuple[Axis, ...]] | None:
    """The axes, sub-axes included, that give every rank the block that it is said to hold.

    On the mesh dp=2,tp=2 the blocks [0], [1], [2], [3] of a dim cut into 4 are (dp, tp), the blocks [0], [2], [1], [3]
    are (tp, dp), and [0], [0], [1], [1] of a dim cut into 2 are (dp,).

    Args:
        mesh: the mesh.
        blocks: what each rank holds.
        counts: into how many blocks each dim is sharded.

    Returns:
        Per dim its axes, major first, neighbours joined; None where no axes of the mesh mean these blocks.
    """
    digits: list[list[tuple[int, Axis]]] = [[] for _ in counts]
    for name in mesh.axis_names:
        for axis, step in _digits(mesh, name, blocks):
            cut = [dim for dim, stride in enumerate(step) if stride]
            if len(cut) > 1 or any(stride < 0 for stride in step):
                return None
            for dim in cut:
                digits[dim].append((step[dim], axis))
    axes = [tuple(axis for _, axis in sorted(found, key=lambda digit: -digit[0])) for found in digits]
    return axes if _are_these_blocks(mesh, axes, blocks, counts) else None


def blocks_over(mesh: Mesh, placed: Mapping[int, Sequence[int]]) -> list[Sequence[int]] | None:
    """Blocks by rank, from blocks by device id; None where the ids are not those of the mesh."""
    if len(placed) != mesh.size:
        return None
    ids = [mesh.device(rank) for rank in range(mesh.size)]
    return [placed[device] for device in ids] if all(device in placed for device in ids) else None


def _digits(mesh: Mesh, name: str, blocks: Blocks) -> Iterator[tuple[Axis, list[int]]]:
    """An axis as sub-axes, minor first, along each of which the blocks grow by one step."""
    length = mesh.axes[name]
    place = mesh.axis_names.index(name)
    inner = math.prod(tuple(mesh.axes.values())[place + 1 :])
    along = [blocks[coordinate * inner] for coordinate in range(length)]
    minor = 1
    while minor < length:
        step = list(along[minor])
        size = 2
        while size * minor < length and list(along[size * minor]) == [size * stride for stride in step]:
            size += 1
        if length % (minor * size):
            size = length // minor  # No sub-axis ends here: what comes of this is not these blocks.
        pre = length // (minor * size)
        yield Axis(name) if pre == minor == 1 else Axis(name, pre, size), step
        minor *= size


def _are_these_blocks(mesh: Mesh, axes: Sequence[Sequence[Axis]], blocks: Blocks, counts: Sequence[int]) -> bool:
    """Whether every rank holds its block when the dims are sharded over these axes."""
    if [mesh.group_size(of_dim) for of_dim in axes] != list(counts):
        return False
    return all(
        all(mesh.position(coords, of_dim) == block for of_dim, block in zip(axes, held, strict=True))
        for coords, held in zip(mesh.all_coords(), blocks, strict=True)
    )
