"""What stands for CuPy and NCCL where there is no GPU: arrays in host memory, calls that are noted and really move data.

Ranks are threads. A communicator reads and writes memory by address, as NCCL does, so that a wrong count, dtype, buffer
or peer gives wrong numbers, a buffer that is let go too early is noticed, and a call too few waits in vain.
"""

import ctypes
import queue
import threading
import uuid
from collections import defaultdict
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from irpar.ops.collectives.reduced_arrays import reduce_arrays

WAIT_SECONDS = 10.0
DTYPES = {
    "NCCL_INT8": np.int8,
    "NCCL_UINT8": np.uint8,
    "NCCL_INT32": np.int32,
    "NCCL_UINT32": np.uint32,
    "NCCL_INT64": np.int64,
    "NCCL_UINT64": np.uint64,
    "NCCL_FLOAT16": np.float16,
    "NCCL_BFLOAT16": ml_dtypes.bfloat16,
    "NCCL_FLOAT32": np.float32,
    "NCCL_FLOAT64": np.float64,
}
OPERATIONS = {"NCCL_SUM": "sum", "NCCL_PROD": "prod", "NCCL_MAX": "max", "NCCL_MIN": "min"}
HOLDS = frozenset("?bBhHiIlLqQefdFD") | {np.dtype(ml_dtypes.bfloat16).char}
"""What CuPy's arrays can hold, as characters of dtypes."""


class NcclError(RuntimeError):
    pass


class CudaError(RuntimeError):
    pass


class OutOfMemoryError(MemoryError):
    pass


class DeviceArray(np.ndarray):
    """An array that says where it is sharded as CuPy's do, and that does not become one of numpy unasked."""

    device_id = 0

    def __array_finalize__(self, other: Any) -> None:
        self.device_id = getattr(other, "device_id", 0)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data, device_id=self.device_id)


class Network:
    """What joins the communicators of several threads.

    Attributes:
        stuck_from: calls of a communicator from that number on return, and never end on the device.
        error: what communicators say of themselves when a call of theirs is stuck.
    """

    def __init__(self) -> None:
        self.stuck_from = 1 << 30
        self.error: str = ""
        self.came: defaultdict[Any, dict[int, Any]] = defaultdict(dict)
        self.changed = threading.Condition()
        self._sent: defaultdict[Any, queue.Queue[Any]] = defaultdict(queue.Queue)

    def put(self, key: Any, rank: int, value: Any) -> None:
        with self.changed:
            assert rank not in self.came[key], f"rank {rank} comes twice to {key}"
            self.came[key][rank] = value
            self.changed.notify_all()

    def sent(self, *key: Any) -> queue.Queue[Any]:
        with self.changed:
            return self._sent[key]

    def all_of(self, key: Any, count: int) -> list[Any]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.came[key]) == count, WAIT_SECONDS), f"{key} is not complete"
            return [self.came[key][rank] for rank in range(count)]


