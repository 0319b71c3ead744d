"""The engine `cupy`: irpar's own kernels on a CUDA device, node by node."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from irpar.ir import Value

from .arrays import ON_HOST, Arrays
from .bodies import Body, Scope, reads_of
from .cuda import free_bytes, import_cupy
from .device_arrays import DEVICE_DTYPES, HOST_ELEMENTS, DeviceArrays, Notes, Transfer, out_of_memory
from .engine import Constants, EngineSettings
from .errors import EngineError, NodeError
from .memory import check_device_memory
from .program import Segment
from .single_nodes import on_ort
from .staging import Staging


class _Lane:
    """What one rank has of the device: a stream, and the pinned buffers of its copies."""

    def __init__(self, cupy: Any) -> None:
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.staging = Staging(cupy, self.stream)


class Lanes:
    """The streams of the ranks of this process, on one device.

    Segments of a rank run on its stream in order; device arrays that come from elsewhere must be ready there.
    """

    def __init__(self, cupy: Any, device: int) -> None:
        self._cupy = cupy
        self._device = device
        self._lanes: dict[int, _Lane] = {}
        self._lock = threading.Lock()
        self._current = threading.local()

    def stream(self, rank: int) -> Any:
        """The stream of a rank."""
        return self._lane(rank).stream

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """In here the calling thread works for a rank, on its stream."""
        lane = self._lane(rank)
        with self._cupy.cuda.Device(self._device), lane.stream:
            self._current.lane = lane
            yield

    def upload(self, array: "np.ndarray[Any, Any]") -> Any:
        """A device array of a numpy array, on the stream of the rank that is worked for."""
        return self._current.lane.staging.upload(array)

    def download(self, arrays: Sequence[Any]) -> list["np.ndarray[Any, Any]"]:
        """Numpy arrays of device arrays; waits for the stream of the rank that is worked for."""
        found: list[np.ndarray[Any, Any]] = self._current.lane.staging.download(arrays)
        return found

    def _lane(self, rank: int) -> _Lane:
        with self._lock:
            found = self._lanes.get(rank)
            if found is None:
                with self._cupy.cuda.Device(self._device):
                    found = self._lanes[rank] = _Lane(self._cupy)
            return found


class EdgeArrays(Arrays):
    """What a rank holds between segments where these give device arrays: bodies of loops are walked on the host.

    Args:
        lanes: the streams.
        rank: the rank.
    """

    def __init__(self, lanes: Lanes, rank: int) -> None:
        self._lanes = lanes
        self._rank = rank

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
        """A tensor on the device, where that can hold it."""
        if not isinstance(value, np.ndarray) or value.dtype not in DEVICE_DTYPES:
            return value
        with self._lanes.of(self._rank):
            return self._lanes.upload(value)


class CupySegment:
    """A segment of one part, compiled to instructions."""

    def __init__(self, engine: "CupyEngine", segment: Segment, constants: Constants) -> None:
        self._engine = engine
        self._segment = segment
        with engine.lanes.of(engine.compiling):
            self._constants = {value: engine.constant(value, constants) for value in segment.constants}
            self._body = Body(segment.nodes, segment.inputs, segment.outputs, (), Scope(engine.arrays))
            # What is uploaded here is read on the streams of all ranks.
            engine.lanes.stream(engine.compiling).synchronize()

    def run(self, inputs: Sequence[Any], rank: int = 0) -> list[Any]:
        """Compute the segment's outputs on the stream of a rank; see `CompiledSegment.run`."""
        engine = self._engine
        with engine.lanes.of(rank):
            try:
                given = [engine.arrays.enter(value) for value in inputs]
                found = self._body.call(given, dict(self._constants))
                return engine.arrays.leave(found, engine.keep_on_device)
            except NodeError:
                raise
            except MemoryError as error:
                raise out_of_memory(
                    "copying what the segment reads or gives failed", error, self._segment.label
                ) from error


class CupyEngine:
    """Runs segments with irpar's kernels on CuPy: device arrays inside, a stream for each rank.

    Weights are uploaded once for all segments and ranks of a part.

    Attributes:
        arrays: where arrays lie.
        lanes: the streams.
        keep_on_device: whether segments give device arrays.

    Raises:
        NoDeviceError: there is no CuPy or no device.
    """

    name = "cupy"
    is_parallel = True
    compiling = -1
    """The rank whose stream uploads constants: none of the real ones."""

    def __init__(self, settings: EngineSettings) -> None:
        cupy = import_cupy("the engine cupy")
        self.keep_on_device = settings.keep_on_device
        self._device = settings.local_rank % cupy.cuda.runtime.getDeviceCount()
        self.lanes = Lanes(cupy, self._device)
        self._notes = Notes(self.name, settings.strict)
        self.arrays = DeviceArrays(
            self.name,
            cupy,
            Transfer(self.lanes.upload, self.lanes.download),
            self._notes,
            on_ort(settings),
            retried=(cupy.cuda.compiler.CompileException,),
            host_elements=HOST_ELEMENTS,
        )
        self._uploaded: WeakKeyDictionary[Constants, dict[Value, Any]] = WeakKeyDictionary()

    @property
    def notes(self) -> tuple[str, ...]:
        """What ran on the host, a line for each operator."""
        return self._notes.lines

    def check_memory(self, needed: int, what: str) -> None:
        """Arrays lie in the memory of the device; see `Engine.check_memory`."""
        check_device_memory(needed, what, free_bytes(self._device))

    def edge(self, rank: int) -> Arrays:
        """Where the arrays lie that a rank holds between segments; see `Engine.edge`."""
        return EdgeArrays(self.lanes, rank) if self.keep_on_device else ON_HOST

    def compile(self, segment: Segment, constants: Constants) -> CupySegment:
        """Upload constants, and find what computes every node; see `Engine.compile`."""
        return CupySegment(self, segment, constants)

    def constant(self, value: Value, constants: Constants) -> Any:
        """A constant of a part, uploaded when it is first asked for.

        Raises:
            EngineError: the device has no room for it.
        """
        known = self._uploaded.setdefault(constants, {})
        if value not in known:
            array = constants.array(value)
            try:
                known[value] = self.arrays.constant(array, reads_of(value))
            except MemoryError as error:
                failed = out_of_memory(f"uploading {array.nbytes:,} bytes failed", error, f"constant %{value.name}")
                raise EngineError(failed.what, where=failed.where, do=failed.do) from error
        return known[value]
