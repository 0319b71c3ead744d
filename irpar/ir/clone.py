"""Copies of nodes, graphs and modules."""

from collections.abc import Mapping, Sequence

from .attributes import Attribute, Graphs
from .function import Function
from .graph import Graph, Node
from .module import Module
from .state_rules import states_of
from .value import Names, Value

ValueTexts = tuple[str, str | None, str]
"""What a value is called: name, source, doc."""
NodeTexts = tuple[str, str | None, str | None, str]
"""What a node is called: name, source, scope, doc."""


def clone_value(value: Value) -> Value:
    """A value with the same name, type and facts that belongs to nothing yet; its tensor is shared."""
    return clone_value_as(value, (value.name, value._source, value.doc))


def clone_value_as(value: Value, texts: ValueTexts) -> Value:
    """As `clone_value`, called otherwise."""
    made = Value.__new__(Value)  # All of it is set here: modules are copied again and again.
    made.name, made._source, made.doc = texts
    made.type, made.data, made.sharding = value.type, value.data, value.sharding
    made.global_shape, made.memory = value.global_shape, value.memory
    made.metadata = dict(value.metadata) if value.metadata else None
    made.node, made.graph, made.index, made._uses = None, None, 0, {}
    return made


def clone_node_as(node: Node, values: dict[Value, Value], texts: NodeTexts, results: Sequence[ValueTexts]) -> Node:
    """As `clone_node`, of a node that holds no graphs, and it and its results are called otherwise."""
    return _clone_without_graphs(node, values, texts, tuple(map(clone_value_as, node.results, results)))


def _clone_without_graphs(node: Node, values: dict[Value, Value], texts: NodeTexts, results: tuple[Value, ...]) -> Node:
    made = Node.__new__(Node)  # As above.
    made.name, made.source, made.scope, made.doc = texts
    made.op_type, made.domain, made.version, made.callee = node.op_type, node.domain, node.version, node.callee
    made.phase, made.stage, made.place, made.strategy = node.phase, node.stage, node.place, node.strategy
    made.metadata = dict(node.metadata) if node.metadata else None
    made.attributes = dict(node.attributes)
    made.graph = made._previous = made._next = made._read = made._inputs = None
    made._order = 0
    made._operands = [None if operand is None else values.get(operand, operand) for operand in node._operands]
    for index, operand in enumerate(made._operands):
        if operand is not None:
            operand._uses[made, index] = None
    made.results = results
    for index, (value, result) in enumerate(zip(node.results, results, strict=True)):
        result.node, result.index = made, index
        values[value] = result
    return made


def clone_node(
    node: Node,
    values: dict[Value, Value],
    names: Names | None = None,
    callees: Mapping[Function, Function] | None = None,
) -> Node:
    """A copy of a node that belongs to no graph yet.

    Args:
        node: the node.
        values: what stands for each value; operands that are not in it are read as they are. The copies of the
            results are added.
        names: the name table of the graph that the copy will go to, for its nested graphs.
        callees: what stands for each called function.
    """
    texts = node.name, node.source, node.scope, node.doc
    made = _clone_without_graphs(node, values, texts, tuple(map(clone_value, node.results)))
    if callees and node.callee is not None:
        made.callee = callees.get(node.callee, node.callee)
    if node.attributes and node.holds_graphs:
        for name, attribute in node.attributes.items():
            made.attributes[name] = _clone_attribute(attribute, made, values, names, callees)
    return made


def _clone_attribute(
    attribute: Attribute,
    holder: Node,
    values: dict[Value, Value],
    names: Names | None,
    callees: Mapping[Function, Function] | None,
) -> Attribute:
    nested = (attribute,) if isinstance(attribute, Graph) else attribute if isinstance(attribute, Graphs) else ()
    copies = []
    for graph in nested:
        copy = clone_graph(graph, values, names=names, callees=callees)
        copy.parent = holder
        copies.append(copy)
    if isinstance(attribute, Graph):
        return copies[0]
    return Graphs(copies) if copies else attribute


def clone_graph(
    graph: Graph,
    values: dict[Value, Value] | None = None,
    *,
    names: Names | None = None,
    callees: Mapping[Function, Function] | None = None,
) -> Graph:
    """A copy of a graph, nested graphs included. `values` gets what stands for each of its values."""
    values = {} if values is None else values
    made = Graph(graph.name, names=names if names is not None else graph.names.heir())
    made.view, made.ranks, made.doc = graph.view, graph.ranks, graph.doc
    made.metadata = dict(graph.metadata) if graph.metadata else None
    for value in graph.inputs:
        values[value] = made.adopt_input(clone_value(value))
    for value in graph.constants:
        values[value] = made.adopt_constant(clone_value(value))
    for node in graph:
        made.append(clone_node(node, values, made.names, callees))
    made.set_outputs([values.get(value, value) for value in graph.outputs], graph.output_names)
    made.states = states_of(graph, values)
    return made


def clone_module(module: Module) -> Module:
    """A copy of a module; constants share their tensors."""
    made = Module(opsets=module.opsets)
    callees: dict[Function, Function] = {}
    for key, function in module.functions.items():
        # Bodies are copied in a second round, since functions call each other in any order.
        copy = Function(function.domain, function.name, Graph(), overload=function.overload)
        copy.attributes, copy.opsets = dict(function.attributes), dict(function.opsets)
        copy.doc, copy.metadata = function.doc, dict(function.metadata) if function.metadata else None
        callees[function] = made.functions[key] = copy
    for function, copy in callees.items():
        copy.graph = clone_graph(function.graph, callees=callees)
    made.graphs = [clone_graph(graph, callees=callees) for graph in module.graphs]
    copy_facts(module, made)
    return made


def copy_facts(module: Module, made: Module) -> None:
    """Give a module all that another one has beside graphs and functions: meshes, what was said of values, and logs."""
    made.meshes = dict(module.meshes)
    made.ir_version, made.producer, made.doc = module.ir_version, module.producer, module.doc
    made.metadata, made.source = dict(module.metadata), module.source
    made.annotations = list(module.annotations)
    made.decisions = {name: list(known) for name, known in module.decisions.items()}
    made.whole, made.annotated, made.gone = dict(module.whole), dict(module.annotated), dict(module.gone)
    made.placed = dict(module.placed)
    made.conflicts, made.fixed, made.run_as_said = dict(module.conflicts), dict(module.fixed), dict(module.run_as_said)
    made.network, made.memory_limit, made.dim_names = module.network, module.memory_limit, dict(module.dim_names)
    made.literals, made.repeats = set(module.literals), dict(module.repeats)
    made.free_results = set(module.free_results)


def without_metadata(module: Module) -> Module:
    """A copy without metadata_props, for reading: exporters put much into them that is not the program."""
    made = clone_module(module)
    made.metadata = {}
    for function in made.functions.values():
        function.metadata = None
    for graph in made.all_graphs():
        graph.metadata = None
        for node in graph:
            node.metadata = None
        for value in graph.values():
            value.metadata = None
    return made
