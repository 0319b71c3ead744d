"""inline-functions: put bodies of functions in the place of their calls."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from irpar.analysis.types.type_merge import merge
from irpar.ir import Builder, Function, Graph, Module, Node, Value
from irpar.ir.instantiate import body_of_call
from irpar.ops.effects import is_compute, schema_of
from irpar.pass_manager import Pass, PassResult
from irpar.sharding import IrparError

MOST_NODES = 5_000_000
"""That opening all functions may make, the bodies of functions counted."""


class InlineError(IrparError):
    """A function that cannot be opened."""


@dataclass(frozen=True)
class InlineFunctions(Pass):
    """Open the calls of functions: all of them, or of those whose names match `only`, such as `[my.domain.*, Gelu]`.

    Before: any graph. After: no call of such a function is left, and none of these functions. A node that comes from a
    body has the call's source and scope before its own; a result keeps the name that it had at the call.

    A function whose body follows another opset version than its caller is opened where its operators mean the same in
    both; else it is refused.
    """

    name: ClassVar[str] = "inline-functions"
    only: tuple[str, ...] = ()

    def run(self, module: Module) -> PassResult:
        """Open the calls in all graphs and functions.

        Raises:
            InlineError: functions call each other in a circle, follow opsets that do not agree, or would become too
                many nodes.
        """
        if not module.functions:
            return PassResult(False, statistics={"calls": 0, "functions": 0})
        order = _callees_first(module)
        chosen = {function for function in order if self.opens(function)}
        _refuse_explosion(module, order, chosen)
        calls = 0
        # A body is opened itself before it is copied to its callers, so that no call is opened twice.
        for function in order:
            calls += _open_calls(function.graph, chosen, function.opsets)
        for graph in module.graphs:
            calls += _open_calls(graph, chosen, module.opsets)
        for function in chosen:
            del module.functions[function.key]
        return PassResult(bool(chosen), statistics={"calls": calls, "functions": len(chosen)})

    def opens(self, function: Function) -> bool:
        """Whether the option `only` names the function, by its name or by domain and name."""
        names = function.name, f"{function.domain}.{function.name}"
        return not self.only or any(fnmatch.fnmatchcase(name, glob) for glob in self.only for name in names)


def _callees_first(module: Module) -> list[Function]:
    """The functions, each after those that it calls.

    Raises:
        InlineError: they call each other in a circle, or call what the module does not have.
    """
    import networkx as nx  # slow to import, and few models need it

    calls = nx.DiGraph()
    calls.add_nodes_from(module.functions.values())
    for function in module.functions.values():
        calls.add_edges_from((callee, function) for callee in _called(function.graph))
    for callee in (*calls, *(callee for graph in module.graphs for callee in _called(graph))):
        if module.functions.get(callee.key) is not callee:
            raise InlineError(f"{callee!r} is called but not in the module", do="add the function to the module")
    try:
        return list(nx.topological_sort(calls))
    except nx.NetworkXUnfeasible:
        circle = [edge[1] for edge in nx.find_cycle(calls)][::-1]
        names = [_name(function) for function in (*circle, circle[0])]
        raise InlineError(
            f"functions call each other in a circle: {' -> '.join(names)}", do="ONNX has no recursion: use a Loop"
        ) from None


def _called(graph: Graph) -> list[Function]:
    return [node.callee for node in graph.walk() if node.callee is not None]


def _refuse_explosion(module: Module, order: Sequence[Function], chosen: set[Function]) -> None:
    """Count the nodes before any call is opened: functions that call others twice double them at each level.

    Raises:
        InlineError: naming the function that would become too many.
    """
    sizes: dict[Function, int] = {}
    total = 0
    for function in order:
        size = _opened_size(function.graph, sizes)
        if function in chosen:
            sizes[function] = size
        total += size
        _refuse_size(size, total, _name(function))
    for graph in module.graphs:
        called = [callee for callee in _called(graph) if callee in sizes]
        largest = max(called, key=sizes.__getitem__, default=None)
        size = _opened_size(graph, sizes)
        total += size
        _refuse_size(size, total, "the graph" if largest is None else _name(largest))


def _opened_size(graph: Graph, sizes: dict[Function, int]) -> int:
    """Nodes of a graph once the calls in it are opened; `sizes` has the functions that are opened."""
    return sum(1 if node.callee is None else sizes.get(node.callee, 1) for node in graph.walk())


def _refuse_size(size: int, total: int, name: str) -> None:
    if total > MOST_NODES:
        raise InlineError(
            f"opening {name} makes {size:,} nodes, {total:,} with what was opened before; {MOST_NODES:,} is the most",
            do="export the model without these functions, or open only some of them: inline-functions{only=[...]}",
        )


def _open_calls(graph: Graph, chosen: set[Function], opsets: dict[str, int]) -> int:
    calls = [node for node in graph.walk() if node.callee in chosen]
    for call in calls:
        _open(call, opsets)
    return len(calls)


def _open(call: Node, opsets: dict[str, int]) -> None:
    """Put the body of the called function in the place of a call."""
    graph, function = call.graph, call.callee
    assert graph is not None
    assert function is not None
    body = body_of_call(call, graph.names)
    for node in body.walk():
        _follow(node, opsets, function)
        _inherit(node, call)
    for index, value in enumerate(body.inputs):
        operand = call.operands[index] if index < len(call.operands) else None
        _pass_operand(call, value, operand)
        graph.names.release(value)
    inner = {value for nested in body.graphs() for value in nested.values()} - set(body.inputs)
    for value in inner:
        # A value without a source of its own stands for none in the imported model.
        if value.source:
            value.source = _joined(call.source, value.source)
    results = graph.absorb(body, call)
    _take_over(call, _apart_where_annotated(call, results, inner, opsets), inner)


def _pass_operand(call: Node, value: Value, operand: Value | None) -> None:
    """Let the readers of a function's input read the operand, or nothing where it is left out."""
    for reader, place in value.uses:
        if operand is None and reader.is_return:
            raise InlineError(
                f"the function returns its input {value.name}, which the call leaves out",
                where=f"node {call.label}",
                do="give the operand",
            )
        reader.set_operand(place, operand)


