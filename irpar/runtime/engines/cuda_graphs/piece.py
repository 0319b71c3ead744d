"""A stretch of a segment that is captured, for one rank: its CUDA graphs, by what comes in."""

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from irpar.analysis.engines import writes_out
from irpar.ir import Node, Value, tensor_type
from irpar.kernels.cuda import padding
from irpar.ops.effects import is_compute
from irpar.runtime.engines.arena import Arena, ArenaLayout, with_states
from irpar.runtime.engines.bodies import Instruction, bring
from irpar.runtime.engines.control_flow import SCAN
from irpar.runtime.engines.device_arrays import DEVICE_DTYPES, DeviceArrays, Held, PlacedKernel, place_of
from irpar.runtime.engines.lanes import RankStream
from irpar.runtime.engines.operation import Environment

from .graph import CapturedGraph, CopiedInput
from .recording import Recording
from .stretches import Stretch

GRAPHS = 8
"""Graphs that are kept of a piece: as many shapes as a server's batches or a schedule of sequence lengths come in."""
REPLAYS = 10
"""What is captured pays if it is replayed so often: changes with as many replays between them do not add up."""
MOVES = 3
"""An operand that lay elsewhere so often is copied to a place of the graph's from then on."""
STAYS = 10
"""An operand that was copied from one place in so many replays in a row is read there, until it lies elsewhere."""
WATCHED = 64
"""Replays in which that is looked at."""
CHANGES = 8
"""Numbers that the host reads, and that were others so often, are no part of what is captured from then on."""
CAPTURES = 32
"""A piece that was captured so often is captured again only if it was replayed `REPLAYS` times for each capture."""
_SEEN = 64
_PRODUCTS = {("", "MatMul"): 2, ("", "Gemm"): 2, ("irpar", "FusedMatMul"): 3}
"""Matrix products, and which of their operands may be more than a number for each column."""


class CaptureError(Exception):
    """A capture failed; its cause says why.

    Attributes:
        node: where; None: the graph as a whole was refused.
    """

    def __init__(self, node: Node | None) -> None:
        super().__init__()
        self.node = node


class Key(NamedTuple):
    """What a graph is captured for.

    Attributes:
        places: the arrays that it reads where they lie.
        shapes: of what is copied to it, the numbers that the host reads, and what lies where in the arena.
    """

    places: tuple[int, ...]
    shapes: Hashable


class Origins(NamedTuple):
    """Where the operands of a piece come from.

    Attributes:
        on_host: the host reads their numbers.
        bound: they lie where they lay in the last run, as a rule.
        states: those of them that are state, which is on the device from its first run on.
        leaving: what leaves the segment on the device.
        inside: what of it may lie in the arena.
        taken: what is copied from where it lies before anything else is captured or replayed.
    """

    on_host: frozenset[Value]
    bound: frozenset[Value]
    states: frozenset[Value]
    leaving: frozenset[Value]
    inside: frozenset[Value]
    taken: frozenset[Value]


