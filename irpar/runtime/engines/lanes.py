"""The streams of the ranks of this process, on one device or on one each."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from irpar.ir import Node
from irpar.kernels.cuda.cublas_lt import tf32

from .faults import DeviceFaults
from .staging import Staging


class RankStream:
    """What one rank has of a device: a stream, and the pinned buffers of its copies."""

    def __init__(self, cupy: Any, device: int) -> None:
        self.device = device
        with cupy.cuda.Device(device):
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self.staging = Staging(cupy, self.stream)


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
    """

    def __init__(self, cupy: Any, device_of: Callable[[int], int], meets_others: bool, is_tf32: bool = False) -> None:
        self._cupy = cupy
        self.device_of = device_of
        self._meets_others = meets_others
        self._is_tf32 = is_tf32
        self._lanes: dict[int, RankStream] = {}
        self._lock = threading.Lock()
        self._faults = DeviceFaults(cupy)
        self._current = threading.local()

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """In here the calling thread works for a rank, on its device and stream."""
        lane = self._lane(rank, self.device_of(rank))
        with self._cupy.cuda.Device(lane.device):
            outer = self._cupy.cuda.get_current_stream()
            if self._meets_others:
                lane.stream.wait_event(self._reached(outer))
            with self._working(lane):
                yield
            if self._meets_others:
                outer.wait_event(self._reached(lane.stream))

    @contextmanager
    def preparing(self, device: int) -> Iterator[None]:
        """In here the calling thread brings to a device what all ranks on it read from then on."""
        lane = self._lane(-1 - device, device)
        with self._cupy.cuda.Device(device), self._working(lane):
            yield
            lane.stream.synchronize()

    def upload(self, array: "np.ndarray[Any, Any]") -> Any:
        """A device array of a numpy array, on the stream that is worked on."""
        return self._current.lane.staging.upload(array)

    def download(self, arrays: Sequence[Any]) -> list["np.ndarray[Any, Any]"]:
        """Numpy arrays of device arrays; waits for the stream that is worked on.

        Raises:
            NodeError: a node found something wrong of what it read.
        """
        found: list[np.ndarray[Any, Any]] = self._current.lane.staging.download(arrays)
        self._faults.check()
        return found

    def word(self, node: Node, problem: str) -> Any:
        """Where a node notes a problem on the device that is worked on; see `DeviceFaults`."""
        return self._faults.word(self._current.lane.device, node, problem)

    def adopt(self, array: Any) -> Any:
        """A device array on the device that is worked on: itself, or a copy of what lies on another."""
        return array if array.data.device_id == self._current.lane.device else array.copy()

    @contextmanager
    def _working(self, lane: RankStream) -> Iterator[None]:
        with lane.stream, tf32(self._is_tf32):
            self._current.lane = lane
            yield

    def _reached(self, stream: Any) -> Any:
        """An event at what a stream has been given so far."""
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def _lane(self, key: int, device: int) -> RankStream:
        with self._lock:
            found = self._lanes.get(key)
            if found is None:
                found = self._lanes[key] = RankStream(self._cupy, device)
            return found
