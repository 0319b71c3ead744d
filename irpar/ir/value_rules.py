"""What must hold of one value: type, sharding, memory, numbers; a local one is the block that its sharding says."""

from collections.abc import Iterator
from typing import get_args

from irpar.sharding import Axis, IrparError, Mesh, Sharding, block_range, check_disjoint

from .dtypes import DType
from .graph import Graph
from .module import Module
from .types import InflightType, OptionalType, SequenceType, TensorType, Type
from .value import Memory, Value

_MEMORIES = frozenset(get_args(Memory))
_COMPLEX = (DType.C64, DType.C128)


def is_reducible(dtype: DType, reduce: str) -> bool:
    """Whether elements of a type can be reduced: `and`, `or` on truth values and integers, the others on numbers."""
    if reduce in ("and", "or"):
        return dtype is DType.BOOL or dtype.is_integer
    if reduce in ("max", "min") and dtype in _COMPLEX:
        return False
    return dtype not in (DType.BOOL, DType.STR)


def innermost(type_: Type) -> TensorType | None:
    """The tensor type inside a sequence, an optional or a tensor in flight."""
    while isinstance(type_, (SequenceType, OptionalType, InflightType)):
        type_ = type_.elem
    return type_ if isinstance(type_, TensorType) else None


class ValueRules:
    """Checks values of one graph and of the graphs nested in it.

    Args:
        module: whose meshes are known.
        graph: the outermost graph, which says whether the view is local, and for which ranks.
    """

    def __init__(self, module: Module, graph: Graph) -> None:
        self.meshes = tuple(module.meshes.values())
        self.is_local = graph.view == "local"
        # With several meshes a rank does not say a place in each, so any block of the mesh will do.
        self.ranks = graph.ranks if len(self.meshes) == 1 else ()
        self._known: dict[Sharding, list[str]] = {}
        self._positions: dict[tuple[Mesh, tuple[Axis, ...]], set[int]] = {}

    def problems(self, value: Value) -> Iterator[str]:
        """What is wrong with a value."""
        if value.memory not in _MEMORIES:
            yield f"is in memory {value.memory!r}; there are {', '.join(sorted(_MEMORIES))}"
        type_ = value.type if type(value.type) is TensorType else innermost(value.type)
        if type_ is not None and type_.shape is not None:
            for dim in type_.shape:
                if type(dim) is int and dim < 0:
                    yield f"has a negative dim in {type_}"
        if value.sharding is not None:
            yield from self._sharding(value, type_, value.sharding)
        if value.global_shape is not None or self.is_local:
            yield from self._local(value, type_)
        if value.data is not None:
            yield from self._data(value)

    def _sharding(self, value: Value, type_: TensorType | None, sharding: Sharding) -> Iterator[str]:
        known = self._known.get(sharding)
        if known is None:
            known = self._known[sharding] = list(self._mesh_problems(sharding))
        yield from known
        if type_ is None or type_.shape is None:
            yield f"has a sharding, but is {value.type}: only tensors of known rank have one"
        elif len(type_.shape) != sharding.rank:
            yield f"is {value.type}, but its sharding has {sharding.rank} dims"
        if sharding.partial and type_ is not None and not is_reducible(type_.dtype, sharding.reduce):
            yield f"is {type_.dtype}, which cannot be partial({sharding.reduce})"

    def _mesh_problems(self, sharding: Sharding) -> Iterator[str]:
        if sharding.mesh not in self.meshes:
            yield f"is sharded on mesh @{sharding.mesh.name} ({sharding.mesh}), which the module does not have"
        try:
            check_disjoint(sharding.mesh, sharding.all_axes)
        except IrparError as error:
            yield f"has a sharding {sharding} that cannot be: {error.what}"

    def _local(self, value: Value, type_: TensorType | None) -> Iterator[str]:
        shape, sharding = value.global_shape, value.sharding
        if not self.is_local:
            yield f"has the shape of a whole, {list(shape or ())}, in a graph that is in global view"
        elif shape is None:
            if sharding is not None and any(dim.axes for dim in sharding.dims):
                yield f"is sharded by {sharding} in a local graph, but the shape of the whole is not there"
        elif type_ is None or type_.shape is None or len(type_.shape) != len(shape):
            yield f"is {value.type}, which is no block of {list(shape)}"
        elif sharding is None:
            if type_.is_static and type_.shape != shape:
                yield f"is {value.type} of a whole {list(shape)}, but no sharding shards it"
        elif sharding.rank == len(shape) and not self._known[sharding]:
            yield from self._block(value, type_, shape, sharding)

    def _block(self, value: Value, type_: TensorType, shape: tuple[int, ...], sharding: Sharding) -> Iterator[str]:
        for dim, (size, whole) in enumerate(zip(type_.shape or (), shape, strict=True)):
            if not isinstance(size, int):
                continue
            sizes = self._block_sizes(sharding, dim, whole)
            if self.ranks and len(sizes) > 1:
                yield f"has blocks of {sorted(sizes)} in dim {dim} on ranks {list(self.ranks)}, which share the graph"
            elif size not in sizes:
                expected = " or ".join(map(str, sorted(sizes)))
                yield (
                    f"is {value.type}, but {sharding} of {list(shape)} makes blocks of {expected} in dim {dim}: "
                    "a local graph holds blocks only"
                )

    def _block_sizes(self, sharding: Sharding, dim: int, whole: int) -> set[int]:
        axes = sharding.dims[dim].axes
        if not axes:
            return {whole}
        mesh = sharding.mesh
        positions = self._positions.get((mesh, axes))
        if positions is None:
            ranks = [rank for rank in self.ranks if rank < mesh.size]
            coords = map(mesh.coords, ranks) if ranks else mesh.all_coords()
            positions = self._positions[mesh, axes] = {mesh.position(place, axes) for place in coords}
        parts = mesh.group_size(axes)
        return {stop - start for start, stop in (block_range(whole, parts, position) for position in positions)}

    def _data(self, value: Value) -> Iterator[str]:
        assert value.data is not None
        type_ = value.type
        if value.data.type == type_:
            return
        is_whole = self.is_local and value.global_shape == value.data.shape
        if not is_whole or not isinstance(type_, TensorType) or type_.dtype is not value.data.dtype:
            yield f"is {type_}, but its numbers are {value.data.type}"
