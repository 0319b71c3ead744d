"""Ranks that are GPUs, joined by NCCL: a process for each, or all in this one.

What ranks compare before data moves, messages and failures go over connections between their processes (`WiredGroup`);
only the data of collectives goes through NCCL, and of that not what it lacks: strings, bitwise reductions of integers,
products and orders of complex numbers, float8 sums. These go between the hosts.

A communicator is made for each set of ranks that meet, when they first do, from a unique id of its own that the first
of them sends to the others. Splitting one of all ranks (ncclCommSplit) would need every rank of the mesh to take part
in every split, those too that never come to a collective of these axes, and in one order; a rank that died at a quite
other place would hold up all. What is made for its members alone needs only these, who have just met.

NCCL sums float16 and bfloat16 from rank to rank, rounding on the way; groups on CPUs round once. Its max and min of
floats may give a number where one of two is NaN.
"""

import atexit
import math
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Self
from weakref import WeakSet

import numpy as np

from irpar.runtime.communication import Releasable
from irpar.runtime.errors import PeerError, RunError, more_time
from irpar.runtime.groups.base import Array, Call, Collective, rank_text
from irpar.runtime.groups.spmd import Finish, Meeting, see_late
from irpar.runtime.groups.wire.connect import meet
from irpar.runtime.groups.wire.control import NOBODY, Control
from irpar.runtime.groups.wire.wired import ASK_SECONDS, WiredGroup
from irpar.runtime.launch.environment import World
from irpar.sharding import Mesh

from .devices import NcclDevices
from .ending import DESTROY_SECONDS, PAUSE_SECONDS, destroy
from .lane import DeviceChannel, DeviceError, Work, enqueue_together, load_cupy
from .sharing import about_device, check_devices
from .transfers import moves_nothing, wire_of

_SPINS = 100
"""So often it is asked at once whether a collective is done, before the processor is left to others between."""
_ABORT_SECONDS = 0.5
"""In which NCCL has told its kernels to end."""
_CONNECT_SECONDS = 1.5
"""How long a rank that ends waits for NCCL to be done connecting: it soon sees that a rank is gone, and never that one
hangs. Launchers end the others 2 s after the first that fails."""
_BLAME_SECONDS = 1.0
"""How much later than NCCL's own error a peer's end may show."""


class Nccl:
    """The group `nccl`: one process for each GPU where a launcher made them, else all GPUs in this process."""

    @classmethod
    def join(cls, mesh: Mesh, seconds: float) -> "NcclGroup | NcclDevices":
        """Meet the other ranks.

        Raises:
            IrparError: CuPy, NCCL or a device is missing, there are not as many ranks as the mesh has, or devices, or
                a rank did not come.
        """
        world = World.of_environment()
        if world is None or world.size == 1:
            return NcclDevices.on_devices(mesh, seconds, load_cupy())
        return NcclGroup.join(mesh, seconds)


