"""Segments: the compute of a local graph between two nodes of communication, in the graph's order."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from irpar.ir import Graph, Node, Value, captured_or_read
from irpar.ops import holds_collectives, traits

from .types.control_flow import runs


def stretches(nodes: Iterable[Node], joined: Collection[Node] = ()) -> list[list[Node]]:
    """Nodes of communication (or whose bodies communicate) each by itself, the compute nodes between two together.

    Args:
        nodes: in order.
        joined: nodes of communication that count as compute.
    """
    found: list[list[Node]] = []
    is_open = False
    for node in nodes:
        talks = node not in joined and holds_collectives(node)
        if is_open and not talks:
            found[-1].append(node)
        else:
            found.append([node])
        is_open = not talks
    return found


def is_segment(stretch: list[Node], joined: Collection[Node] = ()) -> bool:
    """Whether a stretch is compute, with what counts as such."""
    return stretch[0] in joined or not holds_collectives(stretch[0])


def live_reads(graph: Graph, outputs: Iterable[Value]) -> dict[Node, tuple[Value, ...]]:
    """What each node that is needed for some values reads, captured values included; in graph order.

    Nodes that communicate are needed: other ranks wait for them.
    """
    needed = {value.node for value in outputs if value.node is not None}
    found: dict[Node, tuple[Value, ...]] = {}
    for node in reversed(graph):
        if node in needed or holds_collectives(node):
            found[node] = tuple(dict.fromkeys(captured_or_read(node)))
            needed.update(value.node for value in found[node] if value.node is not None)
    return dict(reversed(found.items()))


def segment_entries(graph: Graph) -> Iterator[dict[str, Any]]:
    """The segments of a local graph and of its bodies that communicate, in order, as plan.json lists them.

    What runs is listed: no nodes that nothing needs.
    """
    after: int | None = None
    for stretch in stretches(live_reads(graph, graph.outputs)):
        if is_segment(stretch):
            first, last = stretch[0], stretch[-1]
            yield {
                "first": first.label,
                "last": last.label,
                "nodes": len(stretch),
                "after": after,
                "times": runs(graph),
            }
        elif traits(stretch[0]).communicates:
            number = stretch[0].attributes.get("id")
            after = number if isinstance(number, int) else after
        else:
            for body in stretch[0].nested_graphs():
                yield from segment_entries(body)
