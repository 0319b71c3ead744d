"""A local graph as a sequence of steps: compute segments, and the collectives between them."""

import heapq
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from irpar.ir import Function, Graph, Node, Value, captured_or_read
from irpar.ops import holds_collectives
from irpar.ops.collectives import STARTED, WAIT
from irpar.ops.effects import is_compute

from .engines.control_flow import TRIPS
from .errors import ProgramError
from .groups.base import Collective


@dataclass(frozen=True, eq=False)
class Segment:
    """Nodes that run without communication.

    Attributes:
        index: its number in the program.
        graph: the local graph that the nodes belong to.
        nodes: in an order in which they can run.
        inputs: values from outside that are not constants.
        constants: constants of the graph that the nodes read.
        outputs: results that something outside reads.
    """

    index: int
    graph: Graph
    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    constants: tuple[Value, ...]
    outputs: tuple[Value, ...]

    @property
    def label(self) -> str:
        """What messages call it."""
        first, last = self.nodes[0], self.nodes[-1]
        through = "" if first is last else f" to {last.label}"
        return f"segment {self.index}, {len(self.nodes)} node(s): {first.label}{through}"

    def functions(self) -> tuple[Function, ...]:
        """The functions that its nodes call, directly or not."""
        return tuple(called_functions(self.nodes))


@dataclass(frozen=True, eq=False)
class ComputeStep:
    """Run a segment, then let go of `frees`."""

    segment: Segment
    frees: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class CollectiveStep:
    """Execute a collective, or what goes from rank to rank; then let go of `frees`."""

    collective: Collective
    operand: Value | None
    result: Value | None
    frees: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class StartStep:
    """Let a collective begin, then let go of `frees`; its result is in flight until it is waited for."""

    collective: Collective
    operand: Value
    result: Value
    frees: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class WaitStep:
    """Wait for a collective that was started, then let go of `frees`."""

    inflight: Value
    result: Value
    frees: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class BodiesStep:
    """Run a node whose bodies hold collectives, trip by trip, then let go of `frees`.

    Attributes:
        node: an If, a Loop or a Scan.
        bodies: what each of its bodies does.
    """

    node: Node
    bodies: "Mapping[Graph, Program]"
    frees: tuple[Value, ...]


Step = ComputeStep | CollectiveStep | StartStep | WaitStep | BodiesStep


@dataclass(frozen=True, eq=False)
class Program:
    """What one rank does.

    Attributes:
        graph: the local graph.
        steps: in order.
        outputs: the values to keep to the end: the graph's results, then what was asked for besides.
    """

    graph: Graph
    steps: tuple[Step, ...]
    outputs: tuple[Value, ...]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The compute segments in order, those of bodies among them."""
        return tuple(step.segment for step in self.all_steps() if isinstance(step, ComputeStep))

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives in order, those of bodies among them, each once, where it begins."""
        return tuple(step.collective for step in self.all_steps() if isinstance(step, CollectiveStep | StartStep))

    def all_steps(self) -> Iterator[Step]:
        """All steps, each followed by those of its bodies."""
        for step in self.steps:
            yield step
            if isinstance(step, BodiesStep):
                for body in step.bodies.values():
                    yield from body.all_steps()


def is_collective(node: Node) -> bool:
    """True for what is executed among ranks, or cannot be: everything but compute."""
    return not is_compute(node)


def called_functions(nodes: Iterable[Node]) -> dict[Function, None]:
    """The functions that nodes call, nested graphs and other functions included, in order of first call."""
    found: dict[Function, None] = {}
    waiting = deque(nodes)
    while waiting:
        node = waiting.popleft()
        for nested in node.nested_graphs():
            waiting.extend(nested)
        if node.callee is not None and node.callee not in found:
            found[node.callee] = None
            waiting.extend(node.callee.graph)
    return found


def build_program(graph: Graph, extra: Sequence[Value] = ()) -> Program:
    """Cut a local graph into as few segments as the order of its collectives allows.

    Collectives run in order of their ids, except where one needs the result of another with a greater id; this order
    depends on nothing else, so that all ranks agree on it. A node whose bodies hold collectives takes its turn by the
    least of their ids, and is a program in itself. One that is started is waited for where the graph has the Wait, and
    what the graph has in between is computed in between. Nodes that nothing needs are left out.

    Args:
        graph: the local graph, or the body of a node, in topological order.
        extra: values of it to keep besides its results.

    Raises:
        ProgramError: collectives in functions and in bodies that are not run trip by trip, and `irpar` nodes that
            are no collectives.
    """
    _check_nested(graph)
    outputs = tuple(dict.fromkeys((*graph.outputs, *extra)))
    reads = _live_reads(graph, outputs)
    slots, order = _schedule(graph, reads, outputs)
    return Program(graph, _with_frees(graph, _steps(graph, reads, slots, order, outputs), outputs), outputs)


