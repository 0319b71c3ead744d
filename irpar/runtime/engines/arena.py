"""Results of nodes in an arena: places that are decided once, in memory that a rank uses again and again."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from irpar.analysis.engines import writes_out
from irpar.analysis.memory.offsets.heuristics import place
from irpar.analysis.memory.offsets.lifetimes import Lifetime
from irpar.ir import Node, Value, captured_or_read, tensor_type
from irpar.runtime.instructions import Segment


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a result lies: bytes from the start of the arena, shape and dtype."""

    offset: int
    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"


@dataclass(frozen=True, eq=False)
class ArenaLayout:
    """Where the results of a segment lie that have a place in the arena.

    Attributes:
        slots: by the node that makes the result.
        nbytes: what the arena must hold at least.
    """

    slots: Mapping[Node, Slot]
    nbytes: int


class Arena:
    """Memory of one rank, for one segment after the other.

    Args:
        module: the array module of the memory.
        memory: an array of bytes.
    """

    def __init__(self, module: Any, memory: Any) -> None:
        self._module = module
        self._memory = memory
        self._buffers: dict[ArenaLayout, dict[Node, Any]] = {}

    @property
    def nbytes(self) -> int:
        """Its size."""
        return int(self._memory.nbytes)

    def buffers(self, layout: ArenaLayout) -> Mapping[Node, Any]:
        """The array that each node of a segment writes its result into."""
        found = self._buffers.get(layout)
        if found is None:
            found = self._buffers[layout] = {node: self._buffer(slot) for node, slot in layout.slots.items()}
        return found

    def _buffer(self, slot: Slot) -> Any:
        size = slot.dtype.itemsize * int(np.prod(slot.shape))
        return self._memory[slot.offset : slot.offset + size].view(slot.dtype).reshape(slot.shape)

    def copied_out(self, value: Any) -> Any:
        """A result that outlives the segment: itself, or a copy of what lies in the arena."""
        if isinstance(value, list):
            return [self.copied_out(item) for item in value]
        is_array = isinstance(value, type(self._memory))
        return value.copy() if is_array and self._module.may_share_memory(value, self._memory) else value


def arena_layout(segment: Segment) -> ArenaLayout:
    """Places for the results inside a segment that kernels can write into arrays that they are given.

    What a node gives that cannot do so may be a view of what it reads, which is then held as long.
    """
    writing = [node for node in segment.nodes if _has_place(node)]
    made = {node.result: node for node in writing if node.result not in segment.outputs}
    last = _last_steps(segment, frozenset(writing))
    steps = {node: step for step, node in enumerate(segment.nodes)}
    held = [
        Lifetime(value, value.tensor_type.nbytes, steps[node], last.get(value, steps[node]))
        for value, node in made.items()
    ]
    found = place(held)
    slots = {
        node: Slot(found.offsets[value], value.tensor_type.static_shape, value.dtype.numpy)
        for value, node in made.items()
    }
    return ArenaLayout(slots, found.nbytes)


def places_of(segment: Segment) -> dict[Node, int]:
    """The nodes of a segment that may write over a state, and which of its inputs that is."""
    places = {value: place for place, value in enumerate(segment.inputs)}
    return {node: places[state] for node, state in segment.over.items()}


def _has_place(node: Node) -> bool:
    """Whether a node has one result, of known size and not empty, that its kernel can write into what it is given."""
    if not writes_out(node) or not node.result.is_static:
        return False
    type_ = tensor_type(node.result.type)
    return type_ is not None and type_.nbytes > 0


def _last_steps(segment: Segment, writing: frozenset[Node]) -> dict[Value, int]:
    """The step after which nothing reads a value, nor what may be a view of it."""
    last: dict[Value, int] = dict.fromkeys(segment.outputs, len(segment.nodes))
    for step, node in reversed(list(enumerate(segment.nodes))):
        end = step if node in writing else max((last.get(value, step) for value in node.results), default=step)
        for value in captured_or_read(node):
            last[value] = max(last.get(value, end), end)
    return last


class Arenas:
    """The arenas of the ranks of this process; runs beside each other have one each.

    Args:
        make: an arena of a rank, and of a size.
    """

    def __init__(self, make: Callable[[int, int], Arena]) -> None:
        self._make = make
        self._free: dict[int, list[Arena]] = {}

    def take(self, rank: int, nbytes: int) -> Arena | None:
        """An arena of a rank that holds so many bytes; None for none."""
        if not nbytes:
            return None
        free = self._free.setdefault(rank, [])
        while free:
            found = free.pop()
            if found.nbytes >= nbytes:
                return found
        return self._make(rank, nbytes)

    def give_back(self, rank: int, arena: Arena | None) -> None:
        """Let others use an arena."""
        if arena is not None:
            self._free[rank].append(arena)

    def clear(self) -> None:
        """Let go of all that nobody uses."""
        self._free = {rank: [] for rank in self._free}
