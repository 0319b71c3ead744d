"""Whether two modules are the same program with the same facts, and where they first differ."""

from collections.abc import Iterator, Mapping
from typing import Any

from .annotation import Annotation
from .attributes import Attribute, Floats, Graphs, Tensors, same_attribute
from .function import Function
from .graph import Graph, Node
from .module import Module
from .tensor import ExternalTensor, JoinedTensor, SlicedTensor, Tensor
from .value import Value

_MODULE_FACTS = ("opsets", "ir_version", "producer", "doc", "metadata", "meshes", "network", "memory_limit")
_GRAPH_FACTS = ("name", "view", "ranks", "output_names", "doc")
_FUNCTION_FACTS = ("key", "opsets", "doc")
_NODE_FACTS = (
    "op_type",
    "domain",
    "version",
    "name",
    "source",
    "scope",
    "phase",
    "stage",
    "place",
    "doc",
)
_STATE_FACTS = ("kind", "output", "parameter")
_VALUE_FACTS = ("name", "type", "sharding", "global_shape", "memory", "source", "index", "doc")

Difference = Iterator[str]


def same_module(a: Module, b: Module) -> str | None:
    """The first difference between two modules, in words, or None.

    Compared is all that the text form holds: not `decisions` and `source`. Constants are compared bit by bit, unless
    both lie at the same place of the same file.
    """
    return next(_modules(a, b), None)


def _facts(place: str, a: object, b: object, names: tuple[str, ...]) -> Difference:
    for name in names:
        first, second = getattr(a, name), getattr(b, name)
        if first != second:
            yield f"{place}: {name} is {first!r} and {second!r}"
    first, second = getattr(a, "metadata", None) or {}, getattr(b, "metadata", None) or {}
    if first != second:
        yield f"{place}: metadata is {first!r} and {second!r}"


def _modules(a: Module, b: Module) -> Difference:
    yield from _facts("module", a, b, _MODULE_FACTS)
    waiting = [_annotation(annotation) for annotation in a.annotations]
    if waiting != [_annotation(annotation) for annotation in b.annotations]:
        yield f"module: annotations are {a.annotations} and {b.annotations}"
    if list(a.fixed) != list(b.fixed):
        yield f"module: fixed inputs are {list(a.fixed)} and {list(b.fixed)}"
    for name, tensor in a.fixed.items():
        if not same_tensor(tensor, b.fixed[name]):
            yield f"module: the values of the fixed input {name} differ"
    if list(a.functions) != list(b.functions):
        yield f"module: functions are {list(a.functions)} and {list(b.functions)}"
    for key, function in a.functions.items():
        yield from _functions(function, b.functions[key])
    if len(a.graphs) != len(b.graphs):
        yield f"module: {len(a.graphs)} and {len(b.graphs)} graphs"
    for first, second in zip(a.graphs, b.graphs, strict=True):
        yield from _graphs(first, second, {})


def _annotation(annotation: Annotation) -> tuple[object, ...]:
    spec = [dim if dim is None or isinstance(dim, str) else list(dim) for dim in annotation.spec]
    return annotation.pattern, spec, annotation.where


def _functions(a: Function, b: Function) -> Difference:
    place = f"function @{a.domain}.{a.name}"
    yield from _facts(place, a, b, _FUNCTION_FACTS)
    yield from _attributes(place, a.attributes, b.attributes, {})
    yield from _graphs(a.graph, b.graph, {})


def _graphs(a: Graph, b: Graph, twins: dict[Value, Value]) -> Difference:
    place = f"graph @{a.name}"
    yield from _facts(place, a, b, _GRAPH_FACTS)
    pairs = ((list(a.inputs), list(b.inputs), "inputs"), (list(a.constants), list(b.constants), "constants"))
    for first, second, what in pairs:
        if len(first) != len(second):
            yield f"{place}: {len(first)} and {len(second)} {what}"
        for one, other in zip(first, second, strict=True):
            yield from _values(place, one, other, twins)
    yield from _states(place, a, b, twins)
    if len(a) != len(b):
        yield f"{place}: {len(a)} and {len(b)} nodes"
    for node, twin in zip(a, b, strict=True):
        yield from _nodes(place, node, twin, twins)
    if [twins.get(value) for value in a.outputs] != list(b.outputs):
        yield f"{place}: outputs are {a.outputs} and {b.outputs}"