class Piece:
    """The graphs of a stretch for one rank.

    Args:
        stretch: it.
        slots: where each value stands in what the rank holds.
        origins: where its operands come from.
        arrays: where arrays lie.
        was_run: whether it has been run, so that all that it needs is compiled.

    Attributes:
        stretch: as given.
        taken: of what it makes, see `Origins.taken`.
        changing: an operand whose numbers the host reads, and which were others too often; None: there is none.
    """

    def __init__(
        self, stretch: Stretch, slots: Mapping[Value, int], origins: Origins, arrays: DeviceArrays, was_run: bool
    ) -> None:
        self.stretch = stretch
        self.taken = origins.taken.intersection(stretch.makes)
        self._slots = slots
        self._origins = origins
        self._arrays = arrays
        self._was_run = was_run
        self._on_host = [value for value in stretch.reads if value in origins.on_host]
        self._bound = [value for value in stretch.reads if value in origins.bound - origins.on_host]
        self._graphs: weakref.WeakKeyDictionary[object, OrderedDict[Key, CapturedGraph]] = weakref.WeakKeyDictionary()
        self._seen: dict[Hashable, None] = {}
        self._last: Key | None = None
        self._newest: tuple[Key | None, Callable[[], CapturedGraph | None], Callable[[], Arena | None]]
        self._newest = None, _nothing, _nothing
        self._numbers: list[bytes] = []
        self._captures = self._replays = 0
        self._moved: Counter[Value] = Counter()
        self._changed: Counter[Value] = Counter()
        self._settled: set[Value] = set()
        self._replays_before = 0
        self.changing: Value | None = None
        self._choose()

    def _choose(self) -> None:
        """Say where each kind of operand stands."""
        apart = {*self._on_host, *self._bound}
        self._copied = [value for value in self.stretch.reads if value not in apart]
        self._copied_slots = [self._slots[value] for value in self._copied]
        self._host_slots = [self._slots[value] for value in self._on_host]
        self._take_bound = _taker([self._slots[value] for value in self._bound])
        self._take_copied = _taker(self._copied_slots)
        self._copied_from: tuple[int, ...] = ()
        self._stays, self._watched = 0, WATCHED if self._copied else 0

    # -- choosing a graph -----------------------------------------------------------------------------------------

    def key(self, held: list[Any], writes_over: bool, layout: ArenaLayout) -> Key:
        """What a graph must have been captured for, to be replayed on what a rank holds."""
        copied = [held[slot] for slot in self._copied_slots]
        shapes: list[Hashable] = [writes_over, layout]
        for value in copied:
            array = value.host if isinstance(value, Held) else value
            shapes += (array.shape, array.dtype)
        if self._host_slots:
            shapes += self._read_numbers(held)
        return Key(tuple(map(id, self._take_bound(held))), tuple(shapes))

    def _read_numbers(self, held: list[Any]) -> list[Hashable]:
        found: list[Hashable] = []
        numbers: list[bytes] = []
        for slot in self._host_slots:
            array = self._arrays.host(held[slot])
            held[slot] = held[slot] if isinstance(held[slot], Held) else Held(array)
            numbers.append(array.tobytes())
            found += (array.shape, array.dtype, numbers[-1])
        self._note_changes(numbers)
        return found

    def _note_changes(self, numbers: list[bytes]) -> None:
        for value, before, now in zip(self._on_host, self._numbers, numbers, strict=False):
            if before != now:
                self._forgive()
                self._changed[value] += 1
                if self._changed[value] > CHANGES:
                    self.changing = value
        self._numbers = numbers

    def _forgive(self) -> None:
        """Forget moves and changes that many replays came after."""
        if self._replays - self._replays_before >= REPLAYS:
            self._moved.clear()
            self._changed.clear()
        self._replays_before = self._replays

    def find(self, key: Key, arena: Arena | None) -> CapturedGraph | None:
        """The graph for a key, that is replayed then."""
        graphs = self._graphs.get(self if arena is None else arena)
        found = None if graphs is None else graphs.get(key)
        if found is None or graphs is None:
            return None
        if not found.is_alive:
            del graphs[key]
            return None
        graphs.move_to_end(key)
        self._newest = key, weakref.ref(found), _nothing if arena is None else weakref.ref(arena)
        self._replays += 1
        self._last = key
        return found

    def newest(
        self, held: list[Any], arena: Arena | None, writes_over: bool, layout: ArenaLayout
    ) -> CapturedGraph | None:
        """The graph that was replayed last, if it is the one for what a rank holds; waits for no device."""
        key, find, of_arena = self._newest
        graph = find()
        if graph is None or not graph.is_alive or of_arena() is not arena:
            return None
        if any(not isinstance(held[slot], np.ndarray) for slot in self._host_slots):
            return None
        if key != self.key(held, writes_over, layout) or (self._watched and self._has_settled(held)):
            return None
        self._replays += 1
        return graph

    def _has_settled(self, held: list[Any]) -> bool:
        """Read from now on where it lies what stays there; whether there is such, so that the key is another."""
        arrays = self._take_copied(held)
        before, self._copied_from = self._copied_from, tuple(map(id, arrays))
        self._stays = self._stays + 1 if before == self._copied_from else 0
        self._watched -= 1
        if self._stays < STAYS:
            return False
        kind = self._arrays.module.ndarray
        found = {
            value
            for value, array in zip(self._copied, arrays, strict=True)
            if isinstance(array, kind)
            and array.flags.c_contiguous
            and value not in self._origins.states | self._settled
        }
        if found:
            self._settled |= found
            self._bound = [value for value in self.stretch.reads if value in found.union(self._bound)]
            self._was_run = True
            self._choose()
        self._watched = 0
        return bool(found)

    def is_worth(self, key: Key) -> bool:
        """Whether to capture a graph for a key: when it comes again, unless others came all the time."""
        is_known = self._was_run or key.shapes in self._seen
        self._was_run = False
        self._seen[key.shapes] = None
        if len(self._seen) > _SEEN:
            del self._seen[next(iter(self._seen))]
        return is_known and (self._captures < CAPTURES or self._replays > REPLAYS * self._captures)

    def can_bind(self, held: list[Any]) -> bool:
        """Whether what is read where it lies does lie on the device; what often does not is copied there."""
        kind, arrays = self._arrays.module.ndarray, self._take_bound(held)
        elsewhere = [value for value, array in zip(self._bound, arrays, strict=True) if not isinstance(array, kind)]
        if elsewhere:
            self._forgive()
            self._moved.update({value: MOVES for value in elsewhere if value not in self._origins.states})
            self._count_moves(elsewhere)
        return not elsewhere

    def lacks_room(self) -> None:
        """Note that a capture found no room, which is tried once more and then no longer."""
        self._captures += CAPTURES // 2

    def note_moves(self, key: Key) -> bool:
        """Copy from now on what lies elsewhere too often; whether there is such, so that the key is another."""
        last, self._last = self._last, key
        if last is None or last.shapes != key.shapes or len(last.places) != len(key.places):
            return False
        pairs = zip(self._bound, last.places, key.places, strict=True)
        moved = [value for value, before, now in pairs if before != now]
        if moved:
            self._forgive()
        return self._count_moves(moved)

    def _count_moves(self, moved: Iterable[Value]) -> bool:
        """Count that operands lay elsewhere; whether some are copied from now on."""
        moved = {*moved}
        self._moved.update(moved)
        left = self._settled & moved
        bound = [value for value in self._bound if self._moved[value] < MOVES and value not in left]
        if len(bound) == len(self._bound):
            return False
        self._bound, self._was_run = bound, True
        self._choose()
        return True

    # -- capturing ------------------------------------------------------------------------------------------------

    def capture(
        self,
        key: Key,
        held: list[Any],
        environment: Environment,
        layout: ArenaLayout,
        over: Mapping[Value, Value],
        arena: Arena | None,
        lane: RankStream,
    ) -> CapturedGraph:
        """Capture a graph.

        Args:
            key: what it is for.
            held: what the rank holds.
            environment: constants, and where results go.
            layout: where results lie in the arena, and what is copied there.
            over: results that are written over a state.
            arena: of the run.
            lane: the stream.

        Raises:
            CaptureError: the stretch cannot be captured.
            MemoryError: there is no room.
        """
        self._captures += 1
        rooms = {} if arena is None else arena.buffers(layout).inputs
        copied = [
            CopiedInput(slot, self._room(held[slot], rooms.get(value)))
            for value, slot in zip(self._copied, self._copied_slots, strict=True)
        ]
        bound = list(self._take_bound(held))
        environment.update(zip(self._copied, (array for _, array in copied), strict=True))
        environment.update(zip(self._bound, bound, strict=True))
        for value, slot in zip(self._on_host, self._host_slots, strict=True):
            environment[value] = Held(self._arrays.host(held[slot]).copy())
        states = {value: environment[state] for value, state in over.items()}
        replaced = {value: state for value, state in states.items() if self._arrays.is_own(state)}
        into = {**environment.into, **self._room_for_results(environment.into, replaced.keys())}
        environment.into = with_states(into, (one.node for one in self.stretch.instructions), replaced)
        recording = self._record(environment, replaced, layout, arena, lane)
        made = [(self._slots[value], environment[value]) for value in self.stretch.makes]
        places = {place_of(array): self._slots[value] for value, array in zip(self._bound, bound, strict=True)}
        echoes = [(slot, places[place_of(array)]) for slot, array in made if place_of(array) in places]
        results = [(slot, array) for slot, array in made if place_of(array) not in places]
        inside = {id(memory_of(array)) for array in bound}
        own = [array for _, array in (*copied, *results) if not isinstance(array, Held)]
        lane.lent |= {id(memory_of(array)) for array in own} - inside
        graph = CapturedGraph(recording.graph, copied, bound, results, echoes, recording.kept)
        self._keep(key, graph, arena)
        return graph

    def _record(
        self,
        environment: Environment,
        replaced: Mapping[Value, Any],
        layout: ArenaLayout,
        arena: Arena | None,
        lane: RankStream,
    ) -> Recording:
        """Capture the nodes; what they make that outlives a replay is brought to where it may stay."""
        stays = {id(memory_of(array)) for array in environment.values() if not isinstance(array, Held)}
        stays |= {id(memory_of(array)) for array in _flat(environment.into.values())}
        outside = stays - (set() if arena is None else {id(memory_of(arena.memory))})
        leaving = self._origins.leaving - self._origins.inside - layout.carried
        node = None
        try:
            with lane.captured() as recording:
                for one in self.stretch.instructions:
                    node = one.node
                    self._run(one, environment, layout, arena, recording)
                node = None
                bring(environment, replaced, self._arrays)
                for value in self.stretch.makes:
                    if isinstance(environment[value], Held):
                        environment[value].host.flags.writeable = False  # All replays give it.
                        continue
                    array, fitting = environment[value], outside if value in leaving else stays
                    if id(memory_of(array)) not in fitting and value not in self._origins.taken:
                        with recording.apart():
                            environment[value] = array.copy(order="K")
        except MemoryError:
            raise
        except Exception as error:
            raise CaptureError(node) from error
        return recording

    def _run(
        self, one: Instruction, environment: Environment, layout: ArenaLayout, arena: Arena | None, recording: Recording
    ) -> None:
        """Run a node; what its kernel makes beside results that have their places lies where the arena is free then."""
        places = _flat([environment.into.get(one.node)])
        is_kernel = isinstance(one.operation, PlacedKernel) or one.node.identity == SCAN
        if arena is None or not is_kernel or len(places) < len(one.results):
            one.run(environment)
            return
        with recording.lending(arena, layout.free_beside(one.node, arena.nbytes)) as lent:
            one.run(environment)
        for value, place in zip(one.results, places, strict=True):  # Not all kernels write where they are told.
            array = environment.get(value)
            if array is None or isinstance(array, Held) or not lent.holds(array):
                continue
            if (place.shape, place.dtype) == (array.shape, array.dtype):
                place[...] = array
                environment[value] = place
            else:
                environment[value] = array.copy(order="K")

    def _room(self, value: Any, room: Any) -> Any:
        """Where an input is copied to: `room`, where it fits there."""
        array = value.host if isinstance(value, Held) else value
        if room is not None and (room.shape, room.dtype) == (array.shape, array.dtype):
            return room
        return self._arrays.module.empty(array.shape, array.dtype)

    def _room_for_results(self, into: Mapping[Node, Any], replacing: Set[Value]) -> dict[Node, Any]:
        """Where results go that outlive a replay, and have no place in the arena nor replace a state."""
        wanted = {*self.stretch.makes} - replacing
        found: dict[Node, Any] = {}
        for one in self.stretch.instructions:
            if wanted.isdisjoint(one.results) or not _may_write(one):
                continue
            given = into.get(one.node)
            places = (
                [None] * len(one.results) if given is None else list(given) if isinstance(given, tuple) else [given]
            )
            rooms = [
                self._room_of(one.node, value) if place is None and value in wanted else place
                for value, place in zip(one.results, places, strict=True)
            ]
            if any(room is not None for room in rooms):
                found[one.node] = rooms[0] if len(rooms) == 1 else tuple(rooms)
        return found

    def _room_of(self, node: Node, value: Value) -> Any:
        type_ = tensor_type(value.type)
        if type_ is None or not type_.is_static or not type_.nbytes or type_.dtype.numpy not in DEVICE_DTYPES:
            return None
        module, shape, dtype = self._arrays.module, type_.static_shape, type_.dtype.numpy
        # A group would copy rows that lie further apart.
        is_apart = value in self._origins.leaving and all(is_compute(user) or user.is_return for user in value.users)
        room = padding.pitched(module, shape, dtype, _terms(node)) if is_apart else None
        return module.empty(shape, dtype) if room is None else room

    def _keep(self, key: Key, graph: CapturedGraph, arena: Arena | None) -> None:
        graphs = self._graphs.setdefault(self if arena is None else arena, OrderedDict())
        graphs[key] = graph
        for old in [known for known, other in graphs.items() if not other.is_alive]:
            del graphs[old]
        while len(graphs) > GRAPHS:
            graphs.popitem(last=False)


