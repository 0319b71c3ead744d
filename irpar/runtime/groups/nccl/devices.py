"""Ranks that are the GPUs of one process, joined by NCCL."""

import atexit
import math
import time
from collections.abc import Sequence
from typing import Any

from irpar.runtime.errors import RunError, more_time
from irpar.runtime.groups.base import Array, Call
from irpar.runtime.groups.results import execute
from irpar.runtime.groups.spmd import Meeting
from irpar.runtime.groups.threads import ThreadGroup
from irpar.runtime.groups.wire.header import Header
from irpar.runtime.launch.environment import start_ranks
from irpar.sharding import IrparError, Mesh

from .ending import PAUSE_SECONDS, destroy
from .lane import DeviceChannel, Work, enqueue_together
from .transfers import moves_nothing, wire_of


class NcclDevices(ThreadGroup):
    """All ranks in this process, rank i on device i, where the engine `cupy` computes it."""

    takes_device_arrays = True

    def __init__(self, mesh: Mesh, seconds: float, cupy: Any, devices: Sequence[int]) -> None:
        super().__init__(mesh)
        self.seconds = seconds
        self.cupy = cupy
        self.lanes = [DeviceChannel(cupy, device) for device in devices]
        self._communicators: dict[tuple[int, ...], list[Any]] = {}
        atexit.register(self._abandon)

    @classmethod
    def on_devices(cls, mesh: Mesh, seconds: float, cupy: Any) -> "NcclDevices":
        """Give each rank a device.

        Raises:
            IrparError: there are not as many.
        """
        count = cupy.cuda.runtime.getDeviceCount()
        if count < mesh.size:
            raise IrparError(
                f"mesh {mesh} has {mesh.size} ranks, and this process sees {count} GPU{'s' if count > 1 else ''}",
                do=f"start a process for each rank: {start_ranks('nccl', mesh.size)}; "
                "docs/clusters.md tells how several ranks can share a GPU",
            )
        return cls(mesh, seconds, cupy, range(mesh.size))

    def execute(self, calls: Sequence[Call]) -> list[Array]:
        """See `ThreadGroup.execute`."""
        collective, dtype = calls[0].collective, calls[0].operand.dtype
        shapes = tuple(call.operand.shape for call in calls)
        lanes = [self.lanes[call.rank] for call in calls]
        wire = wire_of(collective, dtype)
        if wire is None or moves_nothing(shapes) or len(calls) == 1:
            results = execute(collective, [lane.to_host(call) for lane, call in zip(lanes, calls, strict=True)])
            return [lane.like(call, result) for lane, call, result in zip(lanes, calls, results, strict=True)]
        members = tuple(call.rank for call in calls)
        with lanes[0].errors(calls[0].describe(self.mesh)):
            works = [
                lane.prepare(Meeting(call, members, i, Header.of(call, self.mesh), shapes, ()), wire)
                for i, (lane, call) in enumerate(zip(lanes, calls, strict=True))
            ]
            communicators = self._communicators_of(members)
            enqueue_together(self.cupy, list(zip(lanes, works, communicators, strict=True)))
            self._wait(works, communicators)
            return [lane.result(work) for lane, work in zip(lanes, works, strict=True)]

    def hand_over(self, sender: Call, receiver: Call) -> Array:
        """See `ThreadGroup.hand_over`; over the host."""
        return self.lanes[receiver.rank].like(receiver, self.lanes[sender.rank].to_host(sender))

    def close(self) -> None:
        """See `Group.close`."""
        atexit.unregister(self._abandon)
        destroy([communicator for group in self._communicators.values() for communicator in group])
        self._communicators.clear()

    def _communicators_of(self, members: tuple[int, ...]) -> list[Any]:
        found = self._communicators.get(members)
        if found is None:
            devices = [self.lanes[member].device for member in members]
            found = self._communicators[members] = self.cupy.cuda.nccl.NcclCommunicator.initAll(devices)
        return found

    def _wait(self, works: Sequence[Work], communicators: Sequence[Any]) -> None:
        deadline = math.inf
        while not all(work.done.done for work in works):
            for communicator in communicators:
                communicator.check_async_error()
            if deadline == math.inf and all(work.computed.done for work in works):
                deadline = time.monotonic() + self.seconds
            if time.monotonic() > deadline:
                self._abandon()
                raise RunError(
                    f"collective {works[0].meeting.collective.id} did not end in {self.seconds:g} s",
                    notes=(works[0].meeting.header.text,),
                    do=f"see with NCCL_DEBUG=INFO what NCCL waits for, or {more_time()}",
                )
            time.sleep(PAUSE_SECONDS)

    def _abandon(self) -> None:
        for group in self._communicators.values():
            for communicator in group:
                communicator.abort()
        self._communicators.clear()
