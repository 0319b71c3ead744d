"""Along which dim a parameter's state is sharded over the axes of ZeRO."""

from collections.abc import Sequence
from dataclasses import dataclass

from irpar.sharding import Axis, Sharding, are_disjoint, ceil_shape


@dataclass(frozen=True)
class Cut:
    """How a tensor is sharded over more axes.

    Attributes:
        sharding: with the axes; as it was, where they shard no dim.
        why: why no dim is sharded, or blocks are uneven; "" where they are equal.
        is_sharded: whether the axes shard a dim.
    """

    sharding: Sharding
    why: str = ""
    is_sharded: bool = True


def cut_of(lies: Sharding, shape: Sequence[int], axes: Sequence[Axis]) -> Cut:
    """A tensor sharded over axes, or over those of them that do not shard it already.

    Its first free dim that they divide is sharded; else the first that is sharded already, further; else the dim whose
    blocks are longest, unevenly.

    >>> from irpar.sharding import Mesh
    >>> mesh = Mesh({"dp": 4, "tp": 2})
    >>> tall = Sharding.of_spec(mesh, [None, ["tp"]])
    >>> [str(cut_of(tall, shape, [Axis("dp")]).sharding) for shape in ((8, 6), (6, 16), (6, 10))]
    ['[@dp, @tp]', '[_, @(tp,dp)]', '[@dp, @tp]']

    Args:
        lies: how it is sharded without them.
        shape: its sizes.
        axes: of ZeRO, major first.
    """
    mesh = lies.mesh
    axes = [axis for axis in axes if are_disjoint(mesh, [*lies.all_axes, axis])]
    parts = mesh.group_size(axes)
    if not axes:
        return Cut(lies, f"it is sharded over {', '.join(map(str, lies.all_axes))} already", is_sharded=False)
    if parts == 1:
        return Cut(lies, f"{', '.join(map(str, axes))} has one device", is_sharded=False)
    blocks = list(ceil_shape(lies, shape))
    dims = range(len(shape))
    free = [dim for dim in dims if lies.dim_parts(dim) == 1]
    taken = [dim for dim in dims if dim not in free]
    for dim in (*free, *taken):
        if shape[dim] and shape[dim] % (lies.dim_parts(dim) * parts) == 0:
            return Cut(_cut(lies, dim, axes))
    if not shape:
        return Cut(lies, "it is a single number", is_sharded=False)
    # The last blocks of a long dim are short by little.
    dim = max(dims, key=lambda dim: shape[dim] / lies.dim_parts(dim))
    if shape[dim] < lies.dim_parts(dim) * parts:
        return Cut(lies, f"no dim of a block, {blocks}, has {parts} elements", is_sharded=False)
    return Cut(_cut(lies, dim, axes), f"uneven blocks: no dim of a block, {blocks}, divides by {parts}")


def _cut(lies: Sharding, dim: int, axes: Sequence[Axis]) -> Sharding:
    return lies.with_dim(dim, (*lies.dims[dim].axes, *axes))
