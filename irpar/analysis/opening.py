"""Calls of functions opened: the body in the place of the call.

%y = call @my.Scale(%x) {axis=1}        %s = Softmax(%x) {axis=1}
                                        %y = Mul(%s, %k)
"""

from collections.abc import Iterable, Sequence

from irpar.analysis.types.type_merge import merge
from irpar.ir import COMMUNICATION, Builder, Function, Module, Node, Value, clone_module
from irpar.ir.instantiate import body_of_call
from irpar.ops.effects import is_compute, schema_of
from irpar.ops.memory_copies import node_place
from irpar.sharding import IrparError

from .layers.record import LayerOrder, LayerRecord
from .origins_of_calls import ConstantPlaces, restore


class InlineError(IrparError):
    """A function that cannot be opened."""


def with_calls_opened(module: Module) -> Module:
    """A module without calls of functions of communication: itself, or a copy with the graphs in the same order.

    Raises:
        InlineError: a function cannot be opened.
    """
    if not any(function.domain == COMMUNICATION for function in module.functions.values()):
        return module
    made = clone_module(module)
    for graph in made.graphs:
        called = [node for node in graph.walk() if node.callee is not None and node.callee.domain == COMMUNICATION]
        open_calls(called, made.opsets)
    for key in [key for key, function in made.functions.items() if function.domain == COMMUNICATION]:
        del made.functions[key]
    return made


def open_calls(calls: Iterable[Node], opsets: dict[str, int]) -> None:
    """Put the bodies of functions in the places of their calls.

    Args:
        calls: nodes that call functions.
        opsets: of the caller, which gets the versions that it lacks.

    Raises:
        InlineError: a call leaves out what the body needs, or an operator means something else in the caller's opset.
    """
    places, layers = ConstantPlaces(), LayerOrder()
    for call in calls:
        _open(call, opsets, places, layers)
    places.put()
    layers.restore()


def _open(call: Node, opsets: dict[str, int], places: ConstantPlaces, layers: LayerOrder) -> None:
    """Put the body of the called function in the place of a call."""
    graph, function = call.graph, call.callee
    assert graph is not None
    assert function is not None
    body = body_of_call(call, graph.names)
    nodes, record = tuple(body), LayerRecord.of_call(call)
    for node in body.walk():
        _follow(node, opsets, function)
        if record is None:
            _inherit(node, call)
    if function.domain == COMMUNICATION:
        restore(call, body, places)
    for index, value in enumerate(body.inputs):
        operand = call.operands[index] if index < len(call.operands) else None
        _pass_operand(call, value, operand)
        graph.names.release(value)
    inner = {value for nested in body.graphs() for value in nested.values()} - set(body.inputs)
    for value in inner:
        # All that is in a function is where its call is.
        value.memory = node_place(call)
        # A value without a source of its own stands for none in the imported model.
        if value.source and record is None:
            value.source = _joined(call.source, value.source)
    results: Sequence[Value] = graph.absorb(body, call)
    results = _apart_where_annotated(call, results, inner, opsets)
    if record is not None:
        record.give_names(nodes, graph.names)
        layers.add(record, nodes)
    _take_over(call, results, inner)


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
            new.global_shape = new.global_shape if old.global_shape is None else old.global_shape
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
            f"the function {function.domain}.{function.name} follows opset {node.version} of {domain}, its caller "
            f"{version}; {node.op_type} is not known to mean the same in both",
            where=f"node {node.label}",
            do="export the model with one opset version, or convert the function",
        )
    node.version = version
