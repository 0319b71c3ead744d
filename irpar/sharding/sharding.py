"""Shardings: which mesh axes cut which dim of a tensor, and which axes hold partial values."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal, get_args

from irpar.errors import ShardingError

from .axes import common_atoms, join_axes
from .mesh import Axis, Mesh

Reduction = Literal["sum", "max", "min", "prod", "and", "or"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)


@dataclass(frozen=True)
class DimSharding:
    """How one dim is sharded.

    Attributes:
        axes: what cuts it, major first.
        is_open: completion may add axes.
        priority: the round of completion from which on the axes are carried on and an open dim takes others; 0 is the
            first.
    """

    axes: tuple[Axis, ...] = ()
    is_open: bool = False
    priority: int = 0

    def __str__(self) -> str:
        names = [str(axis) for axis in self.axes]
        text = f"@({','.join(names)})" if len(names) > 1 else f"@{names[0]}" if names else ""
        return text + ("?" if self.is_open else "") + (f"!{self.priority}" if self.priority else "")

    def spec(self) -> list[str] | None:
        """The form of `--shardings`: `["tp", "?", "priority=1"]`, or None for a dim that is closed and not sharded."""
        words = list(map(str, self.axes))
        if self.is_open:
            words.append("?")
        if self.priority:
            words.append(priority_word(self.priority))
        return words or None


_CLOSED = DimSharding()
_OPEN = DimSharding(is_open=True)

DimSpec = None | str | Sequence[str]
"""How one dim is sharded, in a `--shardings` file: None, an axis, or axes, "?" where open, and "priority=1"."""

MOST_PRIORITY = 999_999_999
_PRIORITY = re.compile(r"\s*priority\s*=\s*(.*?)\s*", re.DOTALL)
_PRIORITY_DO = f'write a whole number from 0 (first) to {MOST_PRIORITY}, such as "priority=1"'


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

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Sharding) or self._hash != other._hash:
            return False
        return self._fields == other._fields

    def __hash__(self) -> int:
        return self._hash

    @property
    def _fields(self) -> tuple[object, ...]:
        return self.mesh, self.dims, self.partial, self.reduce

    @cached_property
    def _hash(self) -> int:
        return hash(self._fields)

    @classmethod
    def replicated(cls, mesh: Mesh, rank: int) -> "Sharding":
        """A tensor of the given rank, whole on every device."""
        return _closed(mesh, ((),) * rank, (), "sum")

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
        """Read one entry of a `--shardings` file: per dim None, an axis, or a list of axes, "?" and "priority=1".

        Raises:
            ShardingError: the entry has another form, or names axes that do not fit the mesh.
        """
        if isinstance(spec, str) or not isinstance(spec, Sequence):
            raise ShardingError(
                f"{spec!r} is not a sharding", do='write a list with one entry a dim, such as [["dp"], null]'
            )
        return _of_dims(mesh, tuple(map(_dim_of_spec, spec)))

    def spec(self) -> list[list[str] | None]:
        """The form that plan.json and `--shardings` use: per dim a list of axes, "?" and the priority, or None."""
        return [words and list(words) for words in self._words]

    @cached_property
    def _words(self) -> tuple[list[str] | None, ...]:
        return tuple(dim.spec() for dim in self.dims)

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.dims)

    @cached_property
    def all_axes(self) -> tuple[Axis, ...]:
        """Every axis that shards a dim or is partial."""
        return (*(axis for dim in self.dims for axis in dim.axes), *self.partial)

    @cached_property
    def axis_names(self) -> frozenset[str]:
        """The names of these axes."""
        return frozenset(axis.name for axis in self.all_axes)

    @cached_property
    def axes(self) -> tuple[tuple[Axis, ...], ...]:
        """The axes of each dim."""
        return tuple(dim.axes for dim in self.dims)

    @cached_property
    def is_replicated(self) -> bool:
        """True where no axis cuts or is partial: every device holds the full tensor."""
        return not self.all_axes

    @cached_property
    def is_open(self) -> bool:
        """True where completion may still add axes to a dim."""
        return any(dim.is_open for dim in self.dims)

    @cached_property
    def priorities(self) -> tuple[int, ...]:
        """The priority of each dim."""
        return tuple(dim.priority for dim in self.dims)

    @cached_property
    def is_settled(self) -> bool:
        """True where nothing is left to completion: no dim is open or has a priority."""
        return not self.is_open and not any(self.priorities)

    def allows(self, other: "Sharding") -> bool:
        """Whether another sharding has the blocks that this one says, and is not partial; of open dims also parts of
        them.

        >>> mesh = Mesh({"dp": 2, "tp": 4})
        >>> said = Sharding.of_spec(mesh, [["dp", "?"], None])
        >>> [said.allows(Sharding.of_spec(mesh, spec)) for spec in ([["dp", "tp"], None], [["tp"], None])]
        [True, False]
        """
        if other.rank != self.rank or self.mesh.group_size(other.partial) > 1:
            return False
        pairs = zip(self.dims, other.axes, strict=True)
        return all(_allows(self.mesh, said, axes) for said, axes in pairs)

    def closed(self) -> "Sharding":
        """The same placement with every dim closed, and without priorities."""
        return self if self.is_settled else Sharding.of_axes(self.mesh, self.axes, self.partial, self.reduce)

    @cached_property
    def canonical(self) -> "Sharding":
        """The same blocks in one spelling: closed, without axes of one device, `x:(1)2, x:(2)2` of 4 joined to `x`."""
        dims, partial = tuple(map(self._cutting, self.axes)), self._cutting(self.partial)
        if self.is_settled and (dims, partial) == (self.axes, self.partial):
            return self
        return Sharding.of_axes(self.mesh, dims, partial, self.reduce)

    def _cutting(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return join_axes(self.mesh, [axis for axis in axes if self.mesh.axis_size(axis) > 1])

    def with_dim(self, dim: int, axes: Sequence[Axis]) -> "Sharding":
        """The same sharding with other axes on one dim."""
        changed = list(self.dims)
        changed[dim] = replace(self.dims[dim], axes=tuple(axes))
        return replace(self, dims=tuple(changed))

    def with_partial(self, axes: Iterable[Axis], reduce: Reduction = "sum") -> "Sharding":
        """The same sharding with other partial axes."""
        partial = tuple(axes)
        if (partial, reduce) == (self.partial, self.reduce):
            return self
        if self.is_settled:
            return _closed(self.mesh, self.axes, partial, reduce)
        return replace(self, partial=partial, reduce=reduce)

    def reduced(self, axes: Sequence[Axis]) -> "Sharding":
        """What it is once it is reduced over axes, whatever parts of its partial ones they are.

        >>> lies = Sharding.of_spec(Mesh({"dp": 4, "tp": 2}), [None]).with_partial([Axis("dp"), Axis("tp")])
        >>> [str(lies.reduced(list(map(Axis.parse, axes)))) for axes in (["dp:(2)2"], ["dp:(2)2", "dp:(1)2"])]
        ['[_] partial(sum: dp:(1)2, tp)', '[_] partial(sum: tp)']
        """
        atoms = common_atoms(self.mesh, (*self.partial, *axes))
        gone = {atom for axis in axes for atom in atoms[axis]}
        left: list[Axis] = []
        for axis in self.partial:
            rest = [atom for atom in atoms[axis] if atom not in gone]
            left += [axis] if rest == list(atoms[axis]) and axis not in axes else join_axes(self.mesh, rest)
        return self.with_partial(left, self.reduce)

    def cut_further(self, axes: Sequence[Axis], shape: Sequence[int]) -> Iterator["Sharding"]:
        """The ways to cut one dim by more axes, no block empty, not partial; none where these cut some dim already.

        >>> lies = Sharding.of_spec(Mesh({"dp": 2, "tp": 4}), [["dp"], None])
        >>> [str(further) for further in lies.cut_further([Axis("tp")], (16, 6))]
        ['[@(dp,tp), _]']
        """
        if not are_disjoint(self.mesh, [*(axis for dim in self.axes for axis in dim), *axes]):
            return
        for dim, cut in enumerate(self.axes):
            more = (*cut, *axes)
            blocks = self.mesh.group_size(more)
            if -(-shape[dim] // blocks) * (blocks - 1) < shape[dim]:
                yield Sharding.of_axes(self.mesh, (*self.axes[:dim], more, *self.axes[dim + 1 :]))

    def dim_parts(self, dim: int) -> int:
        """Into how many blocks a dim is sharded."""
        return self.mesh.group_size(self.dims[dim].axes)

    def __str__(self) -> str:
        dims = ", ".join(f"{'_' if not str(dim) else ''}{dim}" for dim in self.dims)
        return f"[{dims}]" + self.suffix()

    def suffix(self) -> str:
        """What the text form prints after the dims: ` replicated`, ` partial(sum: tp)`, or nothing."""
        if self.partial:
            return f" partial({self.reduce}: {', '.join(map(str, self.partial))})"
        if not self.all_axes and self.is_settled:
            return " replicated"
        return ""


@lru_cache(maxsize=16384)
def _closed(mesh: Mesh, dims: tuple[tuple[Axis, ...], ...], partial: tuple[Axis, ...], reduce: Reduction) -> Sharding:
    """A program has few distinct shardings and asks for each of them many times."""
    return Sharding(mesh, tuple(map(DimSharding, dims)), partial, reduce)


@lru_cache(maxsize=16384)
def _of_dims(mesh: Mesh, dims: tuple[DimSharding, ...]) -> Sharding:
    """The same of what a user or a plan says."""
    return Sharding(mesh, dims)


@lru_cache(maxsize=16384)
def _allows(mesh: Mesh, said: DimSharding, axes: tuple[Axis, ...]) -> bool:
    """Whether the blocks of a dim are those that were said, or of an open dim parts of them."""
    if said.axes == axes:
        return True
    more, rest = divmod(mesh.group_size(axes), mesh.group_size(said.axes))
    if rest or (more > 1 and not said.is_open):
        return False
    return all(mesh.position(coords, axes) // more == mesh.position(coords, said.axes) for coords in mesh.all_coords())


def _dim_of_spec(spec: DimSpec) -> DimSharding:
    if spec is None:
        return _CLOSED
    names = [spec] if isinstance(spec, str) else spec
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ShardingError(
            f"{spec!r} does not say how a dim is sharded", do='write null, or a list of axes such as ["dp", "tp"]'
        )
    return _dim_of_words(tuple(names))


@lru_cache(maxsize=16384)
def _dim_of_words(names: tuple[str, ...]) -> DimSharding:
    """As `_closed`: a plan says the same few things of thousands of tensors."""
    names, priority = _without_priority(names)
    if "?" in names[:-1]:
        raise ShardingError(f'"?" must come last in {list(names)!r}', do='write the axes first, then "?"')
    is_open = bool(names) and names[-1] == "?"
    return DimSharding(tuple(Axis.parse(name) for name in (names[:-1] if is_open else names)), is_open, priority or 0)


def is_priority(word: str) -> bool:
    """Whether a word of a dim's list is its priority, or is meant to be."""
    return _PRIORITY.fullmatch(word) is not None


