"""Where one rank is in its program, and what it holds."""

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from irpar.ir import Node, Value, tensor_type
from irpar.ops.coords import COORDS

from .engines.arena import Arena
from .engines.arrays import Arrays
from .engines.control_flow import TRIPS, Trip, Trips
from .errors import NodeError, RunError
from .groups import Call
from .prepared import PreparedPart
from .specs import program_inputs
from .tape import BodiesStep, CommunicateStep, ComputeStep, StartStep, Step, WaitStep

_Walk = Generator[Call | ComputeStep, Any, None]
"""Takes the results of the collectives that it yields."""


class RankState:
    """Where one rank is in its program, and the values that it holds.

    Args:
        rank, coords: which rank, and its place on the mesh.
        prepared: its program.
        start_call: lets a collective begin.
        arrays: where its arrays lie.
        long_seconds: segments that take longer are not computed in passing.
        arena: memory for its segments.

    Attributes:
        step: the segment that was begun last; None at the end.
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
    ) -> None:
        self.rank = rank
        self.coords = coords
        self.graph = prepared.part.graph
        self._constants = prepared.constants
        self._start_call = start_call
        self._long_seconds = long_seconds
        self.arena = arena
        self._arrays = arrays
        self._places = prepared.tape.places
        self._values: list[Any] = [None] * len(self._places)
        self._walked = self._walk(prepared.tape.steps)
        self.step: ComputeStep | None = None

    def read(self, value: Value) -> Any:
        """A value that the rank holds."""
        return self._constants.array(value) if value.is_constant else self._values[self._places[value]]

    def held(self) -> dict[Value, Any]:
        """All values that the rank holds."""
        held = ((value, self._values[place]) for value, place in self._places.items())
        return {value: array for value, array in held if array is not None}

    def read_on_host(self, value: Value) -> Any:
        """A value that the rank holds: a numpy array, a list of them, or None."""
        return self._arrays.outside(self.read(value))

    def start(self, blocks: Mapping[str, Any]) -> None:
        """Take this rank's blocks of the inputs, and its coordinates.

        Raises:
            RunError: a block does not have the shape that the program says.
        """
        for name, value in program_inputs(self.graph).items():
            block = blocks[name]
            type_ = tensor_type(value.type)
            if type_ is not None and type_.is_static and block.shape != type_.static_shape:
                raise RunError(
                    f"the block of {name} on rank {self.rank} is {list(block.shape)}, the program takes {type_}",
                    do="partition the model again",
                )
            self._values[self._places[value]] = block
        for value in self.graph.inputs:
            if value.name == COORDS:
                self._values[self._places[value]] = np.asarray(self.coords, np.int64)

    def go_on(self, result: Any = None) -> Call | ComputeStep | None:
        """Come to the next collective or long segment; what was come to last is done.

        Args:
            result: of the collective that the rank waited at.

        Returns:
            The collective to meet the others in, or the segment to `compute`; None at the end.

        Raises:
            Exception: what an engine or a group raises; `step` says where.
        """
        try:
            return self._walked.send(result)
        except StopIteration:
            self.step = None
            return None

    def compute(self, step: ComputeStep) -> None:
        """Run a segment."""
        values = self._values
        inputs = [values[place] for place in step.inputs]
        for place in step.frees:
            values[place] = None  # The engine holds it as long as a node reads it.
        results = step.run(inputs, self.rank, self.arena)
        for place, result in zip(step.outputs, results, strict=True):
            values[place] = result

    def _operand(self, step: CommunicateStep | StartStep) -> Any:
        if step.operand is not None:
            operand = self._values[step.operand]
        elif step.constant is not None:
            operand = self._constants.array(step.constant)
        else:
            operand = step.collective.blank()
        return self._arrays.operand(operand)

    def _walk(self, steps: Iterable[Step]) -> _Walk:
        """The steps, those of bodies as often as these run; each has been done when the next is asked."""
        values = self._values
        for step in steps:
            if isinstance(step, ComputeStep):
                self.step = step
                if step.seconds > self._long_seconds:
                    yield step
                else:
                    self.compute(step)
            elif isinstance(step, CommunicateStep):
                result = yield Call(self.rank, self.coords, step.collective, self._operand(step))
                if step.result is not None:
                    values[step.result] = result
            elif isinstance(step, StartStep):
                values[step.result] = call = Call(self.rank, self.coords, step.collective, self._operand(step))
                self._start_call(call)
            elif isinstance(step, WaitStep):
                values[step.result] = yield values[step.inflight]
            else:
                yield from self._bodies(step)
            for place in step.frees:
                values[place] = None

    def _write(self, values: Iterable[Value], arrays: Iterable[Any]) -> None:
        for value, array in zip(values, arrays, strict=True):
            self._values[self._places[value]] = array

    def _bodies(self, step: BodiesStep) -> _Walk:
        operands = [None if value is None else self.read(value) for value in step.node.operands]
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
