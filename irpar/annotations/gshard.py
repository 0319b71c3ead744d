"""GShard's `replicate`, `split` and `shard` (arXiv 2006.16668, section 3.2)."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from irpar.ir import Module
from irpar.sharding import Axis, DimSpec, Mesh

from .devices import SpellingError, axes_over, device_array, mesh_over, spec_of
from .named import annotate_named


def replicate(module: Module, tensor: str) -> int:
    """Keep a tensor whole on every device.

    Args:
        module: the module.
        tensor: name or glob of tensors.

    Returns:
        How many tensors match.

    Raises:
        IrparError: none matches.
    """
    return annotate_named(module, tensor, lambda rank: [None] * rank, f'"{tensor}" (replicate)')


def split(module: Module, tensor: str, split_dimension: int, num_partitions: int) -> int:
    """Shard one dim of a tensor into partitions, the i-th for the i-th device.

    The partitions are matched to axes of the mesh whose sizes multiply to their number. Where these are not all axes,
    each partition is on all devices that differ only in the others; GShard leaves those devices without one.

    Args:
        module: the module, with its mesh.
        tensor: name or glob of tensors.
        split_dimension: the dim; negative counts from the last.
        num_partitions: into how many blocks.

    Returns:
        How many tensors match.

    Raises:
        IrparError: there is no mesh, no axes have that size, several have, or the tensor has no such dim.
    """
    said = f'"{tensor}" (split {split_dimension}, {num_partitions})'
    for name, number in (("split_dimension", split_dimension), ("num_partitions", num_partitions)):
        if type(number) is not int:
            raise SpellingError(f"{name} is {number!r}", where=said, do="give a whole number")
    if not module.meshes:
        raise SpellingError(
            "there is no mesh to split over", where=said, do="give one first: module.set_mesh(irpar.Mesh({...}))"
        )
    axes = _axes_of_size(module.mesh, num_partitions, said)

    def spec(rank: int) -> list[DimSpec]:
        if not -rank <= split_dimension < rank:
            raise SpellingError(
                f"split_dimension is {split_dimension}, the tensor has {rank} dim(s)",
                where=said,
                do=f"give a dim from 0 to {rank - 1}" if rank else "leave scalars out",
            )
        return [axes if dim == split_dimension % rank else None for dim in range(rank)]

    return annotate_named(module, tensor, spec, said)


def _axes_of_size(mesh: Mesh, number: int, said: str) -> list[str] | None:
    if number == 1:
        return None
    choices = list(_choices(mesh, number))
    if len(choices) == 1:
        return choices[0]
    sizes = f"the mesh {mesh} ({mesh.size} devices)"
    if choices:
        raise SpellingError(
            f"{len(choices)} choices of axes of {sizes} have {number} places",
            where=said,
            notes=tuple(f"axes: {', '.join(axes)}" for axes in choices),
            do="name the axes: module.shard(tensor, [...]), or list the devices: gshard.shard(tensor, ...)",
        )
    raise SpellingError(
        f"no axes of {sizes} have {number} places",
        where=said,
        do='use a number that axes of the mesh multiply to, or parts of axes: module.shard(tensor, ["tp:(1)2", ...])',
    )


def _choices(mesh: Mesh, number: int) -> Iterator[list[str]]:
    """Sets of axes whose sizes multiply to a number, in the order of the mesh; those that cut nothing left out."""
    axes = [axis for axis, size in mesh.axes.items() if size > 1]
    for count in range(1, len(axes) + 1):
        for taken in itertools.combinations(axes, count):
            if math.prod(mesh.axes[axis] for axis in taken) == number:
                yield list(taken)


def shard(module: Module, tensor: str, device_assignment: Any, *, axis_names: Sequence[str] | None = None) -> int:
    """Shard a tensor as an array of devices is sharded: block [i, j] lies on device_assignment[i, j].

    >>> shard(module, "w", [[0, 1], [2, 3]])  # w is sharded 2 x 2                                   # doctest: +SKIP

    Args:
        module: the module. Without a mesh it gets the array as its mesh; with one, the array must be a view of it.
        tensor: name or glob of tensors, all of one rank.
        device_assignment: array (or nested lists) of device ids with as many dims as the tensor, or with one more:
            then its last dim lists the devices that hold copies of a block.
        axis_names: what to call the axes where the module gets its mesh here; d0, d1 ... by default.

    Returns:
        How many tensors match.

    Raises:
        IrparError: the array does not fit the tensor or the module's mesh.
    """
    devices = device_array(device_assignment, "device_assignment")
    said = f'"{tensor}" (shard over {" x ".join(map(str, devices.shape))} devices)'
    mesh = mesh_over(module, devices, axis_names, "device_assignment")

    def spec(rank: int) -> Sequence[DimSpec]:
        if devices.ndim not in (rank, rank + 1):
            raise SpellingError(
                f"device_assignment has {devices.ndim} dims, the tensor {rank}",
                where=said,
                do=f"give an array of {rank} dims, or of {rank + 1}, the last one for copies",
            )
        cut = [dim for dim in range(rank) if devices.shape[dim] > 1]
        axes: dict[int, tuple[Axis, ...]] = dict(
            zip(cut, axes_over(mesh, devices, cut, "device_assignment"), strict=True)
        )
        return spec_of([axes.get(dim, ()) for dim in range(rank)])

    return annotate_named(module, tensor, spec, said, mesh)
