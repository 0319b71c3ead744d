"""The instructions of a rank's program: of the main program and of the bodies in it alike."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from irpar.analysis.memory.sums import Sum
from irpar.ir import Function, Graph, Memory, Node, Place, Value
from irpar.ops.effects import goes_to_group
from irpar.ops.facts import int_attribute
from irpar.ops.memory_copies import node_place, source_memory, target_memory

from .called_functions import called_functions
from .errors import ProgramError
from .groups.base import Collective


@dataclass(frozen=True, eq=False)
class Segment:
    """Nodes that run without communication.

    Attributes:
        index: its number in the program.
        graph: the local graph that the nodes belong to.
        nodes: in the order of the graph.
        inputs: values from outside that are not constants: those that are read, then state that is only written over.
        constants: constants of the graph that the nodes read.
        outputs: results that something outside reads.
        over: the results that can be written over a state that they replace, and that state, one of the inputs; or over
            a sum as a trip of a loop finds it.
        steady: the inputs that are state which this segment or another one of the program writes over.
    """

    index: int
    graph: Graph
    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    constants: tuple[Value, ...]
    outputs: tuple[Value, ...]
    over: Mapping[Value, Value] = field(default_factory=dict)
    steady: frozenset[Value] = frozenset()

    @property
    def place(self) -> Place:
        """Where it is computed."""
        return node_place(self.nodes[0])

    @property
    def communicates(self) -> bool:
        """Whether nodes of communication are part of it."""
        return any(map(goes_to_group, self.nodes))

    @property
    def label(self) -> str:
        """What messages call it."""
        first, last = self.nodes[0], self.nodes[-1]
        through = "" if first is last else f" to {last.label}"
        return f"segment {self.index}, {len(self.nodes)} node(s): {first.label}{through}"

    def functions(self) -> tuple[Function, ...]:
        """The functions that its nodes call, directly or not."""
        return tuple(called_functions(self.nodes))


@dataclass(frozen=True, eq=False)
class Compute:
    """Run a segment."""

    segment: Segment

    @property
    def reads(self) -> tuple[Value, ...]:
        return self.segment.inputs

    @property
    def writes(self) -> tuple[Value, ...]:
        return self.segment.outputs


@dataclass(frozen=True, eq=False)
class Communicate:
    """Execute a collective, or what goes from rank to rank.

    Attributes:
        collective: what its members must agree on.
        operand: what this rank brings; None where it only receives.
        result: what it gets; None where it only sends.
    """

    collective: Collective
    operand: Value | None
    result: Value | None

    @property
    def reads(self) -> tuple[Value, ...]:
        return () if self.operand is None else (self.operand,)

    @property
    def writes(self) -> tuple[Value, ...]:
        return () if self.result is None else (self.result,)


class _FromOperand:
    """What makes one value of another."""

    operand: Value
    result: Value

    @property
    def reads(self) -> tuple[Value, ...]:
        return (self.operand,)

    @property
    def writes(self) -> tuple[Value, ...]:
        return (self.result,)


class _FromFlight:
    """What waits for a value in flight."""

    inflight: Value
    result: Value

    @property
    def reads(self) -> tuple[Value, ...]:
        return (self.inflight,)

    @property
    def writes(self) -> tuple[Value, ...]:
        return (self.result,)


@dataclass(frozen=True, eq=False)
class Start(_FromOperand):
    """Let a collective begin; its result is in flight until it is waited for."""

    collective: Collective
    operand: Value
    result: Value


@dataclass(frozen=True, eq=False)
class Wait(_FromFlight):
    """Wait for a collective that was started."""

    inflight: Value
    result: Value


@dataclass(frozen=True)
class MemoryCopy:
    """What is copied between memories of a rank.

    Attributes:
        id: its id in the program.
        source, target: the memories.
        label: what messages call it.
    """

    id: int
    source: Memory
    target: Memory
    label: str = field(default="", compare=False)

    @classmethod
    def of(cls, node: Node) -> "MemoryCopy":
        """Read a node.

        Raises:
            ProgramError: it has no id.
        """
        if "id" not in node.attributes:
            raise ProgramError(
                f"a copy to the {target_memory(node)} has no id", where=node.label, do="run group-segments first"
            )
        text = f"%{node.result.name} = {node.op_type}(%{node.inputs[0].name})"
        return cls(int_attribute(node, "id"), source_memory(node), target_memory(node), text)


@dataclass(frozen=True, eq=False)
class Copy(_FromOperand):
    """Copy a value to another memory."""

    copy: MemoryCopy
    operand: Value
    result: Value


@dataclass(frozen=True, eq=False)
class StartCopy(Copy):
    """Let a copy begin; its result is in flight until it is waited for."""


@dataclass(frozen=True, eq=False)
class WaitCopy(_FromFlight):
    """Wait for a copy that was started."""

    inflight: Value
    result: Value


@dataclass(frozen=True, eq=False)
class Free:
    """Let go of values that nothing reads any more."""

    values: tuple[Value, ...]

    reads: ClassVar[tuple[Value, ...]] = ()
    writes: ClassVar[tuple[Value, ...]] = ()


@dataclass(frozen=True, eq=False)
class Commit:
    """Let go of the state before the run, if what it computed is to count.

    Attributes:
        loss: it counts where this is finite.
    """

    loss: Value

    writes: ClassVar[tuple[Value, ...]] = ()

    @property
    def reads(self) -> tuple[Value, ...]:
        return (self.loss,)


@dataclass(frozen=True, eq=False)
class Bodies:
    """Run a node whose bodies hold collectives, trip by trip.

    Attributes:
        node: the node.
        bodies: what each of its bodies does.
        reads: its operands, and what its bodies read from around them.
        sums: those of which trips write one block, which is the loop's own.
    """

    node: Node
    bodies: "Mapping[Graph, Program]"
    reads: tuple[Value, ...]
    sums: tuple[Sum, ...] = ()

    @property
    def writes(self) -> tuple[Value, ...]:
        return self.node.results


@dataclass(frozen=True, eq=False)
class Branch(Bodies):
    """An If: one of its bodies, once."""


@dataclass(frozen=True, eq=False)
class Loop(Bodies):
    """A Loop or a Scan: its body, once for each trip."""


@dataclass(frozen=True, eq=False)
class Call:
    """Run a function of communication.

    Attributes:
        node: the call.
        program: what the function does, one for all of its calls; its collectives have no ids.
        collective: the collective in it, with the id of this call.
    """

    node: Node
    program: "Program"
    collective: Collective

    @property
    def reads(self) -> tuple[Value, ...]:
        return self.node.inputs

    @property
    def writes(self) -> tuple[Value, ...]:
        return self.node.results

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The compute segments of the function."""
        return self.program.segments

    @property
    def stands_for(self) -> dict[Value, Value]:
        """The inputs and results of the function, and the values of the caller that they stand for."""
        inside = (*self.program.graph.inputs, *self.program.graph.outputs)
        return dict(zip(inside, (*self.reads, *self.writes), strict=True))


Instruction = Compute | Communicate | Start | Wait | Copy | StartCopy | WaitCopy | Free | Commit | Branch | Loop | Call


@dataclass(frozen=True, eq=False)
class Program:
    """What one rank does.

    Attributes:
        graph: the local graph.
        instructions: in order, that of the graph.
        outputs: the values to keep to the end: the graph's results, then what was asked for besides.
    """

    graph: Graph
    instructions: tuple[Instruction, ...]
    outputs: tuple[Value, ...]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The compute segments in order, those of bodies among them; then those of functions, once each."""
        own = [found.segment for found in self.all_instructions() if isinstance(found, Compute)]
        called = (segment for found in self.all_instructions() if isinstance(found, Call) for segment in found.segments)
        return tuple(dict.fromkeys((*own, *called)))

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives in order, those of bodies and calls among them, each once, where it begins."""
        kinds = Communicate | Start | Call
        return tuple(found.collective for found in self.all_instructions() if isinstance(found, kinds))

    def all_instructions(self) -> Iterator[Instruction]:
        """All instructions, each followed by those of its bodies."""
        for instruction in self.instructions:
            yield instruction
            if isinstance(instruction, Bodies):
                for body in instruction.bodies.values():
                    yield from body.all_instructions()
