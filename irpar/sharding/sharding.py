"""Shardings: which mesh axes cut which dim of a tensor, and which axes hold partial values."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal, get_args

from .errors import ShardingError
from .mesh import Axis, Mesh

Reduction = Literal["sum", "max", "min", "prod", "and", "or"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)


@dataclass(frozen=True)
class DimSharding:
    """The axes that cut one dim, major first; an open dim may get more axes in completion."""

    axes: tuple[Axis, ...] = ()
    is_open: bool = False

    def __str__(self) -> str:
        names = [str(axis) for axis in self.axes]
        text = f"@({','.join(names)})" if len(names) > 1 else f"@{names[0]}" if names else ""
        return text + ("?" if self.is_open else "")


_CLOSED = DimSharding()
_OPEN = DimSharding(is_open=True)

DimSpec = None | str | Sequence[str]


@dataclass(frozen=True)
class Sharding:
    """How a tensor lies on a mesh.

    Axes named in no dim and not in `partial` replicate. With `partial`, the tensor is the reduction over these axes of
    what the devices hold.

    Raises:
        ShardingError: an axis that the mesh lacks, overlapping axes, an unknown reduction.
    """

    mesh: Mesh
    dims: tuple[DimSharding, ...]
    partial: tuple[Axis, ...] = ()
    reduce: Reduction = field(default="sum")

    def __post_init__(self) -> None:
        if not self.partial and self.reduce != "sum":
            object.__setattr__(self, "reduce", "sum")
        if self.reduce not in REDUCTIONS:
            raise ShardingError(f'unknown reduction "{self.reduce}"', do=f"use one of {', '.join(REDUCTIONS)}")
        if len(self.partial) > 1:
            object.__setattr__(self, "partial", tuple(sorted(self.partial, key=self._mesh_order)))
        check_disjoint(self.mesh, self.all_axes)

    def _mesh_order(self, axis: Axis) -> tuple[int, int]:
        names = self.mesh.axis_names
        return (names.index(axis.name) if axis.name in names else len(names), axis.pre)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.dims, self.partial, self.reduce))

    @classmethod
    def replicated(cls, mesh: Mesh, rank: int) -> "Sharding":
        """A tensor of the given rank, whole on every device."""
        return cls(mesh, (_CLOSED,) * rank)

    @classmethod
    def open(cls, mesh: Mesh, rank: int) -> "Sharding":
        """A tensor of the given rank that completion is free to cut."""
        return cls(mesh, (_OPEN,) * rank)

    @classmethod
    def of_axes(
        cls,
        mesh: Mesh,
        dims: Iterable[Sequence[Axis]],
        partial: Iterable[Axis] = (),
        reduce: Reduction = "sum",
    ) -> "Sharding":
        """A closed sharding from the axes of each dim."""
        return _closed(mesh, tuple(map(tuple, dims)), tuple(partial), reduce)

    @classmethod
    def of_spec(cls, mesh: Mesh, spec: Sequence[DimSpec]) -> "Sharding":
        """Read one entry of a `--shardings` file: per dim None, an axis, or a list of axes with "?" for open.

        Raises:
            ShardingError: the entry has another form, or names axes that do not fit the mesh.
        """
        if isinstance(spec, str) or not isinstance(spec, Sequence):
            raise ShardingError(
                f"{spec!r} is not a sharding", do='write a list with one entry a dim, such as [["dp"], null]'
            )
        return cls(mesh, tuple(_dim_of_spec(dim) for dim in spec))

    def spec(self) -> list[list[str] | None]:
        """The form that plan.json and `--shardings` use: per dim a list of axes ("?" last where open), or None."""
        return [[*map(str, dim.axes), *(["?"] if dim.is_open else [])] or None for dim in self.dims]

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.dims)

    @cached_property
    def all_axes(self) -> tuple[Axis, ...]:
        """Every axis that cuts a dim or is partial."""
        return (*(axis for dim in self.dims for axis in dim.axes), *self.partial)

    @cached_property
    def axes(self) -> tuple[tuple[Axis, ...], ...]:
        """The axes of each dim."""
        return tuple(dim.axes for dim in self.dims)

    @cached_property
    def is_replicated(self) -> bool:
        """True where no axis cuts or is partial: every device holds the whole tensor."""
        return not self.all_axes

    @cached_property
    def is_open(self) -> bool:
        """True where completion may still add axes to a dim."""
        return any(dim.is_open for dim in self.dims)

    def closed(self) -> "Sharding":
        """The same placement with every dim closed."""
        return Sharding.of_axes(self.mesh, self.axes, self.partial, self.reduce) if self.is_open else self

    def with_dim(self, dim: int, axes: Sequence[Axis]) -> "Sharding":
        """The same sharding with other axes on one dim."""
        changed = list(self.dims)
        changed[dim] = DimSharding(tuple(axes), self.dims[dim].is_open)
        return replace(self, dims=tuple(changed))

    def with_partial(self, axes: Iterable[Axis], reduce: Reduction = "sum") -> "Sharding":
        """The same sharding with other partial axes."""
        return replace(self, partial=tuple(axes), reduce=reduce)

    def dim_parts(self, dim: int) -> int:
        """Into how many blocks a dim is cut."""
        return self.mesh.group_size(self.dims[dim].axes)

    def __str__(self) -> str:
        dims = ", ".join(f"{'_' if not str(dim) else ''}{dim}" for dim in self.dims)
        return f"[{dims}]" + self.suffix()

    def suffix(self) -> str:
        """What the text form prints after the dims: ` replicated`, ` partial(sum: tp)`, or nothing."""
        if self.partial:
            return f" partial({self.reduce}: {', '.join(map(str, self.partial))})"
        if not self.all_axes and not self.is_open:
            return " replicated"
        return ""


@lru_cache(maxsize=16384)
def _closed(mesh: Mesh, dims: tuple[tuple[Axis, ...], ...], partial: tuple[Axis, ...], reduce: Reduction) -> Sharding:
    """A program has few distinct shardings and asks for each of them many times."""
    return Sharding(mesh, tuple(map(DimSharding, dims)), partial, reduce)


def _dim_of_spec(spec: DimSpec) -> DimSharding:
    if spec is None:
        return _CLOSED
    names = [spec] if isinstance(spec, str) else spec
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ShardingError(
            f"{spec!r} does not say how a dim is sharded", do='write null, or a list of axes such as ["dp", "tp"]'
        )
    if "?" in names[:-1]:
        raise ShardingError(f'"?" must come last in {list(names)!r}', do='write the axes first, then "?"')
    is_open = bool(names) and names[-1] == "?"
    return DimSharding(tuple(Axis.parse(name) for name in (names[:-1] if is_open else names)), is_open)


def check_disjoint(mesh: Mesh, axes: Sequence[Axis]) -> None:
    """Refuse axes that the mesh lacks or that overlap.

    Raises:
        ShardingError: naming the axis.
    """
    axis = _first_overlapping(mesh, axes)
    if axis is not None:
        raise ShardingError(f"mesh axis {axis} is used twice in one sharding", do="use each axis for one dim only")


def are_disjoint(mesh: Mesh, axes: Sequence[Axis]) -> bool:
    """True for axes that one sharding may use together: each device has one position along all of them."""
    return _first_overlapping(mesh, axes) is None


def _first_overlapping(mesh: Mesh, axes: Sequence[Axis]) -> Axis | None:
    """The first axis that overlaps one before it.

    Sub-axes are apart where the later starts at a multiple of where the earlier ends: of an axis of 6, x:(1)2 and
    x:(2)3, but not x:(1)2 and x:(3)2, whose cuts cross.
    """
    seen: dict[str, list[Axis]] = {}
    for axis in axes:
        mesh.axis_size(axis)
        others = seen.setdefault(axis.name, [])
        if any(_overlap(axis, other) for other in others):
            return axis
        others.append(axis)
    return None


def _overlap(a: Axis, b: Axis) -> bool:
    if a.size is None or b.size is None:
        return True
    return a.pre % (b.pre * b.size) != 0 and b.pre % (a.pre * a.size) != 0
