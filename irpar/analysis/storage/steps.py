"""The steps of a program: nodes in a row that work on one layer. What is brought comes a number of steps before."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from irpar.analysis.gathers import layers_of
from irpar.analysis.layers.units import OPTIMIZER
from irpar.analysis.memory.liveness import value_bytes
from irpar.ir import Graph, Node, Value, captured_or_read

from .items import MovableValue


@dataclass(frozen=True)
class Steps:
    """Where steps begin.

    Attributes:
        firsts: the place of the first node of each step; 0 of the first one.
        nodes: how many there are in all.
        loops: the steps that are loops whose bodies bring by themselves what they read.
    """

    firsts: tuple[int, ...]
    nodes: int
    loops: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """How many steps there are."""
        return len(self.firsts)

    def of(self, place: int) -> int:
        """The step of a node."""
        return bisect_right(self.firsts, place) - 1

    def before(self, step: int, most: int) -> int:
        """So many steps before one, but behind the loop before it: what comes earlier would be there meanwhile."""
        behind = max((loop + 1 for loop in self.loops if loop < step), default=0)
        return max(behind, step - most)

    def beside(self, step: int, most: int) -> int:
        """So many steps behind one that are there, but in front of the next loop."""
        ahead = min((loop - 1 for loop in self.loops if loop > step), default=self.count - 1)
        return min(ahead, step + most)

    def has_loop(self, first: int, end: int) -> bool:
        """Whether one of some steps is a loop."""
        return any(first <= loop < end for loop in self.loops)

    def with_loops(self, places: Collection[int]) -> "Steps":
        """The same, in which loops at some places are steps of their own."""
        own = {place + more for place in places for more in (0, 1) if place + more < self.nodes}
        firsts = tuple(sorted({*self.firsts, *own}))
        return Steps(firsts, self.nodes, tuple(sorted(map(firsts.index, places))))


_SMALL = 0.01
"""Of the largest layer: what is smaller does not tell which one a node works on. Several share a 0.5."""


def steps_of_layers(graph: Graph, items: Sequence[MovableValue]) -> Steps:
    """Steps that each work on the weights of one layer, and the state that belongs to them, in one phase.

    reads w1 . b1 w2 . . w3 . w1: of layers (w1, b1), (w2, w3) the steps are [w1 . b1] [w2 . . w3 .] [w1]

    What makes a gradient, and what is made of it before an update, belongs to the layer of that, and so does what else
    of the optimizer reads it, such as the norm of all gradients.
    """
    weights = {item.value: item.nbytes for item in items if item.kind == "weights"}
    numbers = layers_of(graph, list(weights))
    sizes = Counter[int]()
    for value, nbytes in weights.items():
        sizes[numbers.get(value.source_name, -1)] += nbytes
    least = _SMALL * max(sizes.values(), default=0)
    told = [value for value, nbytes in weights.items() if nbytes >= least and value.source_name in numbers]
    of_value = {value: numbers[value.source_name] for value in told}
    names = {value.source_name for value in told}
    for value, state in graph.states.items():
        if value not in of_value and state.parameter in names:
            of_value[value] = numbers[state.parameter]
    return _steps(graph, of_value, _before_updates(graph, of_value, least))


def steps_of_reads(graph: Graph, items: Sequence[MovableValue]) -> Steps:
    """The shortest steps: one begins where a node reads, or makes, an item that the step has not met yet."""
    places = sorted({place for item in items for place in (*item.touched, item.replaced_at) if place > 0})
    return Steps((0, *places), len(graph))


def _before_updates(graph: Graph, of_value: Mapping[Value, int], least: float) -> dict[Value, int | None]:
    """Gradients, with what they are one after the other, to the layer whose state is updated by them; None: several."""
    found: dict[Value, int | None] = {}
    for node in reversed(list(graph)):
        is_optimizer = node.phase == OPTIMIZER
        layers = _layers_read(node, of_value)
        if layers and not is_optimizer:
            continue
        layers = layers or _layers_made(node, found)
        made = [value for value in node.inputs if value.node and value.is_static and value_bytes(value) >= least]
        if len(layers) == 1 and (is_optimizer or len(made) == 1):
            (layer,) = layers
            found.update((value, layer if found.get(value, layer) == layer else None) for value in made)
    return found


def _steps(graph: Graph, of_value: Mapping[Value, int], before_updates: Mapping[Value, int | None]) -> Steps:
    firsts, now = [0], None
    for place, node in enumerate(graph):
        layers = _layers_read(node, of_value) or _layers_made(node, before_updates)
        if not layers and node.phase == OPTIMIZER:
            layers = _layers_read(node, before_updates)
        if not layers or (now is not None and now[0] == node.phase and now[1] in layers):
            continue
        if now is not None:
            firsts.append(place)
        now = node.phase, layers[0]
    return Steps(tuple(firsts), len(graph))


def _layers_read(node: Node, of_value: Mapping[Value, int | None]) -> list[int]:
    return _layers(captured_or_read(node), of_value)


def _layers_made(node: Node, of_value: Mapping[Value, int | None]) -> list[int]:
    return _layers(node.results, of_value)


def _layers(values: Iterable[Value], of_value: Mapping[Value, int | None]) -> list[int]:
    found = dict.fromkeys(of_value.get(value) for value in values)
    return [layer for layer in found if layer is not None]
