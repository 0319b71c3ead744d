"""What a program holds over its steps: each value with what it is for, and where in the model it belongs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from irpar.ir import Graph, Node, Value

from .arena import lifetimes
from .by_use import USES, uses_by_value
from .liveness import Uses, peak, uses_of, value_bytes

_LATER = ("backward", "optimizer")
"""Phases whose nodes belong where what they read does, if they say nothing else."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes that are held for some steps of a program: step 0 is before its first node, step n its node n.

    Attributes:
        name: of the value.
        scope: where in the model; "" where nothing tells.
        use: one of `by_use.USES`.
        nbytes: how many.
        first, last: the steps.
    """

    name: str
    scope: str
    use: str
    nbytes: int
    first: int
    last: int


def holdings(graph: Graph, uses: Uses | None = None) -> list[Holding]:
    """All that a program holds on the device, in the order in which it is made, constants first.

    What bodies hold is told by what is in them.

    What is held at each step adds up to what `liveness.held_bytes` counts, and the constants.

    Args:
        graph: a local graph.
        uses: from `uses_of`, if they are known.
    """
    scopes, end = _Scopes(graph), len(graph)
    constants = [
        Holding(value.source_name, scopes.of_value(value), "parameters", value_bytes(value), 0, end)
        for inner in graph.graphs()
        for value in inner.constants
        if value.memory == "device"
    ]
    return constants + list(_computed(graph, uses or uses_of(graph), scopes))


def _computed(graph: Graph, uses: Uses, scopes: "_Scopes") -> Iterator[Holding]:
    """What is held of inputs and results; of the bodies of a node, what the one with most holds at its own peak."""
    for_what, end = uses_by_value(graph), len(graph)
    for one in lifetimes(graph, uses):
        if isinstance(one.key, Value):
            use = for_what.get(one.key, "activations")
            last = min(one.last, end)
            yield Holding(one.key.source_name, scopes.of_value(one.key), use, one.nbytes, one.first, last)
            continue
        body = max(one.key.nested_graphs(), key=lambda nested: peak(nested).activation_bytes)
        inside = _computed(body, uses_of(body), _Scopes(body))
        for held in at_step(inside, step_of_peak(body)):
            scope = held.scope or scopes.of_node(one.key)
            yield replace(held, scope=scope, first=one.first, last=one.last)


def bytes_by_step(held: Iterable[Holding], steps: int) -> dict[str, list[int]]:
    """How many bytes of each use are held at each step, from 0 to `steps`."""
    changes = {use: [0] * (steps + 2) for use in USES}
    for one in held:
        changes[one.use][one.first] += one.nbytes
        changes[one.use][one.last + 1] -= one.nbytes
    return {use: list(accumulate(each[:-1])) for use, each in changes.items()}


def at_step(held: Iterable[Holding], step: int) -> list[Holding]:
    """What is held at a step."""
    return [one for one in held if one.first <= step <= one.last]


def step_of_peak(graph: Graph, uses: Uses | None = None) -> int:
    """The first step of a program at which it holds most."""
    where = peak(graph, uses).node
    return 0 if where is None else next(step for step, node in enumerate(graph, 1) if node is where)


class _Scopes:
    """Where in the model values belong.

    State and constants belong to the first node that reads them and is of some scope, what an optimizer keeps of a
    parameter to that parameter, and what a node of the backward pass or of the update makes, where it says nothing, to
    what it reads.
    """

    def __init__(self, graph: Graph) -> None:
        self._of: dict[Value, str] = {}
        self._nodes: dict[Node, str] = {}
        names = {value.source_name: value for value in graph.states}
        for value in (*graph.inputs, *(each for inner in graph.graphs() for each in inner.constants)):
            self._of[value] = next((node.scope for node in value.users if node.scope), "")
        for value, state in graph.states.items():
            owner = names.get(state.parameter or "")
            if owner is not None:
                self._of[value] = self._of[owner]
        for node in graph:
            self._nodes[node] = node.scope or next(self._read(node), "")
            self._of.update(dict.fromkeys(node.results, self._nodes[node]))

    def _read(self, node: Node) -> Iterator[str]:
        """The scopes of what a node of a later phase reads."""
        if node.phase in _LATER:
            yield from (scope for value in node.inputs if (scope := self._of.get(value, "")))

    def of_value(self, value: Value) -> str:
        """That of a value."""
        return self._of.get(value, "")

    def of_node(self, node: Node) -> str:
        """That of a node."""
        return self._nodes[node]
