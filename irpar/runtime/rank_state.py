"""Where one rank is in its program, and what it holds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from irpar.ir import Node, Value, tensor_type
from irpar.ops.coords import COORDS

from .engines.arrays import Arrays
from .engines.base import CompiledSegment
from .engines.control_flow import TRIPS, Trip, Trips
from .errors import NodeError, RunError
from .groups import Call
from .instructions import Bodies, Communicate, Compute, Free, Program, Start, Wait
from .prepared import PreparedPart
from .specs import program_inputs


class RankState:
    """Where one rank is in its program, and the values that it holds.

    Attributes:
        step: the step that comes next; None at the end. Starts are done in passing.
    """

    def __init__(
        self,
        rank: int,
        coords: tuple[int, ...],
        prepared: PreparedPart,
        start_call: Callable[[Call], None],
        arrays: Arrays,
    ) -> None:
        self.rank = rank
        self.coords = coords
        self.graph = prepared.part.graph
        self._prepared = prepared
        self._start_call = start_call
        self._arrays = arrays
        self._values: dict[Value, Any] = {}
        self._steps = self._walk(prepared.program)
        self.step: Compute | Communicate | Wait | None = None

    @property
    def compute(self) -> Compute | None:
        """The step that comes next, where it is a segment."""
        return self.step if isinstance(self.step, Compute) else None

    @property
    def compiled(self) -> CompiledSegment:
        """The compiled segment that comes next."""
        assert isinstance(self.step, Compute)
        return self._prepared.compiled[self.step.segment]

    def read(self, value: Value) -> Any:
        """A value that the rank holds."""
        return self._prepared.constants.array(value) if value.is_constant else self._values[value]

    def read_on_host(self, value: Value) -> Any:
        """A value that the rank holds: a numpy array, a list of them, or None."""
        return self._arrays.outside(self.read(value))

    def start(self, blocks: Mapping[str, Any]) -> None:
        """Take this rank's blocks of the inputs, and its coordinates, and come to the first step.

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
            self._values[value] = block
        for value in self.graph.inputs:
            if value.name == COORDS:
                self._values[value] = np.asarray(self.coords, np.int64)
        self.step = next(self._steps, None)

    def compute_step(self) -> None:
        """Run the segment that comes next."""
        step = self.compute
        assert step is not None
        inputs = [self._values[value] for value in step.segment.inputs]
        results = self.compiled.run(inputs, self.rank)
        self._values.update(zip(step.segment.outputs, results, strict=True))
        self.step = next(self._steps, None)

    def call(self) -> Call:
        """The collective that comes next, or is waited for next, with this rank's operand."""
        step = self.step
        if isinstance(step, Wait):
            started: Call = self._values[step.inflight]
            return started
        assert isinstance(step, Communicate)
        operand = step.collective.blank() if step.operand is None else self.read(step.operand)
        return Call(self.rank, self.coords, step.collective, self._arrays.operand(operand))

    def receive(self, result: Any) -> None:
        """Take the result of that collective."""
        step = self.step
        assert isinstance(step, Communicate | Wait)
        if step.result is not None:
            self._values[step.result] = result
        self.step = next(self._steps, None)

    def _walk(self, program: Program) -> Iterator[Compute | Communicate | Wait]:
        """The steps of a program, those of bodies as often as these run; each has been done when the next is asked."""
        for step in program.instructions:
            if isinstance(step, Free):
                for value in step.values:
                    self._values.pop(value, None)
            elif isinstance(step, Bodies):
                yield from self._bodies(step)
            elif isinstance(step, Start):
                call = Call(self.rank, self.coords, step.collective, self._arrays.operand(self.read(step.operand)))
                self._start_call(call)
                self._values[step.result] = call
            else:
                yield step

    def _bodies(self, step: Bodies) -> Iterator[Compute | Communicate | Wait]:
        operands = [None if value is None else self.read(value) for value in step.node.operands]
        trips = TRIPS[step.node.op_type](step.node, operands, self._arrays)
        asked = _next_trip(trips, step.node, None)
        while isinstance(asked, Trip):
            self._values.update(zip(asked.body.inputs, asked.inputs, strict=True))
            yield from self._walk(step.bodies[asked.body])
            asked = _next_trip(trips, step.node, [self.read(value) for value in asked.body.outputs])
        for body in step.bodies:
            for value in (*body.inputs, *(output for output in body.outputs if output.owner is body)):
                self._values.pop(value, None)
        self._values.update(zip(step.node.results, asked, strict=True))


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
