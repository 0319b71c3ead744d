"""Along which dim a parameter's state is sharded over the axes of ZeRO."""

from collections.abc import Sequence
from dataclasses import dataclass

from irpar.sharding import Axis, Sharding, are_disjoint


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
    """A tensor sharded over axes: its first free dim that they divide, else one that is sharded already, else unevenly.

    >>> from irpar.sharding import Mesh
    >>> mesh = Mesh({"dp": 4, "tp": 2})
    >>> tall = Sharding.of_spec(mesh, [None, ["tp"]])
    >>> [str(cut_of(tall, shape, [Axis("dp")]).sharding) for shape in ((8, 6), (6, 16), (6, 10))]
    ['[@dp, @tp]', '[_, @(tp,dp)]', '[_, @(tp,dp)]']

    Args:
        lies: how it is sharded without them.
        shape: its sizes.
        axes: of ZeRO, major first.
    """
    mesh = lies.mesh
    parts = mesh.group_size(axes)
    if not are_disjoint(mesh, [*lies.all_axes, *axes]):
        return Cut(lies, f"it is sharded over {', '.join(map(str, lies.all_axes))} already", is_sharded=False)
    dims = range(len(shape))
    free = [dim for dim in dims if lies.dim_parts(dim) == 1]
    taken = [dim for dim in dims if dim not in free]
    for dim in (*free, *taken):
        if shape[dim] and shape[dim] % (lies.dim_parts(dim) * parts) == 0:
            return Cut(_cut(lies, dim, axes))
    # The last blocks of a long dim are short by little.
    longest = sorted(dims, key=lambda dim: shape[dim] / lies.dim_parts(dim))[-1:]
    if not longest or shape[longest[0]] < lies.dim_parts(longest[0]) * parts:
        return Cut(lies, f"no dim of {list(shape)} has {parts} blocks", is_sharded=False)
    return Cut(_cut(lies, longest[0], axes), f"uneven blocks: no dim of {list(shape)} divides by {parts}")


def _cut(lies: Sharding, dim: int, axes: Sequence[Axis]) -> Sharding:
    return lies.with_dim(dim, (*lies.dims[dim].axes, *axes))
