"""What If, Loop and Scan do with their bodies, whoever runs these; and with SequenceMap and calls for array engines.

Nested graphs read values of the graphs around them, so all of a segment shares one environment (value to array);
a function sees nothing but its operands and gets an environment of its own.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from irpar.analysis.memory.sums import Sum, sums_of
from irpar.ir import Graph, Node, Value, tensor_type
from irpar.runtime.errors import EngineError

from .arrays import ON_HOST, Arrays
from .operation import Environment, Operation

if TYPE_CHECKING:
    from .bodies import Scope


SCAN = ("", "Scan")
"""What writes its results where it is told to, on a device, and its rows one by one there."""


class Trip(NamedTuple):
    """One run of a body that is asked for.

    Attributes:
        body: which one.
        inputs: with what.
        rooms: where its outputs are to lie; None for those that may lie anywhere, which all may where it is empty.
    """

    body: Graph
    inputs: Sequence[Any]
    rooms: Sequence[Any] = ()


Trips = Generator[Trip, Sequence[Any], Sequence[Any]]
"""Yields one trip after the other, is sent what came out of each, and returns the results of the node."""


def _truth(value: Any, arrays: Arrays) -> bool:
    return bool(arrays.host(value).reshape(()))


def _body(node: Node, name: str) -> Graph:
    graph = node.attributes.get(name)
    if not isinstance(graph, Graph):
        raise EngineError(
            f"{node.op_type} has no graph {name!r}", where=f"node {node.label}", do="mend the model, or export it again"
        )
    return graph


def _if(node: Node, inputs: Sequence[Any], arrays: Arrays = ON_HOST) -> Trips:
    return (yield Trip(_body(node, "then_branch" if _truth(inputs[0], arrays) else "else_branch"), ()))


def _loop(node: Node, inputs: Sequence[Any], arrays: Arrays = ON_HOST) -> Trips:
    body = _body(node, "body")
    carried = len(node.operands) - 2
    limit = None if inputs[0] is None else int(arrays.host(inputs[0]).reshape(()))
    going = inputs[1] is None or _truth(inputs[1], arrays)
    state: Sequence[Any] = inputs[2:]
    rows: list[list[Any]] = [[] for _ in range(len(body.outputs) - 1 - carried)]
    count = 0
    while going and (limit is None or count < limit):
        numbers = arrays.keep(np.asarray(count, np.int64)), arrays.keep(np.asarray(going))
        results = yield Trip(body, (*numbers, *state))
        going, state = _truth(results[0], arrays), results[1 : 1 + carried]
        for row, value in zip(rows, results[1 + carried :], strict=True):
            row.append(value)
        count += 1
    stacked = [_stack(row, 0, body.outputs[1 + carried + index], arrays) for index, row in enumerate(rows)]
    return [*state, *stacked]


def _scan(node: Node, inputs: Sequence[Any], arrays: Arrays = ON_HOST, rooms: Sequence[Any] = ()) -> Trips:
    if node.version and node.version < 9:
        raise EngineError("Scan of opset 8 cannot be computed", where=node.label, do="convert the model to opset 13")
    body = _body(node, "body")
    scanned: int = node.attributes["num_scan_inputs"]  # type: ignore[assignment]
    carried = len(node.operands) - scanned
    produced = len(body.outputs) - carried
    backward = _ints(node, "scan_input_directions", scanned)
    prepend = _ints(node, "scan_output_directions", produced)
    state: Sequence[Any] = inputs[:carried]
    axes = _ints(node, "scan_input_axes", scanned)
    xp, scanned_arrays = arrays.together(inputs[carried:])
    sources = [xp.moveaxis(array, axis, 0) for array, axis in zip(scanned_arrays, axes, strict=True)]
    lengths = {len(source) for source in sources}
    if len(lengths) != 1:
        raise ValueError(f"scan inputs have different lengths {sorted(lengths)}")
    length = lengths.pop()
    rows: list[list[Any]] = [[] for _ in range(produced)]
    result_axes = _ints(node, "scan_output_axes", produced)
    own_rooms = rooms[carried:] or [None] * produced
    stacks = [room if axis == 0 else None for axis, room in zip(result_axes, own_rooms, strict=True)]
    has_rooms = any(stack is not None for stack in stacks)
    for step in range(length):
        places = [length - 1 - step if reverse else step for reverse in backward]
        # Of a vector numpy gives a number, which engines do not take for a tensor.
        items = [arrays.keep(xp.asarray(source[place])) for source, place in zip(sources, places, strict=True)]
        into: list[Any] = []
        if has_rooms:
            ends = [length - 1 - step if reverse else step for reverse in prepend]
            into = [None] * carried
            into += (None if stack is None else stack[end] for stack, end in zip(stacks, ends, strict=True))
        results = yield Trip(body, (*state, *items), into)
        state = results[:carried]
        for row, value in zip(rows, results[carried:], strict=True):
            row.append(value)
    ordered = [row[::-1] if reverse else row for row, reverse in zip(rows, prepend, strict=True)]
    stacked = [
        stack if stack is not None and arrays.is_stack(stack, row) else _stack(row, axis, value, arrays)
        for stack, row, axis, value in zip(stacks, ordered, result_axes, body.outputs[carried:], strict=True)
    ]
    return [*state, *stacked]


def with_own_blocks(operands: Sequence[Any], sums: Sequence[Sum], arrays: Arrays) -> list[Any]:
    """The operands of a loop, with a block of its own for each sum of which trips write one: nobody else holds it."""
    found = [*operands]
    for each in sums:
        found[each.operand] = arrays.copied(found[each.operand])
    return found


TRIPS: Mapping[str, Callable[..., Trips]] = {"If": _if, "Loop": _loop, "Scan": _scan}
"""Operators of ai.onnx by what runs their bodies, given the node, its operands, and where arrays lie."""


def _ints(node: Node, name: str, count: int) -> tuple[int, ...]:
    value = node.attributes.get(name)
    return tuple(value) if isinstance(value, tuple) else (0,) * count  # type: ignore[arg-type]


def _stack(row: Sequence[Any], axis: int, value: Value, arrays: Arrays) -> Any:
    """The scan output of a body's result over all iterations."""
    if row:
        xp, items = arrays.together(row)
        return arrays.keep(xp.stack(items, axis))
    type_ = tensor_type(value.type)
    if type_ is None or not type_.is_static:
        raise ValueError(f"no iteration ran, and %{value.name} has no static type that gives the empty result a shape")
    shape = list(type_.static_shape)
    shape.insert(axis if axis >= 0 else axis + len(shape) + 1, 0)
    return arrays.keep(np.empty(shape, type_.dtype.numpy))


