"""Graphs that differ in the sizes of tensors alone, as those of ranks with blocks of different sizes do.

    %y = Gather(%w, %i) : f32[2, 8]    with %w : f32[33, 8]
    %y = Gather(%w, %i) : f32[2, 8]    with %w : f32[32, 8]: its twin

Which values are held when, and what can run when, is the same in both.
"""

import itertools
from collections.abc import Collection, Hashable
from operator import attrgetter

from irpar.ir import Graph, InflightType, Node, Tensor, TensorType, Type, Value

from .equal_nodes import attribute_key, numbers_key

_NODE_FACTS = attrgetter("domain", "op_type", "version", "callee", "phase", "stage", "place", "strategy", "metadata")
"""By metadata nodes say that they are computed again."""
_VALUE_FACTS = attrgetter("memory", "sharding", "is_constant")


def twins_of(graph: Graph, other: Graph) -> dict[Value, Value] | None:
    """What stands in the places of a graph's values in another graph; None where more than sizes differs.

    Types that are equal in one are equal in the other, too. Of constants only single numbers are compared that are
    not whole: others may be sizes, or places in blocks. What holds graphs, or is held by a node, has no twin.
    """
    return _Comparison().run(graph, other)


class _Comparison:
    """Two graphs in the order of their nodes."""

    def __init__(self) -> None:
        self._twins: dict[Value, Value] = {}
        self._types: dict[Type, Type] = {}
        self._back: dict[Type, Type] = {}

    def run(self, graph: Graph, other: Graph) -> dict[Value, Value] | None:
        """The twins of all values, if all is alike."""
        is_alone = graph.parent is None and other.parent is None
        if not is_alone or len(graph) != len(other) or graph.output_names != other.output_names:
            return None
        is_alike = self._values(graph.inputs, other.inputs) and self._values(graph.constants, other.constants)
        pairs = zip((*graph, graph.return_node), (*other, other.return_node), strict=True)
        if not is_alike or not self._states(graph, other) or not all(itertools.starmap(self._node, pairs)):
            return None
        return self._twins

    def _states(self, graph: Graph, other: Graph) -> bool:
        ours = [(self._twins[value], state.kind, state.output) for value, state in graph.states.items()]
        return ours == [(value, state.kind, state.output) for value, state in other.states.items()]

    def _node(self, node: Node, other: Node) -> bool:
        return (
            _NODE_FACTS(node) == _NODE_FACTS(other)
            and self._reads(node) == other.operands
            and (not node.attributes or _attributes(node) == _attributes(other))
            and len(node.attributes) == len(other.attributes)
            and self._values(node.results, other.results)
        )

    def _reads(self, node: Node) -> tuple[Value | None, ...]:
        """The twins of what a node reads."""
        return tuple([None if value is None else self._twins.get(value) for value in node.operands])

    def _values(self, values: Collection[Value], others: Collection[Value]) -> bool:
        self._twins.update(zip(values, others, strict=False))
        return len(values) == len(others) and all(map(self._value, values, others))

    def _value(self, value: Value, other: Value) -> bool:
        return (
            _VALUE_FACTS(value) == _VALUE_FACTS(other)
            and self._type(value.type, other.type)
            and (value.data is other.data or _number(value.data) == _number(other.data))
        )

    def _type(self, type_: Type, other: Type) -> bool:
        known = self._types.get(type_)
        if known is not None:
            return known is other or known == other
        if self._back.setdefault(other, type_) != type_ or not _differ_in_sizes(type_, other):
            return False
        self._types[type_] = other
        return True


def _attributes(node: Node) -> list[tuple[str, Hashable]]:
    """The attributes of a node, each by its numbers; by itself where it has too many, or is none."""
    found = []
    for name, attribute in node.attributes.items():
        key = attribute_key(attribute)
        found.append((name, id(attribute) if key is None else key))
    return found


def _differ_in_sizes(type_: Type, other: Type) -> bool:
    """Whether two types differ in nothing but how large known dims are; what has one element stays so."""
    if type_ == other:
        return True
    if isinstance(type_, InflightType) and isinstance(other, InflightType):
        return _differ_in_sizes(type_.elem, other.elem)
    if not isinstance(type_, TensorType) or not isinstance(other, TensorType):
        return False
    if type_.dtype is not other.dtype or type_.rank != other.rank or not (type_.is_static and other.is_static):
        return False
    return (type_.size == 1) == (other.size == 1)


def _number(data: Tensor | None) -> Hashable:
    """What counts of a constant: a single number, unless it is whole, as sizes and places are; else that it is one."""
    if data is None or data.size > 1 or data.dtype.is_integer:
        return None
    key = numbers_key(data)
    return id(data) if key is None else key
