"""Type inference of If, Loop and Scan: bodies get the types of what flows in, results those of what flows out."""

from collections.abc import Callable, Sequence
from typing import Protocol

from irpar.ir import UNKNOWN, Dim, DType, Graph, Ints, Node, OptionalType, TensorType, Type, Value

from .type_merge import TypeInferenceError, common

INT = TensorType(DType.I64, ())
FLAG = TensorType(DType.BOOL, ())

_MOST_STEPS = 100
"""How many nodes may lie between constants and the condition of an If that they decide."""


class Bodies(Protocol):
    """What can be done with the body of a node."""

    def visit(self, graph: Graph) -> None:
        """Infer the body for good."""

    def rehearse(self, graph: Graph) -> None:
        """Infer the body on an assumption that may not hold; nothing is counted or told."""


def infer_if(bodies: Bodies, node: Node) -> Sequence[Type]:
    """What holds for the results of both branches; of one, where the other does not fit and constants decide."""
    branches, refused = list(node.nested_graphs()), None
    for branch in list(branches):
        try:
            bodies.visit(branch)
        except TypeInferenceError as error:
            # What constants decide is folded later: then the branch that is never taken is gone.
            if refused is not None or not _is_decided(node.operands[0]):
                raise
            refused = error
            branches.remove(branch)
    found = []
    for index, values in enumerate(zip(*(branch.outputs for branch in branches), strict=True)):
        try:
            found.append(common([value.type for value in values]))
        except TypeInferenceError as error:
            raise _refusal(node, f"the branches differ: result {index} is {error.what}") from None
    return found


def infer_loop(bodies: Bodies, node: Node) -> Sequence[Type]:
    """Carried values by what stays from trip to trip; collected ones get the trip count as first dim."""
    (body,) = node.nested_graphs()
    carried = body.inputs[2:]
    starts = [_type_of(operand) for operand in node.operands[2:]]
    for value, type_ in zip(body.inputs, (INT, FLAG), strict=False):
        value.type = type_
    types = _settle(bodies, node, body, carried, starts, slice(1, 1 + len(carried)))
    trips = _trips(node, body)
    collected = [_insert(value.type, 0, trips) for value in body.outputs[1 + len(carried) :]]
    return [*types, *collected]


def infer_scan(bodies: Bodies, node: Node) -> Sequence[Type]:
    """States by what stays from step to step; scanned operands lose an axis, collected results get one."""
    if 0 < node.version < 9:
        return [UNKNOWN] * len(node.results)
    (body,) = node.nested_graphs()
    scanned = node.attributes["num_scan_inputs"]
    assert isinstance(scanned, int)
    states = len(node.operands) - scanned
    in_axes = scan_axes(node, "scan_input_axes", scanned)
    length: Dim = None
    for value, operand, axis in zip(body.inputs[states:], node.operands[states:], in_axes, strict=True):
        value.type, size = _remove(_type_of(operand), axis)
        length = size if length is None or type(size) is int else length
    starts = [_type_of(operand) for operand in node.operands[:states]]
    types = _settle(bodies, node, body, body.inputs[:states], starts, slice(0, states))
    outputs = body.outputs[states:]
    out_axes = scan_axes(node, "scan_output_axes", len(outputs))
    return [*types, *(_insert(value.type, axis, length) for value, axis in zip(outputs, out_axes, strict=True))]


INFER: dict[tuple[str, str], Callable[[Bodies, Node], Sequence[Type]]] = {
    ("", "If"): infer_if,
    ("", "Loop"): infer_loop,
    ("", "Scan"): infer_scan,
}


def _settle(
    bodies: Bodies, node: Node, body: Graph, carried: Sequence[Value], types: list[Type], place: slice
) -> list[Type]:
    """Types that the carried values keep from round to round: those of the start, less what a round changes.

    The start is f32[1, 4]; a body that appends a row makes f32[2, 4]; what holds for both is f32[_, 4]; that stays.
    A round can only make more dims unknown, so that this ends.
    """
    declared = {value: value.type for graph in body.graphs() for value in graph.values() if value.data is None}
    for value in body.inputs:
        declared.pop(value, None)
    while True:
        for value, type_ in zip(carried, types, strict=True):
            value.type = type_
        bodies.rehearse(body)
        after = [value.type for value in body.outputs[place]]
        # The types inside follow from an assumption that may not hold.
        for value, type_ in declared.items():
            value.type = type_
        try:
            wider = [_widen(before, then) for before, then in zip(types, after, strict=True)]
        except TypeInferenceError as error:
            raise _refusal(node, f"a carried value changes from round to round: it is {error.what}") from None
        if wider == types:
            bodies.visit(body)
            return types
        types = wider