class FakeCupy:
    """One process's CuPy.

    Attributes:
        calls: of communicators and streams, in order: (name, ...).
    """

    ndarray = DeviceArray

    def __init__(self, network: Network, devices: int = 1) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.is_stuck = False
        self.network = network
        self.current_device = 0
        self.streams = [Stream(self, "compute")]
        names = cycle(("communication", "copies"))
        self.cuda = SimpleNamespace(
            Device=lambda number: Device(self, number),
            Stream=lambda non_blocking: Stream(self, next(names)),
            Event=lambda disable_timing: Event(self),
            get_current_stream=lambda: self.streams[-1],
            nccl=Nccl(self),
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            runtime=SimpleNamespace(
                CUDARuntimeError=CudaError,
                getDeviceCount=lambda: devices,
                getDeviceProperties=lambda device: {"uuid": bytes([device]) * 16},
            ),
        )

    def device_array(self, array: Any) -> DeviceArray:
        if array.dtype.char not in HOLDS:
            raise ValueError(f"Unsupported dtype {array.dtype}")
        made = array.view(DeviceArray)
        made.device_id = self.current_device
        return made

    def asarray(self, array: Any) -> DeviceArray:
        return self.device_array(np.array(array))

    def asnumpy(self, array: Any, stream: Any = None) -> np.ndarray:
        assert isinstance(array, DeviceArray)
        return np.array(array.view(np.ndarray))

    def empty(self, shape: Any, dtype: Any) -> DeviceArray:
        made = np.empty(shape, dtype)
        made.view(np.uint8 if made.ndim and made.size else made.dtype)[...] = 0xA5 if made.ndim and made.size else 0
        return self.device_array(made)

    def zeros(self, shape: Any, dtype: Any) -> DeviceArray:
        return self.device_array(np.zeros(shape, dtype))

    def ascontiguousarray(self, array: Any) -> DeviceArray:
        assert isinstance(array, DeviceArray)
        return self.device_array(np.ascontiguousarray(array))

    def concatenate(self, arrays: Any, axis: int) -> DeviceArray:
        assert all(isinstance(array, DeviceArray) for array in arrays)
        return self.device_array(np.concatenate([array.view(np.ndarray) for array in arrays], axis=axis))


class Device:
    def __init__(self, cupy: FakeCupy, number: int) -> None:
        self.cupy, self.number = cupy, number

    def use(self) -> None:
        self.cupy.current_device = self.number

    def __enter__(self) -> None:
        self.before, self.cupy.current_device = self.cupy.current_device, self.number

    def __exit__(self, *_: object) -> None:
        self.cupy.current_device = self.before


class Stream:
    def __init__(self, cupy: FakeCupy, name: str) -> None:
        self.cupy, self.name = cupy, name
        self.ptr = id(self)

    def __enter__(self) -> None:
        self.cupy.streams.append(self)

    def __exit__(self, *_: object) -> None:
        self.cupy.streams.pop()

    def synchronize(self) -> None:
        assert self.name != "communication", "this may wait for ever"

    def wait_event(self, event: "Event") -> None:
        self.cupy.calls.append(("wait", self.name, event.stream))


class Event:
    stream = ""

    def __init__(self, cupy: FakeCupy) -> None:
        self.cupy = cupy

    def record(self, stream: Stream) -> None:
        self.stream = stream.name
        self.cupy.calls.append(("record", stream.name))

    @property
    def done(self) -> bool:
        return self.stream != "communication" or not self.cupy.is_stuck


class Nccl:
    """The module `cupy.cuda.nccl`."""

    available = True
    NcclError = NcclError

    def __init__(self, cupy: FakeCupy) -> None:
        self.cupy = cupy
        self.pending: list[Any] | None = None
        for name in (*DTYPES, *OPERATIONS):
            setattr(self, name, name)
        self.NcclCommunicator = Communicators(cupy)

    def get_version(self) -> int:
        return 22809

    def get_unique_id(self) -> bytes:
        return uuid.uuid4().bytes * 8

    def groupStart(self) -> None:  # noqa: N802  # NCCL's name.
        self.cupy.calls.append(("groupStart",))
        self.pending = []

    def groupEnd(self) -> None:  # noqa: N802  # NCCL's name.
        self.cupy.calls.append(("groupEnd",))
        pending, self.pending = self.pending, None
        assert pending is not None
        for complete in pending:
            complete()


class Communicators:
    """The class `NcclCommunicator`."""

    def __init__(self, cupy: FakeCupy) -> None:
        self.cupy = cupy

    def __call__(self, count: int, unique_id: bytes, rank: int) -> "Communicator":
        assert isinstance(unique_id, bytes)
        assert len(unique_id) == 128
        self.cupy.network.put(("join", unique_id), rank, None)
        self.cupy.network.all_of(("join", unique_id), count)
        return Communicator(self.cupy, count, unique_id, rank)

    def initAll(self, devices: list[int]) -> list["Communicator"]:  # noqa: N802  # NCCL's name.
        assert len(set(devices)) == len(devices)
        name = uuid.uuid4().bytes
        return [Communicator(self.cupy, len(devices), name, rank) for rank in range(len(devices))]


