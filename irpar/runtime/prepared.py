"""Programs compiled for the parts that run them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from irpar.ir import Function, Graph, Node, Value
from irpar.output.parts import Part
from irpar.sharding import IrparError, nearest_names

from .engines.base import CompiledSegment, Constants, Engine
from .errors import InputError
from .instructions import Program, Segment
from .layout import TensorSpec
from .program import build_program
from .specs import spec_of
from .tape import Tape

Key = tuple[int, tuple[Node, ...], tuple[Value, ...], frozenset[Value]]


@dataclass(frozen=True, eq=False)
class PreparedPart:
    """A part with its program, and that made ready to run."""

    part: Part
    program: Program
    constants: Constants
    tape: Tape


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
        joins: see `build_program`; not for programs of which values are fetched, which other ranks may not have.
    """

    def __init__(self, parts: Sequence[Part], engine: Engine, joins: Callable[[Node], bool] | None = None) -> None:
        self._parts = tuple(parts)
        self._engine = engine
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
                    joins=None if fetched else self._joins,
                )
            compiled = {segment: self._compile(part, segment, constants, known) for segment in program.segments}
            parts.append(PreparedPart(part, program, constants, Tape(program, compiled)))
        return Prepared(tuple(parts), fetched)

    def _compile(
        self, part: Part, segment: Segment, constants: Constants, known: dict[Key, CompiledSegment]
    ) -> CompiledSegment:
        key = (part.index, segment.nodes, segment.outputs, frozenset(segment.over))
        found = known.get(key)
        if found is None:
            found = known[key] = self._engine.compile(segment, constants)
        return found


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
