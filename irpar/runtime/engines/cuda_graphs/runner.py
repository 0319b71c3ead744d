"""Running a segment for a rank: pieces by their CUDA graphs, what no graph can hold node by node."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from irpar.ir import Graph, Node, Value
from irpar.kernels import KernelError
from irpar.kernels.cuda.padding import copy_rows, has_rows_apart
from irpar.ops.effects import goes_to_group, is_compute
from irpar.runtime.communication import Choice, Communication
from irpar.runtime.engines.arena import Arena, ArenaLayout, with_states
from irpar.runtime.engines.bodies import Body, bring, run
from irpar.runtime.engines.device_arrays import DeviceArrays, Held, Notes
from irpar.runtime.engines.lanes import RankStream
from irpar.runtime.engines.operation import Environment
from irpar.runtime.instructions import Segment

from .graph import CapturedGraph, Exit
from .piece import CaptureError, Key, Origins, Piece, memory_of
from .stretches import Stretch, following, reasons_apart, stretches

SMALL_STATE_BYTES = 4096
"""State of more bytes is read where it lies, as long as it stays there."""
LARGE_INPUT_BYTES = 1 << 18
"""An input on the device of as many bytes is, too: a copy would take microseconds."""


@dataclass(frozen=True)
class Captured:
    """How much of a segment is captured.

    Attributes:
        pieces: stretches that are, each in a graph of its own.
        captured: nodes in these.
        eager: nodes that are computed one by one.
    """

    pieces: int
    captured: int
    eager: int


@dataclass(frozen=True, eq=False)
class Program:
    """A segment compiled for a device, for the runners of the ranks there.

    Attributes:
        segment: it.
        body: its nodes, ready to run.
        constants: on the device.
        on_host: values that lie on the host.
        is_whole: whether the segment runs once in a run of its program, so that what it gives to other segments may
            stay where it is.
        is_last: whether nothing of its program runs after it.
        talks: how it communicates; None: it does not.
        apart: nodes that no CUDA graph can hold, and why; more are found as the segment runs.
    """

    segment: Segment
    body: Body
    constants: Mapping[Value, Any]
    on_host: frozenset[Value]
    is_whole: bool
    is_last: bool
    talks: Communication | None = None
    apart: dict[Node, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.apart.update(reasons_apart(self.body.instructions, self.on_host))


class Runner:
    """Runs a segment for one rank; not for several threads at once.

    Args:
        program: the segment.
        layout: where results lie in an arena that has no layout for all segments.
        arrays: where arrays lie.
        notes: what is told of nodes that split a graph.
        keep_on_device: whether device arrays come in and go out.
        captures: whether CUDA graphs are made.
        lends: whether results of the program need be valid only until the next run, but for what replaces state.
    """

    def __init__(
        self,
        program: Program,
        layout: ArenaLayout,
        arrays: DeviceArrays,
        notes: Notes,
        keep_on_device: bool,
        captures: bool,
        lends: bool,
    ) -> None:
        self._program = program
        self._layout = layout
        self._arrays = arrays
        self._notes = notes
        self._keep_on_device = keep_on_device
        self._captures = captures
        segment = program.segment
        values = (*segment.inputs, *(value for node in segment.nodes for value in node.results))
        self._slots = {value: slot for slot, value in enumerate(dict.fromkeys(values))}
        self._inputs = len(segment.inputs)
        self._outputs = [self._slots[value] for value in segment.outputs]
        lasting = _replacing(segment.graph) if lends else segment.graph.outputs
        self._escaping = [not program.is_whole or _escapes(value, lasting) for value in segment.outputs]
        stays = lends and program.is_last
        self._inside = [stays and not escapes for escapes in self._escaping]
        self._bound = (self._steady_inputs() | {*layout.slots}) - {*layout.inputs}
        self._talks = program.talks
        self._numbers = count(Choice.GRAPH)
        self._longest = 0.0
        self._steps: list[Piece | Stretch] = []
        self._steps = self._begin()

    @property
    def captured(self) -> Captured:
        """How much is captured."""
        pieces = [step.stretch for step in self._steps if isinstance(step, Piece)]
        nodes = sum(len(stretch.instructions) for stretch in pieces)
        return Captured(len(pieces), nodes, len(self._program.body.instructions) - nodes)

    def replay(self, inputs: list[Any], arena: Arena | None, writes_over: bool, lane: RankStream) -> list[Any] | None:
        """What leaves the segment, where all of it is the graph that was replayed last; else None, and nothing done."""
        step = self._steps[0]
        if len(self._steps) > 1 or not isinstance(step, Piece) or self._talks is not None:
            return None
        graph = step.newest(inputs, arena, writes_over, self._layout_of(arena))
        return None if graph is None else graph.replay_whole(inputs, lane, self._copied)

    def run(self, held: list[Any], arena: Arena | None, writes_over: bool, lane: RankStream) -> list[Any]:
        """Compute the outputs of values for the inputs; the list is the runner's from here on."""
        held += [None] * (len(self._slots) - len(held))
        place = 0
        while place < len(self._steps):
            step = self._steps[place]
            if isinstance(step, Stretch):
                self._run_eagerly(step, held, arena, writes_over)
            elif not self._run_piece(step, held, arena, writes_over, lane):
                continue  # It was split: what is left of it comes next.
            place += 1
        return [held[slot] for slot in self._outputs]

    def leave(self, results: Sequence[Any], arena: Arena | None, lane: RankStream) -> list[Any]:
        """Results as other segments and the caller may keep them: not where a later run writes."""
        inside, carried = (None, ()) if arena is None else (memory_of(arena.memory), self._layout_of(arena).carried)
        outputs = zip(results, self._program.segment.outputs, self._escaping, self._inside, strict=True)
        return [
            self._leaving(array, escapes or arena is None, None if stays or value in carried else inside, lane)
            for array, value, escapes, stays in outputs
        ]

    def _layout_of(self, arena: Arena | None) -> ArenaLayout:
        """What lies where in the arena of a run."""
        return self._layout if arena is None or arena.layout is None else arena.layout

    def _leaving(self, value: Any, escapes: bool, inside: Any, lane: RankStream) -> Any:
        if isinstance(value, list):
            return [self._leaving(item, escapes, inside, lane) for item in value]
        if value is None or isinstance(value, Held):
            return value
        memory = memory_of(value)
        is_lent = memory is inside or (escapes and id(memory) in lane.lent)
        return self._copied(value, lane, lane.stream) if is_lent else value

    def _copied(self, array: Any, lane: RankStream, stream: Any) -> Any:
        """A copy of an array, made on the current stream, with rows one behind the other."""
        is_apart = not array.flags.c_contiguous
        if not array.size or (is_apart and not (self._arrays.gpu and has_rows_apart(array))):
            return array.copy(order="K")
        found = self._arrays.module.empty(array.shape, array.dtype)
        if is_apart:
            assert self._arrays.gpu is not None
            copy_rows(self._arrays.gpu(), *(each.reshape(-1, array.shape[-1]) for each in (array, found)))
        else:
            lane.copy(found.data.ptr, array.data.ptr, array.nbytes, stream)
        return found

    # -- steps ----------------------------------------------------------------------------------------------------

    def _begin(self) -> list[Piece | Stretch]:
        """All nodes, as stretches and pieces."""
        program = self._program
        if program.talks is not None and program.apart:
            self._set_apart_communication("other nodes split the graph")
        apart = program.apart if self._captures else {*program.segment.nodes}
        found = stretches(program.body.instructions, apart, program.on_host, program.segment.over)
        return self._pieces(found, was_run=False, is_all=len(found) == 1)

    def _pieces(self, found: Sequence[Stretch], was_run: bool, is_all: bool) -> list[Piece | Stretch]:
        self._bound.update(value for stretch in found if stretch.is_captured for value in stretch.makes)
        return [
            Piece(stretch, self._slots, self._origins(stretch, found, is_all), self._arrays, was_run)
            if stretch.is_captured
            else stretch
            for stretch in found
        ]

    def _origins(self, stretch: Stretch, beside: Sequence[Stretch], is_all: bool) -> Origins:
        on_host, segment = self._program.on_host, self._program.segment
        read = (value for value in stretch.reads if value in on_host)
        read_there = (value for value in read if next(following(stretch.instructions, value, on_host), None))
        # What is copied to the host before another run begins may lie anywhere.
        leaving = segment.outputs if self._keep_on_device else ()
        inside = (value for value, stays in zip(segment.outputs, self._inside, strict=True) if stays)
        read_later = self._read_beside(stretch, beside)
        copied = (value for value, escapes in zip(segment.outputs, self._escaping, strict=True) if escapes)
        owned = (value for value in copied if value not in read_later)
        taken = owned if self._keep_on_device else segment.outputs if is_all else ()
        return Origins(
            frozenset(read_there),
            frozenset(self._bound),
            frozenset(segment.graph.states),
            frozenset(leaving),
            frozenset(inside),
            frozenset(taken),
        )

    def _read_beside(self, stretch: Stretch, beside: Sequence[Stretch]) -> set[Value]:
        """What steps but one read, of which some may have been cut from a piece just now."""
        steps = (step.stretch if isinstance(step, Piece) else step for step in self._steps)
        return {value for other in (*steps, *beside) if other is not stretch for value in other.reads}

    def _steady_inputs(self) -> set[Value]:
        """The inputs that lie where they lay in the last run, as a rule: state, what other segments give, large ones.

        State that is small is not: what is not written over moves, and a copy of it costs nothing.
        """
        program, segment = self._program, self._program.segment
        if not self._keep_on_device:
            return set()
        states = {value for value in segment.inputs if value in segment.graph.states}
        states = {value for value in states if value in segment.steady or value.tensor_type.nbytes > SMALL_STATE_BYTES}
        computed = {value for value in segment.inputs if value.node is not None and is_compute(value.node)}
        given = {value for value in segment.inputs if value.node is None and value not in segment.graph.states}
        large = {value for value in given if value.is_static and value.tensor_type.nbytes >= LARGE_INPUT_BYTES}
        return states | computed | large if program.is_whole else states

    def _run_eagerly(self, stretch: Stretch, held: list[Any], arena: Arena | None, writes_over: bool) -> None:
        environment = self._environment(arena)
        for value in stretch.reads:
            slot = self._slots[value]
            if slot < self._inputs:
                held[slot] = self._arrays.enter(held[slot], value in self._program.on_host)
            environment[value] = held[slot]
        for value in stretch.frees:
            held[self._slots[value]] = None
        own: dict[Value, Any] = {}
        if writes_over:
            states = {value: environment[state] for value, state in self._over(stretch).items()}
            own = {value: state for value, state in states.items() if self._arrays.is_own(state)}
            environment.into = with_states(environment.into, (one.node for one in stretch.instructions), own)
            del states
        run(stretch.instructions, environment, self._arrays)
        bring(environment, own, self._arrays)
        for value in stretch.makes:
            held[self._slots[value]] = environment[value]

    def _environment(self, arena: Arena | None) -> Environment:
        into = {} if arena is None else arena.buffers(self._layout_of(arena)).into
        return Environment(self._program.constants, into)

    def _over(self, stretch: Stretch) -> dict[Value, Value]:
        """The results of a stretch that may be written over a state, and that state."""
        over = self._program.segment.over
        made = (value for one in stretch.instructions for value in one.results)
        return {value: over[value] for value in made if value in over}

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _run_piece(
        self, piece: Piece, held: list[Any], arena: Arena | None, writes_over: bool, lane: RankStream
    ) -> bool:
        """Run a piece; False if it was split instead."""
        layout = self._layout_of(arena)
        key = piece.key(held, writes_over, layout)
        graph = piece.find(key, arena)
        if graph is None and piece.note_moves(key):
            key = piece.key(held, writes_over, layout)
            graph = piece.find(key, arena)
        if self._talks is not None:
            return self._run_together(self._talks, piece, key, graph, held, arena, writes_over, lane)
        if piece.changing is not None:
            self._set_apart_what_follows(piece.changing)
            return self._split(piece)
        if graph is None:
            is_worth = piece.is_worth(key)  # It counts, also of a first run, whose state comes from the host.
            if not piece.can_bind(held) or not is_worth:
                self._run_eagerly(piece.stretch, held, arena, writes_over)
                return True
            try:
                graph = self._capture(piece, key, held, arena, writes_over, lane)
            except CaptureError as error:
                self._set_apart(piece, error)
                return self._split(piece)
            except MemoryError:
                piece.lacks_room()
                self._run_eagerly(piece.stretch, held, arena, writes_over)
                return True
        graph.replay(held, lane)
        self._after(piece, held, arena, lane)
        return True

    def _after(self, piece: Piece, held: list[Any], arena: Arena | None, lane: RankStream) -> None:
        """Copy what is the caller's, before anything else writes there, and let go of what nothing reads any more."""
        if self._keep_on_device:
            inside = None if arena is None else memory_of(arena.memory)
            for value in piece.taken:
                slot = self._slots[value]
                held[slot] = self._leaving(held[slot], True, inside, lane)
        for value in piece.stretch.frees:
            held[self._slots[value]] = None

    # -- with other ranks -----------------------------------------------------------------------------------------

    def _run_together(
        self,
        talks: Communication,
        piece: Piece,
        key: Key,
        graph: CapturedGraph | None,
        held: list[Any],
        arena: Arena | None,
        writes_over: bool,
        lane: RankStream,
    ) -> bool:
        """Run a piece that communicates as all ranks do: by their graphs, or one collective after the other."""
        agreed = talks.agree(self._choice(piece, key, graph, held))
        if agreed == Choice.ONE_BY_ONE:
            with self._timed():
                self._run_eagerly(piece.stretch, held, arena, writes_over)
            return True
        if agreed == Choice.CAPTURE:
            graph = self._capture_together(talks, piece, key, held, arena, writes_over, lane)
        if agreed == Choice.NEVER or graph is None:
            self._set_apart_communication("not all ranks could capture it")
            return self._split(piece)
        with self._timed():
            graph.replay(held, lane)
            talks.replayed(graph.entries, lane.stream, 2 * self._longest)
        self._after(piece, held, arena, lane)
        return True

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Note how long a run with other ranks takes, of which a later one may take twice as long."""
        begun = time.monotonic()
        yield
        self._longest = max(self._longest, time.monotonic() - begun)

    def _choice(self, piece: Piece, key: Key, graph: CapturedGraph | None, held: list[Any]) -> int:
        """What this rank can do."""
        if piece.changing is not None:
            return Choice.NEVER
        if graph is not None:
            return graph.number
        is_worth = piece.is_worth(key)
        return Choice.CAPTURE if piece.can_bind(held) and is_worth else Choice.ONE_BY_ONE

    def _capture_together(
        self,
        talks: Communication,
        piece: Piece,
        key: Key,
        held: list[Any],
        arena: Arena | None,
        writes_over: bool,
        lane: RankStream,
    ) -> CapturedGraph | None:
        """A graph that all ranks have captured; None: one of them could not."""
        graph: CapturedGraph | None = None
        talks.take_captured()
        try:
            graph = self._capture(piece, key, held, arena, writes_over, lane)
        except CaptureError as error:
            self._notes.add_apart(error.node or piece.stretch.instructions[0].node, _reason(error))
        except MemoryError:
            piece.lacks_room()
        agreed, number = talks.agree(Choice.NEVER if graph is None else Choice.CAPTURE), next(self._numbers)
        if graph is None or agreed == Choice.NEVER:
            return None
        graph.number, graph.entries = number, talks.take_captured()
        talks.group.add_graph(graph)
        return graph

    def _set_apart_communication(self, reason: str) -> None:
        """Note that the collectives run one by one, which no rank asks the others about."""
        self._talks = None
        nodes = (one.node for one in self._program.body.instructions)
        self._program.apart.update({node: reason for node in nodes if goes_to_group(node)})

    def _capture(
        self, piece: Piece, key: Key, held: list[Any], arena: Arena | None, writes_over: bool, lane: RankStream
    ) -> CapturedGraph:
        over = self._over(piece.stretch) if writes_over else {}
        graph = piece.capture(key, held, self._environment(arena), self._layout_of(arena), over, arena, lane)
        for node, reason in tuple(self._program.apart.items()):
            self._notes.add_apart(node, reason)
        if len(self._steps) == 1 and self._keep_on_device:
            graph.exits = self._exits(graph, arena, lane)
        return graph

    def _exits(self, graph: CapturedGraph, arena: Arena | None, lane: RankStream) -> list[Exit] | None:
        """What leaves the segment with a graph of all of it; None where some of it lies on the host."""
        made, sources = dict(graph.results), dict(graph.echoes)
        found = []
        for slot, escapes in zip(self._outputs, self._escaping, strict=True):
            array = made.get(slot)
            if isinstance(array, Held):
                return None
            if array is None:
                found.append(Exit(None, sources[slot], is_copied=False))
                continue
            is_copied = (escapes or arena is None) and id(memory_of(array)) in lane.lent
            found.append(Exit(array, slot, is_copied))
        return found

    def _set_apart(self, piece: Piece, error: CaptureError) -> None:
        """Note which node a capture failed at, or that all of them did."""
        nodes = [one.node for one in piece.stretch.instructions] if error.node is None else [error.node]
        self._program.apart.update(dict.fromkeys(nodes, _reason(error)))

    def _set_apart_what_follows(self, value: Value) -> None:
        """Note the nodes for which the host reads numbers that are others all the time."""
        nodes = following(self._program.body.instructions, value, self._program.on_host)
        reason = f"the host reads %{value.name} for it, whose numbers change"
        self._program.apart.update(dict.fromkeys(nodes, reason))

    def _split(self, piece: Piece) -> bool:
        """Cut a piece where nodes have been set apart since."""
        place = self._steps.index(piece)
        program = self._program
        found = stretches(piece.stretch.instructions, program.apart, program.on_host, program.segment.over)
        self._steps[place : place + 1] = self._pieces(found, was_run=True, is_all=False)
        return False


def _escapes(value: Value, outputs: Sequence[Value]) -> bool:
    """Whether a value, or what collectives give of it, which may be itself, outlives a run of its program."""
    if value in outputs:
        return True
    sent = (node for node in value.users if not is_compute(node))
    return any(_escapes(result, outputs) for node in sent for result in node.results)


def _replacing(graph: Graph) -> list[Value]:
    """The results of a program that replace its state."""
    return [graph.outputs[state.output] for state in graph.states.values() if state.output is not None]


def _reason(error: CaptureError) -> str:
    cause = error.__cause__
    if isinstance(cause, KernelError) and cause.__cause__ is not None:
        cause = cause.__cause__
    text = str(cause).strip().splitlines()
    return text[0] if text else type(cause).__name__
