"""A program made ready to run: what an instruction touches stands in numbered places of a list, found once."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from irpar.analysis.memory.liveness import memories_of
from irpar.analysis.memory.sums import Sum
from irpar.ir import Graph, Node, Place, Value

from .engines.arena import Arena, ArenaLayout
from .engines.base import CompiledSegment
from .groups.base import Collective
from .instructions import (
    Bodies,
    Call,
    Commit,
    Communicate,
    Compute,
    Copy,
    Free,
    Instruction,
    MemoryCopy,
    Program,
    Segment,
    Start,
    StartCopy,
    Wait,
    WaitCopy,
)

if TYPE_CHECKING:
    from .bound_steps import BoundSteps

Places = tuple[int, ...]


@dataclass(eq=False, slots=True)
class ComputeStep:
    """Run a segment.

    Attributes:
        segment: that.
        compiled: its compiled form.
        run: what computes it.
        inputs, outputs: the places of what it takes and gives.
        frees: the places that are empty after it, as in all steps.
        seconds: the shortest time that it took.
        where: on the device, or on the host.
    """

    segment: Segment
    compiled: CompiledSegment
    run: Callable[[list[Any], int, Arena | None, bool], list[Any]]
    inputs: Places
    outputs: Places
    frees: Places = ()
    seconds: float = field(default=float("inf"))
    where: Place = "device"


@dataclass(eq=False, slots=True)
class CommunicateStep:
    """Execute a collective; its operand is a constant, in a place, or nowhere (None)."""

    collective: Collective
    operand: int | None
    constant: Value | None
    result: int | None
    frees: Places = ()


@dataclass(eq=False, slots=True)
class StartStep:
    """Let a collective begin."""

    collective: Collective
    operand: int | None
    constant: Value | None
    result: int
    frees: Places = ()


@dataclass(eq=False, slots=True)
class WaitStep:
    """Wait for a collective that was started."""

    inflight: int
    result: int
    frees: Places = ()


@dataclass(eq=False, slots=True)
class CopyStep:
    """Copy a value to another memory; it is a constant, or in a place."""

    copy: MemoryCopy
    operand: int | None
    constant: Value | None
    result: int
    frees: Places = ()


@dataclass(eq=False, slots=True)
class StartCopyStep(CopyStep):
    """Let a copy begin."""


@dataclass(eq=False, slots=True)
class WaitCopyStep:
    """Wait for a copy that was started."""

    inflight: int
    result: int
    frees: Places = ()


@dataclass(eq=False, slots=True)
class CommitStep:
    """Let go of the state before the run."""

    loss: Value
    frees: Places = ()


@dataclass(eq=False, slots=True)
class BodiesStep:
    """Run a node whose bodies communicate, trip by trip."""

    node: Node
    bodies: "Mapping[Graph, tuple[Step, ...]]"
    sums: tuple[Sum, ...]
    frees: Places = ()


@dataclass(eq=False, slots=True)
class BoundStep:
    """Several steps of a rank that all ranks of its process take together, where they come to them together.

    Attributes:
        steps: these.
        together: those of all ranks.
    """

    steps: "tuple[Step, ...]"
    together: "BoundSteps"
    frees: Places = ()


Step = (
    ComputeStep | CommunicateStep | StartStep | WaitStep | CopyStep | WaitCopyStep | CommitStep | BodiesStep | BoundStep
)


class Tape:
    """The steps of one part's program.

    Attributes:
        steps: in order.
        places: where each value stands that a rank holds.
        layout: where results lie over all segments; None: each has places of its own.
        arena_bytes: what a rank needs of an arena.
        has_spaces: whether something lies elsewhere than on the device.
    """

    def __init__(
        self, program: Program, compiled: Mapping[Segment, CompiledSegment], layout: ArenaLayout | None = None
    ) -> None:
        self.places: dict[Value, int] = {}
        self._compiled = compiled
        self._stands_for: dict[Value, Value] = {}
        """In a call: inputs and results of its function, and what of the caller they are. Others are the function's."""
        self.layout = layout
        own = (segment.arena_bytes for segment in compiled.values())
        self.arena_bytes = max(own, default=0) if layout is None else layout.nbytes
        self.has_spaces = memories_of(program.graph) != ("device",)
        self._place(program.graph.inputs)
        self.steps = self._steps(program)

    @cached_property
    def values(self) -> dict[int, Value]:
        """What stands in each place."""
        return {place: value for value, place in self.places.items()}

    def _place(self, values: Iterable[Value]) -> Places:
        known = self._stands_for
        return tuple(self.places.setdefault(known.get(value, value), len(self.places)) for value in values)

    def _steps(self, program: Program) -> tuple[Step, ...]:
        found: list[Step] = []
        for instruction in program.instructions:
            if isinstance(instruction, Free):
                found[-1].frees += self._place(instruction.values)
            elif isinstance(instruction, Call):
                found.extend(self._called(instruction))
            else:
                found.append(self._step(instruction))
        return tuple(found)

    def _called(self, call: Call) -> list[Step]:
        """The steps of a function where it is called: they read and write in the caller's places.

        What is inside has places that all calls share, as they share compiled segments. What the function takes is the
        caller's to free.
        """
        self._stands_for = call.stands_for
        found: list[Step] = []
        for instruction in call.program.instructions:
            if isinstance(instruction, Free):
                own = (value for value in instruction.values if value not in self._stands_for)
                found[-1].frees += self._place(own)
            else:
                found.append(self._step(instruction))
        for step in found:
            if isinstance(step, CommunicateStep | StartStep):
                step.collective = call.collective
        self._stands_for = {}
        return found

    def _step(self, instruction: Instruction) -> Step:
        match instruction:
            case Compute(segment):
                inputs, outputs = self._place(segment.inputs), self._place(segment.outputs)
                compiled = self._compiled[segment]
                return ComputeStep(segment, compiled, compiled.run, inputs, outputs, where=segment.place)
            case Communicate(collective, operand, result):
                place = None if result is None else self._place([result])[0]
                return CommunicateStep(collective, *self._operand(operand), place)
            case Start(collective, operand, result):
                return StartStep(collective, *self._operand(operand), self._place([result])[0])
            case Wait(inflight, result):
                return WaitStep(self._place([inflight])[0], self._place([result])[0])
            case StartCopy(copy, operand, result):
                return StartCopyStep(copy, *self._operand(operand), self._place([result])[0])
            case Copy(copy, operand, result):
                return CopyStep(copy, *self._operand(operand), self._place([result])[0])
            case WaitCopy(inflight, result):
                return WaitCopyStep(self._place([inflight])[0], self._place([result])[0])
            case Commit(loss):
                return CommitStep(loss)
            case Bodies(node, bodies, _, sums):
                for body in bodies:
                    self._place(value for value in (*body.inputs, *body.outputs) if not value.is_constant)
                self._place(node.results)
                return BodiesStep(node, {body: self._steps(inner) for body, inner in bodies.items()}, sums)
        raise AssertionError(f"no step for {instruction}")

    def _operand(self, value: Value | None) -> tuple[int | None, Value | None]:
        if value is None:
            return None, None
        value = self._stands_for.get(value, value)
        return (None, value) if value.is_constant else (self._place([value])[0], None)
