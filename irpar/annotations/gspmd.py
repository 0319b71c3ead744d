"""GSPMD's `mesh_split` (arXiv 2105.04663, section 3): a device mesh, and which of its dims cuts which of a tensor."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from irpar.ir import Module
from irpar.sharding import DimSpec

from .devices import SpellingError, axes_over, device_array, mesh_over, spec_of
from .named import annotate_named


def mesh_split(
    module: Module,
    tensor: str,
    device_mesh: Any,
    dims_mapping: Sequence[int],
    *,
    axis_names: Sequence[str] | None = None,
) -> int:
    """Shard a tensor over the dims of a device mesh.

    >>> mesh_split(module, "x", [[0, 1], [2, 3]], [0, -1])  # module.shard("x", ["d0", None])   # doctest: +SKIP

    Args:
        module: the module. Without a mesh it gets the device mesh as its own; with one, the device mesh must be a view
            of it: the same devices, along its axes or parts of them.
        tensor: name or glob of tensors.
        device_mesh: array (or nested lists) of device ids, or a `Mesh`.
        dims_mapping: per dim of the tensor a dim of the device mesh, or -1 where it is not sharded.
        axis_names: what to call the axes where the module gets its mesh here; d0, d1 ... by default.

    Returns:
        How many tensors match.

    Raises:
        IrparError: the arguments do not fit each other, the tensor, or the module's mesh.
    """
    devices = device_array(device_mesh, "device_mesh")
    dims_mapping = _plain(dims_mapping, tensor)
    said = f'"{tensor}" (mesh_split {dims_mapping})'
    _check(dims_mapping, devices.ndim, said)
    mesh = mesh_over(module, devices, axis_names, "device_mesh")
    cut = [dim for dim in dims_mapping if dim >= 0]
    axes = dict(zip(cut, spec_of(axes_over(mesh, devices, cut, "device_mesh")), strict=True))
    spec: list[DimSpec] = [axes.get(dim) for dim in dims_mapping]
    return annotate_named(module, tensor, lambda rank: spec, said, mesh)


def _plain(dims_mapping: Any, tensor: str) -> list[Any]:
    """A list of plain numbers; arrays are taken too."""
    listed = dims_mapping.tolist() if isinstance(dims_mapping, np.ndarray) else dims_mapping
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise SpellingError(
            f"dims_mapping is {dims_mapping!r}",
            where=f'"{tensor}" (mesh_split)',
            do="write a list: for each dim of the tensor a dim of the device mesh, or -1",
        )
    return list(listed)


def _check(dims_mapping: Sequence[int], rank: int, where: str) -> None:
    do = f"write for each dim of the tensor a dim of the device mesh, 0 to {rank - 1}, each once, or -1"
    for dim in dims_mapping:
        if type(dim) is not int or not -1 <= dim < rank:
            raise SpellingError(f"dims_mapping has {dim!r}, the device mesh has {rank} dim(s)", where=where, do=do)
        if dim >= 0 and list(dims_mapping).count(dim) > 1:
            raise SpellingError(f"dims_mapping uses dim {dim} of the device mesh twice", where=where, do=do)