def _apart_where_annotated(
    call: Node, results: Sequence[Value], inner: set[Value], opsets: dict[str, int]
) -> list[Value]:
    """The results of a body; an annotated one that is an operand of the call, or comes twice, is a value of its own.

    Adds to `inner`.
    """
    assert call.graph is not None
    found: list[Value] = []
    for old, new in zip(call.results, results, strict=False):
        if old.sharding is not None and (new not in inner or new in found):
            builder = Builder(call.graph, opsets, before=call, like=call)
            new = builder.op("Identity", [new], type=old.type, name=old.name)
            inner.add(new)
        found.append(new)
    return found


def _take_over(call: Node, results: Sequence[Value], inner: set[Value]) -> None:
    """Let the results of the body stand for those of the call; one that is made in there takes its name and facts."""
    names: dict[Value, str] = {}
    for old, new in zip(call.results, results, strict=False):
        if new in inner and new not in names:
            names[new] = old.name
            new.source = old.source or new.source
            new.type = merge(new.type, old.type)
            new.sharding, new.memory, new.doc, new.metadata = old.sharding, old.memory, old.doc, old.metadata
        old.replace_uses(new)
    call.erase()
    for new, name in names.items():
        new.rename(name)


def _inherit(node: Node, call: Node) -> None:
    """Let a node of a body say where its call comes from, then where it stands in the function."""
    node.source = _joined(call.source, node.source)
    node.name = _joined(call.name, node.name) or ""
    node.scope = _joined(call.scope, node.scope)
    node.phase = node.phase or call.phase
    node.stage = call.stage if node.stage is None else node.stage
    node.place = node.place or call.place


def _joined(outer: str | None, inner: str | None) -> str | None:
    return f"{outer}/{inner}" if outer and inner else outer or inner


def _follow(node: Node, opsets: dict[str, int], function: Function) -> None:
    """Let a node follow the opset versions of the caller, which gets those that it lacks.

    Raises:
        InlineError: its operator means something else there.
    """
    if node.callee is not None or not is_compute(node):
        return
    version = opsets.setdefault(node.domain, node.version)
    if node.version == version:
        return
    schemas = schema_of(node.domain, node.op_type, node.version), schema_of(node.domain, node.op_type, version)
    since = [schema.since_version if schema is not None else None for schema in schemas]
    if since[0] is None or since[0] != since[1]:
        domain = node.domain or "ai.onnx"
        raise InlineError(
            f"the function {_name(function)} follows opset {node.version} of {domain}, its caller {version}; "
            f"{node.op_type} is not known to mean the same in both",
            where=f"node {node.label}",
            do="export the model with one opset version, or convert the function",
        )
    node.version = version


def _name(function: Function) -> str:
    return f"{function.domain}.{function.name}"
