"""Functions of layers, and their calls in the place of the nodes."""

import heapq
from collections.abc import Mapping, Sequence

from irpar.analysis.layers import LAYER_DOMAIN, LAYER_KEY, Layers
from irpar.analysis.layers.node_keys import reads
from irpar.analysis.layers.record import LayerRecord, names_of
from irpar.ir import Function, Graph, Module, Node, Value, clone_node, clone_value, holder_in


def put_calls(module: Module, found: Sequence[Layers]) -> None:
    """Make each kind of layers a function, and call it where they stood."""
    graph = module.graph
    places = {node: index for index, node in enumerate(graph)}
    ranks: dict[Node, int] = dict(places)
    foreign = _nodes_outside(graph, found)
    replaced: dict[Value, Value] = {}
    for number, layers in enumerate(found, 1):
        first = [replaced.get(value, value) for value in layers.operands[0]]
        function = _function(module, layers, first, number)
        module.functions[function.key] = function
        for nodes, operands in zip(layers.members, layers.operands, strict=True):
            own = [places[node] for node in nodes]
            between = {name: place for place in range(min(own), max(own)) if (name := foreign.get(place)) is not None}
            record = LayerRecord(names_of(nodes), own, between)
            olds, read = layers.results_of(nodes), [replaced.get(value, value) for value in operands]
            call = _call(function, olds, nodes, read, record)
            replaced.update(zip(olds, call.results, strict=True))
            ranks[call] = max(own)
    if found:
        graph.reorder(_order(graph, ranks))


def _nodes_outside(graph: Graph, found: Sequence[Layers]) -> dict[int, str]:
    """The places of nodes that are in no layer, with the names of what they give."""
    inside = {node for layers in found for nodes in layers.members for node in nodes}
    return {
        place: node.results[0].name for place, node in enumerate(graph) if node not in inside and node.results
    }  # fmt: skip


def _function(module: Module, layers: Layers, operands: Sequence[Value], number: int) -> Function:
    """A function with the first of the layers, which reads these operands, as its body."""
    name = f"layer_{number}"
    while (LAYER_DOMAIN, name, "") in module.functions:
        name += "_"
    body = Graph(name)
    values: dict[Value, Value] = {}
    for operand in operands:
        values[operand] = body.add_input(operand.name, operand.type)
    for node in layers.members[0]:
        body.append(clone_node(node, values, body.names))
    results = [values[value] for value in layers.results_of(layers.members[0])]
    body.set_outputs(results, [value.name for value in results])
    function = Function(LAYER_DOMAIN, name, body)
    function.opsets = dict(module.opsets)
    return function


def _call(
    function: Function, olds: Sequence[Value], nodes: Sequence[Node], operands: Sequence[Value], record: LayerRecord
) -> Node:
    """Put a call in the place of the last node of a layer; the others are gone."""
    graph = nodes[0].graph
    assert graph is not None
    made = [clone_value(value) for value in olds]
    call = function.call(operands, results=made)
    call.metadata = {LAYER_KEY: record.text()}
    call.phase, call.stage, call.place = nodes[0].phase, nodes[0].stage, nodes[0].place
    inside = set(nodes)
    for old, new in zip(olds, made, strict=True):
        old.replace_uses(new, [use for use in old.uses if holder_in(use[0], graph) not in inside])
    following = nodes[-1].next
    while following in inside:
        following = following.next
    for node in reversed(nodes):
        node.erase_forced()
    return graph.append(call) if following is None else graph.insert_before(following, call)


def _order(graph: Graph, ranks: Mapping[Node, int]) -> list[Node]:
    """An order in which each call stands behind what it reads, else as before: a call in the place of its last node."""
    waits = dict.fromkeys(graph, 0)
    readers: dict[Node, list[Node]] = {}
    for node in graph:
        for producer in {value.node for value in reads(node) if value is not None and value.node in waits}:
            assert producer is not None
            waits[node] += 1
            readers.setdefault(producer, []).append(node)
    ready = [(ranks[node], node) for node, count in waits.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for reader in readers.get(node, ()):
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, (ranks[reader], reader))
    return order
