"""The streams of the ranks of this process, on one device or on one each."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from irpar.ir import Node
from irpar.kernels.cuda.cublas_lt import tf32

from .cuda_graphs.recording import GraphMemory, NotCapturedError, Recording
from .faults import DeviceFaults
from .staging import Staging

_ON_DEVICE = 3  # cudaMemcpyKind

Key = int | tuple[str, int]
"""A rank; -1 and less for what all ranks of a device read; ("copies", rank)."""


class RankStream:
    """What one rank has of a device: a stream, the pinned buffers of its copies, and the memory of its CUDA graphs.

    Attributes:
        turn: held by the thread that works on it.
        reached: an event that marks how far a stream has come.
        recording: the capture that is made of what it is given; None: it does what it is given.
        lent: ids of memory that replays of CUDA graphs write to; of some that is gone too.
        latest: a stream that comes after all that the rank gave to any; None: it gave nothing yet.
    """

    def __init__(self, cupy: Any, device: int) -> None:
        self._cupy = cupy
        self.device = device
        self.turn = threading.RLock()
        self.recording: Recording | None = None
        self.lent: set[int] = set()
        self.latest: Any = None
        self._memory: GraphMemory | None = None
        with cupy.cuda.Device(device):
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self.staging = Staging(cupy, self.stream)
            self.reached = cupy.cuda.Event(disable_timing=True)

    def copy(self, target: int, source: int, size: int, stream: Any) -> None:
        """Let a stream copy bytes from one address of its device to another."""
        self._cupy.cuda.runtime.memcpyAsync(target, source, size, _ON_DEVICE, stream.ptr)

    def fill(self, address: int, array: "np.ndarray[Any, Any]", stream: Any) -> None:
        """Let a stream that comes after all before bring the numbers of an array to an address of its device."""
        self.staging.stream = stream
        self.staging.fill(address, array)
        self.staging.stream = self.stream

    def precede(self, stream: Any) -> None:
        """Let a stream come after all that the rank gave to any."""
        if self.latest is not None and self.latest != stream:
            self.reached.record(self.latest)
            stream.wait_event(self.reached)
        self.latest = stream

    @contextmanager
    def captured(self) -> Iterator[Recording]:
        """In here what the stream is given is noted instead of done; see `Recording.running`."""
        if self._memory is None:
            self._memory = GraphMemory(self._cupy)
        self.recording = recording = Recording(self._cupy, self.stream, self._memory)
        try:
            with recording.running():
                yield recording
        finally:
            self.recording = None


class Lanes:
    """The streams of the ranks of this process.

    What a rank computes runs on its stream in order. Where `meets_others` it also comes after what the caller's current
    stream was given before, and before what that is given later, so that whoever else works with device arrays need
    know of the current stream alone.

    Args:
        cupy: the module.
        device_of: the device of a rank.
        meets_others: whether device arrays come from outside and go there.
        is_tf32: whether products of float32 may round their operands to TF32.

    Attributes:
        cupy, device_of, meets_others, is_tf32: as given.
        current: what the calling thread works on, as `lane`.
    """

    def __init__(self, cupy: Any, device_of: Callable[[int], int], meets_others: bool, is_tf32: bool = False) -> None:
        self.cupy = cupy
        self.device_of = device_of
        self.meets_others = meets_others
        self.is_tf32 = is_tf32
        self._lanes: dict[Key, RankStream] = {}
        self._lock = threading.Lock()
        self._faults = DeviceFaults(cupy)
        self.current = threading.local()

    def of(self, rank: int) -> "Work":
        """In here the calling thread works for a rank, on its device and stream."""
        lane = self._lanes.get(rank) or self._lane(rank, self.device_of(rank))
        return Work(self, lane)

    def copying(self, rank: int) -> "Work":
        """In here the calling thread copies for a rank, on its device and a stream beside that on which it computes."""
        key = ("copies", rank)
        lane = self._lanes.get(key) or self._lane(key, self.device_of(rank))
        return Work(self, lane, alone=True)

    def marked(self, lane: RankStream) -> Any:
        """An event that marks how far a stream has come."""
        event = self.cupy.cuda.Event(disable_timing=True)
        event.record(lane.stream)
        return event

    @contextmanager
    def beside(self, rank: int) -> Iterator[RankStream]:
        """In here the calling thread gives the current stream what a rank computes, where all lies on one device."""
        lane = self._lanes.get(rank) or self._lane(rank, self.device_of(rank))
        with lane.turn:
            lane.precede(self.cupy.cuda.get_current_stream())
            yield lane

    @contextmanager
    def preparing(self, device: int) -> Iterator[None]:
        """In here the calling thread brings to a device what all ranks on it read from then on."""
        lane = self._lane(-1 - device, device)
        with Work(self, lane, alone=True):
            yield
            lane.stream.synchronize()

    def upload(self, array: "np.ndarray[Any, Any]") -> Any:
        """A device array of a numpy array, on the stream that is worked on."""
        lane: RankStream = self.current.lane
        return lane.staging.upload(array) if lane.recording is None else lane.recording.upload(array)

    def download(self, arrays: Sequence[Any]) -> list["np.ndarray[Any, Any]"]:
        """Numpy arrays of device arrays; waits for the stream that is worked on.

        Raises:
            NodeError: a node found something wrong of what it read.
            NotCapturedError: the stream only notes what it is given.
        """
        lane: RankStream = self.current.lane
        if lane.recording is not None:
            raise NotCapturedError("it reads numbers on the host that the device computes")
        found = lane.staging.download(arrays)
        self._faults.check()
        return found

    def is_capturing(self) -> bool:
        """Whether the stream that is worked on only notes what it is given."""
        lane: RankStream = self.current.lane
        return lane.recording is not None

    def word(self, node: Node, problem: str) -> Any:
        """Where a node notes a problem on the device that is worked on; see `DeviceFaults`."""
        return self._faults.word(self.current.lane.device, node, problem)

    def adopt(self, array: Any) -> Any:
        """A device array on the device that is worked on: itself, or a copy of what lies on another."""
        return array if array.data.device_id == self.current.lane.device else array.copy()

    def _lane(self, key: Key, device: int) -> RankStream:
        with self._lock:
            found = self._lanes.get(key)
            if found is None:
                found = self._lanes[key] = RankStream(self.cupy, device)
            return found


class Work:
    """A thread's work on a stream, as a context: every segment of every run is one, so that it is written out.

    Args:
        lanes: all of them.
        lane: the stream.
        alone: whether nobody else's work is waited for.
    """

    __slots__ = ("_alone", "_device", "_lane", "_lanes", "_outer", "_precision")

    def __init__(self, lanes: Lanes, lane: RankStream, alone: bool = False) -> None:
        self._lanes = lanes
        self._lane = lane
        self._alone = alone or not lanes.meets_others
        self._device = lanes.cupy.cuda.Device(lane.device)
        self._precision = tf32(lanes.is_tf32)
        self._outer: Any = None

    def __enter__(self) -> RankStream:
        self._lane.turn.acquire()
        try:
            return self._begun()
        except BaseException:
            self._lane.turn.release()
            raise

    def _begun(self) -> RankStream:
        lane, lanes = self._lane, self._lanes
        self._device.__enter__()
        if not self._alone:
            self._outer = lanes.cupy.cuda.get_current_stream()
            lane.precede(self._outer)
            lane.reached.record(self._outer)
            lane.stream.wait_event(lane.reached)
        lane.stream.__enter__()
        self._precision.__enter__()
        lanes.current.lane = lane
        return lane

    def __exit__(self, *raised: Any) -> None:
        lane = self._lane
        try:
            self._precision.__exit__(*raised)
            lane.stream.__exit__(*raised)
            if not self._alone:
                lane.latest = lane.stream
            if not self._alone and raised[0] is None:
                lane.precede(self._outer)
            self._device.__exit__(*raised)
        finally:
            lane.turn.release()
