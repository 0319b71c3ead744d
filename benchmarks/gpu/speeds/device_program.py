"""irpar's side: a program of one rank on an engine, given and giving arrays where it computes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

import irpar
from irpar.ir import Graph, Module, Value
from irpar.runtime.engines.base import Constants, EngineSettings, make_engine
from irpar.runtime.instructions import Commit, Compute, Free, Segment
from irpar.runtime.program import build_program
from irpar.runtime.specs import program_inputs

Array = np.ndarray[Any, Any]


class DeviceProgram:
    """A module on one device, as the runtime runs it, but for what takes inputs from the host and results there.

    State stays on the device from run to run; results are valid until the next one, as those of `torch.compile` with
    reduce-overhead are. A run of a step of training reads its loss, as the runtime does.

    Args:
        module: without collectives.
        engine: of irpar.
        captures: whether it may capture what it runs in CUDA graphs.
        tf32: whether products of float32 may round their operands to TF32.

    Attributes:
        partition: over one device.
        nodes: how many its program has.
    """

    def __init__(self, module: Module, engine: str, *, captures: bool = True, tf32: bool = False) -> None:
        self.partition = irpar.partition(module, irpar.Mesh({"x": 1}))
        (part,) = self.partition.parts
        assert self.partition.module is not None
        settings = EngineSettings(
            self.partition.module.opsets, 1, keep_on_device=engine == "cupy", captures=captures, tf32=tf32, lends=True
        )
        self._engine = make_engine(engine, settings)
        self.graph: Graph = part.graph
        self._program = build_program(part.graph, writes_over=self._engine.writes_over)
        constants = Constants(part)
        self._compiled = {one: self._engine.compile(one, constants) for one in self._program.segments}
        self.nodes = sum(len(segment.nodes) for segment in self._compiled)
        arena_bytes = max((one.arena_bytes for one in self._compiled.values()), default=0)
        self._arena = self._engine.arena(0, arena_bytes) if arena_bytes else None
        self._constants = constants
        self._cupy: Any = __import__("cupy") if engine == "cupy" else None
        self._held: dict[Value, Any] = {}

    # -- running --------------------------------------------------------------------------------------------------

    def give(self, inputs: Mapping[str, Array]) -> None:
        """Place what every run takes; state begins as the model says."""
        for name, value in program_inputs(self.graph).items():
            state = self.graph.states.get(value)
            if state is None:
                array = inputs[name]
            elif state.data is None:
                array = np.zeros(value.tensor_type.static_shape, value.dtype.numpy)
            else:
                array = state.data.numpy()
            self._held[value] = self.placed(array)

    def __call__(self) -> list[Any]:
        """The results, state among them, where they are computed; the device may still be at them."""
        values, writes_over = dict(self._held), False
        for instruction in self._program.instructions:
            match instruction:
                case Compute(segment):
                    self._compute(segment, values, writes_over)
                case Free(freed):
                    for value in freed:
                        values.pop(value, None)
                case Commit(loss):
                    writes_over = bool(np.isfinite(self._engine.edge(0).host(values[loss])).all())
        found = [self._read(value, values) for value in self.graph.outputs]
        for value, state in self.graph.states.items():
            if state.output is not None:
                self._held[value] = found[state.output]
        return found

    def _compute(self, segment: Segment, values: dict[Value, Any], writes_over: bool) -> None:
        given = [values[value] for value in segment.inputs]
        results = self._compiled[segment].run(given, 0, self._arena, writes_over)
        values.update(zip(segment.outputs, results, strict=True))

    def _read(self, value: Value, values: Mapping[Value, Any]) -> Any:
        return self._constants.array(value) if value.is_constant else values[value]

    def results(self, found: Sequence[Any]) -> dict[str, Any]:
        """The results by name that replace no state."""
        replacing = {state.output for state in self.graph.states.values()}
        names = enumerate(self.graph.output_names)
        return {name: found[place] for place, name in names if place not in replacing}

    # -- moving ---------------------------------------------------------------------------------------------------

    def placed(self, array: Array) -> Any:
        """An array where the engine computes."""
        return np.array(array) if self._cupy is None else self._cupy.asarray(array)

    def wait(self) -> None:
        """Until the device is done."""
        if self._cupy is not None:
            self._cupy.cuda.runtime.deviceSynchronize()

    # -- facts ----------------------------------------------------------------------------------------------------

    @property
    def notes(self) -> tuple[str, ...]:
        """What the engine tells of how nodes were computed."""
        return tuple(self._engine.notes)

    @property
    def operators(self) -> list[str]:
        """What is computed, in order: what the engine made of the nodes."""
        segments = [getattr(compiled, "segment", own) for own, compiled in self._compiled.items()]
        return [node.op_type for segment in segments for node in segment.nodes]

    def capture_facts(self) -> list[dict[str, int]]:
        """How much of each segment is captured in CUDA graphs, where the engine captures."""
        told = [getattr(compiled, "captured", None) for compiled in self._compiled.values()]
        return [{} if facts is None else asdict(facts) for facts in told]
