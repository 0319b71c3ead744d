"""Results of nodes in an arena: places that are decided once, in memory that a rank uses again and again."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from irpar.analysis.engines import writes_out
from irpar.analysis.memory.liveness import nested_bytes
from irpar.analysis.memory.offsets.heuristics import place
from irpar.analysis.memory.offsets.lifetimes import Lifetime, Offsets
from irpar.analysis.memory.scratch import needed_bytes, nested_scratch
from irpar.ir import DType, Node, Value, captured_or_read, tensor_type
from irpar.runtime.instructions import Segment

from .arena_height import height, most_with, outside_of
from .control_flow import SCAN

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a result lies: bytes from the start of the arena, shape and dtype."""

    offset: int
    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"


@dataclass(frozen=True, eq=False)
class ArenaLayout:
    """Where the results of a segment, or of all segments of a program, lie that have a place in the arena.

    Attributes:
        nodes: those that write results which have one.
        slots: by result.
        inputs: where inputs are copied to.
        scratch: where what a kernel needs beside its results lies, by node: offset and bytes.
        nbytes: what the arena must hold at least.
        held: what each place is held for: offset and end, first and last step.
        steps: when each node runs.
        leaving: results that are held when the arena has other uses; they have no place, and are no views of it.
        carried: results of a segment that later ones read where they lie.
    """

    nodes: tuple[Node, ...]
    slots: Mapping[Value, Slot]
    inputs: Mapping[Value, Slot]
    scratch: Mapping[Node, tuple[int, int]]
    nbytes: int
    held: "np.ndarray[Any, np.dtype[np.int64]]"
    steps: Mapping[Node, int]
    leaving: Set[Value] = frozenset()
    carried: Set[Value] = frozenset()

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
        leaving: as the layout has it.
    """

    into: Mapping[Node, Any]
    inputs: Mapping[Value, Any]
    scratch: Mapping[Node, Any]
    leaving: Set[Value] = frozenset()


NO_BUFFERS = Buffers({}, {}, {})
"""All results lie anywhere."""


class Arena:
    """Memory of one rank, for one segment after the other.

    Args:
        module: the array module of the memory.
        memory: an array of bytes.

    Attributes:
        memory: as given.
        layout: for all segments of the program that runs; None: each has places of its own.
        of_program: the arrays of that layout.
    """

    def __init__(self, module: Any, memory: Any) -> None:
        self._module = module
        self.memory = memory
        self.layout: ArenaLayout | None = None
        self.of_program = NO_BUFFERS
        self._buffers: WeakKeyDictionary[ArenaLayout, Buffers] = WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Its size."""
        return int(self.memory.nbytes)

    def buffers(self, layout: ArenaLayout) -> Buffers:
        """The arrays that the nodes of a segment, or of a program, write to."""
        found = self._buffers.get(layout)
        if found is None:
            into = {node: self._into(node, layout.slots) for node in layout.nodes}
            scratch = {node: self.memory[start : start + size] for node, (start, size) in layout.scratch.items()}
            inputs = {value: self._buffer(slot) for value, slot in layout.inputs.items()}
            found = self._buffers[layout] = Buffers(into, inputs, scratch, layout.leaving)
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
    dtypes: "Set[np.dtype[Any]] | None" = None,
    beside: bool = False,
    with_ends: bool = False,
) -> ArenaLayout:
    """Places for the results of a segment that kernels can write into arrays that they are given.

    Outputs have none, unless they are copied from there in the end. What a node gives that cannot do so may be a view
    of what it reads, which is then held as long.

    Args:
        segment: it.
        dtypes: those that results may have; None: all.
        beside: whether results may also lie outside, where memory is allocated and freed at little cost: as many do so
            as lets the segment take no more than what it holds at once.
        with_ends: whether inputs are copied to the arena, and outputs from it; state lies elsewhere.
    """
    writing = frozenset(filter(writes_out, segment.nodes))
    last = last_steps(segment.nodes, dict.fromkeys(segment.outputs, len(segment.nodes)), writing)
    held: list[Lifetime[Value | Node]] = []
    if with_ends:
        leaving = {*segment.over}
        copied = [value for value in segment.inputs if value not in segment.graph.states and _has_place(value, dtypes)]
        held.extend(Lifetime(value, value.tensor_type.nbytes, 0, last.get(value, 0)) for value in copied)
    else:
        leaving = {*segment.outputs}
    held.extend(result_lifetimes(segment.nodes, writing, leaving, last, dtypes))
    found = place(held)
    nbytes = found.nbytes
    if beside:
        outside = list(outside_of(segment, {one.key for one in held}, last))
        steps = len(segment.nodes) + 1
        nbytes = height(held, found, outside, steps, most_with(held, outside, steps))
        held = [one for one in held if found.offsets[one.key] + one.nbytes <= nbytes]
    slots = slots_of(held, found)
    inputs = {value: slots.pop(value) for value in segment.inputs if value in slots}
    nodes = tuple(node for node in segment.nodes if not slots.keys().isdisjoint(node.results))
    return ArenaLayout(nodes, slots, inputs, {}, nbytes, rows_of(held, found), steps_of(segment.nodes))


