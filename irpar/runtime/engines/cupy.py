"""The engine `cupy`: irpar's own kernels on a CUDA device, captured in CUDA graphs."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from irpar.ir import Memory, Value
from irpar.runtime import instructions
from irpar.runtime.errors import EngineError, NodeError, RunError
from irpar.runtime.instructions import Segment
from irpar.runtime.memory import AddsInPlace, check_device_memory

from .arena import Arena, ArenaLayout, arena_layout, joint_layout
from .arrays import ON_HOST, Arrays, Moving
from .base import CompiledSegment, Constants, EngineSettings
from .bodies import Body, Scope, reads_of
from .cuda import free_bytes, import_cupy
from .cuda_graphs.runner import Captured, Program, Runner
from .device_arrays import DEVICE_DTYPES, HOST_ELEMENTS, DeviceArrays, HostDeviceCopy, Notes, out_of_memory
from .fused_segments import fused
from .lanes import Lanes
from .single_nodes import on_ort

CUDA_GRAPHS = "IRPAR_CUDA_GRAPHS"
"""The environment variable that turns CUDA graphs off where it is "0"."""


class EdgeArrays(Arrays):
    """What a rank holds between segments where these give device arrays: bodies of loops are walked on the host.

    Args:
        lanes: the streams.
        rank: the rank.
    """

    is_host = False

    def __init__(self, lanes: Lanes, rank: int) -> None:
        self._lanes = lanes
        self._rank = rank

    def moving(self, value: Any, to: Memory) -> Moving:
        """A copy through pinned memory on a stream of its own, which comes after all that the rank's was given.

        What the device holds is an array of numpy where it is a constant, or of a dtype that CuPy lacks.
        """
        if isinstance(value, np.ndarray) and (to == "host" or value.dtype not in DEVICE_DTYPES):
            return ON_HOST.moving(value, to)
        lanes, rank = self._lanes, self._rank
        with lanes.of(rank) as lane:
            made = lanes.cupy.empty(value.shape, value.dtype) if to == "device" else None
            ready = lanes.marked(lane)

        def run() -> Any:
            with lanes.copying(rank) as lane:
                lane.stream.wait_event(ready)
                if made is None:
                    return lane.staging.download([value])[0]
                lane.staging.fill(made.data.ptr, value)
                return lanes.marked(lane)

        def result(done: Any) -> Any:
            if made is None:
                return done
            with lanes.of(rank) as lane:
                lane.stream.wait_event(done)
            return made

        return Moving(run, result)

    def host(self, value: Any) -> "np.ndarray[Any, Any]":
        """A tensor as a numpy array; waits for the rank's stream."""
        if isinstance(value, np.ndarray | np.generic):
            return np.asarray(value)
        with self._lanes.of(self._rank):
            return self._lanes.download([value])[0]

    def together(self, values: Sequence[Any]) -> tuple[ModuleType, list[Any]]:
        """Tensors as numpy arrays."""
        return np, [self.host(value) for value in values]

    def outside(self, value: Any) -> Any:
        """A value in numpy arrays."""
        if isinstance(value, list):
            return [self.outside(item) for item in value]
        return None if value is None else self.host(value)

    def operand(self, value: Any) -> Any:
        """A tensor on the device, if it can hold it."""
        if not isinstance(value, np.ndarray) or value.dtype not in DEVICE_DTYPES:
            return value
        with self._lanes.of(self._rank):
            return self._lanes.upload(value)


