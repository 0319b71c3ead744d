"""What makes nodes of two layers alike: operator, attributes, types and facts, whatever they read and are called."""

from collections.abc import Hashable

from irpar.analysis.equal_nodes import MAX_ELEMENTS, attribute_key, is_short_index, numbers_key
from irpar.ir import Graph, Graphs, Node, Tensor, Tensors, Value, captured_or_read, place_of


def reads(node: Node) -> tuple[Value | None, ...]:
    """The operands of a node, then each value once that graphs in it read from outside."""
    operands = node.operands
    if not node.attributes or not node.holds_graphs:
        return operands
    captured = dict.fromkeys(list(captured_or_read(node))[len(node.inputs) :])
    return (*operands, *captured)


class NodeKeys:
    """Numbers nodes: two have one number where they differ in nothing but names and in the values that they read.

    Of a value that is read its type counts, and whether it is a constant; of a short list of indices (a shape, axes)
    the numbers too. So weights and settings such as a scale may differ from layer to layer.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._types: dict[Hashable, int] = {}
        self._operands: dict[Value | None, Hashable] = {}

    def number(self, node: Node) -> int:
        """The number of a node."""
        attributes: Hashable = ()
        if node.attributes:
            inside: dict[Value, int] = {}
            found = [(name, self._attribute(each, inside)) for name, each in sorted(node.attributes.items())]
            attributes = tuple(found)
        known = self._operands
        key = (
            (node.domain, node.op_type, node.version, node.callee),
            attributes,
            tuple([known[value] if value in known else self._operand(value) for value in reads(node)]),
            tuple([self._result(value) for value in node.results]),
            (node.phase, node.stage, node.place, node.strategy),
        )
        return self._numbers.setdefault(key, len(self._numbers))

    def _type(self, value: Value) -> int:
        return self._types.setdefault(value.type, len(self._types))

    def _operand(self, value: Value | None) -> Hashable:
        data = None if value is None else value.data
        if value is None:
            key: Hashable = None
        elif data is None:
            key = self._type(value)
        else:
            key = self._constant(value, data)
        self._operands[value] = key
        return key

    def _constant(self, value: Value, data: Tensor) -> Hashable:
        numbers = numbers_key(data) if is_short_index(data) else None
        return "constant", self._type(value), numbers

    def _result(self, value: Value) -> Hashable:
        facts = value.sharding, value.memory, value.global_shape
        if facts != (None, "device", None):
            return self._type(value), facts
        number = self._operands[value] = self._type(value)  # As what reads it has it.
        return number

    def _attribute(self, attribute: object, inside: dict[Value, int]) -> Hashable:
        """An attribute as something to hash; values of nested graphs are numbered in `inside`."""
        if isinstance(attribute, Graph):
            return self._graph(attribute, inside)
        if isinstance(attribute, Graphs):
            return tuple(self._graph(graph, inside) for graph in attribute)
        if isinstance(attribute, Tensor):
            return self._tensor(attribute)
        if isinstance(attribute, Tensors):
            return tuple(map(self._tensor, attribute))
        return attribute_key(attribute)  # type: ignore[arg-type]

    def _tensor(self, data: Tensor) -> Hashable:
        """Equal numbers where that takes no file to see; else the same place."""
        numbers = numbers_key(data) if data.size <= MAX_ELEMENTS else None
        return place_of(data) if numbers is None else numbers

    def _graph(self, graph: Graph, inside: dict[Value, int]) -> Hashable:
        """A nested graph; what it reads from outside is numbered as it is met, as in `reads`."""
        lines: list[Hashable] = []
        for value in graph.inputs:
            inside[value] = len(inside)
            lines.append(self._result(value))
        for value in graph.constants:
            assert value.data is not None
            inside[value] = len(inside)
            lines.append((self._tensor(value.data), self._result(value)))
        for node in graph:
            read = tuple(self._inner(value, inside) for value in node.operands)
            attributes = tuple(
                (name, self._attribute(node.attributes[name], inside)) for name in sorted(node.attributes)
            )
            results = tuple(map(self._result, node.results))
            inside.update((value, len(inside) + index) for index, value in enumerate(node.results))
            identity = node.domain, node.op_type, node.version, node.callee
            facts = node.phase, node.stage, node.place, node.strategy
            lines.append((identity, read, attributes, results, facts))
        return (*lines, tuple(self._inner(value, inside) for value in graph.outputs))

    def _inner(self, value: Value | None, inside: dict[Value, int]) -> Hashable:
        if value is None:
            return None
        if value not in inside:
            inside[value] = len(inside)
            return "outside", inside[value]
        return inside[value]
