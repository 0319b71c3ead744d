"""Segments: the compute of a local graph between two nodes of communication, in the graph's order."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from irpar.ir import Graph, Node, Place, Value, captured_or_read
from irpar.ops import holds_collectives
from irpar.ops.effects import is_communication
from irpar.ops.memory_copies import node_place

from .types.control_flow import runs


def stretches(nodes: Iterable[Node], joined: Collection[Node] = ()) -> list[list[Node]]:
    """Communication and copies (or what has them in bodies) each by itself, what computes between two together.

    What computes on the host and what does on the device are not together.

    Args:
        nodes: in order.
        joined: nodes of communication that count as compute.
    """
    found: list[list[Node]] = []
    where: Place | None = None
    for node in nodes:
        talks = node not in joined and holds_collectives(node)
        place = None if talks else node_place(node)
        if place is not None and place == where:
            found[-1].append(node)
        else:
            found.append([node])
        where = place
    return found


def is_segment(stretch: list[Node], joined: Collection[Node] = ()) -> bool:
    """Whether a stretch is compute, with what counts as such."""
    return stretch[0] in joined or not holds_collectives(stretch[0])


def live_nodes(graph: Graph, outputs: Iterable[Value]) -> list[Node]:
    """The nodes that are needed for some values, in graph order.

    Nodes that communicate are needed: other ranks wait for them.
    """
    needed = {value.node for value in outputs}
    found: list[Node] = []
    for node in reversed(graph):
        if node in needed or holds_collectives(node):
            found.append(node)
            needed.update([value.node for value in captured_or_read(node)])
    found.reverse()
    return found


def live_reads(graph: Graph, outputs: Iterable[Value]) -> dict[Node, tuple[Value, ...]]:
    """What each node of `live_nodes` reads, captured values included; in graph order."""
    return {node: tuple(dict.fromkeys(captured_or_read(node))) for node in live_nodes(graph, outputs)}


def segment_entries(graph: Graph) -> Iterator[dict[str, Any]]:
    """The segments of a local graph and of its bodies that communicate, in order, as plan.json lists them.

    What runs is listed: no nodes that nothing needs.
    """
    after: int | None = None
    for stretch in stretches(live_nodes(graph, graph.outputs)):
        if is_segment(stretch):
            first, last = stretch[0], stretch[-1]
            yield {
                "first": first.label,
                "last": last.label,
                "nodes": len(stretch),
                "after": after,
                "times": runs(graph),
                **({"place": "host"} if node_place(first) == "host" else {}),
            }
        elif is_communication(stretch[0]):
            number = stretch[0].attributes.get("id")
            after = number if isinstance(number, int) else after
        else:
            for body in stretch[0].nested_graphs():
                yield from segment_entries(body)