def _check_nested(graph: Graph) -> None:
    for node in graph:
        if holds_collectives(node) and not is_collective(node) and (node.domain or node.op_type not in TRIPS):
            raise ProgramError(
                f"{node.operator} holds a body with collectives, which cannot be executed",
                where=node.label,
                do="keep what the body reads whole (replicated), so that the body needs no communication",
            )
    for function in called_functions(graph):
        if any(is_collective(inner) for inner in function.graph.walk()):
            raise ProgramError(
                f"function {function.name} holds collectives, which cannot be executed yet", do="run inline-functions"
            )


def _live_reads(graph: Graph, outputs: Iterable[Value]) -> dict[Node, tuple[Value, ...]]:
    """What each node that is needed reads, captured values included; in graph order."""
    needed = {value.node for value in outputs if value.node is not None}
    found: dict[Node, tuple[Value, ...]] = {}
    for node in reversed(graph):
        if node in needed or holds_collectives(node):
            found[node] = tuple(dict.fromkeys(captured_or_read(node)))
            needed.update(value.node for value in found[node] if value.node is not None)
    return dict(reversed(found.items()))


@dataclass
class _Window:
    """Between which collectives a node can run: slot n is after the first n collectives."""

    earliest: int
    latest: int
    only_constants: bool


def _schedule(
    graph: Graph, reads: dict[Node, tuple[Value, ...]], outputs: Sequence[Value]
) -> tuple[dict[Node, int], list[Node]]:
    """The slot of every compute node, and the collectives in order.

    Each node has a window of slots. The fewest slots that stab all windows are found from the windows that end first
    (the greedy choice is optimal on intervals). A node then takes the first of them in its window, and one that reads
    only constants the one before its first reader, so that what it makes does not wait in memory.
    """
    order = _collective_order(reads)
    position = {node: number for number, node in enumerate(order)}
    windows = _windows(reads, position, outputs)
    _keep_between(reads, position, windows)
    used: list[int] = []
    for window in sorted(windows.values(), key=lambda window: window.latest):
        if not used or window.earliest > used[-1]:
            used.append(window.latest)
    slots: dict[Node, int] = {}
    for node in reversed(reads):
        if node not in windows:
            continue
        window = windows[node]
        if not window.only_constants:
            slots[node] = used[bisect_left(used, window.earliest)]
            continue
        latest = used[bisect_right(used, window.latest) - 1]
        readers = (user for value in node.results for user in _readers(value, graph))
        slots[node] = min((slots[user] for user in readers if user in slots), default=latest)
        slots[node] = min(slots[node], latest)
    return slots, order


def _readers(value: Value, graph: Graph) -> Iterable[Node]:
    """The nodes of `graph` that read a value, themselves or inside their nested graphs."""
    for user in value.users:
        node: Node | None = user
        while node is not None and node.graph is not graph:
            node = node.graph.parent if node.graph is not None else None
        if node is not None:
            yield node


def _collective_order(reads: dict[Node, tuple[Value, ...]]) -> list[Node]:
    """The collectives: of those that could run next, always the one with the smallest id."""
    missing = {node: len({value.node for value in values if value.node in reads}) for node, values in reads.items()}
    readers: dict[Node, list[Node]] = {node: [] for node in reads}
    for node, values in reads.items():
        for producer in {value.node for value in values if value.node in reads}:
            assert producer is not None
            readers[producer].append(node)
    number = {node: place for place, node in enumerate(reads)}
    ready: deque[Node] = deque()
    waiting: list[tuple[int, int, Node]] = []
    order: list[Node] = []

    turns = _turns(reads)

    def enter(node: Node) -> None:
        if holds_collectives(node):
            heapq.heappush(waiting, (turns[node], number[node], node))
        else:
            ready.append(node)

    for node in reads:
        if not missing[node]:
            enter(node)
    while ready or waiting:
        if ready:
            node = ready.popleft()
        else:
            node = heapq.heappop(waiting)[2]
            order.append(node)
        for reader in readers[node]:
            missing[reader] -= 1
            if not missing[reader]:
                enter(reader)
    return order


def _turns(nodes: Iterable[Node]) -> dict[Node, int]:
    """When communication takes its turn: by id; a Wait with what communicates before it in the graph."""
    turns: dict[Node, int] = {}
    last = -1
    for node in nodes:
        if is_collective(node) and node.op_type == WAIT:
            turns[node] = last
        elif holds_collectives(node):
            last = turns[node] = _turn(node)
    return turns


def _turn(node: Node) -> int:
    """The id of a collective, or the least of those in the bodies of a node."""
    if is_collective(node):
        return Collective.of(node).id
    return min(_turn(inner) for nested in node.nested_graphs() for inner in nested if holds_collectives(inner))


def _windows(
    reads: dict[Node, tuple[Value, ...]], position: dict[Node, int], outputs: Sequence[Value]
) -> dict[Node, _Window]:
    windows: dict[Node, _Window] = {}
    for node, values in reads.items():
        if node in position:
            continue
        window = windows[node] = _Window(0, len(position), True)
        for value in values:
            producer = value.node
            if producer in position:
                window.earliest = max(window.earliest, position[producer] + 1)
                window.only_constants = False
            elif producer in windows:
                window.earliest = max(window.earliest, windows[producer].earliest)
                window.only_constants &= windows[producer].only_constants
            elif not value.is_constant:
                window.only_constants = False
    for node in reversed(reads):
        latest = position[node] if node in position else windows[node].latest
        for value in reads[node]:
            if value.node in windows:
                windows[value.node].latest = min(windows[value.node].latest, latest)
    return windows


