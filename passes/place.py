"""place: nodes on the host or on the device, with copies between their memories."""

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Literal

from irpar.analysis.cost.model import FEMTOSECONDS, CostModel
from irpar.analysis.cost.network import Network
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.cost.network_name import network_name
from irpar.analysis.memory.limit_search import LEAST_SECONDS, MOST_TRIES, next_end, search_within
from irpar.analysis.memory.liveness import peak, peak_bytes, value_bytes
from irpar.analysis.placement import NoRoomError, Placement, PlacementGraph, solve
from irpar.analysis.placement.of_program import PlaceableProgram, of_program
from irpar.analysis.placement.overlap import overlap
from irpar.analysis.placement.pins import Pins
from irpar.analysis.placement.reasons import Reasons
from irpar.analysis.placement.rewriting import write
from irpar.analysis.placement.simulation import Simulator
from irpar.analysis.recompute.costs import ASSUMED, Costs
from irpar.ir import Graph, Module, Node
from irpar.ir.clone import clone_graph
from irpar.ops.memory_copies import copied_bytes, copies_of, number_copies
from irpar.pass_manager import Pass, PassResult, format_pass
from irpar.sharding import IrparError
from irpar.units import bytes_text, count_text, gigabytes, seconds_text

__all__ = ["Place"]


@dataclass(frozen=True)
class Place(Pass):
    """Let each node run on the host or on the device, and copy between their memories what the other side reads.

    Before: local view, the order that of execution. After: the same values in the same order; nodes on the host say
    `place=host`, weights and state lie where they are read and replaced, each value is copied once in each direction.
    Copies begin before they are needed where something hides them and the device has room. With limit-gb no rank's
    device holds more, which later passes keep: it is the module's memory limit then.

    What is not pinned is where the sum of all nodes and copies takes least time, none beside another: a minimal cut;
    where the device has no room for that, by linear programs and by CP-SAT (`irpar.analysis.placement`). The device has
    the room of the option, but no more than the module's memory limit; else that, else that of the network's device.

    Options:
        host: scopes, nodes, weights or inputs of the model that are on the host, or globs of them.
        device: the same on the device.
        rest: where the others are: auto, where the step takes least time; device.
        limit_gb: what a device may hold, in GB; 0: what the module or the network says.
        overlap: whether copies begin early, and are waited for late.
        network: a preset or a network file's text that knows the host and the link to it; by default the module's.
        seconds: of search, for all programs together.
        unmatched: whether a pin that names nothing, or nothing that can be there, is refused or skipped.
    """

    name = "place"
    host: tuple[str, ...] = ()
    device: tuple[str, ...] = ()
    rest: Literal["auto", "device"] = "auto"
    limit_gb: float = 0
    overlap: bool = True
    network: str = ""
    seconds: float = 10
    unmatched: Literal["refused", "skipped"] = "refused"

    def run(self, module: Module) -> PassResult:
        """Rewrite the programs.

        Raises:
            IrparError: an option does not fit, or what is pinned cannot be there.
            NoRoomError: nothing fits the limit.
        """
        self._check(module)
        network = self._network(module)
        limit = self._limit(module, network)
        pins = Pins(self.host, self.device, self.rest == "auto", format_pass(self), self.unmatched == "refused")
        before, known_limit = peak_bytes(module), module.memory_limit
        placed = self._placed(module, network, limit, pins)
        left = dict.fromkeys(line for program, _ in placed for line in pins.left(program))
        longest = max(placed, key=lambda each: each[1].outcome.cost)
        why: list[str] = []
        for program, found in placed:
            reasons = Reasons(program, found, pins.of(program))
            if program is longest[0]:
                why = reasons.of_host()
            module.placed |= write(program, found.on_device, reasons)
            if self.overlap:
                _overlap(module, program.source, network, limit)
        number_copies(module.graphs)
        if self.limit_gb:
            module.memory_limit = limit
        is_changed = any(not all(found.on_device) for _, found in placed)
        if not is_changed:
            note = f"all is on the device, which holds {bytes_text(before)}"
            return PassResult(module.memory_limit != known_limit, notes=(note, *left))
        return PassResult(
            True,
            notes=(
                *_notes(*longest, network_name(self._said_network(module)), before, peak_bytes(module)),
                *why,
                *left,
            ),
            statistics=_statistics(module),
        )

    def _check(self, module: Module) -> None:
        where = format_pass(self)
        if not module.is_local:
            raise IrparError("place needs the local view", where=where, do="run it after localize")
        if not 0 <= self.limit_gb < math.inf:
            raise IrparError(
                f"place with limit-gb={self.limit_gb:g}",
                where=where,
                do="give a finite number of GB above 0, such as limit-gb=24, or 0, for all that the device has",
            )
        if not 0 < self.seconds < math.inf:
            raise IrparError(
                f"place with seconds={self.seconds:g}", where=where, do="give a finite number of seconds above 0"
            )
        if any(True for graph in module.graphs for _ in copies_of(graph)):
            raise IrparError(
                "the module has copies between memories already", where=where, do="run place once, before store"
            )

    def _said_network(self, module: Module) -> str:
        """As the option or the module has it; the assumed one where that knows no seconds."""
        is_enough = self.network or network_of(module.network).knows_seconds
        return (self.network or module.network) if is_enough else ASSUMED

    def _network(self, module: Module) -> Network:
        """The network by which nodes and copies take time.

        Raises:
            IrparError: it does not know both sides.
        """
        network = network_of(self._said_network(module))
        missing = [
            what
            for what, known in (("device", network.device), ("host", network.host), ("host_link", network.host_link))
            if known is None
        ]
        if missing:
            raise IrparError(
                f"the network {network.name} says nothing of {' and '.join(missing)}, so nobody knows what is faster",
                where=format_pass(self),
                do=f"name a network that does, such as {ASSUMED}, or write device, host and host_link into its file",
            )
        return network

    def _limit(self, module: Module, network: Network) -> int | None:
        if self.limit_gb:
            limit = gigabytes(self.limit_gb)
            return min(limit, module.memory_limit or limit)
        return module.memory_limit or network.memory

    def _placed(
        self, module: Module, network: Network, limit: int | None, pins: Pins
    ) -> list[tuple[PlaceableProgram, Placement]]:
        """The programs, and where their units are; those that are the same are searched once."""
        cost_of = Costs(module, network).of_node
        programs = [of_program(graph, cost_of, network) for graph in module.graphs]
        pins.check(programs)
        end = time.monotonic() + self.seconds
        known: dict[PlacementGraph, Placement] = {}
        placed = []
        for number, program in enumerate(programs):
            pinned = pins.pinned(program)
            found = known.get(pinned)
            if found is None or (limit is not None and _held_after(program, found) > limit):
                until = next_end(end, len(programs) - number, LEAST_SECONDS)
                found = known[pinned] = self._fitting(program, pinned, limit, until)
            placed.append((program, found))
        return placed

    def _fitting(self, program: PlaceableProgram, pinned: PlacementGraph, limit: int | None, end: float) -> Placement:
        try:
            return _fitting(program, pinned, limit, end)
        except NoRoomError as error:
            raise NoRoomError(limit or 0, error.least, format_pass(self)) from None


