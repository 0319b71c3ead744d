"""Where one rank is in its program, and what it holds."""

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from irpar.ir import Memory, Node, Value, tensor_type
from irpar.ops import called_communication
from irpar.ops.effects import is_communication
from irpar.ops.memory_copies import reads_sizes_alone

from .engines.arena import Arena
from .engines.arrays import Arrays
from .engines.control_flow import TRIPS, Trip, Trips, with_own_blocks
from .errors import NodeError, RunError
from .groups import Array, Call
from .instructions import MemoryCopy
from .prepared import PreparedPart
from .spaces import InFlight, Spaces, misread
from .tape import (
    BodiesStep,
    BoundStep,
    CommitStep,
    CommunicateStep,
    ComputeStep,
    CopyStep,
    StartCopyStep,
    StartStep,
    Step,
    WaitCopyStep,
    WaitStep,
)

At = Call | ComputeStep | BoundStep
"""What a rank comes to that it cannot do in passing."""
_Walk = Generator[At, Any, None]
"""Takes the results of the collectives that it yields; of bound steps, whether they have been taken."""


class RankState:
    """Where one rank is in its program, and the values that it holds.

    Args:
        rank, coords: which rank, and its place on the mesh.
        prepared: its program.
        start_call: lets a collective begin.
        arrays: where its arrays lie.
        long_seconds: segments that take longer are not computed in passing.
        arena: memory for its segments.
        let_go: is called where the state before the run is not needed any more; None: it stays the caller's.
        steps: of the program, some of them bound; None: as its tape has them.
        spaces: copies between memories; None: all lies on the device.

    Attributes:
        step: the segment that was begun last; None at the end.
        copying: the copy between memories that is waited for, or begun; None: none is.
        go_on: comes to the next collective, to the next long segment, to `compute`, or to bound steps. What was come to
            last is done, and its result is given, where it was a collective; of bound steps, whether they have been
            taken; None else. It raises `StopIteration` at the end; and what an engine or a group raises, when `step`
            says where.
    """

    def __init__(
        self,
        rank: int,
        coords: tuple[int, ...],
        prepared: PreparedPart,
        start_call: Callable[[Call], None],
        arrays: Arrays,
        long_seconds: float = math.inf,
        arena: Arena | None = None,
        let_go: Callable[[], None] | None = None,
        steps: Iterable[Step] | None = None,
        spaces: Spaces | None = None,
    ) -> None:
        self.rank = rank
        self.coords = coords
        self.graph = prepared.part.graph
        self._prepared = prepared
        self._on_host: dict[Value, Any] = {}
        """What was read on the host already."""
        self._constants = prepared.constants
        self._start_call = start_call
        self._long_seconds = long_seconds
        self.arena = arena
        self._let_go = let_go
        self._writes_over = False
        self._arrays = arrays
        self._places = prepared.tape.places
        self._values: list[Any] = [None] * len(self._places)
        self._spaces = spaces
        self._lies: list[Memory | None] = [None] * len(self._places)
        """In which memory the value of each place lies, of a program with several."""
        walked = prepared.tape.steps if steps is None else steps
        self.go_on: Callable[[Any], At] = self._walk(walked).send
        self.step: ComputeStep | None = None
        self.copying: MemoryCopy | None = None

    def read(self, value: Value) -> Any:
        """A value that the rank holds."""
        return self._constants.array(value) if value.is_constant else self._values[self._places[value]]

    def held(self) -> dict[Value, Any]:
        """All values that the rank holds."""
        held = ((value, self._values[place]) for value, place in self._places.items())
        return {value: array for value, array in held if array is not None}

    def read_on_host(self, value: Value) -> Any:
        """A value that the rank holds: a numpy array, a list of them, or None."""
        if value in self._on_host:
            return self._on_host[value]
        return (self._arrays if self._spaces is None else self._spaces).outside(self.read(value))

    @property
    def outputs(self) -> Mapping[str, Value]:
        """The program's results, by name."""
        return self._prepared.outputs

    def next_states(self) -> dict[str, Any]:
        """What replaces each state, by the state's name."""
        names, places, constants = self._prepared.next_states
        found = dict(zip(names, map(self._values.__getitem__, places), strict=True))
        return found | {name: self._constants.array(value) for name, value in constants.items()}

    def start(self, blocks: Mapping[str, Any], states: dict[str, Any] | None = None) -> None:
        """Take this rank's blocks of the inputs, and its coordinates.

        Args:
            blocks: of the inputs, by name.
            states: those of a session, which are of the program's shapes; None: they are among the inputs.

        Raises:
            RunError: a block does not have the shape that the program says.
        """
        prepared = self._prepared
        if states is not None:
            for name, place in prepared.state_places.items():
                self._values[place] = states[name]
        for name, place, value in prepared.inputs if states is None else prepared.given:
            block = blocks[name]
            type_ = tensor_type(value.type)
            if type_ is not None and type_.is_static and block.shape != type_.static_shape:
                raise RunError(
                    f"the block of {name} on rank {self.rank} is {list(block.shape)}, the program takes {type_}",
                    do="partition the model again",
                )
            self._values[place] = block
        if prepared.coords is not None:
            self._values[prepared.coords] = np.asarray(self.coords, np.int64)
        if self._spaces is not None:
            self._enter(self._spaces, {} if states is None else states)

    def _enter(self, spaces: Spaces, states: dict[str, Any]) -> None:
        """Bring inputs to where they lie, unless they are there; of states of a session those of later runs, too.

        What comes from other ranks always lies on the device.
        """
        for value, place in self._places.items():
            if value.node is not None and (is_communication(value.node) or called_communication(value.node)):
                self._lies[place] = "device"
        for value in self.graph.inputs:
            place = self._places[value]
            self._lies[place] = value.memory
            given = self._values[place]
            if value.memory == "disk" and isinstance(given, np.ndarray):
                self._values[place] = spaces.to_disk(given)
            elif value.memory == "device":
                self._values[place] = self._arrays.operand(given)
            if value.source_name in states:
                states[value.source_name] = self._values[place]

    def _check_reads(self, step: ComputeStep) -> None:
        """Refuse to run a segment on what lies in another memory than its own.

        Raises:
            RunError: naming the value.
        """
        for value, place in zip(step.segment.inputs, step.inputs, strict=True):
            lies = self._lies[place]
            if lies != step.where and not reads_sizes_alone(value, step.segment.nodes):
                raise misread(value, step.where, lies, step.segment.label)

    def copy_out(self, places: Sequence[tuple[int, Array]]) -> bool:
        """Copy what stands in some places; False where one holds what is of another shape or dtype than its copy."""
        values = self._values
        for place, into in places:
            array = values[place]
            if array.shape != into.shape or array.dtype != into.dtype:
                return False
            into[...] = array
        return True

    def copy_in(self, places: Sequence[tuple[int, Array]], frees: Iterable[int]) -> None:
        """Let copies stand in some places, and nothing in others."""
        values = self._values
        for place in frees:
            values[place] = None
        for place, array in places:
            values[place] = array.copy()

    def compute(self, step: ComputeStep) -> None:
        """Run a segment."""
        values = self._values
        if self._spaces is not None:
            self._check_reads(step)
            for place in step.outputs:
                self._lies[place] = step.where
        inputs = list(map(values.__getitem__, step.inputs))
        for place in step.frees:
            values[place] = None  # The engine holds it as long as a node reads it.
        # What a body writes over are the loop's own sums.
        writes_over = self._writes_over or step.segment.graph is not self.graph
        for place, result in zip(step.outputs, step.run(inputs, self.rank, self.arena, writes_over), strict=True):
            values[place] = result

    def _commit(self, step: CommitStep) -> None:
        """Let the state before the run go, which stays where the loss is not finite."""
        if self._let_go is None:
            return
        loss = self._on_host[step.loss] = self.read_on_host(step.loss)
        if bool(np.isfinite(loss).all()):
            self._let_go()
            self._writes_over = True

    def _copy(self, step: CopyStep) -> None:
        """Copy a value to another memory, or begin to."""
        spaces = self._spaces
        assert spaces is not None
        self.copying = step.copy
        if step.operand is None:
            assert step.constant is not None
            operand = spaces.constant(step.constant, self._constants)
        else:
            operand = self._values[step.operand]
            if self._lies[step.operand] != step.copy.source:
                value = next(value for value, place in self._places.items() if place == step.operand)
                raise misread(value, step.copy.source, self._lies[step.operand], step.copy.label)
        begun = spaces.start if type(step) is StartCopyStep else spaces.copy
        self._values[step.result] = begun(step.copy, operand)
        self._lies[step.result] = step.copy.target
        self.copying = None

    def _wait(self, step: WaitCopyStep) -> None:
        """Wait for a copy that was started."""
        assert self._spaces is not None
        inflight: InFlight = self._values[step.inflight]
        self.copying = inflight.copy
        self._values[step.result] = self._spaces.wait(inflight)
        self._lies[step.result] = inflight.copy.target
        self.copying = None

    def _operand(self, step: CommunicateStep | StartStep) -> Any:
        """What a rank brings that is in no place."""
        return step.collective.blank() if step.constant is None else self._constants.array(step.constant)

    def _walk(self, steps: Iterable[Step]) -> _Walk:
        """The steps, those of bodies as often as these run; each has been done when the next is asked."""
        values, rank, coords, brought = self._values, self.rank, self.coords, self._arrays.operand
        for step in steps:
            if type(step) is ComputeStep:
                self.step = step
                if step.seconds > self._long_seconds:
                    yield step
                else:
                    self.compute(step)
            elif type(step) is CommunicateStep:
                operand = self._operand(step) if step.operand is None else values[step.operand]
                result = yield Call(rank, coords, step.collective, brought(operand))
                if step.result is not None:
                    values[step.result] = result
            elif type(step) is StartStep:
                operand = self._operand(step) if step.operand is None else values[step.operand]
                values[step.result] = call = Call(rank, coords, step.collective, brought(operand))
                self._start_call(call)
            elif type(step) is WaitStep:
                values[step.result] = yield values[step.inflight]
            elif type(step) is BoundStep:
                if not (yield step):
                    yield from self._walk(step.steps)
            elif isinstance(step, CopyStep):
                self._copy(step)
            elif type(step) is WaitCopyStep:
                self._wait(step)
            elif type(step) is CommitStep:
                self._commit(step)
            elif type(step) is BodiesStep:
                yield from self._bodies(step)
            for place in step.frees:
                values[place] = None

    def _write(self, values: Iterable[Value], arrays: Iterable[Any]) -> None:
        for value, array in zip(values, arrays, strict=True):
            self._values[self._places[value]] = array
            self._lies[self._places[value]] = value.memory

    def _bodies(self, step: BodiesStep) -> _Walk:
        operands = [None if value is None else self.read(value) for value in step.node.operands]
        operands = with_own_blocks(operands, step.sums, self._arrays)
        trips = TRIPS[step.node.op_type](step.node, operands, self._arrays)
        asked = _next_trip(trips, step.node, None)
        while isinstance(asked, Trip):
            self._write(asked.body.inputs, asked.inputs)
            yield from self._walk(step.bodies[asked.body])
            asked = _next_trip(trips, step.node, [self.read(value) for value in asked.body.outputs])
        for body in step.bodies:
            own = [*body.inputs, *(output for output in body.outputs if output.owner is body)]
            for value in own:
                if not value.is_constant:
                    self._values[self._places[value]] = None
        self._write(step.node.results, asked)


def _next_trip(trips: Trips, node: Node, results: Sequence[Any] | None) -> Trip | Sequence[Any]:
    """The next run of a body that a node asks for; at the end its results.

    Raises:
        NodeError: the node cannot be run with its operands, or with what came out of its body.
    """
    try:
        return trips.send(results)  # type: ignore[arg-type]  # None starts it.
    except StopIteration as end:
        found: Sequence[Any] = end.value
        return found
    except ValueError as error:
        raise NodeError(
            f"{node.operator} failed: {error}",
            where=f"node {node.label}",
            do="check what the node reads, and whether the original runs on these inputs in ONNX Runtime",
        ) from error
