"""One CUDA graph, and where it reads and writes."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from irpar.runtime.engines.device_arrays import Held
from irpar.runtime.engines.lanes import RankStream
from irpar.runtime.log import Entry


class CopiedInput(NamedTuple):
    """An operand that is copied to where the graph reads it.

    Attributes:
        slot: where it stands in what the rank holds.
        array: where it goes.
    """

    slot: int
    array: Any


class Exit(NamedTuple):
    """What leaves a segment, where one graph computes all of it.

    Attributes:
        array: what the graph makes; None: `source` is written over.
        source: the slot of that state.
        is_copied: whether it is copied from there.
    """

    array: Any
    source: int
    is_copied: bool


class CapturedGraph:
    """A CUDA graph of a stretch, for inputs of certain shapes at certain places.

    Args:
        graph: CuPy's.
        copied: what is copied before it runs.
        bound: the arrays that it reads where they lie, or writes over; it is of no use when one of them is gone.
        results: slot and array of what it makes.
        echoes: slot of a result that is written over an operand, and that operand's.
        kept: what it needs besides.

    Attributes:
        results, echoes: as given.
        number: among those that all ranks captured together, and launch so; 0: it is this rank's alone.
        entries: the collectives in it.
        exits: what leaves the segment; None: that takes more than copies.
    """

    def __init__(
        self,
        graph: Any,
        copied: Sequence[CopiedInput],
        bound: Sequence[Any],
        results: Sequence[tuple[int, Any]],
        echoes: Sequence[tuple[int, int]],
        kept: Sequence[Any],
    ) -> None:
        self._graph = graph
        self._copied = [(slot, array, array.data.ptr, array.nbytes) for slot, array in copied]
        self.results = results
        self.echoes = echoes
        self._kept = kept
        self.exits: Sequence[Exit] | None = None
        self.number = 0
        self.entries: Sequence[Entry] = ()
        self._bound = [weakref.ref(array, self.let_go) for array in bound]

    @property
    def is_alive(self) -> bool:
        """Whether all that it reads is still there."""
        return self._graph is not None

    def replay(self, held: list[Any], lane: RankStream) -> None:
        """Run it on the stream of a rank, on what the rank holds."""
        for slot, array, address, size in self._copied:
            _copy(lane, held[slot], array, address, size)
            held[slot] = array
        self._graph.launch(lane.stream)
        for slot, array in self.results:
            held[slot] = array
        for slot, source in self.echoes:
            held[slot] = held[source]

    def replay_whole(
        self, held: list[Any], lane: RankStream, copied: Callable[[Any, RankStream, Any], Any]
    ) -> list[Any] | None:
        """Run it on the stream that is current, and give what leaves the segment.

        None, and nothing done, where an input takes more than a copy.

        Args:
            held: what the rank holds.
            lane: of the rank.
            copied: gives a copy of an array, made on a stream of the lane.
        """
        if self.exits is None:
            return None
        stream = lane.latest
        for slot, _, address, size in self._copied:
            value = held[slot]
            if isinstance(value, np.ndarray):
                lane.fill(address, value, stream)
            elif isinstance(value, Held) or not value.flags.c_contiguous or value.data.device_id != lane.device:
                return None
            elif size:
                lane.copy(address, value.data.ptr, size, stream)
        self._graph.launch(stream)
        return [
            held[source] if array is None else copied(array, lane, stream) if is_copied else array
            for array, source, is_copied in self.exits
        ]

    def let_go(self, _: object = None) -> None:
        """Give up the graph, which a piece finds no more then."""
        self._graph = None
        self._copied, self.results, self._kept, self.exits = [], (), (), None


def _copy(lane: RankStream, value: Any, array: Any, address: int, size: int) -> None:
    """Bring a tensor to where a graph reads it."""
    if isinstance(value, np.ndarray):
        lane.staging.fill(address, value)
    elif isinstance(value, Held):
        lane.staging.fill(address, value.host)
    elif value is not array and size:
        found = value if value.data.device_id == lane.device else value.copy()
        if found.flags.c_contiguous:
            lane.copy(address, found.data.ptr, size, lane.stream)
        else:
            array[...] = found
