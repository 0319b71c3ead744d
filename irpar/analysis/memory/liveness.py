"""Liveness: which values are held when, and the most bytes that are held at once, in each memory by itself."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from typing import NamedTuple

from irpar.analysis.segments import stretches
from irpar.ir import COMMUNICATION, Graph, InflightType, Memory, Module, Node, TensorType, Value
from irpar.ops import holds_collectives, traits
from irpar.ops.bodies import waits_for_copy
from irpar.ops.memory_copies import MEMORIES

from .replaced import Reads, held_for, let_go, reads_of, update_of, written_over
from .sums import sums_in, sums_of


@dataclass(frozen=True)
class Peak:
    """The most of one memory that running a graph in its order needs.

    Attributes:
        constant_bytes: all constants, held throughout.
        activation_bytes: the most bytes of inputs and results held at once.
        node: the node that runs when the most is held; None where that is before the first one.
    """

    constant_bytes: int
    activation_bytes: int
    node: Node | None

    @property
    def total_bytes(self) -> int:
        """Constants and activations."""
        return self.constant_bytes + self.activation_bytes


def value_bytes(value: Value) -> int:
    """Bytes of a static tensor value, or of one that is being copied; 0 for what has no static size."""
    known = value.type
    if type(known) is InflightType and value.node is not None and traits(value.node).copies:
        known = known.elem
    return known.known_bytes if type(known) is TensorType else 0


def bytes_in(value: Value, memory: Memory) -> int:
    """Bytes of a value where it lies in a memory; 0 where it lies in another."""
    return value_bytes(value) if value.memory == memory else 0


def constant_bytes(graph: Graph, memory: Memory = "device") -> int:
    """Bytes of all constants of a graph in a memory, those of nested graphs included."""
    return sum(bytes_in(value, memory) for inner in graph.graphs() for value in inner.constants)


def memories_of(graph: Graph) -> tuple[Memory, ...]:
    """The memories in which something of a graph lies, the device's first and in any case."""
    found = {value.memory for inner in graph.graphs() for value in inner.values()}
    return tuple(memory for memory in MEMORIES if memory == "device" or memory in found)


class Spans(NamedTuple):
    """Through which steps values of a graph are held in a memory: 0 is before the first node, 1 while that runs.

    Attributes:
        values: those with bytes of their own there.
        first, last: the steps of each, both included.
        steps: how many there are, 0 aside.
    """

    values: list[Value]
    first: list[int]
    last: list[int]
    steps: int

    def held(self, sizes: Iterable[int]) -> list[int]:
        """What is held at each step.

        Args:
            sizes: of the values, in bytes.
        """
        changes = [0] * (self.steps + 3)
        for size, first, last in zip(sizes, self.first, self.last, strict=True):
            changes[first] += size
            changes[last + 1] -= size
        return list(islice(accumulate(changes), self.steps + 1))


@dataclass(frozen=True)
class Uses:
    """Until when the values of a graph are held, in the order that it has.

    Attributes:
        graph: it.
        roots: from `roots_of`.
        last: from `last_uses`.
    """

    graph: Graph
    roots: dict[Value, Value]
    last: dict[Value, Node]

    @cached_property
    def on_device(self) -> Spans:
        """The spans of what lies on the device."""
        return spans_of(self)


def spans_of(uses: Uses, memory: Memory = "device") -> Spans:
    """The spans of a graph in its order; of one that differs in sizes alone they are the same."""
    graph, roots = uses.graph, uses.roots
    steps = {node: step for step, node in enumerate(graph, 1)}
    steps[graph.return_node] = len(steps) + 1
    ends = {value: steps[node] for value, node in uses.last.items()}
    values = [value for value in graph.inputs if value not in roots and value.memory == memory]
    first = [0] * len(values)
    last = [ends.get(value, 0) for value in values]
    for step, node in enumerate(graph, 1):
        for value in node.results:
            if value not in roots and value.memory == memory:
                values.append(value)
                first.append(step)
                last.append(ends.get(value, step))
    return Spans(values, first, last, len(graph))


def uses_of(graph: Graph, reads: Reads | None = None) -> Uses:
    """What peak, arena and kinds of memory are counted from; who asks for several finds it once.

    Args:
        graph: it.
        reads: from `reads_of`, which is the same in any order of the nodes; None: it is found.
    """
    reads = reads_of(graph) if reads is None else reads
    roots = roots_of(graph)
    return Uses(graph, roots, last_uses(graph, roots, reads))


