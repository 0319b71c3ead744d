"""Programs compiled for the parts that run them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from irpar.ir import Function, Graph, Node, Value
from irpar.ops.coords import COORDS
from irpar.ops.memory_copies import space_problems
from irpar.output.parts import Part
from irpar.sharding import IrparError, nearest_names

from .engines.arena import ArenaLayout
from .engines.base import CompiledSegment, Constants, Engine
from .errors import EngineError, InputError, ProgramError
from .instructions import Program, Segment
from .layout import TensorSpec
from .program import build_program
from .specs import program_inputs, spec_of
from .tape import Tape

Key = tuple[int, tuple[Node, ...], tuple[Value, ...], frozenset[Value]]


class PlacedInput(NamedTuple):
    """An input, and in which place of a rank's values it stands."""

    name: str
    place: int
    value: Value


class NextStates(NamedTuple):
    """What replaces states.

    Attributes:
        names: of those states that computed values replace.
        places: where these values stand.
        constants: name to constant of the others.
    """

    names: tuple[str, ...]
    places: tuple[int, ...]
    constants: dict[str, Value]


@dataclass(frozen=True, eq=False)
class PreparedPart:
    """A part with its program, and that made ready to run; and what a run reads and gives, found once."""

    part: Part
    program: Program
    constants: Constants
    tape: Tape

    @cached_property
    def inputs(self) -> tuple[PlacedInput, ...]:
        """The inputs that a user may give."""
        places = self.tape.places
        return tuple(PlacedInput(name, places[value], value) for name, value in program_inputs(self.part.graph).items())

    @cached_property
    def given(self) -> tuple[PlacedInput, ...]:
        """Those that are no state."""
        return tuple(one for one in self.inputs if one.value not in self.part.graph.states)

    @cached_property
    def coords(self) -> int | None:
        """Where a rank's coordinates stand; None: the program does not read them."""
        return next((self.tape.places[value] for value in self.part.graph.inputs if value.name == COORDS), None)

    @cached_property
    def state_places(self) -> dict[str, int]:
        """Where each state stands, by name."""
        return {one.name: one.place for one in self.inputs if one.value in self.part.graph.states}

    @cached_property
    def outputs(self) -> dict[str, Value]:
        """The results, by name."""
        return dict(zip(self.part.graph.output_names, self.part.graph.outputs, strict=True))

    @cached_property
    def next_states(self) -> NextStates:
        """What replaces the states that are replaced."""
        graph, places = self.part.graph, self.tape.places
        replaced = {state.source_name: known.output for state, known in graph.states.items()}
        found = {name: graph.output(output) for name, output in replaced.items() if output is not None}
        constants = {name: value for name, value in found.items() if value.is_constant}
        names = tuple(name for name in found if name not in constants)
        return NextStates(names, tuple(places[found[name]] for name in names), constants)


@dataclass(frozen=True, eq=False)
class Prepared:
    """All parts, ready to run.

    Attributes:
        parts: in order of the executor's parts.
        fetched: name to the value of each graph that has it.
    """

    parts: tuple[PreparedPart, ...]
    fetched: dict[str, dict[Graph, Value]]

    def specs(self, graph: Graph) -> list[TensorSpec]:
        """What is fetched, as `graph` has it, or else as another graph does."""
        return [
            spec_of(values.get(graph) or next(iter(values.values())), name) for name, values in self.fetched.items()
        ]


