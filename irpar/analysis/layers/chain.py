"""Equal layers one behind another, of which a few stand for all while passes plan them.

x -> L0 -> L1 -> ... -> L95 -> y      each reads what the one before it gives, weights of its own, and what all share

In a training step also what the one behind it gives: its gradient.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from irpar.analysis.equal_nodes import MAX_ELEMENTS, numbers_key
from irpar.ir import ArrayTensor, DType, Graph, Module, Node, Tensor, Value, place_of
from irpar.ops.elementwise import VARIADIC

from .chain_names import LayerNames, Words
from .find import Layers, find_layers_in_order
from .units import FORWARD, NotAlike, Stretch, in_phases, with_gradients

FIRST, LAST = 3, 2
"""Layers at the two ends of a chain that are planned: the third and its neighbours are to come out alike."""
MODEL = FIRST - 1
"""The layer, of the planned ones, that stands for those that are left out: all are as it is."""
_FEW = 8
"""Numbers of a constant that rules of operators may read: one for each dim."""
LEAST_COUNT = 16
"""Layers of a chain that is worth it: to look for fewer, and to compare them, costs about what it saves."""


@dataclass(frozen=True)
class Chain:
    """Layers of which each reads what the ones beside it give.

    Attributes:
        layers: them.
        stretches: where their nodes stand: each layer has some in each.
        own: which of the operands of a layer are its own: constants, or inputs of the graph.
        results: which results of the graph replace state of a layer, for each.
        names: what their nodes and values are called.
        over_all: nodes elsewhere that read something of every layer, such as the sum that is the norm of all gradients.
        reshaped: constants of layers under other shapes, by `id` and shape: filled in later, for all programs.
    """

    layers: Layers
    stretches: tuple[Stretch, ...]
    own: tuple[int, ...]
    results: tuple[tuple[int, ...], ...]
    names: LayerNames
    over_all: frozenset[Node]
    reshaped: dict[tuple[int, tuple[int, ...]], Tensor] = field(default_factory=dict, compare=False)

    @property
    def kept(self) -> list[int]:
        """The layers that are planned."""
        count = self.layers.count
        return [*range(FIRST), *range(count - LAST, count)]

    @property
    def left_out(self) -> range:
        """The layers that the last of the first ones stands for."""
        return range(FIRST, self.layers.count - LAST)

    def own_of(self, layer: int) -> list[Value]:
        """The constants and inputs that only this layer reads."""
        return [self.layers.operands[layer][place] for place in self.own]

    def kept_results(self, count: int) -> list[int]:
        """Of so many results of the graph those that replace no state of a layer that is left out."""
        gone = {index for layer in self.left_out for index in self.results[layer]}
        return [index for index in range(count) if index not in gone]

    def values_of(self, layer: int) -> list[Value]:
        """What belongs to a layer: results of its nodes, and its constants and inputs."""
        return _values(self.layers, self.own, layer)


def find_chain(module: Module) -> Chain | None:
    """The longest chain of equal layers of a graph in global view; None where none is worth it.

    Raises:
        NotAlike: there is one, but its layers are told apart by something.
    """
    graph = module.graph
    is_step = in_phases(graph)
    every = find_layers_in_order(graph, phase=FORWARD if is_step else None)
    found = [layers for layers in every if layers.count >= LEAST_COUNT]
    if not found:
        return None
    layers = max(found, key=lambda each: (each.count - 1) * each.size)
    stretches: tuple[Stretch, ...] = (Stretch(0, layers.size),)
    if is_step:
        layers, stretches = with_gradients(graph, layers)
        if layers.count < LEAST_COUNT:
            raise NotAlike("their gradients or updates differ")
    _check_order(graph, layers, stretches)
    own = _own_operands(layers)
    _check_shared(graph, layers)
    results = _results(graph, layers, own)
    replacing = {graph.output(index) for each in results for index in each}
    over_all = _over_all(graph, layers)
    _check_readers(graph, layers, stretches, replacing, over_all)
    _check_facts(module, layers, own)
    names = LayerNames.of([_named(layers, own, layer) for layer in range(layers.count)])
    if names is None:
        raise NotAlike("names of their values follow no common pattern")
    chain = Chain(layers, stretches, own, results, names, over_all)
    _check_words(module, chain)
    return chain


def _values(layers: Layers, own: Sequence[int], layer: int) -> list[Value]:
    results = [value for node in layers.members[layer] for value in node.results]
    return results + [layers.operands[layer][place] for place in own]


def _named(layers: Layers, own: Sequence[int], layer: int) -> list[str]:
    """The names of nodes and values of a layer, in one order for all layers; "" where one has none."""
    found: list[str | None] = []
    for node in layers.members[layer]:
        found += [node.name, node.source, node.scope]
    for value in _values(layers, own, layer):
        found += [value.name, value.source]
    return [name or "" for name in found]


def _check_order(graph: Graph, layers: Layers, stretches: Sequence[Stretch]) -> None:
    """Layers follow each other without anything between."""
    place = {node: number for number, node in enumerate(graph)}
    for stretch in stretches:
        ordered = layers.members[::-1] if stretch.backward else layers.members
        expected = place[stretch.of(ordered[0])[0]]
        for node in (node for nodes in ordered for node in stretch.of(nodes)):
            if place[node] != expected:
                raise NotAlike(f"{node.title} does not follow the node before it in its layer")
            if node.holds_graphs or node.callee is not None or node.strategy is not None or node.doc or node.metadata:
                raise NotAlike(f"{node.title} holds a graph, is a call, or is described")
            expected += 1


def _own_operands(layers: Layers) -> tuple[int, ...]:
    """The operands that each layer has for itself.

    Raises:
        NotAlike: one is neither this, nor the same for all, nor what a layer beside it gives.
    """
    given = [{value: place for place, value in enumerate(layers.results_of(nodes))} for nodes in layers.members]
    own = []
    for place, values in enumerate(zip(*layers.operands, strict=True)):
        if all(value is values[0] for value in values):
            continue
        before = {known.get(value) for known, value in zip(given, values[1:], strict=False)}
        behind = {known.get(value) for known, value in zip(given[1:], values, strict=False)}
        if any(len(places) == 1 and None not in places for places in (before, behind)):
            continue
        if len(set(values)) < len(values) or any(value.node is not None for value in values):
            raise NotAlike(f"%{values[0].name} is read by some layers, or is computed for one")
        own.append(place)
    return tuple(own)


def _check_shared(graph: Graph, layers: Layers) -> None:
    """No layer trains what all read: how that and its gradient lie is weighed against all layers, one by one."""
    for value in layers.operands[MODEL]:
        state = graph.states.get(value)
        if state is not None and state.is_trained and value in layers.operands[MODEL + 1]:
            raise NotAlike(f"%{value.name} is trained, and read by more than one layer")


def is_over_any_number(node: Node) -> bool:
    """Whether a node computes one thing of operands alike, however many there are."""
    return not node.domain and node.op_type in VARIADIC and all(value.type == node.result.type for value in node.inputs)


def runs_of_layers(
    values: Iterable[Value], given: Mapping[Value, tuple[int, Hashable]]
) -> list[tuple[int | None, tuple[Hashable, ...]]]:
    """What stands side by side of one layer, and which of its values that is.

    Args:
        values: in their order.
        given: which layer gives each, and which of its values it is; what is not there runs under None.
    """
    pairs = (given.get(value, (None, None)) for value in values)
    return [(layer, tuple(place for _, place in run)) for layer, run in itertools.groupby(pairs, lambda pair: pair[0])]


def _over_all(graph: Graph, layers: Layers) -> frozenset[Node]:
    """Nodes behind all layers that read the same of each, one layer behind another."""
    inside = {node for nodes in layers.members for node in nodes}
    results = [layers.results_of(nodes) for nodes in layers.members]
    given = {value: (layer, place) for layer, values in enumerate(results) for place, value in enumerate(values)}
    found = set[Node]()
    for node in {user for value in results[MODEL] for user in value.users} - inside:
        if node.graph is not graph or node.is_return or not is_over_any_number(node):
            continue
        runs = runs_of_layers(node.inputs, given)
        runs = runs[runs[0][0] is None : len(runs) - (runs[-1][0] is None)]
        if [layer for layer, _ in runs] == list(range(layers.count)) and len({read for _, read in runs}) == 1:
            found.add(node)
    return frozenset(found)


def _check_readers(
    graph: Graph,
    layers: Layers,
    stretches: Sequence[Stretch],
    replacing: Collection[Value],
    over_all: Collection[Node],
) -> None:
    """What a layer that is left out gives is read in it and beside it; so is what the layer before those gives.

    The graph itself reads what replaces states of the layers, and some nodes read of all layers.
    """
    inside = {node: number for number, nodes in enumerate(layers.members) for node in nodes}
    first = -1 if any(stretch.backward for stretch in stretches) else 0
    for number in range(MODEL, layers.count - LAST):
        near = range(number + first, number + 2)
        for value in layers.results_of(layers.members[number]):
            for user in value.users:
                may_read = user in over_all or (user is graph.return_node and value in replacing)
                if inside.get(user) not in near and not may_read:
                    raise NotAlike(f"%{value.name} is read outside of the next layer")


def _results(graph: Graph, layers: Layers, own: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """For each layer which results of the graph replace its states, in the order of these.

    Raises:
        NotAlike: states of layers are replaced, or belong to parameters, each otherwise.
    """
    found, told = [], set()
    times = Counter(graph.outputs)
    for layer, nodes in enumerate(layers.members):
        values = [layers.operands[layer][place] for place in own]
        names = {value.source_name: number for number, value in enumerate(values)}
        place = {value: (number, value.index) for number, node in enumerate(nodes) for value in node.results}
        facts, replaced = [], []
        for state in (graph.states.get(value) for value in values):
            output = None if state is None or state.output is None else graph.output(state.output)
            if output is not None and (output not in place or times[output] > 1):
                raise NotAlike(
                    f"%{output.name} replaces a state of a layer, and is not computed in it, or a result besides"
                )
            if state is not None and state.output is not None:
                replaced.append(state.output)
            parameter = (
                None if state is None or state.parameter is None else names.get(state.parameter, state.parameter)
            )
            facts.append((None if output is None else place[output], parameter))
        found.append(tuple(replaced))
        told.add(tuple(facts))
    if len(told) > 1:
        raise NotAlike("states are replaced, or belong to parameters, otherwise than in another layer")
    return tuple(found)


def _check_facts(module: Module, layers: Layers, own: Sequence[int]) -> None:
    """What is a layer's own lies alike, few numbers are the same, and only the layer reads it; nothing is described."""
    for place in own:
        values = [operands[place] for operands in layers.operands]
        if len({_facts(module, value) for value in values}) > 1:
            raise NotAlike(f"%{values[0].name} is not of the same kind in all layers")
        for value, nodes in zip(values, layers.members, strict=True):
            if not set(value.users).issubset(nodes):
                raise NotAlike(f"%{value.name} is read outside of its layer")
    for layer in range(layers.count):
        for value in _values(layers, own, layer):
            if value.doc or value.metadata:
                raise NotAlike(f"%{value.name} is described")


