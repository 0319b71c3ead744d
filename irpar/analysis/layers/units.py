"""What belongs to a layer in the whole of a training step: itself, its gradients, and the update of its weights.

F0 F1 ... F95   head   B95 ... B1 B0   U0 U1 ... U95      layer 1: F1, B1 and U1, in three stretches
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from irpar.ir import Graph, Node, Value

from .find import Layers, Nodes, as_layers
from .node_keys import NodeKeys
from .occurrences import shape_of

FORWARD, OPTIMIZER = "forward", "optimizer"


class NotAlike(Exception):  # noqa: N818 - it says why layers are planned each for itself
    """Layers, or what passes made of them, that are not as alike as it takes; the message says which and why."""


@dataclass(frozen=True)
class Stretch:
    """Nodes of all layers that stand in a graph one layer behind another.

    Attributes:
        start, stop: which of the nodes of a layer.
        backward: from the last layer to the first.
    """

    start: int
    stop: int
    backward: bool = False

    def of(self, nodes: Nodes) -> Nodes:
        """Those of one layer."""
        return nodes[self.start : self.stop]


def in_phases(graph: Graph) -> bool:
    """Whether a graph has more than a forward pass."""
    return any(node.phase not in (None, FORWARD) for node in graph)


def with_gradients(graph: Graph, layers: Layers) -> tuple[Layers, tuple[Stretch, ...]]:
    """Layers of a forward pass with what belongs to them in the phases behind it.

    What computes a gradient has the source of the node that it is of; what updates a weight reads this, or its state.

    Returns:
        As many layers as are alike in all of it, and where their nodes stand.

    Raises:
        NotAlike: these nodes stand in no common order, or the model's have no names.
    """
    layer = {node: number for number, nodes in enumerate(layers.members) for node in nodes}
    if not any(node.source for node in layer):
        raise NotAlike("nodes of the model have no names, by which gradients are known to be of a layer")
    _add_gradients(graph, layer)
    _add_updates(graph, layer)
    backward: list[bool] = []
    parts: list[list[list[Node]]] = [[] for _ in layers.members]
    every = list(range(layers.count))
    for numbers, found in _stretches(graph, layer, layers.count):
        if len(numbers) < layers.count:
            continue  # They belong to what stands around all layers.
        if numbers not in (every, every[::-1]):
            raise NotAlike(f"{found[0][0].title} and what follows it are not in the order of layers")
        backward.append(numbers[0] > 0)
        for number, nodes in zip(numbers, found, strict=True):
            parts[number].append(nodes)
    parts = _equal(parts)
    starts = [0, *itertools.accumulate(map(len, parts[0]))]
    stretches = tuple(itertools.starmap(Stretch, zip(starts[:-1], starts[1:], backward, strict=True)))
    return as_layers(tuple(tuple(itertools.chain.from_iterable(part)) for part in parts)), stretches


def _equal(parts: list[list[list[Node]]]) -> list[list[list[Node]]]:
    """Without layers at the ends that are others than the one in the middle: the first may need no gradient further."""
    keys = NodeKeys()
    number = {node: keys.number(node) for part in parts for nodes in part for node in nodes}
    shapes = [(*map(len, part), shape_of([*itertools.chain.from_iterable(part)], number)) for part in parts]
    middle = len(shapes) // 2
    first, last = middle, middle
    while first and shapes[first - 1] == shapes[middle]:
        first -= 1
    while last + 1 < len(shapes) and shapes[last + 1] == shapes[middle]:
        last += 1
    return parts[first : last + 1]


def _add_gradients(graph: Graph, layer: dict[Node, int]) -> None:
    known: dict[str, int | None] = {}
    for node, number in layer.items():
        if node.source and known.setdefault(node.source, number) != number:
            known[node.source] = None
    made: dict[Node, int] = {}
    for place, node in enumerate(graph):
        if node.phase in (FORWARD, OPTIMIZER):
            continue
        made[node] = place
        if node.source:
            its = known.get(node.source)
        else:  # A sum of two gradients, or a cast of one: it stands behind what it is made of.
            makers = [value.node for value in node.inputs if value.node in made]
            its = layer.get(max(makers, key=made.__getitem__)) if makers else None
        if its is not None:
            layer[node] = its


def _add_updates(graph: Graph, layer: dict[Node, int]) -> None:
    """Nodes of the optimizer that read of one layer alone: its weights, their state and gradients, or such nodes."""
    inputs = _states_of_layers(graph, layer)
    for node in graph:
        if node.phase != OPTIMIZER:
            continue
        read = {inputs.get(value) if value.node is None else layer.get(value.node) for value in node.inputs} - {None}
        if len(read) == 1:
            (number,) = read
            assert number is not None
            layer[node] = number


def _states_of_layers(graph: Graph, layer: Mapping[Node, int]) -> dict[Value, int]:
    """States of which one layer alone reads the parameter."""
    found: dict[Value, int] = {}
    named = {value.source_name: value for value in graph.states}
    for value, state in graph.states.items():
        parameter = value if state.parameter is None else named.get(state.parameter, value)
        readers = {layer.get(user) for user in parameter.users if user.phase != OPTIMIZER}
        number = readers.pop() if len(readers) == 1 else None
        if number is not None:
            found[value] = number
    return found


def _stretches(graph: Graph, layer: Mapping[Node, int], count: int) -> Iterator[tuple[list[int], list[list[Node]]]]:
    """Layers that follow each other with nothing between, so many at a time: which, and their nodes."""
    numbers: list[int] = []
    parts: list[list[Node]] = []
    before: tuple[int, str | None] | None = None
    for node in (*graph, graph.return_node):
        number = layer.get(node)
        here = None if number is None else (number, node.phase)
        if numbers and (number is None or (here != before and len(numbers) == count)):
            yield numbers, parts
            numbers, parts = [], []
        if number is not None:
            if here != before or not numbers:
                numbers.append(number)
                parts.append([])
            parts[-1].append(node)
        before = here
