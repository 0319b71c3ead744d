"""Nodes that compute the same: equal operators, attributes and operands, in the order of the graph."""

from collections import ChainMap
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence

from irpar.ir import Attribute, DType, ExternalTensor, Floats, Graph, Node, Tensor, Tensors, Value
from irpar.ops.effects import is_deterministic
from irpar.ops.recomputed import is_recomputed

MAX_ELEMENTS = 64
"""Elements up to which constants of indices, shapes and axes are compared by their numbers."""

PhaseOf = Callable[[Node], Hashable]
Same = dict[Value, Value]
"""A value to the earlier one that it equals."""


def equal_constants(graph: Graph) -> list[tuple[Value, Value]]:
    """The single numbers and short lists of indices that an earlier constant equals, each with that one.

    Others stay apart: equal weights of two layers can be annotated each for itself. No file is read.
    """
    found: list[tuple[Value, Value]] = []
    _find_constants(graph, {}, found)
    return found


def _find_constants(graph: Graph, table: MutableMapping[Hashable, Value], found: list[tuple[Value, Value]]) -> None:
    for value in graph.constants:
        key = _constant_key(value)
        if key is not None:
            known = table.setdefault(key, value)
            if known is not value:
                found.append((value, known))
    for node in graph:
        if node.attributes:
            for nested in node.nested_graphs():
                _find_constants(nested, ChainMap({}, table), found)  # type: ignore[arg-type]


def _constant_key(value: Value) -> Hashable:
    """What makes two constants one; None where they stay apart in any case."""
    data = value.data
    assert data is not None
    if data.size > 1 and not is_short_index(data):
        return None
    numbers = numbers_key(data)
    return None if numbers is None else (numbers, value.type, value.sharding, value.memory, value.global_shape)


def is_short_index(data: Tensor) -> bool:
    """Whether a tensor is a shape, axes or few indices, whose numbers count wherever it is read."""
    return data.dtype.is_index and data.size <= MAX_ELEMENTS


def merge_constants(equal: Sequence[tuple[Value, Value]]) -> None:
    """Let the readers of each first constant read the second; the first is gone then."""
    for value, known in equal:
        value.replace_uses(known)
        assert value.graph is not None
        value.graph.remove_constant(value)


def equal_nodes(
    graph: Graph,
    may_merge: Callable[[Node], bool],
    *,
    same: Mapping[Value, Value] | None = None,
    without: frozenset[str] = frozenset(),
    phase_of: PhaseOf = lambda node: node.phase,
) -> list[tuple[Node, Node]]:
    """The nodes that compute what an earlier one computes, in order, each with that one.

    Nodes in a nested graph are compared with those before its holder too. Nodes that hold graphs, draw random numbers,
    or differ in phase, stage, place or in how their results lie are equal to none; neither is what is
    computed again on purpose.

    Args:
        graph: with the graphs nested in it.
        may_merge: which nodes are compared.
        same: values that count as others.
        without: attributes that do not count.
        phase_of: what stands for the phase of a node.
    """
    found: list[tuple[Node, Node]] = []
    _find(graph, may_merge, without, phase_of, {}, dict(same or {}), found)
    return found


def _find(
    graph: Graph,
    may_merge: Callable[[Node], bool],
    without: frozenset[str],
    phase_of: PhaseOf,
    table: MutableMapping[Hashable, Node],
    same: Same,
    found: list[tuple[Node, Node]],
) -> None:
    for node in graph:
        if node.attributes and node.holds_graphs:
            for nested in node.nested_graphs():
                _find(nested, may_merge, without, phase_of, ChainMap({}, table), same, found)  # type: ignore[arg-type]
            continue
        key = _node_key(node, same, without, phase_of) if may_merge(node) else None
        if key is None:
            continue
        known = table.setdefault(key, node)
        if known is not node:
            found.append((node, known))
            same.update(zip(node.results, known.results, strict=True))


def _node_key(node: Node, same: Same, without: frozenset[str], phase_of: PhaseOf) -> Hashable:
    """What makes two nodes one; None for a node that stays in any case."""
    if not node.results or not is_deterministic(node) or is_recomputed(node):
        return None
    attributes = []
    for name in sorted(node.attributes) if node.attributes else ():
        if name in without:
            continue
        key = attribute_key(node.attributes[name])
        if key is None:
            return None
        attributes.append((name, key))
    operands = node.operands
    if same:
        operands = tuple([None if value is None else same.get(value, value) for value in operands])
    facts = phase_of(node), node.stage, node.place, node.strategy
    lies = tuple([(value.sharding, value.memory, value.global_shape) for value in node.results])
    return node.domain, node.op_type, node.version, node.callee, operands, tuple(attributes), facts, lies


def attribute_key(attribute: Attribute) -> Hashable:
    """An attribute as something to hash, or None. The kind counts too, since 1 and 1.0 are equal in Python."""
    if isinstance(attribute, Tensor):
        return numbers_key(attribute) if attribute.size <= MAX_ELEMENTS else None
    if isinstance(attribute, float):
        return "float", attribute.hex()
    if isinstance(attribute, Floats):
        return "floats", tuple(map(float.hex, attribute))
    if isinstance(attribute, Tensors):
        return None
    return type(attribute), attribute


def numbers_key(data: Tensor) -> Hashable:
    """dtype, shape and bits, so that 0.0 and -0.0 differ; None for what lies in a file."""
    if any(isinstance(base, ExternalTensor) for base in data.bases):
        return None
    numbers = tuple(data.numpy().ravel().tolist()) if data.dtype is DType.STR else data.raw()
    return data.dtype, data.shape, numbers
