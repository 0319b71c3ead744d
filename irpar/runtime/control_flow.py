"""If, Loop, Scan, SequenceMap and calls of functions for the numpy engine: compiled once, run with one environment.

Nested graphs read values of the graphs around them, so all of a segment shares one environment (value to array);
a function sees nothing but its operands and gets an environment of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from irpar.ir import Graph, Node, Value, tensor_type

from .errors import EngineError

if TYPE_CHECKING:
    from .numpy_engine import Body, Scope

Environment = dict[Value, Any]
Operation = Callable[[list[Any], Environment], Sequence[Any]]


def _truth(value: Any) -> bool:
    return bool(np.asarray(value).reshape(()))


def _body(node: Node, name: str, scope: "Scope") -> "Body":
    graph = node.attributes.get(name)
    if not isinstance(graph, Graph):
        raise EngineError(
            f"{node.op_type} has no graph {name!r}", where=f"node {node.label}", do="mend the model, or export it again"
        )
    return scope.body(graph)


def _if(node: Node, scope: "Scope") -> Operation:
    branches = {True: _body(node, "then_branch", scope), False: _body(node, "else_branch", scope)}

    def run(inputs: list[Any], environment: Environment) -> Sequence[Any]:
        return branches[_truth(inputs[0])].call((), environment)

    return run


def _loop(node: Node, scope: "Scope") -> Operation:
    body = _body(node, "body", scope)
    carried = len(node.operands) - 2
    scanned = len(body.outputs) - 1 - carried

    def run(inputs: list[Any], environment: Environment) -> Sequence[Any]:
        limit = None if inputs[0] is None else int(np.asarray(inputs[0]).reshape(()))
        going = inputs[1] is None or _truth(inputs[1])
        state: Sequence[Any] = inputs[2:]
        rows: list[list[Any]] = [[] for _ in range(scanned)]
        count = 0
        while going and (limit is None or count < limit):
            results = body.call((np.asarray(count, np.int64), np.asarray(going), *state), environment)
            going, state = _truth(results[0]), results[1 : 1 + carried]
            for row, value in zip(rows, results[1 + carried :], strict=True):
                row.append(value)
            count += 1
        stacked = [_stack(row, 0, body.outputs[1 + carried + index], node) for index, row in enumerate(rows)]
        return [*state, *stacked]

    return run


def _scan(node: Node, scope: "Scope") -> Operation:
    if node.version and node.version < 9:
        raise EngineError("Scan of opset 8 cannot be computed", where=node.label, do="convert the model to opset 13")
    body = _body(node, "body", scope)
    scanned: int = node.attributes["num_scan_inputs"]  # type: ignore[assignment]
    carried = len(node.operands) - scanned
    produced = len(body.outputs) - carried
    axes = _ints(node, "scan_input_axes", scanned)
    backward = _ints(node, "scan_input_directions", scanned)
    result_axes = _ints(node, "scan_output_axes", produced)
    prepend = _ints(node, "scan_output_directions", produced)

    def run(inputs: list[Any], environment: Environment) -> Sequence[Any]:
        state: Sequence[Any] = inputs[:carried]
        sources = [np.moveaxis(array, axis, 0) for array, axis in zip(inputs[carried:], axes, strict=True)]
        lengths = {len(source) for source in sources}
        if len(lengths) != 1:
            raise ValueError(f"scan inputs have different lengths {sorted(lengths)}")
        length = lengths.pop()
        rows: list[list[Any]] = [[] for _ in range(produced)]
        for step in range(length):
            items = [
                source[length - 1 - step if reverse else step]
                for source, reverse in zip(sources, backward, strict=True)
            ]
            results = body.call((*state, *items), environment)
            state = results[:carried]
            for row, value in zip(rows, results[carried:], strict=True):
                row.append(value)
        stacked = [
            _stack(row[::-1] if reverse else row, axis, value, node)
            for row, axis, reverse, value in zip(rows, result_axes, prepend, body.outputs[carried:], strict=True)
        ]
        return [*state, *stacked]

    return run


def _ints(node: Node, name: str, count: int) -> tuple[int, ...]:
    value = node.attributes.get(name)
    return tuple(value) if isinstance(value, tuple) else (0,) * count  # type: ignore[arg-type]


def _stack(row: Sequence[Any], axis: int, value: Value, node: Node) -> Any:
    """The scan output of a body's result over all iterations."""
    if row:
        return np.stack(row, axis)
    type_ = tensor_type(value.type)
    if type_ is None or not type_.is_static:
        raise ValueError(f"no iteration ran, and %{value.name} has no static type that gives the empty result a shape")
    shape = list(type_.static_shape)
    shape.insert(axis if axis >= 0 else axis + len(shape) + 1, 0)
    return np.empty(shape, type_.dtype.numpy)


def _sequence_map(node: Node, scope: "Scope") -> Operation:
    body = _body(node, "body", scope)

    def run(inputs: list[Any], environment: Environment) -> Sequence[Any]:
        results: list[list[Any]] = [[] for _ in body.outputs]
        for step in range(len(inputs[0])):
            items = [value[step] if isinstance(value, list) else value for value in inputs]
            for row, value in zip(results, body.call(items, environment), strict=True):
                row.append(value)
        return results

    return run


def call(node: Node, scope: "Scope") -> Operation:
    """A call of a model function; its attributes are what the body's attribute references mean."""
    function = node.callee
    assert function is not None
    stated = {**function.attributes, **{name: scope.resolve(value, node) for name, value in node.attributes.items()}}
    given = {name: value for name, value in stated.items() if value is not None}
    body = scope.inside(given).body(function.graph)

    def run(inputs: list[Any], environment: Environment) -> Sequence[Any]:
        absent = [None] * (len(function.graph.inputs) - len(inputs))
        return body.call([*inputs, *absent], {})

    return run


CONTROL_FLOW: Mapping[str, Callable[[Node, "Scope"], Operation]] = {
    "If": _if,
    "Loop": _loop,
    "Scan": _scan,
    "SequenceMap": _sequence_map,
}
"""Operators of ai.onnx that hold graphs: what compiles each."""
