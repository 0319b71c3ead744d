"""Orders of the nodes of a graph in which equal layers may stand one behind another."""

from collections.abc import Iterator

from irpar.ir import Graph, Node, Value

from .node_keys import reads


def order_of_operands(graph: Graph) -> list[Node]:
    """The nodes in the order in which the results need them, operand by operand: the same however a file orders them.

    c = Add(b, a), where a = Relu(x) and b = Exp(x) stand in this or the other order:   b, a, c
    """
    order: list[Node] = []
    met: set[Node] = set()
    for root in (graph.return_node, *graph):
        waiting = [(root, iter(reads(root)))] if root not in met else []
        met.add(root)
        while waiting:
            node, operands = waiting[-1]
            producer = _next_producer(operands, graph, met)
            if producer is not None:
                met.add(producer)
                waiting.append((producer, iter(reads(producer))))
                continue
            waiting.pop()
            if node is not graph.return_node:
                order.append(node)
    return order


def _next_producer(operands: Iterator[Value | None], graph: Graph, met: set[Node]) -> Node | None:
    for value in operands:
        node = None if value is None else value.node
        if node is not None and node.graph is graph and node not in met:
            return node
    return None


def live_across(order: list[Node], graph: Graph) -> list[int]:
    """For each place in an order, and its end, how many values are made before it and read from there on."""
    place = {node: number for number, node in enumerate(order)}
    last: dict[Value, int] = {}
    for number, node in enumerate(order):
        last.update((value, number) for value in reads(node) if value is not None)
    last.update((value, len(order)) for value in graph.outputs)
    steps = [0] * (len(order) + 2)
    for value, until in last.items():
        if value.node in place:
            steps[place[value.node] + 1] += 1
            steps[until + 1] -= 1
    found, total = [], 0
    for step in steps[:-1]:
        total += step
        found.append(total)
    return found