def _may_write(one: Instruction) -> bool:
    """Whether a node can write its results into arrays that it is given; else they are copied there."""
    return writes_out(one.node) or (isinstance(one.operation, PlacedKernel) and one.operation.writes_out)


def _terms(node: Node) -> int:
    """How many terms each element of a product with one matrix sums up; 0: a node is no such product, or adds to it."""
    added = _PRODUCTS.get((node.domain, node.op_type))
    if added is None or any(operand is not None for operand in node.operands[added:]):
        return 0
    types = [tensor_type(operand.type) for operand in node.inputs[:2]]
    shapes = [type_.static_shape for type_ in types if type_ is not None and type_.is_static]
    if len(shapes) < 2 or len(shapes[0]) < 2 or len(shapes[1]) != 2:
        return 0
    return shapes[0][-2 if node.attributes.get("transA") else -1]


def _nothing() -> None:
    """What a reference to nothing gives."""


def memory_of(array: Any) -> Any:
    """The memory that a device array lies in, which views share."""
    return array.data.mem


def _flat(arrays: Iterable[Any]) -> list[Any]:
    """The arrays that nodes write to, those of nodes with several too."""
    found: list[Any] = []
    for array in arrays:
        found += array if isinstance(array, tuple) else [array]
    return [array for array in found if array is not None]


def _taker(slots: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """What takes the arrays of some slots of a list."""
    if len(slots) > 1:
        return itemgetter(*slots)
    return lambda held: tuple(held[slot] for slot in slots)
