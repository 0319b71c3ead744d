"""Device meshes: named axes over a row-major (or explicit) list of devices."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from irpar.arguments import require
from irpar.errors import ShardingError

MOST_DEVICES = 65_536
"""Of a mesh; the ranks are listed one by one, in plans and in programs."""
_SHOWN = 10**30
"""Counts from here on are not written out: Python itself refuses to write numbers of thousands of digits."""
_AXIS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def too_many(count: int) -> str:
    """In words that a count of devices is above the bound; of numbers beyond any use that they are that."""
    shown = f"{count:,}" if count < _SHOWN else "far too many"
    return f"{shown} devices; irpar shards over {MOST_DEVICES:,} at most"


class Axis(NamedTuple):
    """A mesh axis, or the part of one: `tp`, or `tp:(2)4` (a sub-axis of size 4 inside 2 major blocks).

    A sub-axis `name:(pre)size` of an axis with N devices numbers the devices as `(pre, size, N / (pre * size))`,
    row-major, and means the middle one. `size` is None for the whole axis.
    """

    name: str
    pre: int = 1
    size: int | None = None

    def __str__(self) -> str:
        return self.name if self.size is None else f"{self.name}:({self.pre}){self.size}"

    @classmethod
    @lru_cache(maxsize=4096)
    def parse(cls, text: str) -> "Axis":
        """Read `tp` or `tp:(2)4`.

        Raises:
            ShardingError: the text is neither.
        """
        match = re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)(?::\(([0-9]{1,9})\)([0-9]{1,9}))?", text.strip())
        if match is None:
            raise ShardingError(
                f'"{text}" is not a mesh axis', do='write an axis name such as tp, or a sub-axis "tp:(2)4"'
            )
        name, pre, size = match.groups()
        return cls(name) if size is None else cls(name, int(pre), int(size))


@dataclass(frozen=True, eq=False)
class Mesh:
    """Named axes with sizes over a list of devices.

    Args:
        axes: axis name to size, major first, e.g. `Mesh({"dp": 2, "tp": 4})`.
        devices: device ids, one for each place in row-major order of the axes; None means 0, 1, 2 ...
        name: what the text form calls it (`@m`).

    Raises:
        ShardingError: a name or size that cannot be, or device ids that do not fit the axes.
    """

    axes: Mapping[str, int]
    devices: tuple[int, ...] | None = None
    name: str = "m"

    def __post_init__(self) -> None:
        require("axes", self.axes, Mapping, 'write Mesh({"dp": 2, "tp": 4}), or Mesh.parse("dp=2,tp=4")')
        axes = dict(self.axes)
        object.__setattr__(self, "axes", axes)
        for axis, size in axes.items():
            require("the name of a mesh axis", axis, str, 'write Mesh({"dp": 2, "tp": 4})')
            if not _AXIS_NAME.match(axis):
                raise ShardingError(
                    f'"{axis}" cannot name a mesh axis', do="use letters, digits and _ only, a letter first"
                )
            require(f"the size of mesh axis {axis}", size, int, "give every axis a whole number, 1 or more")
            if size < 1:
                raise ShardingError(f"mesh axis {axis} has size {size}", do="give every axis a size of 1 or more")
        if self.size > MOST_DEVICES:
            raise ShardingError(
                f"the mesh {self._shortened()} has {too_many(self.size)}",
                do="give smaller sizes, such as dp=2,tp=4",
            )
        if self.devices is not None:
            devices = tuple(self.devices)
            if len(devices) == self.size and devices == tuple(range(len(devices))):
                object.__setattr__(self, "devices", None)
                return
            object.__setattr__(self, "devices", devices)
            if len(set(devices)) != len(devices) or len(devices) != self.size or min(devices) < 0:
                raise ShardingError(
                    f"mesh {self} has {self.size} places but its device list is {list(devices)}",
                    do=f"list {self.size} different device ids of 0 or more",
                )

    @classmethod
    def of(cls, given: "Mesh | Mapping[str, int] | str") -> "Mesh":
        """A mesh as Python users write it: a Mesh, `{"dp": 2, "tp": 4}` or `"dp=2,tp=4"`.

        Raises:
            ShardingError: it names no mesh.
            ArgumentError: it is none of these.
        """
        require(
            "mesh", given, (Mesh, Mapping, str), 'write "dp=2,tp=4", {"dp": 2, "tp": 4} or Mesh({"dp": 2, "tp": 4})'
        )
        return given if isinstance(given, Mesh) else cls.parse(given) if isinstance(given, str) else cls(given)

    @classmethod
    def parse(cls, text: str, name: str = "m") -> "Mesh":
        """Read `dp=2,tp=4`.

        Raises:
            ShardingError: the text has another form, a repeated axis, or a size below 1.
        """
        require("mesh", text, str, "write it as dp=2,tp=4")
        axes: dict[str, int] = {}
        for item in text.split(","):
            axis, equals, size = (part.strip() for part in item.partition("="))
            if not equals or not re.fullmatch(r"[0-9]{1,9}", size):
                raise ShardingError(f'"{text}" is not a mesh: cannot read "{item.strip()}"', do="write it as dp=2,tp=4")
            if axis in axes:
                raise ShardingError(f'mesh "{text}" names axis {axis} twice', do="name each axis once")
            axes[axis] = int(size)
        return cls(axes, name=name)

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.axes.items())

    def _shortened(self) -> str:
        text = ",".join(f"{axis}={size if size < _SHOWN else '...'}" for axis, size in self.axes.items())
        return text if len(text) <= 60 else f"{text[:57]}..."

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Mesh) and self._key == other._key)

    @cached_property
    def _key(self) -> tuple[object, ...]:
        return (tuple(self.axes.items()), self.devices, self.name)

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    @cached_property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.axes.values())

    @cached_property
    def axis_names(self) -> tuple[str, ...]:
        """Axis names, major first."""
        return tuple(self.axes)

    def axis_size(self, axis: Axis) -> int:
        """Number of devices along an axis or sub-axis.

        Raises:
            ShardingError: the mesh has no such axis, or the sub-axis does not fit it.
        """
        whole = self.axes.get(axis.name)
        if whole is None:
            raise ShardingError(f'no axis "{axis.name}" in mesh {self}', do=self._remedy(axis.name))
        if axis.size is None:
            return whole
        if axis.pre < 1 or axis.size < 2 or whole % (axis.pre * axis.size):
            raise ShardingError(
                f"sub-axis {axis} does not fit axis {axis.name} of size {whole}",
                do=f"in {axis.name}:(PRE)SIZE, PRE * SIZE must divide {whole}, and SIZE must be 2 or more",
            )
        return axis.size

    def _remedy(self, name: str) -> str:
        known = ", ".join(f'"{axis}" (size {size})' for axis, size in self.axes.items())
        return (
            f"write {known}, or add {name} to the mesh ({name}=1 shards nothing)"
            if known
            else f"add {name} to the mesh"
        )

    def group_size(self, axes: Sequence[Axis]) -> int:
        """Number of devices that differ only in `axes`."""
        key = tuple(axes)
        known = self._group_sizes.get(key)
        if known is None:
            known = self._group_sizes[key] = math.prod(self.axis_size(axis) for axis in key)
        return known

    @cached_property
    def _group_sizes(self) -> dict[tuple[Axis, ...], int]:
        return {}

    def coords(self, rank: int) -> tuple[int, ...]:
        """Row-major coordinates of a rank (a place in the mesh, not a device id)."""
        result = []
        for size in reversed(tuple(self.axes.values())):
            rank, coordinate = divmod(rank, size)
            result.append(coordinate)
        return tuple(reversed(result))

    def rank(self, coords: Sequence[int]) -> int:
        """The rank at row-major coordinates."""
        rank = 0
        for coordinate, size in zip(coords, self.axes.values(), strict=True):
            rank = rank * size + coordinate
        return rank

    def device(self, rank: int) -> int:
        """The device id at a rank."""
        return rank if self.devices is None else self.devices[rank]

    def all_coords(self) -> Iterator[tuple[int, ...]]:
        """Coordinates of rank 0, 1, 2 ..."""
        return itertools.product(*(range(size) for size in self.axes.values()))

    def position(self, coords: Sequence[int], axes: Sequence[Axis]) -> int:
        """Row-major position of `coords` along `axes`, major first: 0 .. group_size(axes) - 1."""
        position = 0
        for axis in axes:
            size = self.axis_size(axis)
            coordinate = coords[self.axis_names.index(axis.name)]
            minor = 1 if axis.size is None else self.axes[axis.name] // (axis.pre * axis.size)
            position = position * size + coordinate // minor % size
        return position

    def positions(self, axes: Sequence[Axis]) -> Sequence[int]:
        """The position of each rank along `axes`."""
        key = tuple(axes)
        known = self._positions.get(key)
        if known is None:
            known = self._positions[key] = [self.position(coords, key) for coords in self.all_coords()]
        return known

    @cached_property
    def _positions(self) -> dict[tuple[Axis, ...], list[int]]:
        return {}

    def groups(self, axes: Sequence[Axis]) -> list[list[int]]:
        """The groups of ranks that a collective over `axes` joins, each in order of position along `axes`."""
        found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for rank, coords in enumerate(self.all_coords()):
            key = tuple(self._without(coords, axes))
            found.setdefault(key, []).append((self.position(coords, axes), rank))
        return [[rank for _, rank in sorted(members)] for members in found.values()]

    def _without(self, coords: Sequence[int], axes: Sequence[Axis]) -> Iterator[int]:
        """Coordinates with what `axes` count taken out."""
        for name, coordinate in zip(self.axis_names, coords, strict=True):
            rest = coordinate
            for axis in axes:
                if axis.name != name:
                    continue
                size = self.axis_size(axis)
                minor = 1 if axis.size is None else self.axes[name] // (axis.pre * axis.size)
                rest -= coordinate // minor % size * minor
            yield rest
