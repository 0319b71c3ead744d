"""The engine `numpy`: irpar's own kernels, node by node."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from irpar.runtime.instructions import Program, Segment
from irpar.runtime.memory import AddsInPlace, check_memory

from .arena import NO_BUFFERS, Arena, ArenaLayout, places_of, with_states
from .arrays import ON_HOST, Arrays
from .base import CompiledSegment, Constants, EngineSettings
from .bodies import Body, Scope
from .operation import Environment
from .program_arena import program_layout


class NumpySegment:
    """A segment of one part, compiled to instructions."""

    arena_bytes = 0
    bind = None

    def __init__(self, segment: Segment, constants: Constants) -> None:
        self._outputs = segment.outputs
        self._nodes = segment.nodes
        self._over = places_of(segment)
        self._constants = {value: constants.array(value) for value in segment.constants}
        self._body = Body(segment.nodes, segment.inputs, segment.outputs, (), Scope(ON_HOST))

    def run(self, inputs: list[Any], rank: int = 0, arena: Arena | None = None, writes_over: bool = False) -> list[Any]:
        """Compute the segment's outputs; see `CompiledSegment.run`."""
        into, _, scratch, leaving = NO_BUFFERS if arena is None else arena.of_program
        if writes_over:
            states = {value: inputs[place] for value, place in self._over.items()}
            into = with_states(into, self._nodes, {value: one for value, one in states.items() if ON_HOST.is_own(one)})
        results = self._body.take(inputs, Environment(self._constants, into, scratch))
        if arena is None:
            return results
        found = zip(self._outputs, results, strict=True)
        return [arena.copied_out(result) if value in leaving else result for value, result in found]


class NumpyEngine:
    """Runs segments with irpar's kernels on numpy."""

    name = "numpy"
    is_parallel = False
    writes_over = True
    adds_in_place: AddsInPlace = "all"
    keeps = True
    device_array = None
    notes: tuple[str, ...] = ()

    def __init__(self, settings: EngineSettings) -> None:
        pass

    def check_memory(self, needed: int, what: str, processes: int = 1) -> None:
        """Arrays lie in the host's memory; see `Engine.check_memory`."""
        check_memory(needed, what, processes)

    def edge(self, rank: int) -> Arrays:
        """Arrays are numpy's; see `Engine.edge`."""
        return ON_HOST

    def arena(self, rank: int, nbytes: int) -> Arena:
        """See `Engine.arena`."""
        return Arena(np, np.empty(nbytes, np.uint8))

    def layout(self, program: Program, compiled: Mapping[Segment, CompiledSegment]) -> ArenaLayout:
        """One arena for all segments; see `Engine.layout`."""
        return program_layout(program)

    def compile(self, segment: Segment, constants: Constants) -> NumpySegment:
        """Look up a kernel for every node of a segment; see `Engine.compile`."""
        return NumpySegment(segment, constants)