class NcclGroup(WiredGroup):
    """One rank, whose process has one device for it.

    Args:
        mesh: the mesh of all ranks.
        rank: the one of this process.
        seconds: how long a rank waits for others at a collective.
        control: the connections to the other ranks.
        lane: the device.
        captures: whether collectives are captured in CUDA graphs with what is around them.

    Attributes:
        captures: as given.
    """

    takes_device_arrays = True

    def __init__(
        self, mesh: Mesh, rank: int, seconds: float, control: Control, lane: DeviceChannel, captures: bool = False
    ) -> None:
        super().__init__(mesh, rank, seconds, control)
        self.cupy = lane.cupy
        self.lane = lane
        self.captures = captures
        self._communicators: dict[tuple[int, ...], Any] = {}
        self._graphs: WeakSet[Any] = WeakSet()
        self._has_failed = False
        self._connecting: tuple[threading.Thread, list[Any]] | None = None
        atexit.register(self._end_failed)

    @classmethod
    def join(cls, mesh: Mesh, seconds: float) -> Self:
        """See `SpmdGroup.join`."""
        cupy = load_cupy()
        world = World.of_ranks("nccl", mesh)
        device = world.local_rank % cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.Device(device).use()
        lane = DeviceChannel(cupy, device)  # CUDA takes its time to start, for which no rank waits at a collective.
        about = about_device(cupy, device)
        control, all_about = meet(world, mesh, about, seconds)
        try:
            check_devices(all_about)
            return cls(mesh, world.rank, seconds, control, lane, about["captures"])
        except BaseException:
            control.close()
            raise

    def move(self, meeting: Meeting) -> Finish:
        """See `WiredGroup.move`."""
        with self._blamed():
            finish = self._move(meeting)

        def blamed() -> Array:
            with self._blamed():
                return finish()

        return blamed

    def close(self) -> None:
        """See `Group.close`; communicators of a run that failed are aborted, since peers may never come to end them."""
        atexit.unregister(self._end_failed)
        if self._has_failed or self.control.is_broken:
            self._end_failed()
        else:
            self.control.leave()  # Nobody ends a communicator that another still uses.
            self._let_graphs_go()
            destroy(self._communicators.values())
        self._communicators.clear()
        super().close()

    # -- in CUDA graphs -------------------------------------------------------------------------------------------

    def can_capture(self, collective: Collective, dtype: "np.dtype[Any]") -> bool:
        """See `CapturingGroup.can_capture`."""
        return len(self.members(collective.axes)) > 1 and wire_of(collective, dtype) is not None

    def capture(self, call: Call) -> Work:
        """See `CapturingGroup.capture`; the members have met before, when the collective ran by itself."""
        meeting = self._meeting(call)
        wire, communicator = wire_of(call.collective, call.operand.dtype), self._communicators.get(meeting.members)
        if wire is None or communicator is None:
            raise RunError(f"{call.collective} cannot be captured before its ranks have met")
        with self.lane.errors(meeting.header.text):
            work = self.lane.prepare(meeting, wire)
            enqueue_together(self.cupy, [(self.lane, work, communicator)])
        return work

    def captured_result(self, begun: Work) -> Any:
        """See `CapturingGroup.captured_result`."""
        self.cupy.cuda.get_current_stream().wait_event(begun.done)
        return self.lane.result(begun)

    def watch(self, stream: Any, seconds: float) -> None:
        """See `CapturingGroup.watch`."""
        done = self.cupy.cuda.Event(disable_timing=True)
        done.record(stream)
        self.control.where = f"{rank_text(self.mesh, self.rank)} waits for a CUDA graph with collectives"
        deadline = time.monotonic() + self.seconds + seconds
        with self._translated(), self._blamed(), self.lane.errors("a CUDA graph with collectives"):
            for _ in self._until(done, self._communicators.values()):
                if time.monotonic() > deadline:
                    raise self._graph_stuck(self.seconds + seconds)

    def add_graph(self, graph: Releasable) -> None:
        """See `CapturingGroup.add_graph`."""
        self._graphs.add(graph)

    def _let_graphs_go(self) -> None:
        for graph in tuple(self._graphs):
            graph.let_go()
        self._graphs.clear()

    def _graph_stuck(self, seconds: float) -> RunError:
        """The error of a graph that does not end; all others are told of it."""
        error = RunError(
            f"a CUDA graph with collectives did not end in {seconds:g} s, though all ranks launched it",
            do=f"see with NCCL_DEBUG=INFO what NCCL waits for; where the network is slow, {more_time()}",
        )
        self.control.tell_failed(NOBODY, str(error))
        return error

    # -- inside ---------------------------------------------------------------------------------------------------

    def _begin(self, call: Call) -> Finish:
        """On the device too where a rank is alone."""
        if len(self.members(call.collective.axes)) > 1 or self.lane.is_on_host(call.operand):
            return super()._begin(call)
        on_host = Call(call.rank, call.coords, call.collective, self.lane.to_host(call))
        finish = super()._begin(on_host)
        return lambda: self.lane.like(call, finish())

    def _move(self, meeting: Meeting) -> Finish:
        wire = wire_of(meeting.collective, meeting.operand.dtype)
        if wire is None or moves_nothing(meeting.shapes):
            return self._between_hosts(meeting)
        with self.lane.errors(meeting.header.text):
            communicator = self._communicator(meeting)
            work = self.lane.prepare(meeting, wire)
            enqueue_together(self.cupy, [(self.lane, work, communicator)])

        def finish() -> Array:
            with self.lane.errors(meeting.header.text):
                self._wait(work, communicator)
                return self.lane.result(work)

        return finish

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """Free the device where something fails, and tell of the peer that is the cause, if there is one.

        Raises:
            LostError: a rank failed.
        """
        try:
            yield
        except BaseException as error:
            self._has_failed = True
            self._abandon()  # What is left on the stream waits for peers that do not come.
            if isinstance(error, DeviceError) and self.control.learns_of_failure(_BLAME_SECONDS):
                self.control.check()
            raise

    def _between_hosts(self, meeting: Meeting) -> Finish:
        """What NCCL cannot move, or need not."""
        on_host = self.lane.to_host(meeting.call)
        call = Call(self.rank, meeting.call.coords, meeting.collective, on_host)
        finish = self.through_hosts(replace(meeting, call=call))
        return lambda: self.lane.like(meeting.call, finish())

    def _wait(self, work: Work, communicator: Any) -> None:
        """Wait until a collective is done, looking after peers, NCCL and the clock.

        Raises:
            LostError: a rank failed.
            RunError: it took too long.
        """
        meeting = work.meeting
        deadline = math.inf
        self.control.where = meeting.header.text
        for _ in self._until(work.done, [communicator]):
            if deadline == math.inf and work.computed.done:
                deadline = time.monotonic() + self.seconds  # What this rank itself computes has no bound.
            if time.monotonic() > deadline:
                raise self._stuck(meeting)

    def _until(self, done: Any, communicators: Collection[Any]) -> Iterator[None]:
        """Look after peers and NCCL until an event has come, again and again.

        Raises:
            LostError: a rank failed.
        """
        for _ in range(_SPINS):
            if done.done:
                return
        while not done.done:
            for communicator in communicators:
                communicator.check_async_error()
            self.control.pump()
            if not done.done:
                self.control.check()  # A member that has left has done its part.
            yield
            time.sleep(PAUSE_SECONDS)

    def _stuck(self, meeting: Meeting) -> RunError:
        """The error of a collective to which all came, and which does not end; all others are told of it."""
        error = RunError(
            f"collective {meeting.collective.id} did not end in {self.seconds:g} s, though all its ranks came to it",
            notes=(meeting.header.text, *self._elsewhere(meeting).values()),
            do=f"see with NCCL_DEBUG=INFO what NCCL waits for; where the network is slow, {more_time()}",
        )
        # A member that went on may have done its part, and one that is silent may compute: none is to blame for it.
        self.control.tell_failed(NOBODY, str(error))
        return error

    def _unconnected(self, meeting: Meeting) -> RunError:
        """The error of a communicator that NCCL does not make; all others are told of it."""
        elsewhere = self._elsewhere(meeting)
        id_ = meeting.collective.id
        if not elsewhere:
            error = RunError(
                f"NCCL did not connect the ranks of collective {id_} in {self.seconds:g} s, though all came to it",
                notes=(meeting.header.text,),
                do="let their hosts reach each other as NCCL wants to (NCCL_DEBUG=INFO tells how, NCCL_SOCKET_IFNAME "
                f"says by which network); where it is slow, {more_time()}",
            )
            self.control.tell_failed(NOBODY, str(error))
            return error
        notes = (meeting.header.text, *elsewhere.values())
        what = f"did not connect with NCCL for collective {id_} in {self.seconds:g} s"
        first = min(elsewhere)
        self.control.tell_failed(first, "\n".join((f"it {what}", *notes)))
        return PeerError(f"{rank_text(self.mesh, first)} {what}", rank=first, notes=notes, do=see_late())

    def _elsewhere(self, meeting: Meeting) -> dict[int, str]:
        """Members that do not wait in a collective as this rank does, and what is known of each.

        Raises:
            LostError: a rank failed, as it turns out.
        """
        others = [member for member in meeting.members if member != self.rank]
        here = self.control.ask(others, ASK_SECONDS)
        self.control.check()
        known = {member: here.get(member) or f"{rank_text(self.mesh, member)} gives no answer" for member in others}
        return {rank: text for rank, text in known.items() if f" is at {meeting.collective} with " not in text}

    def _communicator(self, meeting: Meeting) -> Any:
        found = self._communicators.get(meeting.members)
        if found is None:
            found = self._communicators[meeting.members] = self._connect(meeting, self._unique_id(meeting))
        return found

    def _unique_id(self, meeting: Meeting) -> bytes:
        """Made by the first member, who sends it to the others."""
        first, peers = meeting.members[0], self.control.peers
        if first != self.rank:
            # Both ends have met as often; other data of this meeting has the number itself.
            number = -peers[first].met
            self.wait_for_data(meeting, {first: number})
            return bytes(peers[first].data.pop(number))
        unique_id: bytes = self.cupy.cuda.nccl.get_unique_id()
        for member in meeting.members[1:]:
            peers[member].send_data(-peers[member].met, unique_id)
        return unique_id

    def _connect(self, meeting: Meeting, unique_id: bytes) -> Any:
        """A communicator of the members; NCCL waits for all of them without a bound, so another thread does."""
        made: list[Any] = []

        def make() -> None:
            try:
                with self.cupy.cuda.Device(self.lane.device):
                    kind = self.cupy.cuda.nccl.NcclCommunicator
                    made.append(kind(len(meeting.members), unique_id, meeting.position))
            except BaseException as error:
                made.append(error)

        thread = threading.Thread(target=make, name="irpar-nccl-connect", daemon=True)
        deadline = time.monotonic() + self.seconds
        thread.start()
        self._connecting = (thread, made)
        while thread.is_alive():
            thread.join(0.005)
            self.control.pump()
            self.control.check()
            if time.monotonic() > deadline and thread.is_alive():
                raise self._unconnected(meeting)
        self._connecting = None
        if isinstance(made[0], BaseException):
            raise made[0]
        return made[0]

    def _end_failed(self) -> None:
        """Abandon what is under way, and see NCCL done: a process that ends while it connects may end in a crash."""
        self._abandon()
        if self._connecting is None:
            return
        (thread, made), self._connecting = self._connecting, None
        thread.join(_CONNECT_SECONDS)
        for communicator in made:
            if not isinstance(communicator, BaseException):
                with suppress(Exception):  # What the run failed of is to be told.
                    communicator.abort()

    def _abandon(self) -> None:
        """Let the device end what it waits for; this does not wait for peers.

        CUDA waits for a graph to end before it lets it go, and NCCL for its graphs to be gone: so one begins to abort,
        while the other lets go, and neither is waited for without a bound.
        """
        communicators = [*self._communicators.values()]
        self._communicators.clear()

        def abort() -> None:
            for communicator in communicators:
                communicator.abort()

        if not self._graphs:
            abort()
            return
        aborting, letting_go = (
            threading.Thread(target=target, name="irpar-nccl-abort", daemon=True)
            for target in (abort, self._let_graphs_go)
        )
        try:
            aborting.start()
        except RuntimeError:  # The interpreter ends, and nothing is under way.
            self._let_graphs_go()
            abort()
            return
        aborting.join(_ABORT_SECONDS)
        letting_go.start()
        for thread in (letting_go, aborting):
            thread.join(DESTROY_SECONDS)