def _values(place: str, a: Value, b: Value, twins: dict[Value, Value]) -> Difference:
    twins[a] = b
    yield from _facts(f"{place}, value %{a.name}", a, b, _VALUE_FACTS)
    if (a.data is None) != (b.data is None):
        yield f"{place}, value %{a.name}: only one of the two is a constant"
    if a.data is not None and b.data is not None and not same_tensor(a.data, b.data):
        yield f"{place}, constant %{a.name}: the numbers differ"


def _states(place: str, a: Graph, b: Graph, twins: dict[Value, Value]) -> Difference:
    if {twins.get(value) for value in a.states} != set(b.states):
        yield f"{place}: state is {list(a.states)} and {list(b.states)}"
        return
    for value, state in a.states.items():
        other = b.states[twins[value]]
        yield from _facts(f"{place}, state %{value.name}", state, other, _STATE_FACTS)
        if (state.data is None) != (other.data is None):
            yield f"{place}, state %{value.name}: only one of the two begins with numbers"
        if state.data is not None and other.data is not None and not same_tensor(state.data, other.data):
            yield f"{place}, state %{value.name}: the numbers differ"


def _nodes(place: str, a: Node, b: Node, twins: dict[Value, Value]) -> Difference:
    place = f"{place}, node {a.label}"
    yield from _facts(place, a, b, _NODE_FACTS)
    if (a.callee.key if a.callee else None) != (b.callee.key if b.callee else None):
        yield f"{place}: calls {a.callee} and {b.callee}"
    if [None if value is None else twins.get(value) for value in a.operands] != list(b.operands):
        yield f"{place}: operands are {a.operands} and {b.operands}"
    if len(a.results) != len(b.results):
        yield f"{place}: {len(a.results)} and {len(b.results)} results"
    yield from _attributes(place, a.attributes, b.attributes, twins)
    for first, second in zip(a.results, b.results, strict=True):
        yield from _values(place, first, second, twins)


def _attributes(place: str, a: Mapping[str, Any], b: Mapping[str, Any], twins: dict[Value, Value]) -> Difference:
    if list(a) != list(b):
        yield f"{place}: attributes are {list(a)} and {list(b)}"
    for name, first in a.items():
        yield from _attribute(f"{place}, attribute {name}", first, b[name], twins)


def _attribute(place: str, a: Attribute | None, b: Attribute | None, twins: dict[Value, Value]) -> Difference:
    if isinstance(a, Graph) and isinstance(b, Graph):
        yield from _graphs(a, b, twins)
    elif isinstance(a, (Graphs, Tensors)) and type(a) is type(b) and isinstance(b, (Graphs, Tensors)):
        if len(a) != len(b):
            yield f"{place}: {len(a)} and {len(b)} items"
        items: Iterator[tuple[Any, Any]] = zip(a, b, strict=True)
        for first, second in items:
            yield from _attribute(place, first, second, twins)
    elif isinstance(a, Tensor) and isinstance(b, Tensor):
        if not same_tensor(a, b):
            yield f"{place}: the numbers differ"
    elif isinstance(a, (float, Floats)) and type(a) is type(b):
        # By digits, so that NaN equals itself and -0.0 does not equal 0.0.
        if repr(a) != repr(b):
            yield f"{place}: {a!r} and {b!r}"
    elif (a is None or b is None or not same_attribute(a, b)) and a is not b:
        yield f"{place}: {a!r} and {b!r}"


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """True where two tensors agree in dtype, shape and every bit; reads nothing where both lie at one place."""
    if isinstance(a, ExternalTensor) and isinstance(b, ExternalTensor):
        first = (a.path.resolve(), a.offset, a.length)
        if first == (b.path.resolve(), b.offset, b.length):
            return a.dtype is b.dtype and a.shape == b.shape
    if isinstance(a, SlicedTensor) and isinstance(b, SlicedTensor) and a.region == b.region:
        return same_tensor(a.base, b.base)
    if isinstance(a, JoinedTensor) and isinstance(b, JoinedTensor) and (a.dim, a.parts) == (b.dim, b.parts):
        both = zip(a.pieces, b.pieces, strict=False)
        return a.type == b.type and len(a.pieces) == len(b.pieces) and all(same_tensor(*pair) for pair in both)
    return a.equals(b)
