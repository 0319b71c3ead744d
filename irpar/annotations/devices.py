"""Arrays of device ids: checked, made a mesh where there is none, and seen as axes of the mesh that there is."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from irpar.ir import Module
from irpar.sharding import Axis, IrparError, Mesh
from irpar.sharding.mesh import MOST_DEVICES, too_many
from irpar.sharding.tiles import axes_of_blocks, blocks_over

Devices = np.ndarray[Any, np.dtype[np.int64]]
"""Device ids, each once, in an array with one dim for each way to cut."""


class SpellingError(IrparError):
    """An annotation in another system's words that cannot be, or that irpar cannot say."""


def device_array(given: Any, what: str) -> Devices:
    """Device ids as an array.

    Args:
        given: nested lists, or an array; a `Mesh` is the array of its devices.
        what: what messages call it.

    Raises:
        SpellingError: it is ragged or empty, or an id is no whole number, is negative, or comes twice.
    """
    do = "write nested lists of device ids, each id once, such as [[0, 1], [2, 3]]"
    if isinstance(given, Mesh):
        return _devices_of(given)
    if isinstance(given, range) and given[MOST_DEVICES:]:  # Before it is written out.
        raise SpellingError(f"{what} has {too_many(MOST_DEVICES + 1)}", do="use fewer devices")
    try:
        found = np.asarray(given)
    except (ValueError, TypeError, OverflowError):
        raise SpellingError(f"{what} is no array: its lists differ in length, or hold no numbers", do=do) from None
    if found.ndim == 0 or found.size == 0 or found.dtype.kind not in "iu":
        raise SpellingError(f"{what} is no array of device ids: {_shown(given)}", do=do)
    if found.size > MOST_DEVICES:
        raise SpellingError(f"{what} has {too_many(found.size)}", do="use fewer devices")
    ids = found.ravel().tolist()
    if min(ids) < 0 or len(set(ids)) < len(ids):
        twice = "a device twice" if min(ids) >= 0 else "a negative device id"
        raise SpellingError(f"{what} has {twice}: {_shown(given)}", do=do)
    return found.astype(np.int64)


def _devices_of(mesh: Mesh) -> Devices:
    ids = [mesh.device(rank) for rank in range(mesh.size)]
    return np.asarray(ids, dtype=np.int64).reshape(tuple(mesh.axes.values()) or (1,))


def _shown(given: Any) -> str:
    text = repr(given).replace("\n", "")
    return text if len(text) <= 80 else text[:77] + "..."


def mesh_over(module: Module, devices: Devices, names: Sequence[str] | None, what: str) -> Mesh:
    """The mesh of the module, or, where it has none yet, the array as a mesh.

    Args:
        module: the module, which stays as it is.
        devices: the array.
        names: what to call the axes of a new mesh; d0, d1 ... by default.
        what: what messages call the array.

    Raises:
        IrparError: the names do not fit, or the devices are not those of the module's mesh.
    """
    if names is not None and (isinstance(names, str) or len(names) != devices.ndim or len(set(names)) < len(names)):
        raise SpellingError(
            f"{names!r} does not name the {devices.ndim} dim(s) of {what}",
            do="give a list with a name for each dim, all different",
        )
    ids = devices.ravel().tolist()
    if not module.meshes:
        axes = names if names is not None else [f"d{dim}" for dim in range(devices.ndim)]
        return Mesh({axis: int(size) for axis, size in zip(axes, devices.shape, strict=True)}, devices=tuple(ids))
    mesh = module.mesh
    own = [mesh.device(rank) for rank in range(mesh.size)]
    if set(ids) != set(own):
        raise SpellingError(
            f"{what} does not have the devices of the mesh {mesh}",
            notes=(f"{what}: {len(ids)}, {_shown(ids)}", f"the mesh: {len(own)}, {_shown(own)}"),
            do="list all devices of the mesh: every annotation of a module is over the same ones",
        )
    return mesh


def axes_over(mesh: Mesh, devices: Devices, dims: Sequence[int], what: str) -> list[tuple[Axis, ...]]:
    """The axes of the mesh that some dims of a device array are.

    Args:
        mesh: a mesh of the same devices.
        devices: the array.
        dims: dims of the array.
        what: what messages call the array.

    Raises:
        SpellingError: no axes, or parts of axes, run through the devices in that order.
    """
    if devices.shape == tuple(mesh.axes.values()) and np.array_equal(devices, _devices_of(mesh)):
        return [(Axis(mesh.axis_names[dim]),) for dim in dims]
    places = itertools.product(*map(range, devices.shape))
    placed = {int(devices[place]): [place[dim] for dim in dims] for place in places}
    blocks = blocks_over(mesh, placed)
    found = None if blocks is None else axes_of_blocks(mesh, blocks, [devices.shape[dim] for dim in dims])
    if found is None:
        raise SpellingError(
            f"{what} is no view of the mesh {mesh}: its devices run along no axes in that order",
            notes=(f"the devices: {_shown(devices.tolist())}",),
            do="list the devices in the order of the mesh, or give the module a mesh in this order: "
            "Mesh({...}, devices=(...))",
        )
    return found


def spec_of(axes: Sequence[Sequence[Axis]]) -> list[list[str] | None]:
    """Axes of each dim as an annotation writes them."""
    return [[str(axis) for axis in of_dim] or None for of_dim in axes]