def priority_word(priority: int) -> str:
    """How a priority stands in the list of a dim.

    Raises:
        ShardingError: it is no number from 0 to `MOST_PRIORITY`.
    """
    if type(priority) is not int or not 0 <= priority <= MOST_PRIORITY:
        raise ShardingError(f"{priority!r} is no priority", do=_PRIORITY_DO)
    return f"priority={priority}"


def with_priority(spec: Sequence[DimSpec], priority: int) -> list[DimSpec]:
    """An annotation with a priority for its dims that are sharded or open and have none of their own.

    >>> with_priority([None, "tp", ["?", "priority=2"]], 1)
    [None, ['tp', 'priority=1'], ['?', 'priority=2']]

    Raises:
        ShardingError: it is no number from 0 to `MOST_PRIORITY`.
    """
    word = priority_word(priority)

    def dim(said: DimSpec) -> DimSpec:
        words = [said] if isinstance(said, str) else said
        is_list = isinstance(words, Sequence) and all(isinstance(name, str) for name in words)
        return [*words, word] if words and is_list and not any(map(is_priority, words)) else said

    return [dim(said) for said in spec] if priority else list(spec)


def _without_priority(words: tuple[str, ...]) -> tuple[tuple[str, ...], int | None]:
    """The words of a dim before its priority, and the priority; None where there is none."""
    numbers = [match[1] for word in words if (match := _PRIORITY.fullmatch(word))]
    if not numbers:
        return words, None
    if len(numbers) > 1:
        raise ShardingError(f"{list(words)!r} has {len(numbers)} priorities", do="give each dim one")
    if not is_priority(words[-1]):
        raise ShardingError(
            f'"priority={numbers[0]}" must come last in {list(words)!r}',
            do='write the axes first, then "?" where the dim is open, then the priority',
        )
    if not re.fullmatch(r"[0-9]{1,9}", numbers[0]):
        raise ShardingError(f'"{numbers[0][:20]}" is no priority', do=_PRIORITY_DO)
    return words[:-1], int(numbers[0])


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
    return _known_overlapping(mesh, tuple(axes))


@lru_cache(maxsize=16384)
def _known_overlapping(mesh: Mesh, axes: tuple[Axis, ...]) -> Axis | None:
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
