"""The state that the ranks of this process hold between the runs of a session: blocks, where the ranks compute."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from irpar.errors import listed
from irpar.ir import Graph, Tensor, Value
from irpar.ir.state import StateKind
from irpar.output.parts import Part
from irpar.sharding import local_region

from .errors import StateLostError
from .layout import TensorSpec
from .specs import spec_of
from .storage.disk_array import DiskArray

Blocks = dict[str, Any]


@dataclass(frozen=True)
class StateSpec:
    """One state of a program.

    Attributes:
        spec: the full tensor, by the name that the source model has for the input.
        kind: see `irpar.ir.state.State`.
        output: the name of the result that replaces it; None: it stays as it is.
        parameter: the parameter that it belongs to.
    """

    spec: TensorSpec
    kind: StateKind
    output: str | None
    parameter: str | None


def state_specs(graph: Graph) -> tuple[StateSpec, ...]:
    """The states of a graph, in order of its inputs."""
    return tuple(
        StateSpec(
            spec_of(value, value.source_name),
            state.kind,
            None if state.output is None else graph.output_names[state.output],
            state.parameter,
        )
        for value in graph.inputs
        if (state := graph.states.get(value)) is not None
    )


def first_states(graph: Graph, given: Collection[str] = ()) -> Blocks:
    """What the states of a graph begin with, whole; without those of some names."""
    return {
        value.source_name: _zeros(value.whole_shape, value) if state.data is None else state.data.numpy()
        for value, state in graph.states.items()
        if value.source_name not in given
    }


def _zeros(shape: Sequence[int], value: Value) -> Any:
    return np.zeros(shape, value.dtype.numpy)


def _own(blocks: Mapping[str, Any]) -> Mapping[str, Any]:
    """Blocks that nobody else writes to; inputs and constants are read-only here, what nodes compute is not."""
    if not _on_host(blocks):
        return blocks
    return {
        name: block.copy() if isinstance(block, np.ndarray) and not block.flags.writeable else block
        for name, block in blocks.items()
    }


def _on_host(blocks: Mapping[str, Any]) -> bool:
    """Whether some blocks are arrays of the host; the kinds of many blocks are few."""
    return any(issubclass(kind, np.ndarray) for kind in set(map(type, blocks.values())))


def _replaced(graph: Graph) -> tuple[frozenset[str], frozenset[str]]:
    """The names of the states that a run replaces, and of the others."""
    names = frozenset(value.source_name for value in graph.states)
    found = frozenset(value.source_name for value, state in graph.states.items() if state.output is not None)
    return found, names - found


OnDisk = Callable[[Tensor, int], Any]
"""Gives what a rank holds of a tensor that is to lie on a disk: where it is already, if it can be read there."""


class HeldState:
    """What the ranks of this process hold, session by session.

    Args:
        parts: theirs.
        coords: of each rank.
        on_disk: for states that lie on a disk.
    """

    def __init__(
        self, parts: Sequence[Part], coords: Mapping[int, Sequence[int]], on_disk: OnDisk | None = None
    ) -> None:
        self._lay_on_disk = on_disk
        self._graphs = {rank: part.graph for part in parts for rank in part.ranks if rank in coords}
        self._replaced = {rank: _replaced(graph) for rank, graph in self._graphs.items()}
        self._coords = coords
        self._held: dict[int, dict[int, Blocks]] = {}
        self._before: dict[tuple[int, int], Blocks] = {}
        self._gone: dict[tuple[int, int], frozenset[str]] = {}
        """What of a session's state a run has let go on a rank, and not replaced yet."""

    def blocks(self, session: int, rank: int) -> Blocks:
        """What a rank holds by name; at the beginning of a session what the program begins with.

        Raises:
            StateLostError: a run failed while it replaced it.
        """
        if gone := self._gone.get((session, rank)):
            raise StateLostError(
                f"the state of this session is gone: a run failed on rank {rank} while it was replaced",
                notes=(f"lost: {listed(sorted(gone), 5)}",),
                do="load a checkpoint, or begin a new session",
            )
        return self._held_by(session, rank)

    def _held_by(self, session: int, rank: int) -> Blocks:
        held = self._held.setdefault(session, {})
        if rank not in held:
            held[rank] = {
                value.source_name: self._first(value, rank)
                for value in self._graphs[rank].inputs
                if value in self._graphs[rank].states
            }
        return held[rank]

    def begin(self, session: int, rank: int) -> Blocks:
        """As `blocks`, for a run: what was there before the last one is let go."""
        self._before.pop((session, rank), None)
        return self.blocks(session, rank)

    def _first(self, value: Value, rank: int) -> Any:
        data = self._graphs[rank].states[value].data
        if data is None:
            return _zeros(value.shape, value)
        if value.sharding is not None and not value.sharding.is_replicated:
            data = data.slice(local_region(value.sharding, data.shape, self._coords[rank]))
        if value.memory == "disk" and self._lay_on_disk is not None:
            return self._lay_on_disk(data, rank)
        return data.numpy().view()  # Nobody writes over what the program begins with.

    def write(self, session: int, rank: int, blocks: Mapping[str, Any]) -> None:
        """Let a rank hold other blocks; what may change outside, such as a view of an input, is copied."""
        self._held_by(session, rank).update(_own(blocks))
        gone = self._gone.pop((session, rank), frozenset()) - blocks.keys()
        if gone:
            self._gone[session, rank] = gone

    def let_go(self, session: int, rank: int) -> None:
        """Hold no more what a run is about to replace: from here on it cannot be undone, and must not fail."""
        gone, staying = self._replaced[rank]
        held, self._gone[session, rank] = self._held_by(session, rank), gone
        self._held[session][rank] = {name: held[name] for name in staying}

    def replace(self, session: int, rank: int, blocks: Mapping[str, Any]) -> None:
        """As `write`, by a run, which can be undone until the next one begins if it has let go of nothing."""
        if (session, rank) not in self._gone:
            self._before[session, rank] = dict(self._held_by(session, rank))
        self.write(session, rank, blocks)

    def undo(self, session: int, rank: int) -> None:
        """Let a rank hold what it held before the last run, which can be undone once.

        Raises:
            StateLostError: that is gone.
        """
        before = self._before.pop((session, rank), None)
        if before is None:
            raise StateLostError("the state before the last run is gone", do="load a checkpoint")
        self.blocks(session, rank).update(before)

    def apart(self, session: int, result: Any) -> Any:
        """A result that its caller may write to: a copy where it shares memory with what is held here."""
        if isinstance(result, list):
            return [self.apart(session, entry) for entry in result]
        of_ranks = filter(_on_host, self._held.get(session, {}).values())
        held = (block for blocks in of_ranks for block in blocks.values())
        is_shared = isinstance(result, np.ndarray) and any(
            isinstance(block, np.ndarray) and np.may_share_memory(result, block) for block in held
        )
        return result.copy() if is_shared else result

    def drop(self, session: int) -> None:
        """Let go of what a session holds."""
        self._held.pop(session, None)
        for rank in self._graphs:
            self._before.pop((session, rank), None)
            self._gone.pop((session, rank), None)

    def read(self, session: int, rank: int, names: Iterable[str]) -> Blocks:
        """The blocks of some states."""
        held = self.blocks(session, rank)
        return {name: held[name] for name in names}


