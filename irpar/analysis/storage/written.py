"""What was done to a program whose weights, state or activations lie elsewhere, and what it comes to."""

from collections.abc import Sequence
from dataclasses import dataclass

from irpar.analysis.memory.liveness import peak
from irpar.ir import Graph, Memory, Value
from irpar.ir.clone import clone_graph

from .bodies import BodyMoves
from .moves import Move, moves_in
from .rewriting import write_moves
from .steps import Steps
from .timeline import Timeline


@dataclass
class Moved:
    """What does not stay on the device.

    Attributes:
        memory: where it lies.
        nbytes: its size.
        brought, sent: bytes that go to the device and come from there in a run.
    """

    memory: Memory
    nbytes: int
    brought: int = 0
    sent: int = 0


@dataclass(frozen=True)
class Written:
    """What was done to a program.

    Attributes:
        moves: what comes and goes.
        timeline: how long that takes, by the network, with what bodies do.
        bodies: what comes and goes in bodies of loops.
        alike: what a program has in common with those that need no search of their own; None: nothing was searched.
    """

    moves: tuple[Move, ...]
    timeline: Timeline
    bodies: tuple[BodyMoves, ...] = ()
    alike: object = None

    def moved(self) -> list[Moved]:
        """What does not stay on the device: what bodies bring from the program around them lies where that says."""
        found: dict[Value, Moved] = {}
        inside = ((move, each.body.trips) for each in self.bodies for move in each.moves)
        for move, times in (*((move, 1) for move in self.moves), *inside):
            nbytes = move.item.nbytes
            one = found.setdefault(move.item.value, Moved(move.memory, nbytes))
            one.brought += times * move.to_device * nbytes
            one.sent += times * move.from_device * nbytes
        return list(found.values())


def with_bodies(taken: Timeline, inside: Sequence[BodyMoves]) -> Timeline:
    """What a program takes, of which the nodes of bodies are part already."""
    copying, exposed = (
        sum(getattr(each, name) for each in (taken, *(one.timeline for one in inside)))
        for name in ("copying", "exposed")
    )
    return Timeline(taken.compute, copying, exposed)


def held_after(graph: Graph, steps: Steps, moves: Sequence[Move]) -> int:
    """What a program holds on the device with moves, by its own liveness."""
    trial = clone_graph(graph)
    write_moves(trial, steps, moves_in(trial, moves))
    return peak(trial).total_bytes
