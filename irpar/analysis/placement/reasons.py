"""Why something is where it is, in words."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from irpar.analysis.memory.liveness import value_bytes
from irpar.ir import Node, Place, Value
from irpar.units import bytes_text, count_text

from .of_program import PlaceableProgram
from .solution import Placement


@dataclass(frozen=True)
class Reasons:
    """Reasons for where the units of a program are.

    Attributes:
        program: it.
        found: where they are.
        pins: units that are pinned, and what says so.
    """

    program: PlaceableProgram
    found: Placement
    pins: Mapping[int, str]

    @cached_property
    def _readers(self) -> dict[int, int]:
        """Units that only hold something, and the first that reads it on the same side."""
        working = {unit for thing, unit in self.program.unit_of.items() if isinstance(thing, Node)}
        near = self.found.on_device
        found: dict[int, int] = {}
        for value in self.program.graph.values:
            for _, reader in value.reads:
                if value.unit not in working and reader in working and near[reader] == near[value.unit]:
                    found.setdefault(value.unit, reader)
        return found

    def of_unit(self, unit: int) -> str:
        """Why a unit is where it is."""
        said = self.pins.get(unit)
        if said is not None:
            return said
        if unit in self.program.refusals:
            return self.program.refusals[unit]
        reader = self._readers.get(unit)
        if reader is not None:
            return self.of_unit(reader)
        if self.found.on_device[unit] != self.found.plain[unit]:
            return "the device has no room for it" if self.found.plain[unit] else "so that other parts fit"
        return "it takes less time there"

    def of_host(self) -> list[str]:
        """For each reason a line about what is on the host for it."""
        nodes: dict[str, list[Node]] = {}
        nbytes: dict[str, int] = {}
        kept = {*self.program.source.constants, *self.program.source.states}
        for thing, unit in self.program.unit_of.items():
            if not self.found.on_device[unit]:
                reason = self.of_unit(unit)
                nodes.setdefault(reason, [])
                if isinstance(thing, Node):
                    nodes[reason].append(thing)
                elif thing in kept:
                    nbytes[reason] = nbytes.get(reason, 0) + value_bytes(thing)
        return [
            f"on the host, {reason}: {count_text(len(each), 'node')}"
            + (f" ({each[0].title} first)" if each else "")
            + f", {bytes_text(nbytes.get(reason, 0))} of weights and state"
            for reason, each in nodes.items()
        ]

    def of_copy(self, value: Value, place: Place, reader: Node) -> str:
        """Why a value is copied to where a node reads it."""
        source = value if value.node is None else value.node
        home = "device" if place == "host" else "host"
        made = "it lies" if isinstance(source, Value) else f"{source.title} runs"
        reads, unit = self.program.unit_of[reader], self.program.unit_of[source]
        return (
            f"{reader.title} runs on the {place} ({self.of_unit(reads)}), {made} on the {home} ({self.of_unit(unit)})"
        )