class BorrowedState(HeldState):
    """What another program's ranks hold, for one that reads some of it and replaces none.

    Args:
        lender: holds it.
        names: of the states that the program has.
        on_disk: those of them that it has on disk.
        read: gives what lies on disk as an array, where the program has it elsewhere.
    """

    def __init__(
        self, lender: HeldState, names: Sequence[str], on_disk: Collection[str], read: Callable[[DiskArray], Any]
    ) -> None:
        super().__init__((), {})
        self._lender = lender
        self._names = names
        self._on_disk = frozenset(on_disk)
        self._read = read

    def begin(self, session: int, rank: int) -> Blocks:
        """See `HeldState.begin`."""
        held = self._lender.read(session, rank, self._names)
        elsewhere = (name for name, block in held.items() if isinstance(block, DiskArray) and name not in self._on_disk)
        return held | {name: self._read(held[name]) for name in elsewhere}

    def replace(self, session: int, rank: int, blocks: Mapping[str, Any]) -> None:
        """See `HeldState.replace`; there is nothing to replace."""

    def let_go(self, session: int, rank: int) -> None:
        """See `HeldState.let_go`; what is lent stays."""

    def apart(self, session: int, result: Any) -> Any:
        """See `HeldState.apart`."""
        return self._lender.apart(session, result)
