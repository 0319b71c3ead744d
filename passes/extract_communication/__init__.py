"""extract-communication: equal subgraphs of communication become calls of one function."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from irpar.analysis.origins_of_calls import INSIDE, origin_text
from irpar.globs import matching_names
from irpar.ir import COMMUNICATION, Function, Graph, Module, Node, RefAttribute, Value, clone_node, clone_value
from irpar.ops import traits
from irpar.ops.collectives import KINDS, STARTED
from irpar.pass_manager import Pass, PassResult
from irpar.sharding import IrparError, nearest_names

from .subgraphs import Subgraph, subgraphs

_INT = 2
"""ONNX's AttributeType of a number."""


@dataclass(frozen=True)
class ExtractCommunication(Pass):
    """Let one function stand for equal subgraphs of communication: a collective with what packs or splits for it.

    Before: local view. After: the same, in the same order; where two subgraphs of a program were equal in all but ids,
    names and reasons, there are calls of one function of the domain `irpar.communication`, each with the id of its
    collective. inline-functions gives the graphs back, to the name.

    A subgraph is a collective, or its start, with the nodes directly before and behind it that were made to serve it
    alone; what goes from rank to rank stays as it is.

    Options:
        match: globs of collectives, by their label or by what they read or give, that become functions even where
            there is but one.
        take: `packing` as well, or the `collectives` alone.
    """

    name: ClassVar[str] = "extract-communication"
    match: tuple[str, ...] = ()
    take: Literal["packing", "collectives"] = "packing"

    def run(self, module: Module) -> PassResult:
        """Find the classes over all programs, and put calls in the place of their members.

        Raises:
            IrparError: the view is global, or a glob matches no collective.
        """
        if not module.is_local:
            raise IrparError("extract-communication needs the local view", do="run it after localize")
        found = [
            (place, subgraph)
            for place, graph in enumerate(module.graphs)
            for body in graph.graphs()
            for subgraph in subgraphs(body, packing=self.take == "packing")
        ]
        tagged = self._tagged([subgraph for _, subgraph in found])
        classes: dict[Hashable, list[tuple[int, Subgraph]]] = {}
        for place, subgraph in found:
            form = subgraph.form()
            if form is not None:
                classes.setdefault(form, []).append((place, subgraph))
        functions = calls = 0
        now: dict[Value, Value] = {}
        for members in classes.values():
            programs = [place for place, _ in members]
            if len(programs) == len(set(programs)) and tagged.isdisjoint(subgraph for _, subgraph in members):
                continue  # No program has two of them.
            function = _function(module, members[0][1], now)
            functions += 1
            for _, subgraph in members:
                _put_call(function, subgraph, now)
                calls += 1
        return PassResult(calls > 0, statistics={"calls": calls, "functions": functions} if calls else {})

    def _tagged(self, known: Sequence[Subgraph]) -> set[Subgraph]:
        """The subgraphs that `match` names.

        Raises:
            IrparError: a glob matches none.
        """
        if not self.match:
            return set()
        of_name: dict[str, list[Subgraph]] = {}
        for subgraph in known:
            for name in _names(subgraph):
                of_name.setdefault(name, []).append(subgraph)
        found: set[Subgraph] = set()
        for glob in self.match:
            names = matching_names(glob, of_name)
            if not names:
                raise IrparError(
                    f'extract-communication: match "{glob}" names no collective',
                    notes=nearest_names(glob, set(of_name)),
                    do="give the node that a collective is for, or a value that it reads or gives, or a glob of these",
                )
            found.update(subgraph for name in names for subgraph in of_name[name])
        return found


def _names(subgraph: Subgraph) -> set[str]:
    """What a subgraph may be called by."""
    values = (*subgraph.inputs, *subgraph.outputs)
    names = {subgraph.collective.source, *(name for value in values for name in (value.name, value.source))}
    return {name for name in names if name}


def _function(module: Module, subgraph: Subgraph, now: Mapping[Value, Value]) -> Function:
    """A function of the module with a copy of a subgraph that says nothing of where that comes from.

    Args:
        module: that.
        subgraph: what is copied.
        now: what stands for values that others gave when the subgraph was found.
    """
    collective = subgraph.collective
    kind = KINDS[STARTED.get(collective.op_type, collective.op_type)]
    if collective.op_type in STARTED:
        kind += "_start"
    number = 0
    while (COMMUNICATION, f"{kind}_{number}", "") in module.functions:
        number += 1
    graph = Graph(f"{kind}_{number}")
    graph.view = "local"
    function = Function(COMMUNICATION, graph.name, graph)
    function.attributes["id"] = None
    function.opsets = {"": module.opsets[""]} if "" in module.opsets else {}
    values: dict[Value, Value] = {}
    for value in subgraph.inputs:
        values[now.get(value, value)] = graph.add_input(value.name, value.type)
    for value in subgraph.constants:
        values[value] = graph.adopt_constant(clone_value(value))
    for node in subgraph.nodes:
        graph.append(_bare(clone_node(node, values, graph.names)))
    for value in subgraph.outputs:
        _strip(values[value])
    graph.set_outputs([values[value] for value in subgraph.outputs])
    for node in graph:
        function.opsets.setdefault(node.domain, node.version or 1)
    module.functions[function.key] = function
    return function


def _bare(node: Node) -> Node:
    """A node without what a call says: where it comes from, and the id."""
    node.name, node.source, node.scope, node.doc, node.metadata = "", None, None, "", None
    node.phase = node.stage = node.place = None
    if traits(node).communicates:
        node.attributes["id"] = RefAttribute("id", _INT)
    return node


def _strip(value: Value) -> None:
    """Leave of a result its type: the call has the rest."""
    value.source, value.sharding, value.global_shape, value.doc, value.metadata = None, None, None, "", None


def _put_call(function: Function, subgraph: Subgraph, now: dict[Value, Value]) -> None:
    """Put a call in the place of a subgraph; `now` gets what stands for its results."""
    first, graph = subgraph.collective, subgraph.collective.graph
    assert graph is not None
    results = [clone_value(value) for value in subgraph.outputs]
    call = function.call(
        [now.get(value, value) for value in subgraph.inputs], {"id": first.attributes["id"]}, results=results
    )
    call.name, call.source, call.scope, call.doc = first.name, first.source, first.scope, first.doc
    call.phase, call.stage, call.place, call.strategy = first.phase, first.stage, first.place, first.strategy
    text = origin_text(first, subgraph.nodes, list(subgraph.constants.items()), subgraph.outputs)
    metadata = {**(first.metadata or {}), **({} if text is None else {INSIDE: text})}
    call.metadata = metadata or None
    names = [value.name for value in subgraph.outputs]
    graph.insert_before(subgraph.nodes[0], call)
    for old, new in zip(subgraph.outputs, results, strict=True):
        old.replace_uses(new)
        now[old] = new
    _erase(subgraph.nodes)
    for value in subgraph.constants:
        graph.remove_constant(value)
    for value, name in zip(results, names, strict=True):
        value.rename(name)


def _erase(nodes: Iterable[Node]) -> None:
    for node in reversed(list(nodes)):
        node.erase()
