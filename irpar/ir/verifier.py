"""The verifier: what must hold of every module between passes.

Operators add checks of their own through `register_check`; `irpar.ops` does so for its collectives.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from irpar.sharding import IrparError

from .attributes import Floats, Graphs, Ints, RefAttribute, Strings, Tensors, Types
from .function import COMMUNICATION, Function
from .graph import DOMAIN, Graph, Node
from .module import Module
from .state_rules import state_problems
from .tensor import Tensor
from .types import InflightType, OptionalType, SequenceType, TensorType, UnknownType
from .value import Names, Value
from .value_rules import ValueRules

SHOWN = 10
"""Problems that a message lists."""

Check = Callable[[Module, Node], Iterable[str]]
"""Looks at a node; yields what is wrong with it, each as the end of a sentence that the node starts."""

ModuleCheck = Callable[[Module], Iterable[str]]
"""Looks at a module as a whole; yields what is wrong with it."""

_CHECKS: dict[tuple[str, str], list[Check]] = {}
_MODULE_CHECKS: list[ModuleCheck] = []

_TYPES = (TensorType, SequenceType, OptionalType, InflightType, UnknownType)
_SCALARS = frozenset({int, float, str, bytes})
_ELEMENTS: dict[type, tuple[type, ...]] = {
    Ints: (int,),
    Floats: (float,),
    Strings: (str, bytes),
    Tensors: (Tensor,),
    Graphs: (Graph,),
    Types: _TYPES,
}
_SHARED_IDS = ("Wait",)
_COPIES = ("Copy", "CopyStart")
"""Their ids are another space than those of communication."""


class VerifyError(IrparError):
    """A module that breaks rules of the IR; the message lists the first 10."""


def register_check(domain: str, op_type: str, check: Check) -> None:
    """Let `verify` call `check` for every node of an operator."""
    _CHECKS.setdefault((domain, op_type), []).append(check)


def register_module_check(check: ModuleCheck) -> None:
    """Let `verify` call `check` for every module."""
    _MODULE_CHECKS.append(check)


def verify(module: Module) -> None:
    """Check a module against the rules of the IR: near-linear in its size, reads no numbers.

    Raises:
        VerifyError: listing what is wrong, each with its graph, its node or value, and the rule.
    """
    problems = list(_module(module))
    for function in module.functions.values():
        place = f"function @{'.'.join(filter(None, function.key[:2]))}"
        problems.extend(_RootVerifier(module, function.graph, place, function).problems())
    for graph in module.graphs:
        problems.extend(_RootVerifier(module, graph, f"graph @{graph.name}", None).problems())
    if not problems:
        return
    count = len(problems)
    shown = f", the first {SHOWN}" if count > SHOWN else ""
    raise VerifyError(
        f"the IR is not valid: {count} problem{'s' if count > 1 else ''}{shown}",
        notes=tuple(problems[:SHOWN]),
        do="mend what made this module; if it was a pass, run it with --verify-each and report it",
    )


# -- the module -----------------------------------------------------------------------------------------------------


def _module(module: Module) -> Iterator[str]:
    for name, mesh in module.meshes.items():
        if name != mesh.name:
            yield f"module: mesh @{mesh.name} is kept under the name {name!r}"
    for key, function in module.functions.items():
        if key != function.key:
            yield f"module: function {function.key} is kept under {key}"
    if not module.graphs:
        yield "module: has no graph"
    views = {graph.view for graph in module.graphs}
    if "global" in views and len(module.graphs) > 1:
        yield f"module: has {len(module.graphs)} graphs; there is one in global view, or all are in local view"
    yield from _fixed(module)
    yield from _ranks(module)
    yield from _recursion(module)
    for check in _MODULE_CHECKS:
        for problem in check(module):
            yield f"module: {problem}"


def _fixed(module: Module) -> Iterator[str]:
    inputs = {value.source_name: value for graph in module.graphs for value in graph.inputs}
    for name, tensor in module.fixed.items():
        value = inputs.get(name)
        if value is None:
            yield f'module: "{name}" is fixed, and no input has that name'
            continue
        whole = value.type
        if isinstance(whole, TensorType) and value.global_shape is not None:
            whole = whole.with_shape(value.global_shape)
        if any(value in graph.states for graph in module.graphs):
            yield f'module: input "{name}" is fixed, and is state'
        if whole != tensor.type:
            yield f'module: input "{name}" is {whole}, and is fixed to a tensor that is {tensor.type}'


def _ranks(module: Module) -> Iterator[str]:
    size = module.mesh.size if len(module.meshes) == 1 else None
    taken: dict[int, str] = {}
    for graph in module.graphs:
        for rank in graph.ranks:
            if rank in taken:
                yield f"graph @{graph.name}: rank {rank} runs graph @{taken[rank]} already"
            taken[rank] = graph.name
            if rank < 0 or (size is not None and rank >= size):
                yield f"graph @{graph.name}: rank {rank} is outside the mesh {next(iter(module.meshes.values()))}"


def _recursion(module: Module) -> Iterator[str]:
    edges = [
        (function.key, node.callee.key)
        for function in module.functions.values()
        for node in function.graph.walk()
        if node.callee is not None
    ]
    if not edges:
        return
    import networkx as nx  # slow to import, and few modules need it

    try:
        cycle = nx.find_cycle(nx.DiGraph(edges))
    except nx.NetworkXNoCycle:
        return
    yield f"module: functions call each other in a circle: {' -> '.join(edge[0][1] for edge in cycle)}"


# -- one graph with all that is nested in it --------------------------------------------------------------------------


class _RootVerifier:
    """Walks a graph in order; `defined` holds the values that may be read at the place in hand."""

    def __init__(self, module: Module, graph: Graph, place: str, function: Function | None) -> None:
        self.module = module
        self.root = graph
        self.place = place
        self.function = function
        self.names: Names = graph.names
        self.rules = ValueRules(module, graph)
        self.defined: set[Value] = set()
        self.ids: dict[tuple[int, bool], Node] = {}

    def problems(self) -> Iterator[str]:
        """What is wrong, each with its place."""
        if self.function is not None:
            for problem in self._attributes(self.function.attributes):
                yield f"{self.place}: {problem}"
        for place, problem in self._graph(self.root):
            yield f"{self.place}, {place}: {problem}"

    def _graph(self, graph: Graph) -> Iterator[tuple[str, str]]:
        if graph.names is not self.names:
            yield f"nested graph @{graph.name}", "has a name table of its own; nested graphs share that of their root"
        for index, value in enumerate(graph.inputs):
            if value.graph is not graph or value.node is not None or value.index != index:
                yield f"input %{value.name}", "does not know that it is an input of this graph"
            if value.data is not None:
                yield f"input %{value.name}", "holds numbers; a constant is kept among the constants"
            yield from self._define(value)
        for value in graph.constants:
            if value.graph is not graph or value.node is not None or value.data is None:
                yield f"constant %{value.name}", "holds no numbers, or does not know its graph"
            yield from self._define(value)
        for node in graph:
            yield from self._node(graph, node)
        yield from self._results(graph)
        for value, state in graph.states.items():
            for problem in state_problems(graph, value, state):
                yield f"state %{value.name}", problem
            if graph is not self.root or self.function is not None:
                yield f"state %{value.name}", "is in a body or a function; only a whole program has state"
        if graph is not self.root:
            self.defined.difference_update(graph.values())

    def _results(self, graph: Graph) -> Iterator[tuple[str, str]]:
        place = f"results of @{graph.name}"
        for problem in self._operands(graph.return_node):
            yield place, problem
        if len(graph.output_names) != len(graph.outputs):
            yield place, f"are {len(graph.outputs)}, but have {len(graph.output_names)} names"
        if len(set(graph.output_names)) != len(graph.output_names):
            yield place, f"share names: {', '.join(graph.output_names)}"

    # -- values -----------------------------------------------------------------------------------------------------

    def _define(self, value: Value) -> Iterator[tuple[str, str]]:
        self.defined.add(value)
        for problem in self._value(value):
            yield f"%{value.name}", problem

    def _value(self, value: Value) -> Iterator[str]:
        if not value.name or self.names.table.get(value.name) is not value:
            yield "has a name that is empty, or that the graph's name table gives to another value"
        yield from self.rules.problems(value)
        for node, index in value._uses:
            if index >= len(node._operands) or node._operands[index] is not value:
                yield f"lists a use by {node!r} that does not read it"
            elif node.graph is None or node.graph.names is not self.names:
                yield f"is read by {node!r}, which is not in this graph"
        if type(value.type) is InflightType:
            yield from self._inflight(value)

    def _inflight(self, value: Value) -> Iterator[str]:
        readers = [node for node, _ in value._uses]
        if self.function is not None and readers == [self.root.return_node]:
            return  # Who calls the function waits.
        waits = [node for node in readers if node.domain == DOMAIN and node.op_type.endswith("Wait")]
        for node in readers:
            if node not in waits:
                yield f"is in flight, but {node!r} reads it without waiting"
        if len(waits) != 1:
            yield f"is in flight, and is waited for {len(waits)} times instead of once"
        begun = None if value.node is None else value.node.attributes.get("id")
        for wait in waits:
            if (waited := wait.attributes.get("id")) != begun:
                yield f"is in flight under id {begun!r}, and is waited for under id {waited!r}"

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _node(self, graph: Graph, node: Node) -> Iterator[tuple[str, str]]:
        for problem in self._node_problems(graph, node):
            yield f"node {node.label} ({node.op_type})", problem
        if node.attributes:
            for nested in node.nested_graphs():
                if nested.parent is not node:
                    yield f"nested graph @{nested.name}", f"does not know that {node!r} holds it"
                yield from self._graph(nested)
        for index, value in enumerate(node.results):
            if value.node is not node or value.index != index:
                yield f"%{value.name}", f"does not know that it is result {index} of {node!r}"
            if value.data is not None:
                yield f"%{value.name}", "is a result of a node, but holds numbers"
            yield from self._define(value)

    def _node_problems(self, graph: Graph, node: Node) -> Iterator[str]:
        if node.graph is not graph:
            yield "does not know its graph"
        yield from self._operands(node)
        if node.attributes:
            yield from self._attributes(node.attributes)
        if node.callee is not None:
            yield from self._call(node, node.callee)
        elif node.domain == DOMAIN:
            yield from self._irpar(node)
        for check in _CHECKS.get((node.domain, node.op_type), ()):
            yield from check(self.module, node)

    def _operands(self, node: Node) -> Iterator[str]:
        defined = self.defined
        for index, operand in enumerate(node._operands):
            if operand is None:
                continue
            if operand not in defined:
                yield f"reads %{operand.name}, {self._why_undefined(operand)}"
            if (node, index) not in operand._uses:
                yield f"reads %{operand.name}, which does not list the use"

    def _why_undefined(self, value: Value) -> str:
        owner = value.owner
        if owner is None:
            return "which is in no graph"
        if owner.names is not self.names:
            return f"which belongs to another graph, @{owner.name}"
        if owner is self.root:
            return "which is defined after it"
        return f"which is not visible here: it belongs to nested graph @{owner.name}, or is defined later"

    def _call(self, node: Node, callee: Function) -> Iterator[str]:
        if self.module.functions.get(callee.key) is not callee:
            yield f"calls {callee!r}, which is not a function of the module"
        if (node.domain, node.op_type) != (callee.domain, callee.name):
            yield f"is named {node.domain}.{node.op_type}, but calls {callee!r}"
        inputs, outputs = len(callee.graph.inputs), len(callee.graph.outputs)
        if len(node.operands) > inputs or len(node.results) > outputs:
            given = f"{len(node.operands)} operands and {len(node.results)} results"
            yield f"has {given}, but {callee!r} has {inputs} inputs and {outputs} outputs"
        if callee.domain == COMMUNICATION:
            yield from self._id(node)

    def _irpar(self, node: Node) -> Iterator[str]:
        if node.is_return:
            yield "stands among the nodes; a graph's results are set by set_outputs"
        if not node.op_type.endswith(_SHARED_IDS):
            yield from self._id(node)

    def _id(self, node: Node) -> Iterator[str]:
        number = node.attributes.get("id")
        if isinstance(number, int):
            other = self.ids.setdefault((number, node.op_type in _COPIES), node)
            if other is not node:
                yield f"has id {number}, which {other!r} has too"

    def _attributes(self, attributes: Mapping[str, Any]) -> Iterator[str]:
        for name, value in attributes.items():
            kind = type(value)
            if kind in _SCALARS:
                continue
            elements = _ELEMENTS.get(kind)
            if elements is not None:
                wrong = [item for item in value if not isinstance(item, elements) or type(item) is bool]
                if wrong:
                    yield f"has attribute {name}, {kind.__name__}, with the element {wrong[0]!r}"
            elif kind is RefAttribute:
                yield from self._reference(name, value)
            elif not isinstance(value, (Tensor, Graph, *_TYPES)) and not (
                value is None and self._is_default(attributes)
            ):
                yield f"has attribute {name} of a kind that attributes do not have: {value!r}"

    def _is_default(self, attributes: Mapping[str, Any]) -> bool:
        return self.function is not None and attributes is self.function.attributes

    def _reference(self, name: str, value: RefAttribute) -> Iterator[str]:
        if self.function is None:
            yield f"has attribute {name} that refers to an attribute of a call, outside of a function"
        elif value.name not in self.function.attributes:
            yield f"has attribute {name} that refers to {value.name!r}, which the function does not declare"
