"""One CUDA graph, and where it reads and writes."""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from irpar.runtime.engines.device_arrays import Held
from irpar.runtime.engines.lanes import RankStream


class CopiedInput(NamedTuple):
    """An operand that is copied to where the graph reads it.

    Attributes:
        slot: where it stands in what the rank holds.
        array: where it goes.
    """

    slot: int
    array: Any


class CapturedGraph:
    """A CUDA graph of a stretch, for inputs of certain shapes at certain places.

    Args:
        graph: CuPy's.
        copied: what is copied before it runs.
        bound: the arrays that it reads where they lie, or writes over; it is of no use when one of them is gone.
        results: slot and array of what it makes.
        echoes: slot of a result that is written over an operand, and that operand's.
        kept: what it needs besides.
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
        self._results = results
        self._echoes = echoes
        self._kept = kept
        self._bound = [weakref.ref(array, self._let_go) for array in bound]

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
        for slot, array in self._results:
            held[slot] = array
        for slot, source in self._echoes:
            held[slot] = held[source]

    def _let_go(self, _: object) -> None:
        self._graph = None
        self._copied, self._results, self._kept = [], (), ()


def _copy(lane: RankStream, value: Any, array: Any, address: int, size: int) -> None:
    """Bring a tensor to where a graph reads it."""
    if isinstance(value, np.ndarray):
        lane.staging.fill(address, value)
    elif isinstance(value, Held):
        lane.staging.fill(address, value.host)
    elif value is not array and size:
        found = value if value.data.device_id == lane.device else value.copy()
        if found.flags.c_contiguous:
            lane.copy(address, found.data.ptr, size)
        else:
            array[...] = found
