"""The engine `numpy`: irpar's own kernels, node by node."""

from collections.abc import Sequence
from typing import Any

from irpar.runtime.instructions import Segment
from irpar.runtime.memory import check_memory

from .arrays import ON_HOST, Arrays
from .base import Constants, EngineSettings
from .bodies import Body, Scope


class NumpySegment:
    """A segment of one part, compiled to instructions."""

    def __init__(self, segment: Segment, constants: Constants) -> None:
        self._constants = {value: constants.array(value) for value in segment.constants}
        self._body = Body(segment.nodes, segment.inputs, segment.outputs, (), Scope(ON_HOST))

    def run(self, inputs: Sequence[Any], rank: int = 0) -> list[Any]:
        """Compute the segment's outputs; see `CompiledSegment.run`."""
        return self._body.call(inputs, dict(self._constants))


class NumpyEngine:
    """Runs segments with irpar's kernels on numpy."""

    name = "numpy"
    is_parallel = False
    notes: tuple[str, ...] = ()

    def __init__(self, settings: EngineSettings) -> None:
        pass

    def check_memory(self, needed: int, what: str, processes: int = 1) -> None:
        """Arrays lie in the host's memory; see `Engine.check_memory`."""
        check_memory(needed, what, processes)

    def edge(self, rank: int) -> Arrays:
        """Arrays are numpy's; see `Engine.edge`."""
        return ON_HOST

    def compile(self, segment: Segment, constants: Constants) -> NumpySegment:
        """Look up a kernel for every node of a segment; see `Engine.compile`."""
        return NumpySegment(segment, constants)
