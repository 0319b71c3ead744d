"""Why something is where it is, in words."""

from collections.abc import Mapping
from dataclasses import dataclass

from irpar.ir import Node, Place, Value

from .of_program import Program
from .solution import Found


@dataclass(frozen=True)
class Reasons:
    """Reasons for where the units of a program are.

    Attributes:
        program: it.
        found: where they are.
        pins: units that are pinned, and what says so.
    """

    program: Program
    found: Found
    pins: Mapping[int, str]

    def of_unit(self, unit: int) -> str:
        """Why a unit is where it is."""
        said = self.pins.get(unit)
        if said is not None:
            return said
        if unit in self.program.refusals:
            return self.program.refusals[unit]
        if self.found.on_device[unit] != self.found.plain[unit]:
            return "the device has no room for it" if self.found.plain[unit] else "so that other parts fit"
        return "it takes less time there"

    def of_copy(self, value: Value, place: Place, reader: Node) -> str:
        """Why a value is copied to where a node reads it."""
        source = value if value.node is None else value.node
        home = "device" if place == "host" else "host"
        made = "it lies" if isinstance(source, Value) else f"{source.title} runs"
        reads, unit = self.program.unit_of[reader], self.program.unit_of[source]
        return (
            f"{reader.title} runs on the {place} ({self.of_unit(reads)}), {made} on the {home} ({self.of_unit(unit)})"
        )