def _with_bodies(node: Node, scope: "Scope") -> Operation:
    start = TRIPS[node.op_type]
    bodies = {graph: scope.body(graph) for graph in node.nested_graphs()}
    sums, arrays = sums_of(node), scope.arrays

    def run(inputs: list[Any], environment: Environment) -> Sequence[Any]:
        given = environment.into.get(node, ())
        rooms = given if isinstance(given, tuple) else (given,)
        trips = start(node, with_own_blocks(inputs, sums, arrays), arrays, *([rooms] if rooms else []))
        try:
            trip = next(trips)
            while True:
                trip = trips.send(bodies[trip.body].call(trip.inputs, environment, trip.rooms))
        except StopIteration as end:
            results: Sequence[Any] = end.value
            if not rooms:
                return results
            places = zip(results, rooms, strict=True)
            return [made if room is None else arrays.brought(made, room) for made, room in places]

    return run


def _sequence_map(node: Node, scope: "Scope") -> Operation:
    body = scope.body(_body(node, "body"))

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
        return body.call([*inputs, *absent], Environment())

    return run


CONTROL_FLOW: Mapping[str, Callable[[Node, "Scope"], Operation]] = {
    **dict.fromkeys(TRIPS, _with_bodies),
    "SequenceMap": _sequence_map,
}
"""Operators of ai.onnx that hold graphs: what compiles each."""