def peak(graph: Graph, uses: Uses | None = None, memory: Memory = "device") -> Peak:
    """Peak of a memory for a graph that frees each value after its last use; views share their operand's bytes.

    What is written over the state that it replaces shares its bytes too. What a nested graph (If, Loop, Scan) needs
    inside counts while its holder runs. Linear in uses.
    """
    most, where = 0, None
    for node, held in held_bytes(graph, uses, memory):
        if held > most:
            most, where = held, node
    return Peak(constant_bytes(graph, memory), most, where)


def peak_bytes(module: Module) -> int:
    """The most bytes that a rank of a local module holds at once, weights included."""
    return max(peak(graph).total_bytes for graph in module.graphs)


def bytes_at_rest(graph: Graph, uses: Uses | None = None, memory: Memory = "device") -> int:
    """The most bytes of inputs and results that a rank holds while it waits: at a collective, or when it has ended.

    At one in a body it holds what its holder holds, and at most what the body does.
    """
    outputs = sum(bytes_in(value, memory) for value in dict.fromkeys(graph.outputs))
    held = held_bytes(graph, uses, memory)
    return max(outputs, *(size for node, size in held if node is None or holds_collectives(node)))


def held_bytes(graph: Graph, uses: Uses | None = None, memory: Memory = "device") -> Iterator[tuple[Node | None, int]]:
    """The bytes of inputs and results that a memory holds before the first node (None), and while each node runs."""
    uses = uses or uses_of(graph)
    spans = uses.on_device if memory == "device" else spans_of(uses, memory)
    held = iter(spans.held(map(value_bytes, spans.values)))
    yield None, next(held)
    for node, size in zip(graph, held, strict=True):
        yield node, size + nested_bytes(node, memory) if node.attributes else size


def nested_bytes(node: Node, memory: Memory = "device") -> int:
    """The most that the bodies of a node hold at once while it runs; of a call beside its operands and results."""
    if not node.attributes or not (node.holds_graphs or node.callee is not None):
        return 0
    if node.callee is not None and node.callee.domain == COMMUNICATION:
        body = node.callee.graph
        ends = (*body.inputs, *dict.fromkeys(body.outputs))
        held = peak(body, memory=memory).activation_bytes - sum(bytes_in(value, memory) for value in ends)
        return max(0, held)
    return max((peak(nested, memory=memory).activation_bytes for nested in node.nested_graphs()), default=0)


def roots_of(graph: Graph) -> dict[Value, Value]:
    """Values that are views, or are written over others, and the value whose bytes they share.

    Written over are state, and the sums that a loop carries: in its body these are what the loop gives. What they begin
    as, one number spread to a shape, is a view of that. What a copy in flight comes to is there from its start on.
    """
    roots: dict[Value, Value] = dict(written_over(graph))
    roots.update((value, each.final) for each in sums_in(graph) for value in (each.before, each.after))
    starts = (each.start for node in graph if node.attributes for each in sums_of(node))
    roots.update((start, start.node.inputs[0]) for start in starts if start is not None and start.node is not None)
    for node in graph:
        known = traits(node)
        if (known.view or (known.waits and waits_for_copy(node))) and node.inputs:
            source = node.inputs[0]
            roots[node.result] = roots.get(source, source)
    return roots


def last_uses(graph: Graph, roots: dict[Value, Value], reads: Reads | None = None) -> dict[Value, Node]:
    """The last node that reads each value or a view of it; graph results are read by the return node.

    State is held to the end; but that which a step of training replaces, and is not written over, until its last reader
    has run and the update begins. What a started collective or copy takes is held until the wait. What computes on the
    host in one piece holds what it takes until its last node has run.
    """
    ends = _ends_on_host(graph)
    last: dict[Value, Node] = dict.fromkeys(graph.states, graph.return_node)
    first = update_of(graph)
    going = set[Value]() if first is None else let_go(graph).keys() - set(map(roots.get, graph.outputs))
    states = graph.states.keys() - going
    for node in _in_order(graph):
        if node is first:
            # Until then the old state is there to go back to.
            last.update((value, node.previous or node) for value in going)
        end = ends.get(node)
        for value in held_for(node) if reads is None else reads[node]:
            root = roots.get(value, value)
            is_taken = end is not None and root.memory == "host" and ends.get(root.node) is not end
            last[root] = end if end is not None and is_taken else node
    # What is held in any case is told from the rest once, rather than at each reader.
    last = {root: node for root, node in last.items() if root.data is None and root.owner is graph}
    last.update(dict.fromkeys(states, graph.return_node))
    return last


def _ends_on_host(graph: Graph) -> dict[Node | None, Node]:
    """The nodes that compute on the host, and the last one of the piece that each is computed in."""
    if not any(node.place == "host" for node in graph):
        return {}
    return {node: piece[-1] for piece in stretches(graph) if piece[0].place == "host" for node in piece}


def _in_order(graph: Graph) -> Iterator[Node]:
    yield from graph
    yield graph.return_node
