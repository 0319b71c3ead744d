"""Which block of a tensor a device holds.

Dims that do not divide are sharded in ceil-sized blocks; the last ones may be shorter or empty.
"""

from collections.abc import Sequence

from .mesh import Axis, Mesh
from .sharding import Sharding

Region = tuple[tuple[int, int], ...]
"""Per dim the half-open range [start, stop) of a block."""


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def block_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """The half-open range of block `index` of a dim of `size` cut into `parts` ceil-sized blocks."""
    block = ceil_div(size, parts)
    start = min(index * block, size)
    return start, min(start + block, size)


def block_sizes(size: int, parts: int) -> list[int]:
    """Sizes of all blocks: `block_sizes(10, 4)` is [3, 3, 3, 1]."""
    return [stop - start for start, stop in (block_range(size, parts, index) for index in range(parts))]


def filled_blocks(size: int, parts: int) -> int:
    """How many of these blocks have elements: of 5 cut into 4, which is 2, 2, 1, 0, there are 3."""
    return ceil_div(size, ceil_div(size, parts)) if size else 0


def is_even(size: int, parts: int) -> bool:
    """True where all blocks are equal."""
    return size % parts == 0


def local_region(sharding: Sharding, shape: Sequence[int], coords: Sequence[int]) -> Region:
    """The block of a tensor of global `shape` that the device at `coords` holds."""
    mesh = sharding.mesh
    return tuple(
        block_range(size, mesh.group_size(dim.axes), mesh.position(coords, dim.axes)) if dim.axes else (0, size)
        for size, dim in zip(shape, sharding.dims, strict=True)
    )


def all_regions(sharding: Sharding, shape: Sequence[int]) -> list[Region]:
    """The blocks that all devices hold, in order of rank."""
    mesh = sharding.mesh
    by_dim: list[list[tuple[int, int]]] = []
    for size, dim in zip(shape, sharding.dims, strict=True):
        parts = mesh.group_size(dim.axes)
        ranges = [block_range(size, parts, index) for index in range(parts)]
        by_dim.append([ranges[position] for position in mesh.positions(dim.axes)])
    return list(zip(*by_dim, strict=True)) if by_dim else [()] * mesh.size


def local_shape(sharding: Sharding, shape: Sequence[int], coords: Sequence[int]) -> tuple[int, ...]:
    """The shape of that block."""
    return tuple(stop - start for start, stop in local_region(sharding, shape, coords))


def ceil_shape(sharding: Sharding, shape: Sequence[int]) -> tuple[int, ...]:
    """The largest block that any device holds."""
    return tuple(ceil_div(size, sharding.dim_parts(dim)) for dim, size in enumerate(shape))


def minor_gather_is_aligned(size: int, mesh: Mesh, axes: Sequence[Axis], count: int) -> bool:
    """Whether blocks over `axes` join, over their `count` minor axes, to the blocks over the remaining major axes."""
    major = mesh.group_size(axes[: len(axes) - count])
    if major == 1:
        return True
    whole = mesh.group_size(axes)
    return ceil_div(size, major) == ceil_div(size, whole) * (whole // major)
