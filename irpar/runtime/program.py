"""A local graph as a list of instructions, in the graph's order."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

from irpar.analysis.memory.replaced import update_of, written_over
from irpar.analysis.memory.sums import sums_in, sums_of
from irpar.analysis.segments import is_segment, live_reads, stretches
from irpar.ir import COMMUNICATION, Function, Graph, Node, Value
from irpar.ir.state import LOSS
from irpar.ops import holds_collectives, traits
from irpar.ops.bodies import waits_for_copy
from irpar.ops.effects import is_compute
from irpar.ops.memory_copies import is_copy

from .called_functions import called_functions
from .engines.control_flow import TRIPS
from .errors import ProgramError
from .groups.base import Collective
from .instructions import (
    Branch,
    Call,
    Commit,
    Communicate,
    Compute,
    Copy,
    Free,
    Instruction,
    Loop,
    MemoryCopy,
    Program,
    Segment,
    Start,
    StartCopy,
    Wait,
    WaitCopy,
)

_Reads = dict[Node, tuple[Value, ...]]
_Functions = dict[Function, Program]
"""What each function of communication does, for all of its calls."""


def build_program(
    graph: Graph,
    extra: Sequence[Value] = (),
    functions: _Functions | None = None,
    *,
    writes_over: bool = False,
    adds_in_place: bool = False,
    joins: Callable[[Node], bool] | None = None,
) -> Program:
    """The instructions of a local graph: one for each communication or copy, one for what computes between two.

    The order is the graph's: passes decide it, nothing is moved here. A node whose bodies communicate is an instruction
    with programs of its own. Nodes that nothing needs are left out. Between the loss of a step of training and its
    update the state before it is let go.

    Args:
        graph: the local graph, or the body of a node, in topological order.
        extra: values of it to keep besides its results.
        functions: the programs of functions that are known, which gets more of them.
        writes_over: whether segments can write what replaces state over it; the update is a segment of its own then.
        adds_in_place: whether segments of a body can write the sums that its loop carries over what they find.
        joins: whether a node of communication is part of a segment; None: none is.

    Raises:
        ProgramError: collectives in functions that are not of communication alone, and in bodies that are not run trip
            by trip, and `irpar` nodes that are no collectives.
    """
    _check_nested(graph)
    outputs = tuple(dict.fromkeys((*graph.outputs, *extra)))
    reads = live_reads(graph, outputs)
    first = _update(graph, reads)
    joined = {node for node in reads if joins is not None and not is_compute(node) and joins(node)}
    parts = stretches(reads, joined)
    if first is not None and writes_over:
        parts = list(_split(parts, first))
    over = written_over(graph, extra) if writes_over else {}
    if adds_in_place:
        over |= {each.after: each.before for each in sums_in(graph)}
    functions = {} if functions is None else functions
    body_of = partial(build_program, functions=functions, adds_in_place=adds_in_place)
    made = _instructions(graph, parts, joined, reads, outputs, over, partial(_communication, functions, body_of, reads))
    if first is not None:
        _insert_commit(graph, made, parts, first)
    return Program(graph, _with_frees(graph, made, outputs), outputs)


def _check_nested(graph: Graph) -> None:
    for node in graph:
        holds = node.callee is None and holds_collectives(node)
        if holds and is_compute(node) and (node.domain or node.op_type not in TRIPS):
            raise ProgramError(
                f"{node.operator} holds a body with collectives, which cannot be executed",
                where=node.label,
                do="keep what the body reads whole (replicated), so that the body needs no communication",
            )
    for function in called_functions(graph):
        if function.domain == COMMUNICATION:
            _check_function(function)
        elif not all(map(is_compute, function.graph.walk())):
            raise ProgramError(
                f"function {function.name} holds collectives, which cannot be executed yet", do="run inline-functions"
            )


def _check_function(function: Function) -> None:
    """Refuse a function of communication that is not what extract-communication makes.

    Raises:
        ProgramError: saying what it has.
    """
    graph = function.graph
    begun = [node for node in graph if not is_compute(node) and not traits(node).waits]
    made = {value for node in graph for value in node.results}
    if len(begun) != 1 or len(set(graph.outputs)) < len(graph.outputs) or not made.issuperset(graph.outputs):
        raise ProgramError(
            f"function {function.name} has {len(begun)} collectives, or gives what it does not make",
            do="run inline-functions, or partition the model again",
        )


def _update(graph: Graph, reads: _Reads) -> Node | None:
    """The first node of the update that is needed."""
    first, begun = update_of(graph), False
    if first is None:
        return None
    for node in graph:
        begun = begun or node is first
        if begun and node in reads:
            return node
    return None


def _split(parts: Iterable[list[Node]], first: Node) -> Iterator[list[Node]]:
    """Stretches of which one begins with a node."""
    for nodes in parts:
        place = nodes.index(first) if first in nodes else 0
        if place:
            yield nodes[:place]
        yield nodes[place:]


def _insert_commit(graph: Graph, made: list[Instruction], parts: Sequence[list[Node]], first: Node) -> None:
    """Let go of the state before the run where the update begins; behind its segment, if that computes the loss too."""
    loss = graph.output(graph.output_names.index(LOSS))
    (place,) = (number for number, nodes in enumerate(parts) if first in nodes)
    made.insert(place + (loss.node in parts[place]), Commit(loss))


def _instructions(
    graph: Graph,
    parts: Sequence[list[Node]],
    joined: Collection[Node],
    reads: _Reads,
    outputs: Sequence[Value],
    over: Mapping[Value, Value],
    communication: Callable[[Node], Instruction],
) -> list[Instruction]:
    found: list[Instruction] = []
    count = 0
    wanted = _read_elsewhere(parts, reads, outputs)
    for nodes in parts:
        if is_segment(nodes, joined):
            found.append(Compute(_segment(count, graph, nodes, reads, wanted, over)))
            count += 1
        else:
            found.append(communication(nodes[0]))
    return found


def _communication(
    functions: _Functions, body_of: Callable[[Graph], Program], reads: _Reads, node: Node
) -> Instruction:
    if node.callee is not None:
        return _call(node, node.callee, functions)
    if is_copy(node):
        return (StartCopy if traits(node).starts else Copy)(MemoryCopy.of(node), reads[node][0], node.result)
    if waits_for_copy(node):
        return WaitCopy(reads[node][0], node.result)
    if is_compute(node):
        bodies = {body: body_of(body) for body in node.nested_graphs()}
        over = {value for body in bodies.values() for segment in body.segments for value in segment.over}
        sums = tuple(each for each in sums_of(node) if each.after in over)
        return (Branch if node.op_type == "If" else Loop)(node, bodies, reads[node], sums)
    known = traits(node)
    if known.waits:
        return Wait(reads[node][0], node.result)
    called = Collective.of(node)
    if known.starts:
        return Start(called, reads[node][0], node.result)
    return Communicate(called, next(iter(reads[node]), None), next(iter(node.results), None))


def _call(node: Node, function: Function, functions: _Functions) -> Call:
    program = functions.get(function)
    if program is None:
        program = functions[function] = build_program(function.graph)
    computes = any(isinstance(found, Compute) for found in program.instructions)
    counts, number = (len(node.inputs), len(node.results)), node.attributes.get("id")
    if counts != (len(function.graph.inputs), len(function.graph.outputs)) or type(number) is not int:
        raise ProgramError(
            f"{function!r} is called with {counts[0]} operands, {counts[1]} results, id {number!r}",
            where=node.label,
            do="partition the model again",
        )
    if computes and any(value.is_constant for value in node.inputs):
        raise ProgramError(f"{function!r} is called with a constant", where=node.label, do="run inline-functions")
    (begun,) = (inner for inner in function.graph if not is_compute(inner) and not traits(inner).waits)
    return Call(node, program, Collective.of(begun, node))


def _read_elsewhere(parts: Sequence[list[Node]], reads: _Reads, outputs: Sequence[Value]) -> set[Value]:
    """Values that something outside the segment that makes them reads."""
    wanted = set(outputs)
    for nodes in parts:
        made = {value for node in nodes for value in node.results}
        wanted.update(value for node in nodes for value in reads[node] if value not in made)
    return wanted


def _segment(
    index: int, graph: Graph, nodes: Sequence[Node], reads: _Reads, wanted: set[Value], over: Mapping[Value, Value]
) -> Segment:
    made = {value for node in nodes for value in node.results}
    outside = dict.fromkeys(value for node in nodes for value in reads[node] if value not in made)
    inside = {value: over[value] for node in nodes for value in node.results if value in over}
    inputs = tuple(dict.fromkeys((*(value for value in outside if not value.is_constant), *inside.values())))
    constants = tuple(value for value in outside if value.is_constant)
    outputs = tuple(value for node in nodes for value in node.results if value in wanted)
    steady = frozenset(over.values()).intersection(inputs)
    return Segment(index, graph, tuple(nodes), inputs, constants, outputs, inside, steady)


def _with_frees(graph: Graph, instructions: Sequence[Instruction], outputs: Sequence[Value]) -> tuple[Instruction, ...]:
    """Free what no later instruction reads; what a body reads from around it is not its own to free."""
    later = set(outputs)
    found: list[Instruction] = []
    for instruction in reversed(instructions):
        touched = dict.fromkeys((*instruction.reads, *instruction.writes))
        frees = (value for value in touched if value not in later and value.owner is graph)
        values = tuple(value for value in frees if not value.is_constant)
        later.update(instruction.reads)
        if values:
            found.append(Free(values))
        found.append(instruction)
    return tuple(reversed(found))
