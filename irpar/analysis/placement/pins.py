"""What is pinned to the host or to the device, by names of the model."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from irpar.globs import matching_names
from irpar.ir import Node
from irpar.sharding import IrparError, nearest_or_first_names
from irpar.units import count_text

from .graph import PlacementGraph
from .of_program import PlaceableProgram


@dataclass(frozen=True)
class Pins:
    """What is pinned.

    Attributes:
        host, device: scopes, nodes, weights or inputs, or globs of them.
        others_are_free: whether what is not pinned may be on either side; else its nodes are on the device.
        where: who says so, for messages.
        must_match: whether a pin is refused that names nothing, or nothing that can be there.
    """

    host: tuple[str, ...]
    device: tuple[str, ...]
    others_are_free: bool
    where: str
    must_match: bool = True

    def check(self, programs: Iterable[PlaceableProgram]) -> None:
        """Refuse a pin that nothing matches, if each has to match.

        Raises:
            IrparError: naming it.
        """
        if not self.must_match:
            return
        names = dict.fromkeys(name for program in programs for name in program.names())
        for pattern in (*self.host, *self.device):
            if not matching_names(pattern, names):
                raise IrparError(
                    f'no scope, no node, no weight and no input is "{pattern}"',
                    where=self.where,
                    notes=nearest_or_first_names(pattern, names),
                    do="name a scope of the model, such as tables.0, or a glob",
                )

    def of(self, program: PlaceableProgram) -> dict[int, str]:
        """Units that are pinned, and what says so: `host=tables.*`. What cannot be on the host is not.

        Raises:
            IrparError: nothing of what a pin names can be on the host, or something is pinned to both sides.
        """
        found: dict[int, str] = {}
        for said, units in self._named(program):
            side = said.partition("=")[0]
            able = [unit for unit in units if side == "device" or unit not in program.refusals]
            if self.must_match and units and not able:
                raise IrparError(
                    f"{program.graph.units[units[0]].name} cannot be on the host, as {said} says",
                    where=self.where,
                    notes=(program.refusals[units[0]], *_notes_on_loops(program)),
                    do="leave it out",
                )
            for unit in able:
                known = found.setdefault(unit, said)
                if not known.startswith(f"{side}="):
                    raise IrparError(
                        f"{program.graph.units[unit].name} is in {known} and in {said}",
                        where=self.where,
                        notes=("state is where the node runs that replaces it, with all of that update",)
                        if any(program.unit_of.get(value) == unit for value in program.source.states)
                        else (),
                        do="leave it out of one of them",
                    )
        return found

    def left(self, program: PlaceableProgram) -> list[str]:
        """Lines about what is named for the host and stays on the device."""
        lines = []
        for said, units in self._named(program):
            reasons = [program.refusals[unit] for unit in units if unit in program.refusals]
            if reasons and said.startswith("host="):
                lines.append(f"{said} leaves {count_text(len(reasons), 'node')} on the device; the first: {reasons[0]}")
        return lines

    def _named(self, program: PlaceableProgram) -> Iterator[tuple[str, list[int]]]:
        """Each pin, and the units that it names."""
        names = program.names()
        for side, patterns in (("host", self.host), ("device", self.device)):
            for pattern in patterns:
                units = [unit for name in matching_names(pattern, names) for unit in names[name]]
                yield f"{side}={pattern}", list(dict.fromkeys(units))

    def pinned(self, program: PlaceableProgram) -> PlacementGraph:
        """The placement graph of a program, with what is pinned.

        Raises:
            IrparError: something cannot be where it is pinned to.
        """
        where: list[bool | None] = [None] * len(program.graph.units)
        for unit, said in self.of(program).items():
            where[unit] = said.startswith("device=")
        if not self.others_are_free:
            self._leave_others(program, where)
        self._check_possible(program, where)
        return program.graph.pinned(where)

    @staticmethod
    def _leave_others(program: PlaceableProgram, where: list[bool | None]) -> None:
        for thing, unit in program.unit_of.items():
            if isinstance(thing, Node) and where[unit] is None and program.graph.units[unit].device is not None:
                where[unit] = True

    def _check_possible(self, program: PlaceableProgram, where: Sequence[bool | None]) -> None:
        for unit, there in zip(program.graph.units, where, strict=True):
            if there is not None and (unit.device if there else unit.host) is None:
                raise IrparError(
                    f"the program has {unit.name} on the {'host' if there else 'device'} already",
                    where=self.where,
                    do="leave it out",
                )


def _notes_on_loops(program: PlaceableProgram) -> Iterator[str]:
    """What else a pin may have meant."""
    if any(node.holds_graphs for node in program.source):
        yield "what a body computes, as that of the loop over micro-batches, runs where the node does that has the body"
