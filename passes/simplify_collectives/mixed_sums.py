"""Sums of many values, of which some were reduced alike and others not: those that were are added first.

a = AllReduce(p)    b = AllReduce(q)    y = Sum(a, b, c)     becomes    s = Sum(a, b)    y = Sum(s, c)

so that s is reduced once (`reduced_sums`): of the squares of all gradients, which clipping adds, one number for each
group of ranks.
"""

from collections import Counter

from irpar.analysis.explanation.origins import cutting_names
from irpar.ir import DOMAIN, Builder, Decision, Module, Node, Value
from irpar.ops.effects import is_compute
from irpar.ops.linear import carriers

from .reduced_sums import MOST_NODES, Way, way_of


def add_alike_first(module: Module) -> int:
    """Split the sums of a module in global view; returns how many sums there are more."""
    return sum(_split(module, node) for graph in module.graphs for node in list(graph.walk()) if _is_long_sum(node))


def _is_long_sum(node: Node) -> bool:
    return node.identity == ("", "Sum") and len(node.operands) > 2


def _split(module: Module, node: Node) -> int:
    alike: dict[Way, dict[Value, None]] = {}
    counts = Counter(node.inputs)
    for value in counts:
        way = _way(value, node) if counts[value] == 1 else None
        if way is not None:
            alike.setdefault(way, {})[value] = None
    many = [list(values) for values in alike.values() if 1 < len(values) < len(node.operands)]
    for values in many:
        _add_first(module, node, values)
    return len(many)


def _way(value: Value, node: Node) -> Way | None:
    """How an operand of a sum that nothing else reads was reduced, directly or before what carries parts on."""
    result = node.results[0]
    if (value.type, value.sharding) != (result.type, result.sharding):
        return None
    reader = node
    for _ in range(MOST_NODES):
        maker = value.node
        if maker is None or maker.graph is not node.graph or set(value.users) != {reader}:
            return None
        if maker.identity == (DOMAIN, "AllReduce"):
            way = way_of(maker)
            return way if way.reduce == "sum" else None
        if not is_compute(maker) or len(maker.inputs) != 1 or not carriers(maker, "sum"):
            return None
        reader, value = maker, maker.inputs[0]
    return None


def _add_first(module: Module, node: Node, values: list[Value]) -> None:
    result = node.results[0]
    assert node.graph is not None
    first = Builder(node.graph, module.opsets, before=node, like=node).op("Sum", values, type=result.type)
    first.sharding, first.global_shape = result.sharding, result.global_shape
    for axis in cutting_names(first.sharding):
        module.decide(first.name, Decision(f"{node.title} adds it", result.name, (axis,)))
    added = set(values)
    node.set_operands([*(value for value in node.inputs if value not in added), first])