class Preparer:
    """Builds programs and compiles segments; equal segments of one part are compiled once.

    Args:
        parts: of the ranks of this process.
        engine: what compiles.
        hosts: what compiles what is computed on the host: of several the first that can.
        joins: see `build_program`; not for programs of which values are fetched, which other ranks may not have.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        engine: Engine,
        hosts: Sequence[Engine] = (),
        joins: Callable[[Node], bool] | None = None,
    ) -> None:
        self._parts = tuple(parts)
        self._engine, self._hosts = engine, tuple(hosts)
        self._joins = joins
        self._constants = tuple(Constants(part) for part in self._parts)
        self._base: dict[Key, CompiledSegment] = {}

    def prepare(self) -> Prepared:
        """The programs as they are."""
        return self._prepare({}, self._base)

    def prepare_fetch(self, names: Iterable[str]) -> Prepared:
        """The programs with values kept that are named by their source (or own) name.

        Raises:
            InputError: no program has such a value.
        """
        graphs = tuple(dict.fromkeys(part.graph for part in self._parts))
        fetched = {name: find_value(graphs, name) for name in names}
        return self._prepare(fetched, dict(self._base))

    def _prepare(self, fetched: dict[str, dict[Graph, Value]], known: dict[Key, CompiledSegment]) -> Prepared:
        programs: dict[Graph, Program] = {}
        layouts: dict[Graph, ArenaLayout | None] = {}
        functions: dict[Function, Program] = {}
        parts = []
        for part, constants in zip(self._parts, self._constants, strict=True):
            program = programs.get(part.graph)
            if program is None:
                extra = [values[part.graph] for values in fetched.values() if part.graph in values]
                program = programs[part.graph] = build_program(
                    part.graph,
                    extra,
                    functions,
                    writes_over=self._engine.writes_over,
                    adds_in_place=self._engine.adds_in_place == "all",
                    joins=None if fetched else self._joins,
                )
            compiled = {segment: self._compile(part, segment, constants, known) for segment in program.segments}
            if part.graph not in layouts:
                layouts[part.graph] = self._engine.layout(program, compiled)
            parts.append(PreparedPart(part, program, constants, Tape(program, compiled, layouts[part.graph])))
        return Prepared(tuple(parts), fetched)

    def _compile(
        self, part: Part, segment: Segment, constants: Constants, known: dict[Key, CompiledSegment]
    ) -> CompiledSegment:
        key = (part.index, segment.nodes, segment.outputs, frozenset(segment.over))
        found = known.get(key)
        if found is None:
            found = known[key] = self._compiled(segment, constants)
        return found

    def _compiled(self, segment: Segment, constants: Constants) -> CompiledSegment:
        if segment.place == "device":
            return self._engine.compile(segment, constants)
        first, *others = self._hosts
        try:
            return first.compile(segment, constants)
        except EngineError:
            for engine in others:
                return engine.compile(segment, constants)
            raise


def find_value(graphs: Sequence[Graph], name: str) -> dict[Graph, Value]:
    """The value of that source name in each graph that has it: the first in order, so as its producer makes it.

    A value's own name, and the name of a graph's result, count where nothing has the source name. A graph of ranks that
    hold no elements of it may have only what is made of it later, which is sharded otherwise: that one does not count.

    Raises:
        InputError: no graph has it; the message lists the nearest names.
    """
    found: dict[Graph, Value] = {}
    for graph in graphs:
        value = _find(graph, name)
        if value is not None and all(value.sharding == other.sharding for other in found.values()):
            found[graph] = value
    if found:
        return found
    names = {label for graph in graphs for value in graph.values() for label in (value.source, value.name) if label}
    raise InputError(
        f'no value "{name}" to fetch',
        notes=nearest_names(name, names),
        do="name a value of the source model that the program computes (not one that a pass took out)",
    )


def _find(graph: Graph, name: str) -> Value | None:
    own = None
    for value in graph.values():
        if value.source == name:
            return value
        if value.name == name:
            own = value
    if own is None and name in graph.output_names:
        return graph.outputs[graph.output_names.index(name)]
    return own


def holds(graphs: Sequence[Graph], name: str, sharding: str) -> bool:
    """Whether a graph has the value of a source name, lying as the text of a sharding says."""
    try:
        found = find_value(graphs, name)
    except InputError:
        return False
    return any(str(value.sharding) == sharding for value in found.values())


def check_spaces(parts: Sequence[Part]) -> None:
    """Refuse programs whose nodes read what lies in another memory than their own.

    Raises:
        ProgramError: naming the first such node.
    """
    for part in parts:
        problem = next(space_problems(part.graph), None)
        if problem is not None:
            raise ProgramError(
                f"the program of part {part.index} mixes memories: {problem}",
                do="let a pass place values and copies (place, store), or add the copy",
            )


def check_parts(parts: Sequence[Part], ranks: Sequence[int]) -> None:
    """Refuse parts that do not run each of these ranks exactly once.

    Raises:
        IrparError: naming the ranks.
    """
    found = sorted(rank for part in parts for rank in part.ranks)
    if [rank for rank in found if rank in ranks] != sorted(ranks):
        raise IrparError(
            f"the parts run ranks {found}, where ranks {sorted(ranks)} are to run",
            do="every rank needs exactly one program: run localize, and keep all its graphs",
        )
