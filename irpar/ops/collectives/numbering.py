"""Ids of communication: one space for all programs of a module, in program order."""

from collections.abc import Sequence

from irpar.ir import Graph
from irpar.ops.bodies import is_numbered, waits_for_copy
from irpar.ops.facts import int_attribute
from irpar.ops.op_def import traits


def number_collectives(graph: Graph) -> None:
    """Give the collectives of a graph, and of those nested in it, their ids in program order.

    All ranks run programs made from one graph, whose collectives follow in one order, so that the ids agree.
    """
    number = 0
    for node in graph.walk():
        if traits(node).communicates and not waits_for_copy(node):
            node.set_attribute("id", number)
            number += 1


def number_alike(graphs: Sequence[Graph]) -> bool:
    """Number what has ids already in order, alike in all programs; returns whether an id changed.

    A program whose devices hold no elements of something has fewer. Where programs have no common order, ids stay.
    """
    number = numbers_in_order(graphs)
    if number is None or all(known == place for known, place in number.items()):
        return False
    for graph in graphs:
        for node in graph.walk():
            if is_numbered(node):
                node.set_attribute("id", number[int_attribute(node, "id")])
    return True


def numbers_in_order(graphs: Sequence[Graph]) -> dict[int, int] | None:
    """The place of each id in the order that all programs have in common; None where there is none."""
    sequences = [_ids(graph) for graph in graphs]
    longest = max(sequences, key=len)
    number = {known: place for place, known in enumerate(longest)}
    if not all(known in number for ids in sequences for known in ids):
        return None
    if any([number[known] for known in ids] != sorted(number[known] for known in ids) for ids in sequences):
        return None
    return number


def _ids(graph: Graph) -> list[int]:
    """The ids of a program in order, each once: a wait has that of its start."""
    return list(dict.fromkeys(int_attribute(node, "id") for node in graph.walk() if is_numbered(node)))
