"""TensorFlow's DTensor layouts: for each dim of a tensor the dim of the mesh that shards it, or `unsharded`.

Objects are read by what they have (`sharding_specs`, `mesh`), texts as TensorFlow prints them; TensorFlow itself is not
needed.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from irpar.ir import Module
from irpar.sharding import DimSpec, Mesh, with_priority

from .devices import SpellingError, device_array, mesh_over
from .mindspore import Layout as NamedDevices
from .named import annotate_named

UNSHARDED = "unsharded"
"""What stands for a dim that is not sharded."""
_FORM = f'write for each dim of the tensor a dim of the mesh, or "{UNSHARDED}": ["batch", "{UNSHARDED}"]'
_TEXT = re.compile(r"sharding_specs:(?P<specs>.*?),?\s+mesh:(?P<mesh>.*)", re.DOTALL)
_PAIR = re.compile(r"([^,=\s]+)=([0-9]{1,9})")
_ID = re.compile(r"[0-9]{1,18}")
_TEXT_DO = 'write it as TensorFlow does: "sharding_specs:x,unsharded, mesh:|x=2,y=4|0,1,2,3,4,5,6,7|..."'


@dataclass(frozen=True)
class SpecLayout:
    """How the tensors that a name or glob matches are sharded.

    Attributes:
        pattern: name or glob.
        names: per dim of the tensor a dim of the mesh; None where it is not sharded.
        devices: the mesh of the layout; None where it names axes of the module's mesh.
        text: what was written, for reasons and messages.
        where: file and line; empty where there is none.
        priority: of the dims that are sharded.
    """

    pattern: str
    names: tuple[str | None, ...]
    devices: NamedDevices | None
    text: str
    where: str = ""
    priority: int = 0

    def annotate(self, module: Module) -> int:
        """Annotate the tensors that match; a module without a mesh gets that of the layout.

        Returns:
            How many tensors match.

        Raises:
            IrparError: none matches, or the layout does not fit the tensor or the module's mesh.
        """
        mesh: Mesh | None = None
        dims: Sequence[DimSpec] = self.names
        if self.devices is not None:
            mesh = mesh_over(module, self.devices.devices, self.devices.alias_name, "the mesh of the layout")
            dims = self.devices(*self.names).spec(mesh)
        said = with_priority(dims, self.priority)
        return annotate_named(module, self.pattern, lambda rank: said, self.text, mesh, self.where)


def read_layout(pattern: str, given: Any, text: str, where: str = "", priority: int = 0) -> SpecLayout:
    """A layout from a list of names, from TensorFlow's text, or from an object with `sharding_specs` and `mesh`.

    Raises:
        SpellingError: it has another form, or names a dim that its mesh has not.
    """
    place = f"{text}      {where}" if where else text
    devices: NamedDevices | None = None
    if isinstance(given, str):
        found = _TEXT.fullmatch(given.strip())
        if found is None:
            raise SpellingError(f"{given!r} is no layout", where=place, do=_TEXT_DO)
        listed: Any = [name.strip() for name in found["specs"].split(",") if name.strip()]
        devices = _mesh_of_text(found["mesh"], place)
    elif hasattr(given, "sharding_specs"):
        listed, mesh = list(given.sharding_specs), getattr(given, "mesh", None)
        devices = None if mesh is None else _mesh_of_object(mesh, place)
    else:
        listed = given
    is_list = isinstance(listed, Sequence) and not isinstance(listed, str)
    if not is_list or not all(name is None or (isinstance(name, str) and name) for name in listed):
        raise SpellingError(f"{given!r} is no layout", where=place, do=_FORM)
    names = tuple(None if name in (None, UNSHARDED) else name for name in listed)
    for name in names:
        if devices is not None and name is not None and name not in devices.alias_name:
            raise SpellingError(
                f'the mesh of the layout has no dim "{name}"',
                where=place,
                do=f"choose from {', '.join(devices.alias_name)}, and {UNSHARDED}",
            )
    return SpecLayout(pattern, names, devices, text, where, priority)


def _mesh_of_text(text: str, place: str) -> NamedDevices:
    """`NAME|x=2,y=4|global ids|local ids|devices` as named devices; the ids may be left out, or stand as `*CPU`."""
    parts = text.split("|")
    pairs = [_PAIR.fullmatch(pair) for pair in _listed(parts[1] if len(parts) > 1 else "")]
    ids = [_ID.fullmatch(number) for number in _listed(parts[2] if len(parts) > 2 and parts[2][:1] != "*" else "")]
    if not pairs or None in pairs or None in ids:
        raise SpellingError(f'the mesh "{text[:60]}" of the layout cannot be read', where=place, do=_TEXT_DO)
    names, sizes = zip(*(pair.groups() for pair in pairs if pair is not None), strict=True)
    return _named_devices(names, tuple(map(int, sizes)), [int(number[0]) for number in ids if number is not None])


def _listed(text: str) -> list[str]:
    return [part for part in (part.strip() for part in text.split(",")) if part]


def _mesh_of_object(mesh: Any, place: str) -> NamedDevices:
    """A mesh object of TensorFlow, by what it has."""
    try:
        names = tuple(map(str, mesh.dim_names))
        sizes = tuple(int(mesh.dim_size(name)) for name in names)
        ids = device_array(mesh.global_device_ids(), "the mesh of the layout").ravel().tolist()
    except (AttributeError, TypeError, ValueError):
        raise SpellingError(
            f"the mesh of the layout is a {type(mesh).__name__}",
            where=place,
            do="give a mesh with dim_names, dim_size(name) and global_device_ids(), or a list of names",
        ) from None
    return _named_devices(names, sizes, ids)


def _named_devices(names: tuple[str, ...], sizes: tuple[int, ...], ids: Sequence[int]) -> NamedDevices:
    in_order = not ids or (len(ids) == math.prod(sizes) and list(ids) == list(range(len(ids))))
    return NamedDevices(sizes, names, None if in_order else tuple(ids))


def relayout(module: Module, tensor: str, layout: Any) -> int:
    """Say how a tensor is sharded.

    >>> relayout(module, "x", ["batch", UNSHARDED])                                        # doctest: +SKIP
    >>> relayout(module, "x", "sharding_specs:batch,unsharded, mesh:|batch=2,model=4|")    # doctest: +SKIP

    Args:
        module: the module. Without a mesh it gets that of the layout; with one, that of the layout must be a view of
            it: the same devices, along its axes or parts of them.
        tensor: name or glob of tensors.
        layout: TensorFlow's `Layout` (its `sharding_specs` and `mesh`), its text, or a list with one name for each dim,
            which are then axes of the module's mesh.

    Returns:
        How many tensors match.

    Raises:
        IrparError: the layout fits neither the tensor nor the module's mesh.
    """
    shown = str(getattr(layout, "sharding_specs", layout)).replace("\n", " ")
    said = f'"{tensor}" (layout {shown if len(shown) <= 80 else shown[:77] + "..."})'
    return read_layout(tensor, layout, said).annotate(module)
