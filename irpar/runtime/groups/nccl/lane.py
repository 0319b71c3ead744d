"""One rank's GPU as the group `nccl` uses it: through CuPy, and CuPy's binding of NCCL.

CuPy's `NcclCommunicator` has all that is called here, and CuPy is what the engine `cupy` computes with; NVIDIA's own
binding, nccl4py, would be one more dependency, for functions that nothing here needs (float8, growing groups).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from irpar.process import import_native
from irpar.runtime.engines.cuda import INSTALL, import_cupy
from irpar.runtime.errors import RunError
from irpar.runtime.groups.base import Array, Call
from irpar.runtime.groups.spmd import Meeting
from irpar.sharding import IrparError, option

from .transfers import Member, NcclCalls, Wire, transfer


class DeviceError(RunError):
    """CUDA or NCCL failed; that may be because a peer died."""


def load_cupy() -> Any:
    """CuPy, with NCCL and a device.

    Raises:
        IrparError: saying which of them is not there, and how to get it.
    """
    cupy = import_cupy(
        "the group nccl", f"{option('engine', 'ort')} with {option('group', 'processes')} or {option('group', 'mpi')}"
    )
    try:
        has_nccl = import_native("cupy.cuda.nccl").available
    except ImportError:
        has_nccl = False
    if not has_nccl:
        raise IrparError("the group nccl needs NCCL, which CuPy does not find", do=INSTALL)
    return cupy


@dataclass(eq=False)
class Work:
    """A collective of one rank that has been prepared, and its result, which is ready when `done` is.

    Attributes:
        meeting: the collective.
        wire: how its elements travel.
        operand: as it travels; kept until it is done.
        transfer: what NCCL does for it.
        computed: recorded when the operand was computed.
        done: recorded behind all of it; None before that.
        result: as it travelled, or as the operand was where that lies on the device.
    """

    meeting: Meeting
    wire: Wire
    operand: Any
    transfer: NcclCalls
    computed: Any
    done: Any = None
    result: Any = None


class DeviceChannel:
    """One rank's device, with a stream for communication, and one for copies to and from the host.

    Operands are computed, and results read, on the caller's current stream, or behind it (see `Lanes`). Memory of a
    stream is given again only to that stream, and both streams begin by waiting for all that the caller's has been
    given; so nothing is written to while a kernel still reads it. Only copies are waited for without a bound, and these
    wait for nothing but the computation.

    Args:
        cupy: the module, or what stands for it.
        device: its number.
    """

    def __init__(self, cupy: Any, device: int) -> None:
        self.cupy = cupy
        self.device = device
        with cupy.cuda.Device(device):
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self._copying = cupy.cuda.Stream(non_blocking=True)

    def prepare(self, meeting: Meeting, wire: Wire) -> Work:
        """Let the operand come to the device, packed as NCCL wants it, when it has been computed.

        Raises:
            ValueError: the attributes do not fit the operand.
        """
        operand: Any = meeting.operand
        is_on_host = self.is_on_host(operand)
        if is_on_host:
            operand = self._upload(wire.load(operand))
        with self._waiting_for_computing(self.stream) as computed:
            if operand.data.device_id != self.device:
                operand = operand.copy()
            loaded = operand if is_on_host else wire.load(operand)
            member = Member(meeting.collective, meeting.position, meeting.shapes, loaded, self.cupy)
            return Work(meeting, wire, loaded, transfer(member), computed)

    def enqueue(self, work: Work, communicator: Any) -> None:
        """Make the calls of a work; between groupStart and groupEnd where it has several."""
        nccl, wire = self.cupy.cuda.nccl, work.wire
        operation = (getattr(nccl, wire.operation),) if wire.operation else ()
        with self.cupy.cuda.Device(self.device):
            for step in work.transfer.steps:
                argument = operation if step.argument is None else (step.argument,)
                buffers = (buffer.data.ptr for buffer in step.buffers)
                count = step.count * wire.count
                call = getattr(communicator, step.name)
                call(*buffers, count, getattr(nccl, wire.nccl), *argument, self.stream.ptr)

    def complete(self, work: Work) -> None:
        """Enqueue what makes the result."""
        with self.cupy.cuda.Device(self.device), self.stream:
            result = work.transfer.result()
            work.result = result if self.is_on_host(work.meeting.operand) else work.wire.unload(result)
            work.done = self._event(self.stream)

    def result(self, work: Work) -> Array:
        """The result of a work that is done, where the operand was."""
        if not self.is_on_host(work.meeting.operand):
            return work.result  # type: ignore[no-any-return]
        with self.cupy.cuda.Device(self.device):
            found: Array = work.wire.unload(self.cupy.asnumpy(work.result, stream=self._copying))
        return found

    def to_host(self, call: Call) -> Array:
        """The operand of a call, on the host."""
        if self.is_on_host(call.operand):
            return call.operand
        with self.cupy.cuda.Device(self.device):
            found: Array = self.cupy.asnumpy(call.operand)
        return found

    def like(self, call: Call, result: Array) -> Array:
        """An array of the host, where the operand of a call is."""
        return result if self.is_on_host(call.operand) else self._upload(result)

    @contextmanager
    def errors(self, where: str) -> Iterator[None]:
        """Errors of CUDA and NCCL as those of a run."""
        cuda = self.cupy.cuda
        try:
            yield
        except cuda.memory.OutOfMemoryError as error:
            raise RunError(
                f"device {self.device} has not enough memory for a collective: {error}",
                where=where,
                do="cut the model over more devices, or let nothing else run on this one",
            ) from error
        except (cuda.nccl.NcclError, cuda.runtime.CUDARuntimeError) as error:
            raise DeviceError(
                f"device {self.device} failed in a collective: {error}",
                where=where,
                do="run again with NCCL_DEBUG=INFO, which tells more; see docs/clusters.md on GPUs",
            ) from error

    def _upload(self, array: Array) -> Any:
        """A numpy array on the device, the copy ended."""
        with self._waiting_for_computing(self._copying):
            # NumPy makes one dim of none.
            made = self.cupy.asarray(np.ascontiguousarray(array).reshape(array.shape))
            self._copying.synchronize()
        return made

    @contextmanager
    def _waiting_for_computing(self, stream: Any) -> Iterator[Any]:
        """In here the current stream is this one, which goes on at the event that the caller's has come so far."""
        with self.cupy.cuda.Device(self.device):
            computed = self._event(self.cupy.cuda.get_current_stream())
            stream.wait_event(computed)
            with stream:
                yield computed

    def _event(self, stream: Any) -> Any:
        event = self.cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def is_on_host(self, array: Any) -> bool:
        """Whether an array is one of numpy."""
        return not isinstance(array, self.cupy.ndarray)


def enqueue_together(cupy: Any, works: Sequence[tuple[DeviceChannel, Work, Any]]) -> None:
    """Make the calls of one collective, of all ranks of this process, and enqueue what makes their results."""
    is_grouped = sum(len(work.transfer.steps) for _, work, _ in works) > 1
    if is_grouped:
        cupy.cuda.nccl.groupStart()
    try:
        for lane, work, communicator in works:
            lane.enqueue(work, communicator)
    finally:
        if is_grouped:
            cupy.cuda.nccl.groupEnd()
    for lane, work, _ in works:
        lane.complete(work)