def _facts(module: Module, value: Value) -> tuple[object, ...]:
    data, name = value.data, value.source_name
    told = None if data is None else _told(data)
    known = value.name in module.literals, module.dim_names.get(name), name in module.fixed
    state = module.graph.states.get(value)
    kept = None if state is None else state.kind
    return kept, value.type, value.sharding, value.memory, type(data), told, known


def _told(data: Tensor) -> Hashable:
    """What passes may read of the numbers of a constant: of indices, texts and few numbers all.

    Of others that are in memory whether all are one number; and where that are few, whether all are finite, and none is
    zero.
    """
    if data.dtype.is_index or data.dtype is DType.STR or data.size <= _FEW:
        key = numbers_key(data)
        return place_of(data) if key is None else key
    if not isinstance(data, ArrayTensor):
        return None
    numbers = data.numpy()
    first = numbers.flat[0]
    is_one = bool(first == numbers.flat[-1] and (numbers == first).all())
    are_few = data.size <= MAX_ELEMENTS
    return (
        first.tobytes() if is_one else None,
        are_few and numbers.dtype.kind != "c" and bool(np.isfinite(numbers.astype(np.float64)).all()),
        are_few and bool(numbers.all()),
    )


def _check_words(module: Module, chain: Chain) -> None:
    """What was said of the values of each layer, and the log of it, is the same but for their names."""
    count = chain.layers.count
    words = Words(chain.names.around(0, -1, count))
    first = [(value.name, module.annotated.get(value.name)) for value in chain.values_of(0)]
    said = [(place, annotation, module.decisions.get(name, [])) for place, (name, annotation) in enumerate(first)]
    for layer in range(1, count):
        around = chain.names.around(layer, -1, count)
        values = chain.values_of(layer)
        for place, annotation, decisions in said:
            name = values[place].name
            other, told = module.annotated.get(name), module.decisions.get(name, [])
            if other is not annotation and not (annotation and words.annotation(annotation, around) == other):
                raise NotAlike(f"%{name} is annotated otherwise than in the first layer")
            if told != decisions and told != words.decisions(decisions, around):
                raise NotAlike(f"%{name} is sharded for another reason than in the first layer")
