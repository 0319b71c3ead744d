"""MindSpore's `shard` of an operator, its `Layout`; merged collectives, sharded state, recompute, places, offload."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from irpar.ir import Module
from irpar.sharding import Axis, DimSpec, Mesh, join_axes
from irpar.sharding.mesh import MOST_DEVICES, too_many

from .devices import Devices, SpellingError, axes_over, device_array, mesh_over, spec_of
from .mindspore_fusion import set_auto_parallel_context, set_comm_fusion
from .mindspore_offload import set_offload_context
from .mindspore_optimizer import hsdp, set_parallel_optimizer
from .mindspore_place import primitive_target
from .mindspore_recompute import recompute
from .named import infer_undeclared_types
from .strategies import OpCuts, Strategy, annotate_ops, named_nodes

__all__ = [
    "Layout",
    "TensorLayout",
    "hsdp",
    "primitive_target",
    "recompute",
    "set_auto_parallel_context",
    "set_comm_fusion",
    "set_offload_context",
    "set_parallel_optimizer",
    "shard",
]

NO_AXIS = "None"
"""The alias of a dim that is not sharded."""
_INTERLEAVED = "interleaved_parallel"
_COUNTS_DO = 'write for each tensor a count a dim, such as ((2, 1), (1, 4)), or layouts: (layout("dp", "None"), ...)'


@dataclass(frozen=True)
class Layout:
    """A matrix of devices whose dims have names.

    >>> layout = Layout((2, 2, 2), ("dp", "cp", "mp"))
    >>> layout("dp", "None", ("cp", "mp")).aliases
    (('dp',), (), ('cp', 'mp'))

    Args:
        device_matrix: sizes of its dims, major first.
        alias_name: their names.
        rank_list: the device ids in row-major order; 0, 1, 2 ... by default.

    Raises:
        SpellingError: sizes, names or ids that cannot be.
    """

    device_matrix: tuple[int, ...]
    alias_name: tuple[str, ...]
    rank_list: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        sizes, names = tuple(self.device_matrix), tuple(self.alias_name)
        # Before the devices are listed one by one.
        if all(type(size) is int and size > 0 for size in sizes) and math.prod(sizes) > MOST_DEVICES:
            raise SpellingError(f"the device matrix has {too_many(math.prod(sizes))}", do="give smaller sizes")
        where = f"Layout({sizes}, {names})"
        if not sizes or any(type(size) is not int or size < 1 for size in sizes) or len(sizes) != len(names):
            raise SpellingError(
                "the device matrix and its names do not fit",
                where=where,
                do='give sizes of 1 or more and a name for each: Layout((2, 4), ("dp", "mp"))',
            )
        if _INTERLEAVED in names:
            raise SpellingError(
                f"{_INTERLEAVED} cuts inside a device, so that its parts overlap; irpar's shardings do not say that",
                where=where,
                do="leave it out",
            )
        if len(set(names)) < len(names) or NO_AXIS in names:
            raise SpellingError(
                f'a name comes twice, or is "{NO_AXIS}"', where=where, do="give every dim a name of its own"
            )
        for axis in names:
            Mesh({axis: 1})  # refuses what cannot name an axis
        if self.rank_list is not None and len(self.rank_list) != math.prod(sizes):
            raise SpellingError(
                f"the rank list has {len(self.rank_list)} devices, the matrix {math.prod(sizes)}",
                where=where,
                do="list every device once",
            )

    @property
    def devices(self) -> Devices:
        """The device ids in the form of the matrix."""
        ids = range(math.prod(self.device_matrix)) if self.rank_list is None else self.rank_list
        flat = device_array(list(ids), "rank_list")
        return np.asarray(flat.reshape(self.device_matrix), dtype=np.int64)

    def __call__(self, *dims: str | Sequence[str] | None) -> "TensorLayout":
        """The layout of a tensor: per dim an alias, several (major first), or "None".

        Raises:
            SpellingError: an alias that there is not, or one that comes twice.
        """
        aliases = tuple(_aliases(dim) for dim in dims)
        used = [alias for of_dim in aliases for alias in of_dim]
        where = f"layout{dims}"
        for alias in used:
            if alias not in self.alias_name:
                raise SpellingError(
                    f"the layout has no alias {alias!r}",
                    where=where,
                    do=f'choose from {", ".join(self.alias_name)}, and "{NO_AXIS}" for a dim that is not sharded',
                )
            if used.count(alias) > 1:
                raise SpellingError(f'"{alias}" comes twice', where=where, do="use each alias for one dim only")
        return TensorLayout(self, aliases)


def _aliases(dim: str | Sequence[str] | None) -> tuple[str, ...]:
    if dim is None or dim == NO_AXIS:
        return ()
    return (dim,) if isinstance(dim, str) else tuple(dim)


@dataclass(frozen=True)
class TensorLayout:
    """How a tensor is sharded: per dim aliases of a layout, major first."""

    layout: Layout
    aliases: tuple[tuple[str, ...], ...]

    def spec(self, mesh: Mesh) -> tuple[DimSpec, ...]:
        """The same by the axes of a mesh of the same devices.

        Raises:
            SpellingError: an alias is no axes of the mesh, or is not the axis of its own name.
        """
        matrix = self.layout
        places = [matrix.alias_name.index(alias) for of_dim in self.aliases for alias in of_dim]
        found = axes_over(mesh, matrix.devices, places, "the layout")
        axes: dict[str, tuple[Axis, ...]] = {}
        for place, of_alias in zip(places, found, strict=True):
            alias = matrix.alias_name[place]
            if alias in mesh.axes and of_alias != (Axis(alias),) and matrix.device_matrix[place] * mesh.axes[alias] > 1:
                raise SpellingError(
                    f'"{alias}" of the layout is another thing than axis {alias} of the mesh {mesh}',
                    where=f"Layout({matrix.device_matrix}, {matrix.alias_name})",
                    do="use the sizes, the order and the devices of the mesh, or another name",
                )
            axes[alias] = of_alias
        joined = [join_axes(mesh, [axis for alias in of_dim for axis in axes[alias]]) for of_dim in self.aliases]
        return tuple(spec_of(joined))


Given = Sequence[int] | TensorLayout | None


def shard(
    module: Module, op: str, in_strategy: Sequence[Given] | None = None, out_strategy: Sequence[Given] | None = None
) -> int:
    """Say how the operands and results of operators are sharded.

    >>> shard(module, "/fc1/MatMul", ((2, 1), (1, 4)))                              # doctest: +SKIP
    >>> shard(module, "/fc1/MatMul", (layout("dp", "None"), layout("None", "mp")))  # doctest: +SKIP

    Counts are matched to the axes of the mesh: dims that the operator holds to be the same get the same axes. Where no
    axes have their sizes, they mean the devices that MindSpore gives them, along parts of axes.

    Args:
        module: the module. Layouts give it their mesh where it has none; counts need one.
        op: name or glob of nodes.
        in_strategy: for each operand a count a dim, a layout, or None where it is left free.
        out_strategy: the same for each result.

    Returns:
        How many nodes match.

    Raises:
        IrparError: the strategies do not fit the operator or the mesh, or are ambiguous.
    """
    said = f'shard("{op}", {in_strategy}, {out_strategy})'
    text = said if len(said) <= 100 else said[:97] + "..."
    given = {"in": in_strategy, "out": out_strategy}
    if in_strategy is None and out_strategy is None:
        raise SpellingError("there is no strategy", where=text, do=_COUNTS_DO)
    if not all(listed is None or isinstance(listed, (tuple, list)) for listed in given.values()):
        raise SpellingError("the strategies are no tuple of one for each tensor", where=text, do=_COUNTS_DO)
    mesh = _mesh(module, [item for listed in given.values() for item in listed or ()], text)
    cuts = {
        key: tuple(_strategy(item, mesh, text) for item in listed)
        for key, listed in given.items()
        if listed is not None
    }
    nodes = named_nodes(module)
    entry = OpCuts(op, cuts, text)
    infer_undeclared_types(module)
    if not module.meshes:
        module.set_mesh(mesh)
    return annotate_ops(module, entry, nodes)


def _mesh(module: Module, given: Sequence[Given], text: str) -> Mesh:
    """The mesh of the module, with which all layouts agree, or that of the first layout."""
    layouts = [item.layout for item in given if isinstance(item, TensorLayout)]
    if not layouts and not module.meshes:
        raise SpellingError(
            "there is no mesh to match cut counts to",
            where=text,
            do="give one first: module.set_mesh(irpar.Mesh({...})), or use layouts",
        )
    mesh = module.mesh if module.meshes else None
    for layout in layouts:
        known = mesh_over(module, layout.devices, layout.alias_name, "the layout")
        mesh = known if mesh is None else mesh
    assert mesh is not None
    return mesh


def _strategy(item: Any, mesh: Mesh, text: str) -> Strategy | None:
    if item is None:
        return None
    if isinstance(item, TensorLayout):
        return item.spec(mesh)
    is_list = isinstance(item, Sequence) and not isinstance(item, str)
    if not is_list or any(type(count) is not int or count < 1 for count in item):
        raise SpellingError(f"{item!r} is no strategy of a tensor", where=text, do=_COUNTS_DO)
    return tuple(item)