class CupySegment:
    """A segment of one part, fused and compiled to instructions on each device that a rank of the part has."""

    bind = None

    def __init__(self, engine: "CupyEngine", segment: Segment, constants: Constants) -> None:
        last = segment.nodes[-1]
        segment, computed = fused(segment, constants)
        self._engine = engine
        self.segment = segment
        self._programs: dict[int, Program] = {}
        self._runners: dict[int, Runner] = {}
        for device in sorted({engine.lanes.device_of(rank) for rank in engine.ranks(constants)}):
            with engine.lanes.preparing(device):
                known = {
                    value: engine.upload(value) if value in computed else engine.constant(value, constants, device)
                    for value in segment.constants
                }
                scope = Scope(engine.arrays)
                scope.place(segment.inputs, segment.nodes, None)
                body = Body(segment.nodes, segment.inputs, segment.outputs, (), scope)
            is_whole, is_last = segment.graph is constants.graph, last is segment.graph.last
            on_host = frozenset(scope.on_host)
            talks = engine.arrays.talks if segment.communicates else None
            self._programs[device] = Program(segment, body, known, on_host, is_whole, is_last, talks)

    @cached_property
    def _layout(self) -> ArenaLayout:
        """Where results lie in the arena where the segment has places of its own."""
        beside, ends = not self._engine.captures, not self._engine.keep_on_device
        return arena_layout(self.segment, dtypes=DEVICE_DTYPES, beside=beside, with_ends=ends)

    @property
    def arena_bytes(self) -> int:
        """See `CompiledSegment`; one at least where results are lent: graphs belong to who has the arena."""
        return max(self._layout.nbytes, int(self._engine.lends and self._engine.captures))

    @property
    def captured(self) -> Captured | None:
        """How much of it is captured in CUDA graphs, for the first rank that has run it; None: none has."""
        return next((runner.captured for runner in self._runners.values()), None)

    def run(self, inputs: list[Any], rank: int = 0, arena: Arena | None = None, writes_over: bool = False) -> list[Any]:
        """Compute the segment's outputs on the stream of a rank; see `CompiledSegment.run`."""
        try:
            found = self._replay(inputs, rank, arena, writes_over)
            return self._run(inputs, rank, arena, writes_over) if found is None else found
        except (NodeError, RunError):
            raise
        except MemoryError as error:
            what = "copying what the segment reads or produces failed"
            raise out_of_memory(what, error, self.segment.label) from error

    def _replay(self, inputs: list[Any], rank: int, arena: Arena | None, writes_over: bool) -> list[Any] | None:
        """What a graph of all of the segment gives; None: there is none for these inputs."""
        engine, runner = self._engine, self._runners.get(rank)
        if runner is None or not engine.is_direct:
            return None
        with engine.lanes.beside(rank) as lane:
            return runner.replay(inputs, arena, writes_over, lane)

    def _run(self, inputs: list[Any], rank: int, arena: Arena | None, writes_over: bool) -> list[Any]:
        engine = self._engine
        with engine.lanes.of(rank) as lane:
            runner = self._runners.get(rank) or self._runner(rank, arena)
            results = runner.run(inputs, arena, writes_over, lane)
            if engine.keep_on_device:
                results = runner.leave(results, arena, lane)
            return engine.arrays.leave(results, engine.keep_on_device)

    def _runner(self, rank: int, arena: Arena | None) -> Runner:
        engine, program = self._engine, self._programs[self._engine.lanes.device_of(rank)]
        layout = self._layout if arena is None or arena.layout is None else arena.layout
        runner = Runner(
            program, layout, engine.arrays, engine.told, engine.keep_on_device, engine.captures, engine.lends
        )
        self._runners[rank] = runner
        return runner


