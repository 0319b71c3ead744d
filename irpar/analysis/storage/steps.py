"""The steps of a program: nodes in a row that work on one layer. What is brought comes a number of steps before."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from irpar.analysis.gathers import layers_of
from irpar.analysis.layers.units import OPTIMIZER
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

    Before an update, and for a norm of all gradients without one, gradients alone are read: what the optimizer reads
    of what was made in a step belongs to the layer of that.
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
    made = {item.value: item for item in items if item.made is not None and item.nbytes >= least}
    return _steps(graph, of_value, made.values())


def steps_of_reads(graph: Graph, items: Sequence[MovableValue]) -> Steps:
    """The shortest steps: one begins where a node reads, or makes, an item that the step has not met yet."""
    places = sorted({place for item in items for place in (*item.touched, item.replaced_at) if place > 0})
    return Steps((0, *places), len(graph))


def _steps(graph: Graph, of_value: Mapping[Value, int], made: Iterable[MovableValue]) -> Steps:
    made_at = defaultdict[int, list[MovableValue]](list)
    read_at = defaultdict[int, list[MovableValue]](list)
    for item in made:
        assert item.made is not None
        made_at[item.made].append(item)
        for place in item.reads:
            read_at[place].append(item)
    layer_of: dict[MovableValue, int] = {}
    firsts, now = [0], None
    for place, node in enumerate(graph):
        layers = _layers_read(node, of_value)
        if not layers and node.phase == OPTIMIZER:
            layers = [layer_of[item] for item in read_at[place] if item in layer_of]
        if layers and (now is None or now[0] != node.phase or now[1] not in layers):
            if now is not None:
                firsts.append(place)
            now = node.phase, layers[0]
        if now is not None:
            layer_of.update(dict.fromkeys(made_at[place], now[1]))
    return Steps(tuple(firsts), len(graph))


def _layers_read(node: Node, of_value: Mapping[Value, int]) -> list[int]:
    return list(dict.fromkeys(of_value[value] for value in captured_or_read(node) if value in of_value))
