"""What the peak of a program is made of: parameters, gradients, optimizer state, activations and buffers."""

from collections.abc import Iterator, Mapping, Set
from functools import cached_property

from irpar.analysis.looping import LOOPS
from irpar.ir import Graph, Node, Value
from irpar.ir.state import OPTIMIZER_KINDS
from irpar.ops import traits
from irpar.ops.bodies import waits_for_copy
from irpar.ops.coords import root_of
from irpar.ops.effects import is_communication
from irpar.ops.memory_copies import is_copy

from .liveness import Peak, Uses, peak, uses_of, value_bytes
from .offsets.lifetimes import Lifetime, most_held

USES = ("parameters", "gradients", "optimizer", "activations", "buffers")


def bytes_by_use(graph: Graph, most: Peak, uses: Uses | None = None) -> dict[str, int]:
    """What the peak of a local graph on the device is made of, in bytes.

    Args:
        graph: it.
        most: its peak.
        uses: from `uses_of`, if they are known.

    Returns:
        parameters: weights, be they constants or state, and optimizer: state that belongs to parameters, old and new
        where neither is written over the other. gradients: what the update reads, and buffers: gradients before they
        are reduced or added up and what is gathered of parameters, beside other state, such as caches. What is copied
        from another memory is for what it is a copy of. Of each the most that is held at once; activations: the rest at
        the peak.
    """
    found = dict.fromkeys(USES, 0)
    found["parameters"], found["activations"] = most.constant_bytes, most.activation_bytes
    if _tells_uses(graph):
        by_use = _by_use(graph)
        inside = {node: _inside(node, by_use) for node in _loops(graph)}
        held = _Held(uses or uses_of(graph))
        for use, values in by_use.items():
            with_bodies = (held.at(values, node) + each.get(use, 0) for node, each in inside.items())
            found[use] += max([held.most(values), *with_bodies])
            at_peak = inside.get(most.node, {}).get(use, 0) if most.node is not None else 0
            found["activations"] -= held.at(values, most.node) + at_peak
    return found


def _loops(graph: Graph) -> list[Node]:
    """The loops in a graph, not those in bodies."""
    return [node for node in graph if node.attributes and node.identity in LOOPS]


def _inside(node: Node, by_use: Mapping[str, Set[Value]]) -> dict[str, int]:
    """What the body of a loop holds at its peak, by use, but for activations."""
    body = LOOPS[node.identity](node).body
    uses = uses_of(body)
    held, where = _Held(uses), peak(body, uses).node
    return {use: held.at(values, where) for use, values in _by_use_in_body(node, by_use).items()}


def uses_by_value(graph: Graph) -> dict[Value, str]:
    """What values of a local graph are for, each with one of USES; others are activations, constants parameters."""
    found: dict[Value, str] = dict.fromkeys(graph.constants, "parameters")
    for use, values in _uses_of_graph(graph).items():
        for value in values:
            found.setdefault(value, use)
    return found


def _uses_of_graph(graph: Graph) -> Mapping[str, Set[Value]]:
    """What there is beside activations and constants, by use; of a body by what its loop is for."""
    if _tells_uses(graph):
        return _by_use(graph)
    holder = graph.parent
    if holder is None or holder.graph is None or holder.identity not in LOOPS:
        return {}
    return _by_use_in_body(holder, _uses_of_graph(holder.graph))


def _tells_uses(graph: Graph) -> bool:
    """Whether a graph has more than constants and activations, as far as it says."""
    return bool(graph.states) or (graph.parent is None and any(map(is_copy, graph.walk())))


def _by_use(graph: Graph) -> dict[str, set[Value]]:
    """What there is beside activations and constants, by use."""
    found = _kept(graph)
    gradients, unreduced = _gradients(graph)
    found["gradients"] = gradients
    found["buffers"] |= (unreduced | _gathered(graph)) - gradients - found["parameters"] - found["optimizer"]
    known = set[Value]().union(*found.values())
    for node in _loops(graph):
        starts = {start for start, _, _ in _added_up(node, known) if start is not None and not start.is_constant}
        found["buffers"] |= starts - known
    _add_copies(graph, found, found)
    return found


def _add_copies(graph: Graph, by_use: Mapping[str, set[Value]], around: Mapping[str, Set[Value]]) -> None:
    """Add what is copied from memory to memory to what it is a copy of, of the graph or one around it."""
    known = dict.fromkeys((*root_of(graph).constants, *graph.constants), "parameters")
    known |= {value: use for values_of in (around, by_use) for use, values in values_of.items() for value in values}
    for node in graph:
        use = known.get(node.inputs[0]) if node.inputs else None
        if use is not None and (is_copy(node) or waits_for_copy(node)):
            known[node.result] = use
            by_use[use].add(node.result)


