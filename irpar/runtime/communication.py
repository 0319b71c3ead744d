"""Collectives as part of segments: run one by one, or captured with what is around them."""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from hashlib import sha256
from typing import Any, Protocol

import numpy as np

from irpar.ir import Node, TensorType, tensor_type
from irpar.ops.effects import goes_to_group
from irpar.ops.op_def import traits

from .engines.device_arrays import DEVICE_DTYPES
from .groups.base import Call, Collective, Group
from .instructions import Segment
from .log import CollectiveLog, Entry


class Releasable(Protocol):
    """What holds calls of communicators."""

    def let_go(self) -> None:
        """Hold them no more."""
        ...


class CapturingGroup(Group, Protocol):
    """A group of one rank to a process, whose collectives can be captured in CUDA graphs.

    Attributes:
        rank: that of this process.
    """

    rank: int

    def can_capture(self, collective: Collective, dtype: "np.dtype[Any]") -> bool:
        """Whether a collective of this process's rank, with an operand on the device, can be captured."""
        ...

    def capture(self, call: Call) -> Any:
        """Let a collective begin while the current stream is captured; all its members do so.

        Raises:
            RunError: it cannot be captured.
        """
        ...

    def captured_result(self, begun: Any) -> Any:
        """The result of what `capture` gave, which the current stream waits for."""
        ...

    def watch(self, stream: Any, seconds: float) -> None:
        """Wait until a stream has done what it was given, looking after peers and the clock.

        Args:
            stream: it.
            seconds: that it takes by itself, beside the bound of the group.

        Raises:
            RunError: a rank failed, or it took too long.
        """
        ...

    def agree(self, choice: int) -> list[int]:
        """What each rank of the mesh chose, in order; all ask for it.

        Raises:
            PeerError: one failed, or did not come.
        """
        ...

    def add_graph(self, graph: "Releasable") -> None:
        """Let a graph go before communicators end: NCCL waits there for those that hold its calls."""
        ...


class Choice(IntEnum):
    """What a rank can do with a segment; graphs are numbered from GRAPH on."""

    NEVER = 0
    """No graph will do: the collectives run one by one from then on."""
    ONE_BY_ONE = 1
    CAPTURE = 2
    GRAPH = 3


class Communication:
    """How the rank of this process communicates inside of segments.

    A launch of a graph with NCCL's calls is a collective itself: the members of all of them capture them together, and
    launch what they captured so. So the ranks agree on each run of such a segment.

    Args:
        group: of the rank.
        coords: its place on the mesh.

    Attributes:
        group: as given.
        log: of the run.
        is_settled: whether it is known that it is alike on all ranks.
    """

    def __init__(self, group: CapturingGroup, coords: tuple[int, ...]) -> None:
        self.group = group
        self.log = CollectiveLog()
        self.is_settled = False
        self._coords = coords
        self._captured: list[Entry] = []

    # -- which ----------------------------------------------------------------------------------------------------

    def joins(self, node: Node) -> bool:
        """Whether a node of communication may be part of a segment: a collective of floats, or the wait for one."""
        if node.callee is not None or None in node.operands or len(node.operands) != 1 or len(node.results) != 1:
            return False
        known, (operand,) = traits(node), node.inputs
        if known.waits:
            return operand.node is not None and self.joins(operand.node)
        type_ = tensor_type(operand.type)
        return type_ is not None and _is_for_device(type_) and known.communicates and self._can_capture(node, type_)

    def _can_capture(self, node: Node, type_: TensorType) -> bool:
        collective = Collective.of(node)
        is_alone = collective.partners(self.group.rank) is not None
        return not is_alone and self.group.can_capture(collective, type_.dtype.numpy)

    def settle(self, segments: Iterable[Segment]) -> bool:
        """Whether all ranks have the same communication in their segments, which they tell each other."""
        self.is_settled = True
        ids = [
            [(node.op_type, node.attributes.get("id")) for node in segment.nodes if goes_to_group(node)]
            for segment in segments
            if segment.communicates
        ]
        choice = int.from_bytes(sha256(repr(ids).encode()).digest()[:7], "big")
        return len({*self.group.agree(choice)}) == 1

    # -- nodes ----------------------------------------------------------------------------------------------------

    def begin(self, collective: Collective, operand: Any, is_captured: bool) -> Any:
        """Let a collective begin; `finish` takes what this gives."""
        call = Call(self.group.rank, self._coords, collective, operand)
        if is_captured:
            return call, self.group.capture(call)
        self.group.start(call)
        return call, None

    def finish(self, inflight: Any, is_captured: bool) -> Any:
        """The result of a collective that has begun."""
        call, begun = inflight
        return self._joined(call, begun) if is_captured else self._exchanged(call)

    def execute(self, collective: Collective, operand: Any, is_captured: bool) -> Any:
        """Do a collective."""
        call = Call(self.group.rank, self._coords, collective, operand)
        return self._joined(call, self.group.capture(call)) if is_captured else self._exchanged(call)

    def _exchanged(self, call: Call) -> Any:
        result = self.group.exchange({call.rank: call})[call.rank]
        self.log.add(call)
        return result

    def _joined(self, call: Call, begun: Any) -> Any:
        self._captured.append((call.rank, call.collective, call.operand.dtype, call.operand.size))
        return self.group.captured_result(begun)

    # -- graphs ---------------------------------------------------------------------------------------------------

    def agree(self, choice: int) -> int:
        """What all ranks do, of which each has a choice."""
        choices = self.group.agree(choice)
        if min(choices) < Choice.CAPTURE:
            return min(choices)
        return choice if len({*choices}) == 1 else Choice.CAPTURE

    def take_captured(self) -> tuple[Entry, ...]:
        """What was captured since this was called last."""
        found, self._captured = tuple(self._captured), []
        return found

    def replayed(self, entries: Sequence[Entry], stream: Any, seconds: float) -> None:
        """Wait for a graph that has been launched, and note what it did; `seconds`: see `CapturingGroup.watch`."""
        self.group.watch(stream, seconds)
        self.log.add_again(entries)


def _is_for_device(type_: TensorType) -> bool:
    """Whether a tensor is one that no engine computes on the host, and is of known size."""
    dtype = type_.dtype.numpy
    return type_.is_static and type_.nbytes > 0 and dtype in DEVICE_DTYPES and dtype.kind not in "iub"
