"""A module with a few layers of a chain instead of all."""

from collections.abc import Collection

from irpar.ir import Graph, Module, Value, clone_node, clone_value
from irpar.ir.clone import copy_facts
from irpar.ir.state_rules import states_of

from .chain import MODEL, Chain


def folded_module(module: Module, chain: Chain) -> Module:
    """A copy of a module without the layers that others stand for; each name is free for what stood under it.

    x -> L0 -> L1 -> L2 -> ... -> L95 -> y   becomes   x -> L0 -> L1 -> L2 -> L94 -> L95 -> y
    """
    left_out = {value for layer in chain.left_out for value in chain.values_of(layer)}
    names = {value.name for value in left_out}
    made = Module(opsets=module.opsets)
    made.graphs = [_folded_graph(module.graph, chain, left_out)]
    copy_facts(module, made)
    for name in names:
        made.annotated.pop(name, None)
        made.decisions.pop(name, None)
    alike = 1 + len(chain.left_out)
    made.repeats = {value.name: alike for value in chain.values_of(MODEL)}
    return made


def _folded_graph(graph: Graph, chain: Chain, left_out: Collection[Value]) -> Graph:
    made = Graph(graph.name, names=graph.names.heir())
    made.doc = graph.doc
    made.metadata = dict(graph.metadata) if graph.metadata else None
    values: dict[Value, Value] = {}
    for value in graph.inputs:
        if value not in left_out:
            values[value] = made.adopt_input(clone_value(value))
    for value in graph.constants:
        if value not in left_out:
            values[value] = made.adopt_constant(clone_value(value))
    layers = chain.layers
    skipped = {node for layer in chain.left_out for node in layers.members[layer]}
    last = layers.members[chain.left_out[-1]]
    for node in graph:
        if node not in skipped:
            made.append(clone_node(node, values, made.names))
        elif node is last[-1]:
            before = layers.results_of(layers.members[MODEL])
            values.update({old: values[new] for old, new in zip(layers.results_of(last), before, strict=True)})
    made.set_outputs([values[value] for value in graph.outputs], graph.output_names)
    made.states = states_of(graph, values)
    return made
