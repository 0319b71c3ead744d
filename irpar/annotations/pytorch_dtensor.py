"""PyTorch's DTensor placements: for each dim of the mesh whether it cuts a dim of the tensor, or holds copies.

Objects are read by what they have (`dim`, `reduce_op`), texts as PyTorch prints them; PyTorch itself is not needed.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from irpar.ir import Module
from irpar.sharding import Axis, DimSpec, Mesh, join_axes, with_priority
from irpar.sharding.mesh import MOST_DEVICES, too_many

from .devices import SpellingError, axes_over, device_array, mesh_over, spec_of
from .named import annotate_named

_FORM = 'write one placement for each dim of the mesh: "Shard(0)" or "Replicate()"'
_SHARD = re.compile(r"(?:Shard|S)\((?:dim=)?(-?[0-9]{1,9})\)")
_REPLICATE = re.compile(r"Replicate\(\)|R")
_PARTIAL = re.compile(r"_?(?:Mask)?Partial\(.*\)|P(?:\(.*\))?", re.DOTALL)
_STRIDED = re.compile(r"_StridedShard\(.*\)|_S\(.*\)", re.DOTALL)
_ITEM = re.compile(r"[^,()\s]+(?:\([^()]*\))?")

Placement = int | None
"""The dim of the tensor that a dim of the mesh cuts; None where its devices hold copies."""


@dataclass(frozen=True)
class Placements:
    """What is said of the tensors that a name or glob matches.

    Attributes:
        pattern: name or glob.
        placements: one for each dim of the mesh, in its order.
        text: what was written, for reasons and messages.
        where: file and line; empty where there is none.
        priority: of the dims that are sharded.
    """

    pattern: str
    placements: tuple[Placement, ...]
    text: str
    where: str = ""
    priority: int = 0

    def annotate(self, module: Module, axes: Sequence[Sequence[Axis]] | None = None, mesh: Mesh | None = None) -> int:
        """Annotate the tensors that match.

        Args:
            module: the module.
            axes: what the dims of the mesh are called; by default the axes of the module's mesh.
            mesh: what the axes are of; the module gets it once all fits.

        Returns:
            How many tensors match.

        Raises:
            IrparError: none matches, or the placements do not fit the mesh or a tensor.
        """
        place = f"{self.text}      {self.where}" if self.where else self.text
        known = module.mesh if mesh is None else mesh
        by_dim = [(Axis(name),) for name in known.axis_names] if axes is None else axes
        if len(by_dim) != len(self.placements):
            raise SpellingError(
                f"there are {len(self.placements)} placements, the mesh {known} has {len(by_dim)} dim(s)",
                where=place,
                do=_FORM,
            )

        def spec(rank: int) -> Sequence[DimSpec]:
            dims: list[list[Axis]] = [[] for _ in range(rank)]
            for dim, of_mesh in zip(self.placements, by_dim, strict=True):
                if dim is None:
                    continue
                if not -rank <= dim < rank:
                    raise SpellingError(
                        f"Shard({dim}) is out of range: the tensor has {rank} dim(s)",
                        where=place,
                        do=f"shard a dim from {-rank} to {rank - 1}" if rank else "write Replicate() for scalars",
                    )
                dims[dim].extend(of_mesh)
            return with_priority(spec_of([join_axes(known, of_dim) for of_dim in dims]), self.priority)

        return annotate_named(module, self.pattern, spec, self.text, mesh, self.where)


def read_placements(given: Any, where: str) -> tuple[Placement, ...]:
    """Placements from a list of objects or texts, or from one text that lists them: `(Shard(dim=0), Replicate())`.

    Raises:
        SpellingError: one is none that irpar can say, or the list has another form; it says `where`.
    """
    if isinstance(given, str):
        inner = given.strip()
        inner = inner[1:-1] if inner[:1] + inner[-1:] in ("()", "[]") else inner
        if re.sub(r"[\s,]", "", _ITEM.sub("", inner)):
            raise SpellingError(f"{given!r} is no list of placements", where=where, do=_FORM)
        given = _ITEM.findall(inner)
    if not isinstance(given, Sequence):
        raise SpellingError(f"{given!r} is no list of placements", where=where, do=_FORM)
    return tuple(_placement(item, where) for item in given)


def _placement(given: Any, where: str) -> Placement:
    text = given.strip() if isinstance(given, str) else _printed(given)
    if found := _SHARD.fullmatch(text):
        return int(found[1])
    if _REPLICATE.fullmatch(text):
        return None
    if _PARTIAL.fullmatch(text):
        raise SpellingError(
            f"{text}: no input and no weight holds parts of a sum, "
            "and of results irpar decides where a sum is carried out",
            where=where,
            do="write Replicate() where the sum is wanted whole, Shard(d) where in blocks, or leave the tensor out",
        )
    if _STRIDED.fullmatch(text):
        raise SpellingError(
            f"{text}: strided blocks are sharded by the dims of the mesh in another order than that of the mesh",
            where=where,
            do='annotate by axes, minor last: module.shard(tensor, [["tp", "dp"], None])',
        )
    raise SpellingError(f"{text!r} is no placement", where=where, do=_FORM)


def _printed(given: Any) -> str:
    """A placement object as PyTorch prints it."""
    kind = type(given).__name__
    dim = getattr(given, "dim", None)
    if hasattr(given, "split_factor"):
        return f"_StridedShard(dim={dim}, sf={given.split_factor})"
    if hasattr(given, "reduce_op"):
        return f"Partial({given.reduce_op})"
    if type(dim) is int and kind == "Shard":
        return f"Shard(dim={dim})"
    return "Replicate()" if kind == "Replicate" else repr(given)


def distribute_tensor(module: Module, tensor: str, device_mesh: Any = None, placements: Any = None) -> int:
    """Lay out a tensor over a mesh of devices.

    >>> distribute_tensor(module, "w", device_mesh, [Replicate(), Shard(1)])             # doctest: +SKIP
    >>> distribute_tensor(module, "w", placements="(Replicate(), Shard(dim=1))")         # doctest: +SKIP

    A dim of the tensor that several dims of the mesh cut is cut by them in the order of the mesh, the first outermost.

    Args:
        module: the module. Without a mesh it gets the device mesh as its own; with one, the device mesh must be a view
            of it: the same devices, along its axes or parts of them.
        tensor: name or glob of tensors.
        device_mesh: PyTorch's `DeviceMesh` (its `mesh` and `mesh_dim_names`), an array or nested lists of device ids,
            or a `Mesh`; by default the mesh of the module.
        placements: one for each dim of the mesh, as objects or as PyTorch prints them; by default Replicate() in all.

    Returns:
        How many tensors match.

    Raises:
        IrparError: the placements or the device mesh fit neither each other, nor the tensor, nor the module's mesh.
    """
    shown = str(placements).replace("\n", " ")
    said = f'"{tensor}" (placements {shown if len(shown) <= 80 else shown[:77] + "..."})'
    if device_mesh is None:
        if not module.meshes:
            raise SpellingError(
                "there is no mesh to distribute over",
                where=said,
                do="give a device mesh, or module.set_mesh(...) first",
            )
        count, axes, mesh = len(module.mesh.axis_names), None, None
    else:
        names = (
            device_mesh.axis_names if isinstance(device_mesh, Mesh) else getattr(device_mesh, "mesh_dim_names", None)
        )
        devices = device_array(_ids(device_mesh), "device_mesh")
        mesh = mesh_over(module, devices, names, "device_mesh")
        count, axes = devices.ndim, axes_over(mesh, devices, range(devices.ndim), "device_mesh")
    read = (None,) * count if placements is None else read_placements(placements, said)
    return Placements(tensor, read, said).annotate(module, axes, mesh)


def _ids(device_mesh: Any) -> Any:
    """The device ids of PyTorch's mesh as nested lists; of anything else itself.

    Raises:
        SpellingError: they are more than irpar shards over, and are not listed.
    """
    ids = getattr(device_mesh, "mesh", device_mesh)
    if math.prod(getattr(ids, "shape", ())) > MOST_DEVICES:
        raise SpellingError(f"device_mesh has {too_many(math.prod(ids.shape))}", do="use fewer devices")
    return ids.tolist() if hasattr(ids, "tolist") else ids
