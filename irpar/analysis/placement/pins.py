"""What is pinned to the host or to the device, by names of the model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from irpar.globs import matching_names
from irpar.ir import Node
from irpar.sharding import IrparError, nearest_names

from .graph import PlacementGraph
from .of_program import Program


@dataclass(frozen=True)
class Pins:
    """What is pinned.

    Attributes:
        host, device: scopes, nodes, weights or inputs, or globs of them.
        others_are_free: whether what is not pinned may be on either side; else its nodes are on the device.
        where: who says so, for messages.
    """

    host: tuple[str, ...]
    device: tuple[str, ...]
    others_are_free: bool
    where: str

    def check(self, programs: Iterable[Program]) -> None:
        """Refuse a pin that nothing matches.

        Raises:
            IrparError: naming it.
        """
        names = dict.fromkeys(name for program in programs for name in program.names())
        for pattern in (*self.host, *self.device):
            if not matching_names(pattern, names):
                raise IrparError(
                    f'no scope, no node, no weight and no input is "{pattern}"',
                    where=self.where,
                    notes=nearest_names(pattern, names),
                    do="name a scope of the model, such as tables.0, or a glob",
                )

    def of(self, program: Program) -> dict[int, str]:
        """Units that are pinned, and what says so: `host=tables.*`.

        Raises:
            IrparError: something is pinned to both sides.
        """
        names = program.names()
        found: dict[int, str] = {}
        for side, patterns in (("host", self.host), ("device", self.device)):
            for pattern in patterns:
                for name in matching_names(pattern, names):
                    for unit in names[name]:
                        said = found.setdefault(unit, f"{side}={pattern}")
                        if not said.startswith(f"{side}="):
                            raise IrparError(
                                f"{program.graph.units[unit].name} is in {said} and in {side}={pattern}",
                                where=self.where,
                                notes=("state is where the node runs that replaces it, with all of that update",),
                                do="leave it out of one of them",
                            )
        return found

    def pinned(self, program: Program) -> PlacementGraph:
        """The placement graph of a program, with what is pinned.

        Raises:
            IrparError: something cannot be where it is pinned to.
        """
        where: list[bool | None] = [None] * len(program.graph.units)
        for unit, said in self.of(program).items():
            where[unit] = said.startswith("device=")
            if not where[unit] and unit in program.refusals:
                raise IrparError(
                    f"{program.graph.units[unit].name} cannot be on the host, as {said} says",
                    where=self.where,
                    notes=(program.refusals[unit],),
                    do="leave it out",
                )
        if not self.others_are_free:
            self._leave_others(program, where)
        self._check_possible(program, where)
        return program.graph.pinned(where)

    @staticmethod
    def _leave_others(program: Program, where: list[bool | None]) -> None:
        for thing, unit in program.unit_of.items():
            if isinstance(thing, Node) and where[unit] is None and program.graph.units[unit].device is not None:
                where[unit] = True

    def _check_possible(self, program: Program, where: Sequence[bool | None]) -> None:
        for unit, there in zip(program.graph.units, where, strict=True):
            if there is not None and (unit.device if there else unit.host) is None:
                raise IrparError(
                    f"the program has {unit.name} on the {'host' if there else 'device'} already",
                    where=self.where,
                    do="leave it out",
                )