def _widen(before: Type, after: Type) -> Type:
    if after == UNKNOWN and isinstance(before, TensorType):
        return before.with_shape(None)
    if isinstance(before, OptionalType) and not isinstance(after, OptionalType):
        # ONNX lets a loop start with an optional and go on with what is in it; neither type holds for all rounds.
        return UNKNOWN
    return common([before, after])


def trip_count(node: Node) -> int | None:
    """How often the body of a Loop or Scan runs; None where that is not known before. A branch may run or not: None."""
    if node.op_type == "Loop":
        (body,) = node.nested_graphs()
        return _trips(node, body)
    if node.op_type == "Scan" and not 0 < node.version < 9:
        scanned = node.attributes["num_scan_inputs"]
        assert isinstance(scanned, int)
        axes = scan_axes(node, "scan_input_axes", scanned)
        sizes = [_remove(value.type, axis)[1] for value, axis in zip(node.inputs[-scanned:], axes, strict=True)]
        return next((size for size in sizes if type(size) is int), None)
    return None


def assumed_trips(node: Node) -> int:
    """How often the body of a node runs, once where that is not known before."""
    trips = trip_count(node)
    return 1 if trips is None else trips


def runs(graph: Graph | None) -> int | None:
    """How often a graph runs, with all around it; None where that is not known before."""
    count = 1
    while graph is not None and graph.parent is not None:
        each = trip_count(graph.parent)
        if each is None:
            return None
        count *= each
        graph = graph.parent.graph
    return count


def assumed_runs(graph: Graph | None) -> int:
    """How often a graph runs, with all around it; loops of which nobody knows how often go once."""
    count = 1
    while graph is not None and graph.parent is not None:
        count *= assumed_trips(graph.parent)
        graph = graph.parent.graph
    return count


def _trips(node: Node, body: Graph) -> int | None:
    """The trip count where it is a constant and nothing ends the loop early."""
    limit, flag = (*node.operands, None, None)[:2]
    if limit is None or limit.data is None or (flag is not None and not _is_true(flag)):
        return None
    goes_on = body.outputs[0]
    while goes_on.node is not None and goes_on.node.identity == ("", "Identity"):
        goes_on = goes_on.node.inputs[0]
    if goes_on is not body.inputs[1] and not _is_true(goes_on):
        return None
    return max(0, int(limit.data.numpy().item()))


def _is_true(value: Value) -> bool:
    return value.data is not None and bool(value.data.numpy().all())


def _is_decided(condition: Value | None) -> bool:
    """Whether a value follows from constants alone, in few steps."""
    waiting, met = [condition], set[Value]()
    while waiting:
        value = waiting.pop()
        if value is None or value.is_constant or value in met:
            continue
        if value.node is None or any(True for _ in value.node.nested_graphs()) or len(met) > _MOST_STEPS:
            return False
        met.add(value)
        waiting.extend(value.node.operands)
    return True


def _type_of(operand: Value | None) -> Type:
    return UNKNOWN if operand is None else operand.type


def scan_axes(node: Node, name: str, count: int) -> tuple[int, ...]:
    """The axes of an attribute of Scan, each 0 where it is left out."""
    axes = node.attributes.get(name)
    return tuple(axes) if isinstance(axes, Ints) else (0,) * count


def _remove(type_: Type, axis: int) -> tuple[Type, Dim]:
    """A type without an axis, and the size of that axis."""
    if not isinstance(type_, TensorType) or type_.shape is None:
        return type_, None
    if not -len(type_.shape) <= axis < len(type_.shape):
        raise TypeInferenceError(f"a scanned operand {type_} has no axis {axis}", do="mend scan_input_axes")
    dims = list(type_.shape)
    size = dims.pop(axis)
    return type_.with_shape(tuple(dims)), size


def _insert(type_: Type, axis: int, size: Dim) -> Type:
    """A type with one more axis."""
    if not isinstance(type_, TensorType) or type_.shape is None:
        return type_
    rank = len(type_.shape) + 1
    axis = axis + rank if axis < 0 else axis
    return type_.with_shape((*type_.shape[:axis], size, *type_.shape[axis:]))


def _refusal(node: Node, what: str) -> TypeInferenceError:
    return TypeInferenceError(
        f"{node.op_type}: {what}", where=f"node {node.label}", do="give one element type in all of these places"
    )