def _fitting(program: PlaceableProgram, pinned: PlacementGraph, limit: int | None, end: float) -> Placement:
    """Where units are so that the device holds at most so much, by the liveness of the program itself.

    Args:
        program: it.
        pinned: its placement graph, with what is pinned.
        limit: bytes.
        end: when to stop, by `time.monotonic`.

    Raises:
        NoRoomError: nothing fits, not even what holds least.
    """
    if limit is None:
        return solve(pinned)

    def search(asked: int, seconds: float) -> tuple[Placement, bool] | None:
        try:
            return solve(pinned, asked, seconds=seconds), True
        except NoRoomError:
            return None  # By its own account: the liveness of the program is asked below.

    found, _ = search_within(limit, end, search, partial(_held_after, program))
    return _smallest(program, pinned, limit) if found is None else found


def _smallest(program: PlaceableProgram, pinned: PlacementGraph, limit: int) -> Placement:
    """What holds least, where the device has room for it by the liveness of the program.

    Args:
        program: it.
        pinned: its placement graph, with what is pinned.
        limit: bytes.

    Raises:
        NoRoomError: it has none.
    """
    simulator, plain = Simulator(pinned), solve(pinned)
    smallest = simulator.smallest
    found = Placement(smallest, simulator.outcome(smallest), plain.bound, plain.plain, "least memory")
    held = _held_after(program, found)
    if held > limit:
        raise NoRoomError(limit, held)
    return found


def _overlap(module: Module, graph: Graph, network: Network, limit: int | None) -> None:
    """Let copies begin early, where the device then holds no more than it may."""
    cost_of, model = Costs(module, network).of_node, CostModel(network)

    def copy_cost(nbytes: int) -> int:
        return model.copy("host", "device", nbytes) or 0

    asked = limit
    for _ in range(MOST_TRIES):
        trial = clone_graph(graph)
        is_early = overlap(trial, asked, cost_of, copy_cost)
        held = peak(trial).total_bytes if is_early else 0
        if limit is None or asked is None or held <= limit:
            if is_early:
                overlap(graph, asked, cost_of, copy_cost)
            return
        asked -= held - limit


def _held_after(program: PlaceableProgram, found: Placement) -> int:
    """What the device holds once a program runs as placed."""
    trial = clone_graph(program.source)
    write(program.of_clone(trial), found.on_device)
    return peak(trial).total_bytes


def _notes(program: PlaceableProgram, found: Placement, network: str, before: int, after: int) -> tuple[str, ...]:
    """What is where, what is copied, and how good that is; of the program that takes longest."""
    near = [found.on_device[unit] for thing, unit in program.unit_of.items() if isinstance(thing, Node)]
    outcome = found.outcome
    lies = sum(
        value_bytes(value) for value in (*program.source.constants, *program.source.states) if value.memory == "host"
    )
    return (
        f"{count_text(near.count(False), 'node')} of {len(near):,} on the host, where {bytes_text(lies)} of weights "
        f"and state lie: the device holds {bytes_text(after)} instead of {bytes_text(before)}",
        f"a step copies {bytes_text(outcome.to_device)} to the device and {bytes_text(outcome.to_host)} to the host, "
        f"and takes {seconds_text(outcome.cost / FEMTOSECONDS)} by {network}, one thing after the other",
        f"by {found.method}: nothing is faster"
        if found.proven
        else f"by {found.method}: at most {100 * found.gap:.1f} % of that could be saved",
    )


def _statistics(module: Module) -> dict[str, int | float]:
    copies = [node for graph in module.graphs for node in copies_of(graph)]
    hosted = sum(node.place == "host" for graph in module.graphs for node in graph)
    return {"nodes on the host": hosted, "copies": len(copies), "copied bytes": sum(map(copied_bytes, copies))}
