"""A module with a few layers of a chain instead of all."""

from collections.abc import Collection
from dataclasses import replace

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
    made.repeats |= {value.name: alike for value in chain.values_of(MODEL)}
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
    members, stands_for = chain.layers.members, _stands_for(chain)
    skipped = {node for layer in chain.left_out for node in members[layer]}
    for node in graph:
        if node in skipped:
            continue
        copy = made.append(clone_node(node, values, made.names))
        if node in chain.over_all:
            copy.set_operands([values[value] for value in node.inputs if value not in left_out])
        for value in node.results:
            if value in stands_for:
                values[stands_for[value]] = values[value]
    kept = chain.kept_results(graph.output_count)
    names = [graph.output_names[index] for index in kept]
    made.set_outputs([values[graph.output(index)] for index in kept], names)
    place = {index: number for number, index in enumerate(kept)}
    made.states = {
        value: state if state.output is None else replace(state, output=place[state.output])
        for value, state in states_of(graph, values).items()
    }
    return made


def _stands_for(chain: Chain) -> dict[Value, Value]:
    """What the layers on both sides of those that are left out give, and what these give there in its place."""
    results, members = chain.layers.results_of, chain.layers.members
    found: dict[Value, Value] = {}
    for kept, left_out in ((MODEL, chain.left_out[-1]), (chain.kept[MODEL + 1], chain.left_out[0])):
        found.update(zip(results(members[kept]), results(members[left_out]), strict=True))
    return found