def _by_use_in_body(node: Node, by_use: Mapping[str, Set[Value]]) -> dict[str, set[Value]]:
    """The same of the body of a loop: what trips hand on of what it adds up, what they gather, and what they copy."""
    carried = _added_up(node, set[Value]().union(*by_use.values()))
    handed_on = {value for _, before, after in carried for value in (before, after)}
    if not by_use:
        return {}
    body = LOOPS[node.identity](node).body
    found = {use: set[Value]() for use in by_use}
    found["buffers"] = handed_on | _gathered(body)
    _add_copies(body, found, by_use)
    return found


def _added_up(node: Node, known: Set[Value]) -> list[tuple[Value | None, Value, Value]]:
    """What a loop carries to values of a known use: its start, and in the body what comes in and what goes out."""
    loop = LOOPS[node.identity](node)
    return [each for each, final in zip(loop.carried, loop.finals, strict=True) if final in known]


def _kept(graph: Graph) -> dict[str, set[Value]]:
    """State and what replaces it, by use."""
    found: dict[str, set[Value]] = {"parameters": set(), "optimizer": set(), "buffers": set()}
    for value, state in graph.states.items():
        use = "parameters" if state.kind == "parameter" else "optimizer" if state.kind in OPTIMIZER_KINDS else "buffers"
        found[use].add(value)
        if state.output is not None:
            found[use].add(graph.output(state.output))
    return found


class _Held:
    """When values are held that something reads: from the node that makes one to the last that reads it or a view."""

    def __init__(self, uses: Uses) -> None:
        self._graph, self._last = uses.graph, uses.last
        spans = uses.on_device
        self._spans_of = dict(zip(spans.values, zip(spans.first, spans.last, strict=True), strict=True))

    def at(self, values: Set[Value], node: Node | None) -> int:
        """The bytes of some values that are held while a node runs; before the first one where it is None."""
        step = 0 if node is None else self._steps[node]
        return sum(one.nbytes for one in self._lifetimes(values) if one.first <= step <= one.last)

    def most(self, values: Set[Value]) -> int:
        """The most bytes of some values that are held at once."""
        return most_held(self._lifetimes(values), alignment=1)

    @cached_property
    def _steps(self) -> dict[Node, int]:
        return {node: step for step, node in enumerate(self._graph, 1)}

    def _lifetimes(self, values: Set[Value]) -> Iterator[Lifetime[Value]]:
        for value in values:
            span = self._spans_of.get(value)
            if span is not None and value in self._last:
                yield Lifetime(value, value_bytes(value), *span)


def _gradients(graph: Graph) -> tuple[set[Value], set[Value]]:
    """What the update reads of the backward pass; and of that what is still to be reduced, or packed for that."""
    reduced, unreduced = set[Value](), set[Value]()
    waiting = [
        (value, reduced)
        for node in graph
        if node.phase == "optimizer"
        for value in node.inputs
        if _phase(value) == "backward"
    ]
    while waiting:
        value, kind = waiting.pop()
        if value in reduced or value in unreduced:
            continue
        kind.add(value)
        assert value.node is not None
        if only_moves(value.node):
            kind = unreduced if is_communication(value.node) else kind
            waiting += [(operand, kind) for operand in value.node.inputs if _phase(operand) == "backward"]
    return reduced, unreduced


def _phase(value: Value) -> str | None:
    """The phase of what makes a value, or what it is a copy of: copies of state stand wherever there is time."""
    node = value.node
    while node is not None and (is_copy(node) or waits_for_copy(node)):
        node = node.inputs[0].node
    return None if node is None else node.phase


def _gathered(graph: Graph) -> set[Value]:
    """What is gathered of parameters."""
    parameters = {value for value, state in root_of(graph).states.items() if state.kind == "parameter"}
    moved: set[Value] = set(parameters)
    found: set[Value] = set()
    for node in graph:
        if moved.isdisjoint(node.inputs):
            continue
        reads = [value for value in node.inputs if not value.is_constant]
        if moved.issuperset(reads) and only_moves(node) and "reduce" not in node.attributes:
            moved.update(node.results)
            if is_communication(node) or not found.isdisjoint(node.inputs):
                found.update(node.results)
    return found


def only_moves(node: Node) -> bool:
    """Whether results are elements of the operands, or of what other ranks have of them."""
    known = traits(node)
    if known.view or known.moves_elements or known.copies or known.waits:
        return True
    return is_communication(node) or node.identity == ("", "Concat")