def joint_layout(
    segments: Sequence[Segment],
    elsewhere: Collection[Value],
    dtypes: "Set[np.dtype[Any]] | None",
    copied: Collection[Value],
) -> ArenaLayout:
    """Places for the results of segments that run one after the other, also of those that later ones read.

    Args:
        segments: in order; each runs once.
        elsewhere: values that others read, or that are held to the end: they have no place, and are no views of the
            arena when their segment has ended.
        dtypes: as `arena_layout` has them.
        copied: inputs that are copied to the arena when a segment that reads them begins.
    """
    nodes = tuple(node for segment in segments for node in segment.nodes)
    writing = frozenset(node for node in nodes if writes_out(node) or node.identity == SCAN)
    steps = steps_of(nodes)
    held_to = {value: steps[segment.nodes[-1]] for segment in segments for value in segment.outputs}
    last = last_steps(nodes, {value: step for value, step in held_to.items() if value in elsewhere}, writing)
    # What arrives is there before the first node runs.
    first = {value: max(0, steps[segment.nodes[0]] - 1) for segment in reversed(segments) for value in segment.inputs}
    over = {value for segment in segments for value in segment.over}
    arriving = (value for value in copied if value in first and _has_place(value, dtypes))
    held: list[Lifetime[Value | Node]] = [
        Lifetime(value, value.tensor_type.nbytes, first[value], last.get(value, first[value])) for value in arriving
    ]
    held.extend(result_lifetimes(nodes, writing, over.union(elsewhere), last, dtypes))
    # What the plan counts for kernels beside their results has room, and stays free: most need less.
    beside: list[Lifetime[Value | Node]] = []
    for step, node in enumerate(nodes):
        if not node.domain and (needed := needed_bytes(node) + nested_bytes(node) + nested_scratch(node)):
            beside.append(Lifetime(node, needed, step, step))
    found = place(held + beside)
    slots = slots_of(held, found)
    inputs = {value: slots.pop(value) for value in copied if value in slots}
    placed = tuple(node for node in nodes if not slots.keys().isdisjoint(node.results))
    carried = frozenset(held_to).difference(elsewhere)
    return ArenaLayout(placed, slots, inputs, {}, found.nbytes, rows_of(held, found), steps, carried=carried)


def result_lifetimes(
    nodes: Sequence[Node],
    writing: Collection[Node],
    leaving: Collection[Value],
    last: Mapping[Value, int],
    dtypes: "Set[np.dtype[Any]] | None" = None,
) -> Iterator[Lifetime[Value | Node]]:
    """The results of nodes that can have a place, and when they are held.

    Args:
        nodes: in order.
        writing: those that write into arrays that they are given.
        leaving: results that have no place.
        last: from `last_steps`.
        dtypes: those that results may have; None: all.
    """
    for step, node in enumerate(nodes):
        if node in writing:
            for value in node.results:
                if value not in leaving and _has_place(value, dtypes):
                    yield Lifetime(value, value.tensor_type.nbytes, step, last.get(value, step))


def slots_of(held: Iterable[Lifetime[Any]], found: Offsets[Any], begin: int = 0) -> dict[Value, Slot]:
    """Where values lie, in a block that begins at so many bytes."""
    return {
        one.key: Slot(begin + found.offsets[one.key], one.key.tensor_type.static_shape, one.key.dtype.numpy)
        for one in held
        if isinstance(one.key, Value)
    }


def rows_of(held: Iterable[Lifetime[Any]], found: Offsets[Any]) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """As `ArenaLayout.held`."""
    places = ((found.offsets[one.key], one) for one in held)
    rows = [(offset, offset + one.nbytes, one.first, one.last) for offset, one in places]
    return np.array(rows, np.int64).reshape(-1, 4).T


def steps_of(nodes: Iterable[Node]) -> dict[Node, int]:
    """When each node runs."""
    return {node: step for step, node in enumerate(nodes)}


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
    """Whether a result is of known size and not empty, and of one of some dtypes.

    Strings are objects of Python, which bytes cannot hold, and what ONNX packs takes a byte for each element in numpy.
    """
    type_ = tensor_type(value.type)
    if type_ is None or not type_.is_static or not type_.nbytes:
        return False
    dtype = type_.dtype
    if dtype is DType.STR or dtype.bits < 8:
        return False
    return dtypes is None or dtype.numpy in dtypes


def last_steps(nodes: Sequence[Node], held: Mapping[Value, int], writing: Collection[Node]) -> dict[Value, int]:
    """The step after which nothing reads a value, nor what may be a view of it: what nodes give that do not write.

    Args:
        nodes: in order.
        held: until when values are held at least.
        writing: those that write into arrays that they are given.
    """
    last = dict(held)
    for step, node in reversed(list(enumerate(nodes))):
        end = step if node in writing else max((last.get(value, step) for value in node.results), default=step)
        for value in captured_or_read(node):
            last[value] = max(last.get(value, end), end)
    return last


def taken(free: list[T]) -> T | None:
    """The last of what is free, of which runs beside each other take; None: there is none."""
    try:
        return free.pop()
    except IndexError:
        return None


class Arenas:
    """The arenas of the ranks of this process; runs beside each other have one each.

    Args:
        make: an arena of a rank, and of a size.
    """

    def __init__(self, make: Callable[[int, int], Arena]) -> None:
        self._make = make
        self._free: dict[int, list[Arena]] = {}

    def take(self, rank: int, nbytes: int, layout: ArenaLayout | None = None) -> Arena | None:
        """An arena of a rank that holds so many bytes, with what lies where in it for a program; None for none."""
        if not nbytes:
            return None
        free = self._free.setdefault(rank, [])
        found = taken(free)
        while found is not None and found.nbytes < nbytes:
            found = taken(free)
        if found is None:
            found = self._make(rank, nbytes)
        found.layout = layout
        found.of_program = NO_BUFFERS if layout is None else found.buffers(layout)
        return found

    def give_back(self, rank: int, arena: Arena | None) -> None:
        """Let others use an arena."""
        if arena is not None:
            self._free[rank].append(arena)

    def clear(self) -> None:
        """Let go of all that nobody uses."""
        self._free = {rank: [] for rank in self._free}
