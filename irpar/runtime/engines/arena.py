"""Results of nodes in an arena: places that are decided once, in memory that a rank uses again and again."""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from irpar.analysis.engines import writes_out
from irpar.analysis.memory.offsets.heuristics import place
from irpar.analysis.memory.offsets.lifetimes import Lifetime
from irpar.analysis.memory.scratch import scratch_bytes
from irpar.ir import Node, Value, captured_or_read, tensor_type
from irpar.runtime.instructions import Segment

from .arena_height import height


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
        nodes: those that write results which have one.
        slots: by result.
        inputs: where inputs are copied to.
        scratch: where what a kernel needs beside its results lies, by node: offset and bytes.
        nbytes: what the arena must hold at least.
        held: what each place is held for: offset and end, first and last step.
        steps: when each node runs.
    """

    nodes: tuple[Node, ...]
    slots: Mapping[Value, Slot]
    inputs: Mapping[Value, Slot]
    scratch: Mapping[Node, tuple[int, int]]
    nbytes: int
    held: "np.ndarray[Any, np.dtype[np.int64]]"
    steps: Mapping[Node, int]

    def free_beside(self, node: Node, nbytes: int) -> list[tuple[int, int]]:
        """Where nothing lies in an arena of so many bytes while a node of the segment runs: offset and end."""
        step = self.steps[node]
        offsets, ends, first, last = self.held
        found, free = [], 0
        is_held = (first <= step) & (step <= last)
        for offset, end in sorted(zip(offsets[is_held].tolist(), ends[is_held].tolist(), strict=True)):
            if offset > free:
                found.append((free, offset))
            free = max(free, end)
        return [*found, (free, nbytes)] if free < nbytes else found


class Buffers(NamedTuple):
    """Arrays in an arena.

    Attributes:
        into: what the kernel of a node writes its result into; where it has several, a tuple with None for what has no
            place.
        inputs: where inputs are copied to.
        scratch: bytes for what the kernel of a node needs beside.
    """

    into: Mapping[Node, Any]
    inputs: Mapping[Value, Any]
    scratch: Mapping[Node, Any]


class Arena:
    """Memory of one rank, for one segment after the other.

    Args:
        module: the array module of the memory.
        memory: an array of bytes.

    Attributes:
        memory: as given.
    """

    def __init__(self, module: Any, memory: Any) -> None:
        self._module = module
        self.memory = memory
        self._buffers: dict[ArenaLayout, Buffers] = {}

    @property
    def nbytes(self) -> int:
        """Its size."""
        return int(self.memory.nbytes)

    def buffers(self, layout: ArenaLayout) -> Buffers:
        """The arrays that the nodes of a segment write to."""
        found = self._buffers.get(layout)
        if found is None:
            into = {node: self._into(node, layout.slots) for node in layout.nodes}
            scratch = {node: self.memory[start : start + size] for node, (start, size) in layout.scratch.items()}
            inputs = {value: self._buffer(slot) for value, slot in layout.inputs.items()}
            found = self._buffers[layout] = Buffers(into, inputs, scratch)
        return found

    def _into(self, node: Node, slots: Mapping[Value, Slot]) -> Any:
        arrays = tuple(self._buffer(slots[value]) if value in slots else None for value in node.results)
        return arrays[0] if len(arrays) == 1 else arrays

    def _buffer(self, slot: Slot) -> Any:
        size = slot.dtype.itemsize * int(np.prod(slot.shape))
        return self.memory[slot.offset : slot.offset + size].view(slot.dtype).reshape(slot.shape)

    def copied_out(self, value: Any) -> Any:
        """A result that outlives the segment: itself, or a copy of what lies in the arena."""
        if isinstance(value, list):
            return [self.copied_out(item) for item in value]
        is_array = isinstance(value, type(self.memory))
        return value.copy() if is_array and self._module.may_share_memory(value, self.memory) else value


def arena_layout(
    segment: Segment,
    with_scratch: bool = False,
    dtypes: "Set[np.dtype[Any]] | None" = None,
    beside: bool = False,
    with_ends: bool = False,
) -> ArenaLayout:
    """Places for the results of a segment that kernels can write into arrays that they are given.

    Outputs have none, unless they are copied from there in the end. What a node gives that cannot do so may be a view
    of what it reads, which is then held as long.

    Args:
        segment: it.
        with_scratch: whether what kernels of a processor need beside their results has places too.
        dtypes: those that results may have; None: all.
        beside: whether results may also lie outside, where memory is allocated and freed at little cost: as many do so
            as lets the segment take no more than what it holds at once.
        with_ends: whether inputs are copied to the arena, and outputs from it; state lies elsewhere.
    """
    writing = frozenset(filter(writes_out, segment.nodes))
    last = _last_steps(segment, writing)
    held: list[Lifetime[Value | Node]] = []
    if with_ends:
        outside = {*segment.over}
        copied = [value for value in segment.inputs if value not in segment.graph.states and _has_place(value, dtypes)]
        held.extend(Lifetime(value, value.tensor_type.nbytes, 0, last.get(value, 0)) for value in copied)
    else:
        outside = {*segment.outputs}
    for step, node in enumerate(segment.nodes):
        if with_scratch and (needed := scratch_bytes(node)):
            held.append(Lifetime(node, needed, step, step))
        if node in writing:
            inside = [value for value in node.results if value not in outside and _has_place(value, dtypes)]
            held.extend(Lifetime(value, value.tensor_type.nbytes, step, last.get(value, step)) for value in inside)
    found = place(held)
    nbytes = found.nbytes
    if beside:
        nbytes = height(segment, held, found, last)
        held = [one for one in held if found.offsets[one.key] + one.nbytes <= nbytes]
    slots = {
        one.key: Slot(found.offsets[one.key], one.key.tensor_type.static_shape, one.key.dtype.numpy)
        for one in held
        if isinstance(one.key, Value)
    }
    scratch = {one.key: (found.offsets[one.key], one.nbytes) for one in held if isinstance(one.key, Node)}
    inputs = {value: slots.pop(value) for value in segment.inputs if value in slots}
    nodes = tuple(node for node in segment.nodes if not slots.keys().isdisjoint(node.results))
    offsets = [found.offsets[one.key] for one in held]
    rows = [(offset, offset + one.nbytes, one.first, one.last) for offset, one in zip(offsets, held, strict=True)]
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    steps = {node: step for step, node in enumerate(segment.nodes)}
    return ArenaLayout(nodes, slots, inputs, scratch, nbytes, columns, steps)


def places_of(segment: Segment) -> dict[Value, int]:
    """The results of a segment that may be written over a state, and which of its inputs that is."""
    places = {value: place for place, value in enumerate(segment.inputs)}
    return {value: places[state] for value, state in segment.over.items()}


def with_states(into: Mapping[Node, Any], nodes: Iterable[Node], states: Mapping[Value, Any]) -> dict[Node, Any]:
    """Where results of nodes go, where some of them go over arrays of a state."""
    found = dict(into)
    for node in nodes:
        if not states.keys().isdisjoint(node.results):
            given = into.get(node)
            places = given if isinstance(given, tuple) else (given,) * len(node.results)
            arrays = tuple(states.get(value, place) for value, place in zip(node.results, places, strict=True))
            found[node] = arrays[0] if len(arrays) == 1 else arrays
    return found


def _has_place(value: Value, dtypes: "Set[np.dtype[Any]] | None") -> bool:
    """Whether a result is of known size and not empty, and of one of some dtypes."""
    type_ = tensor_type(value.type)
    if type_ is None or not type_.is_static or not type_.nbytes:
        return False
    return dtypes is None or type_.dtype.numpy in dtypes


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