class Communicator:
    def __init__(self, cupy: FakeCupy, count: int, name: bytes, rank: int) -> None:
        self.cupy, self.network = cupy, cupy.network
        self.count, self.name, self.rank = count, name, rank
        self.number = 0
        self.is_open = True

    def _run(self, post: Any, complete: Any) -> None:
        assert self.is_open
        if self.number > self.network.stuck_from:
            self.cupy.is_stuck = True
            return
        post()
        pending = self.cupy.cuda.nccl.pending
        if pending is None:
            complete()
        else:
            pending.append(complete)

    def _collective(self, note: tuple[Any, ...], given: np.ndarray, receive: int, compute: Any) -> None:
        """`compute` makes this rank's result of what all gave."""
        self.cupy.calls.append((*note, self.count, self.rank))
        key = (self.name, note[0], self.number)
        self.number += 1

        def complete() -> None:
            result = compute(self.network.all_of(key, self.count))
            _memory(receive, result.size, result.dtype)[:] = result

        self._run(lambda: self.network.put(key, self.rank, given.copy()), complete)

    def allReduce(self, send: int, receive: int, count: int, dtype: str, op: str, stream: int) -> None:  # noqa: N802  # NCCL's name.
        given = _memory(send, count, DTYPES[dtype])
        self._collective(
            ("allReduce", count, dtype, op), given, receive, lambda came: reduce_arrays(came, OPERATIONS[op])
        )

    def reduceScatter(self, send: int, receive: int, count: int, dtype: str, op: str, stream: int) -> None:  # noqa: N802  # NCCL's name.
        given = _memory(send, count * self.count, DTYPES[dtype])
        own = slice(self.rank * count, (self.rank + 1) * count)
        self._collective(
            ("reduceScatter", count, dtype, op),
            given,
            receive,
            lambda came: reduce_arrays(came, OPERATIONS[op])[own],
        )

    def allGather(self, send: int, receive: int, count: int, dtype: str, stream: int) -> None:  # noqa: N802  # NCCL's name.
        given = _memory(send, count, DTYPES[dtype])
        self._collective(("allGather", count, dtype), given, receive, np.concatenate)

    def broadcast(self, send: int, receive: int, count: int, dtype: str, root: int, stream: int) -> None:
        given = _memory(send, count, DTYPES[dtype])
        self._collective(("broadcast", count, dtype, root), given, receive, lambda came: came[root])

    def send(self, send: int, count: int, dtype: str, peer: int, stream: int) -> None:
        self.cupy.calls.append(("send", count, dtype, peer))
        given = _memory(send, count, DTYPES[dtype]).copy()
        self._run(lambda: self.network.sent(self.name, self.rank, peer).put(given), lambda: None)

    def recv(self, receive: int, count: int, dtype: str, peer: int, stream: int) -> None:
        self.cupy.calls.append(("recv", count, dtype, peer))

        def complete() -> None:
            came = self.network.sent(self.name, peer, self.rank).get(timeout=WAIT_SECONDS)
            assert came.size == count
            _memory(receive, count, DTYPES[dtype])[:] = came

        self._run(lambda: None, complete)

    def check_async_error(self) -> None:
        if self.cupy.is_stuck and self.network.error:
            raise NcclError(self.network.error)

    def abort(self) -> None:
        self.cupy.calls.append(("abort",))
        self.is_open = False

    def destroy(self) -> None:
        self.cupy.calls.append(("destroy",))
        self.is_open = False


def _memory(address: int, count: int, dtype: Any) -> np.ndarray:
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype)
