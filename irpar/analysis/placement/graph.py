"""The graph that placement is decided on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

BEFORE = -1
"""The time before the first node."""

Assignment = tuple[bool, ...]
"""Of each unit whether it is on the device."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What has one place: a node, nodes that go together, or the memory of what no node makes.

    Attributes:
        name: for people.
        host, device: what it costs there, in any unit; None: it cannot be there. It can be in one of them.
    """

    name: str
    host: int | None = 0
    device: int | None = 0


@dataclass(frozen=True, slots=True)
class PlacedValue:
    """What lies where its unit is, and is copied to where others read it.

    It is on the device from when it is made, or else from its first reader there, to its last reader there.

    Attributes:
        name: for people.
        nbytes: of it.
        unit: the number of the unit that makes or holds it.
        made: when; BEFORE: it is there from the start.
        reads: (time, number of the unit) of each that reads it, in order of time, none before it is made.
        until: where it is made it is held to this time at least.
        to_host, to_device: what a copy costs.
        shares: where it is made it takes no bytes, for it is written over as many that its unit holds to the end.
    """

    name: str
    nbytes: int
    unit: int
    made: int = BEFORE
    reads: tuple[tuple[int, int], ...] = ()
    until: int = BEFORE
    to_host: int = 0
    to_device: int = 0
    shares: bool = False


@dataclass(frozen=True)
class PlacementGraph:
    """Units, and the values between them.

    Attributes:
        units: in any order.
        values: likewise.
        times: how many nodes run, one after the other; graph results are read at this time.
    """

    units: tuple[Unit, ...]
    values: tuple[PlacedValue, ...]
    times: int

    @property
    def fixed(self) -> tuple[bool | None, ...]:
        """Of each unit whether it is on the device; None where that is to be decided."""
        return tuple(
            None if unit.host is not None and unit.device is not None else unit.device is not None
            for unit in self.units
        )

    def pinned(self, on_device: Sequence[bool | None]) -> "PlacementGraph":
        """The same, with units that are where it is said.

        Args:
            on_device: of each unit; None: where that is not said.
        """
        units = [
            unit if where is None else replace(unit, host=None) if where else replace(unit, device=None)
            for unit, where in zip(self.units, on_device, strict=True)
        ]
        return replace(self, units=tuple(units))

    def merged(self, numbers: Sequence[int], count: int) -> "PlacementGraph":
        """The same, where units that get one number go together.

        Args:
            numbers: of each unit that of what it becomes a part of.
            count: how many there are then.
        """
        host: list[int | None] = [0] * count
        device: list[int | None] = [0] * count
        names: list[str] = [""] * count
        for unit, number in zip(self.units, numbers, strict=True):
            host[number] = _sum(host[number], unit.host)
            device[number] = _sum(device[number], unit.device)
            names[number] = names[number] or unit.name
        values = [
            replace(value, unit=numbers[value.unit], reads=tuple((time, numbers[unit]) for time, unit in value.reads))
            for value in self.values
        ]
        return PlacementGraph(tuple(map(Unit, names, host, device)), tuple(values), self.times)


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