class CupyEngine:
    """Runs segments with irpar's kernels on CuPy: device arrays inside, a stream for each rank.

    Weights are uploaded once for all segments and ranks of a part. A process of one rank takes the device of its local
    rank. Ranks of one process share a device, unless the group takes device arrays: then each has one of its own, as
    far as there are.

    Attributes:
        arrays: where arrays lie.
        lanes: the streams.
        keep_on_device: whether segments give device arrays.
        captures: whether what a stream is given is captured in CUDA graphs.
        lends: whether results may lie where the next run writes.
        device_array: CuPy's.
        is_direct: whether a replay needs neither the device nor the stream made current.
        told: what is told of how nodes were computed.

    Raises:
        NoDeviceError: there is no CuPy or no device.
    """

    name = "cupy"
    is_parallel = True
    writes_over = True
    adds_in_place: AddsInPlace = "within segments"
    keeps = False

    def __init__(self, settings: EngineSettings) -> None:
        cupy = import_cupy("the engine cupy")
        self.keep_on_device = settings.keep_on_device
        self.captures = settings.captures and os.environ.get(CUDA_GRAPHS) != "0"
        self.lends = settings.lends
        self.device_array: type = cupy.ndarray
        self._ranks = settings.ranks
        self._from_host = settings.from_host
        devices = cupy.cuda.runtime.getDeviceCount()
        own, spreads = settings.local_rank % devices, settings.ranks > 1 and settings.keep_on_device
        self.is_direct = self.captures and self.keep_on_device and devices == 1
        self.lanes = Lanes(
            cupy, lambda rank: rank % devices if spreads else own, settings.keep_on_device, settings.tf32
        )
        self.told = Notes(self.name, settings.strict)
        self.arrays = DeviceArrays(
            self.name,
            cupy,
            HostDeviceCopy(self.lanes.upload, self.lanes.download, self.lanes.adopt, self.lanes.is_capturing),
            self.told,
            on_ort(settings),
            retried=(cupy.cuda.compiler.CompileException,),
            host_elements=HOST_ELEMENTS,
            word=self.lanes.word,
            talks=settings.talks if self.captures else None,
        )
        self._uploaded: WeakKeyDictionary[Constants, dict[tuple[int, Value], Any]] = WeakKeyDictionary()

    @property
    def notes(self) -> tuple[str, ...]:
        """What ran on the host, a line for each operator."""
        return self.told.lines

    def ranks(self, constants: Constants) -> tuple[int, ...]:
        """The ranks of a part that this process runs, which number from 0 where it runs several."""
        return tuple(rank for rank in constants.ranks if rank < self._ranks) if self._ranks > 1 else (0,)

    def check_memory(self, needed: int, what: str, processes: int = 1) -> None:
        """Arrays lie in the memory of the devices, on each those of its ranks; see `Engine.check_memory`."""
        ranks = Counter(self.lanes.device_of(rank) for rank in range(self._ranks))
        for device, count in ranks.items():
            check_device_memory(needed * count // self._ranks, what, free_bytes(device))

    def edge(self, rank: int) -> Arrays:
        """Where the arrays lie that a rank holds between segments; see `Engine.edge`."""
        return EdgeArrays(self.lanes, rank) if self.keep_on_device else ON_HOST

    def arena(self, rank: int, nbytes: int) -> Arena:
        """Memory of the rank's device; see `Engine.arena`."""
        with self.lanes.of(rank):
            try:
                return Arena(self.arrays.module, self.arrays.module.empty(nbytes, np.uint8))
            except MemoryError as error:
                failed = out_of_memory(f"an arena of {nbytes:,} bytes has no room", error, f"rank {rank}")
                raise EngineError(failed.what, where=failed.where, do=failed.do) from error

    def layout(self, program: instructions.Program, compiled: Mapping[Segment, CompiledSegment]) -> ArenaLayout | None:
        """One arena for all segments where each runs once, and what it gives stays on the device; see `Engine.layout`.

        Else segments have places of their own: what leaves them is lent or copied.
        """
        if not self.captures or not self.keep_on_device or self._ranks > 1:
            return None
        if any(isinstance(one, instructions.Bodies | instructions.Call) for one in program.instructions):
            return None
        found: list[Segment] = []
        elsewhere = {*program.outputs}
        for one in program.instructions:
            made = compiled[one.segment] if isinstance(one, instructions.Compute) else None
            if isinstance(made, CupySegment):
                found.append(made.segment)
            else:
                elsewhere.update(one.reads)
        given = [value for value in program.graph.inputs if value not in program.graph.states]
        layout = joint_layout(found, elsewhere, DEVICE_DTYPES, given if self._from_host else ())
        return layout if layout.nbytes else None

    def compile(self, segment: Segment, constants: Constants) -> CupySegment:
        """Upload constants, and find what computes every node; see `Engine.compile`."""
        return CupySegment(self, segment, constants)

    def constant(self, value: Value, constants: Constants, device: int) -> Any:
        """A constant of a part, uploaded to a device when it is first asked for there.

        Raises:
            EngineError: the device has no room for it.
        """
        known = self._uploaded.setdefault(constants, {})
        if (device, value) not in known:
            known[device, value] = self._upload(value, constants.array(value))
        return known[device, value]

    def upload(self, value: Value) -> Any:
        """A constant of no part, uploaded to the device that is worked on; nothing else has its numbers.

        Raises:
            EngineError: the device has no room for it.
        """
        assert value.data is not None
        return self._upload(value, value.data.numpy())

    def _upload(self, value: Value, array: "np.ndarray[Any, Any]") -> Any:
        try:
            return self.arrays.constant(array, reads_of(value))
        except MemoryError as error:
            failed = out_of_memory(f"uploading {array.nbytes:,} bytes failed", error, f"constant %{value.name}")
            raise EngineError(failed.what, where=failed.where, do=failed.do) from error