def _keep_between(reads: Iterable[Node], position: Mapping[Node, int], windows: Mapping[Node, _Window]) -> None:
    """Narrow windows: what stands between a start and its wait is computed there, as far as its operands allow."""
    nodes = list(reads)
    if not any(is_collective(node) and node.op_type == WAIT for node in nodes):
        return
    after = 0
    for node in nodes:
        if node in position and node.op_type in STARTED:
            after = max(after, position[node] + 1)
        elif node in windows and not windows[node].only_constants:
            windows[node].earliest = max(windows[node].earliest, min(after, windows[node].latest))
    before = len(position)
    for node in reversed(nodes):
        if node in position and node.op_type == WAIT:
            before = min(before, position[node])
        elif node in windows and not windows[node].only_constants:
            windows[node].latest = min(windows[node].latest, max(before, windows[node].earliest))


@dataclass
class _Draft:
    """A step before it is known what it frees."""

    reads: tuple[Value, ...]
    segment: Segment | None = None
    collective: tuple[Collective, Value | None, Value | None] | None = None
    started: tuple[Collective, Value, Value] | None = None
    wait: tuple[Value, Value] | None = None
    bodies: tuple[Node, dict[Graph, Program]] | None = None
    writes: tuple[Value, ...] = field(default=())


def _steps(
    graph: Graph,
    reads: dict[Node, tuple[Value, ...]],
    slots: dict[Node, int],
    order: Sequence[Node],
    outputs: Sequence[Value],
) -> list[_Draft]:
    inside: dict[int, list[Node]] = {}
    for node in reads:
        if node in slots:
            inside.setdefault(slots[node], []).append(node)
    wanted = _read_elsewhere(reads, slots, outputs)
    drafts: list[_Draft] = []
    count = 0
    for slot in range(len(order) + 1):
        nodes = inside.get(slot)
        if nodes:
            drafts.append(_segment(count, graph, nodes, reads, wanted))
            count += 1
        if slot < len(order):
            drafts.append(_communication(order[slot], reads))
    return drafts


def _communication(node: Node, reads: dict[Node, tuple[Value, ...]]) -> _Draft:
    if not is_collective(node):
        bodies = {body: build_program(body) for body in node.nested_graphs()}
        return _Draft(reads[node], bodies=(node, bodies), writes=node.results)
    if node.op_type == WAIT:
        operand, result = reads[node][0], node.result
        return _Draft((operand,), wait=(operand, result), writes=(result,))
    called = Collective.of(node)
    if node.op_type in STARTED:
        operand, result = reads[node][0], node.result
        return _Draft((operand,), started=(called, operand, result), writes=(result,))
    given, made = next(iter(reads[node]), None), next(iter(node.results), None)
    return _Draft(reads[node], collective=(called, given, made), writes=node.results)


def _read_elsewhere(
    reads: dict[Node, tuple[Value, ...]], slots: dict[Node, int], outputs: Sequence[Value]
) -> set[Value]:
    """Values that something outside the segment that makes them reads."""
    wanted = set(outputs)
    for node, values in reads.items():
        for value in values:
            if value.node in slots and slots.get(node) != slots[value.node]:
                wanted.add(value)
    return wanted


def _segment(
    index: int, graph: Graph, nodes: Sequence[Node], reads: dict[Node, tuple[Value, ...]], wanted: set[Value]
) -> _Draft:
    made = {value for node in nodes for value in node.results}
    outside = dict.fromkeys(value for node in nodes for value in reads[node] if value not in made)
    inputs = tuple(value for value in outside if not value.is_constant)
    constants = tuple(value for value in outside if value.is_constant)
    outputs = tuple(value for node in nodes for value in node.results if value in wanted)
    segment = Segment(index, graph, tuple(nodes), inputs, constants, outputs)
    return _Draft(inputs, segment=segment, writes=outputs)


def _with_frees(graph: Graph, drafts: Sequence[_Draft], outputs: Sequence[Value]) -> tuple[Step, ...]:
    """Let every step free what no later step reads; what a body reads from around it is not its own to free."""
    later = set(outputs)
    steps: list[Step] = []
    for draft in reversed(drafts):
        touched = dict.fromkeys((*draft.reads, *draft.writes))
        frees = tuple(value for value in touched if value not in later and value.owner is graph)
        frees = tuple(value for value in frees if not value.is_constant)
        later.update(draft.reads)
        if draft.segment is not None:
            steps.append(ComputeStep(draft.segment, frees))
        elif draft.collective is not None:
            steps.append(CollectiveStep(*draft.collective, frees))
        elif draft.started is not None:
            steps.append(StartStep(*draft.started, frees))
        elif draft.wait is not None:
            steps.append(WaitStep(*draft.wait, frees))
        elif draft.bodies is not None:
            steps.append(BodiesStep(*draft.bodies, frees))
    return tuple(reversed(steps))
