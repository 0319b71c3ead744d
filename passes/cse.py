"""cse: merge equal nodes and equal small constants."""

from collections import ChainMap
from collections.abc import Hashable, MutableMapping
from dataclasses import dataclass
from typing import ClassVar

from irpar.analysis.effects import is_communication, is_deterministic
from irpar.ir import Attribute, DType, ExternalTensor, Floats, Graph, Module, Node, Tensor, Tensors, Value
from irpar.pass_manager import Pass, PassResult

MAX_ELEMENTS = 64
"""Elements up to which constants of indices, shapes and axes are compared by their numbers."""

Table = MutableMapping[Hashable, tuple[Value, ...]]


@dataclass(frozen=True)
class Cse(Pass):
    """Let nodes that compute the same be one: the same operator, attributes and operands, in the order of the graph.

    Before: any graph. After: of equal nodes the first is left, unless they draw random numbers, hold graphs, send, or
    differ in phase, stage, place or in how their results lie on the mesh. Nodes in a nested graph merge with equal ones
    before its holder.

    Of the constants only single numbers and short lists of indices merge: equal weights of two layers stay two, since
    each can be annotated for itself. No file is read.
    """

    name: ClassVar[str] = "cse"

    def run(self, module: Module) -> PassResult:
        """Merge in all graphs and functions."""
        nodes = constants = 0
        for graph in (*module.graphs, *(function.graph for function in module.functions.values())):
            constants += _merge_constants(graph, {})
            nodes += _merge_nodes(graph, {})
        return PassResult(nodes + constants > 0, statistics={"nodes": nodes, "constants": constants})


def _merge_constants(graph: Graph, table: Table) -> int:
    count = 0
    for value in list(graph.constants):
        key = _constant_key(value)
        if key is None:
            continue
        known = table.setdefault(key, (value,))[0]
        if known is not value:
            value.replace_uses(known)
            graph.remove_constant(value)
            count += 1
    for node in graph:
        if node.attributes:
            count += sum(_merge_constants(nested, ChainMap({}, table)) for nested in node.nested_graphs())
    return count


def _constant_key(value: Value) -> Hashable:
    """What makes two constants one; None where they stay apart in any case."""
    data = value.data
    assert data is not None
    if data.size > 1 and (not data.dtype.is_index or data.size > MAX_ELEMENTS):
        return None
    numbers = _numbers_key(data)
    return None if numbers is None else (numbers, value.type, value.sharding, value.memory, value.global_shape)


def _merge_nodes(graph: Graph, table: Table) -> int:
    count = 0
    for node in graph:
        if node.attributes and any(True for _ in node.nested_graphs()):
            count += sum(_merge_nodes(nested, ChainMap({}, table)) for nested in node.nested_graphs())
            continue
        key = _node_key(node)
        if key is None:
            continue
        known = table.setdefault(key, node.results)
        if known is not node.results:
            node.replace(known)
            count += 1
    return count


def _node_key(node: Node) -> Hashable:
    """What makes two nodes one; None for a node that stays in any case."""
    if not node.results or is_communication(node) or not is_deterministic(node):
        return None
    attributes = []
    for name in sorted(node.attributes):
        key = _attribute_key(node.attributes[name])
        if key is None:
            return None
        attributes.append((name, key))
    facts = node.phase, node.stage, node.place
    lies = tuple((value.sharding, value.memory) for value in node.results)
    return node.domain, node.op_type, node.version, node.callee, node.operands, tuple(attributes), facts, lies


def _attribute_key(attribute: Attribute) -> Hashable:
    """An attribute as something to hash, or None. The kind counts too, since 1 and 1.0 are equal in Python."""
    if isinstance(attribute, Tensor):
        return _numbers_key(attribute) if attribute.size <= MAX_ELEMENTS else None
    if isinstance(attribute, float):
        return "float", attribute.hex()
    if isinstance(attribute, Floats):
        return "floats", tuple(map(float.hex, attribute))
    if isinstance(attribute, Tensors):
        return None
    return type(attribute), attribute


def _numbers_key(data: Tensor) -> Hashable:
    """dtype, shape and bits, so that 0.0 and -0.0 differ; None for what lies in a file."""
    if isinstance(data.base, ExternalTensor):
        return None
    numbers = tuple(data.numpy().ravel().tolist()) if data.dtype is DType.STR else data.raw()
    return data.dtype, data.shape, numbers
