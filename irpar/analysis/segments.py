"""Segments: the compute of a local graph between two nodes of communication, in the graph's order."""

from collections.abc import Iterable, Iterator
from typing import Any

from irpar.ir import Graph, Node
from irpar.ops import holds_collectives, traits

from .types.control_flow import runs


def stretches(nodes: Iterable[Node]) -> list[list[Node]]:
    """Nodes of communication (or whose bodies communicate) each by itself, the compute nodes between two together."""
    found: list[list[Node]] = []
    is_open = False
    for node in nodes:
        talks = holds_collectives(node)
        if is_open and not talks:
            found[-1].append(node)
        else:
            found.append([node])
        is_open = not talks
    return found


def is_segment(stretch: list[Node]) -> bool:
    """Whether a stretch is compute."""
    return not holds_collectives(stretch[0])


def segment_entries(graph: Graph) -> Iterator[dict[str, Any]]:
    """The segments of a local graph and of its bodies that communicate, in order, as plan.json lists them."""
    after: int | None = None
    for stretch in stretches(graph):
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
